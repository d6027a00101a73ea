"""Train convolutional networks on small machines: forward at pixel resolution, backward at patch resolution."""

from gradfilter.apply import apply_, freeze_, keep_state, load_keep_state_, remove_
from gradfilter.cost import cost
from gradfilter.describe import describe, program
from gradfilter.fidelity import fidelity
from gradfilter.keep import HOSVD, SVD, BFloat16, Fixed, Full, Int8, Subspace
from gradfilter.plan import Backward, Plan
from gradfilter.planner import plan_for

__version__ = "0.1.0"
__all__ = [
    "HOSVD",
    "SVD",
    "BFloat16",
    "Backward",
    "Fixed",
    "Full",
    "Int8",
    "Plan",
    "Subspace",
    "apply_",
    "cost",
    "describe",
    "fidelity",
    "freeze_",
    "keep_state",
    "load_keep_state_",
    "plan_for",
    "program",
    "remove_",
]
