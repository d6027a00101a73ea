"""Keeps: how a layer's (pooled) input is held from forward to backward.

A keep compresses a tensor in forward; what it kept gives the weight gradient in backward, from the compressed form where the
algebra allows. Adding a way to keep is one class in this package and one row in `tests/keep_cases.py`.
"""

from gradfilter.keep.base import KEEPS, Keep, Kept, State, hold, parse_keep
from gradfilter.keep.low_rank import HOSVD, SVD
from gradfilter.keep.precision import FULL, BFloat16, Full, Int8
from gradfilter.keep.sized import Fixed, Subspace
from gradfilter.keep.tucker import Tucker

__all__ = [
    "FULL",
    "HOSVD",
    "KEEPS",
    "SVD",
    "BFloat16",
    "Fixed",
    "Full",
    "Int8",
    "Keep",
    "Kept",
    "State",
    "Subspace",
    "Tucker",
    "hold",
    "parse_keep",
]
