"""The patch rules: what a carrier does, one rule per torch function. Importing this package registers them all."""

from gradfilter.rules import arithmetic, conv, elementwise, norm, pooling, reduce, resample, shape

__all__ = ["arithmetic", "conv", "elementwise", "norm", "pooling", "reduce", "resample", "shape"]
