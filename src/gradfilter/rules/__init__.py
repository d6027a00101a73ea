"""The patch rules: what a carrier does, one rule per torch function. Importing this package registers them all."""

from gradfilter.rules import conv, elementwise, norm, pooling, shape

__all__ = ["conv", "elementwise", "norm", "pooling", "shape"]
