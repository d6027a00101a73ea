"""The patch rules: what a carrier does, one rule per torch function. Importing this package registers them all."""

from gradfilter.rules import arithmetic, channels, conv, elementwise, linear, loss, norm, pooling, reduce, resample, shape, view

__all__ = [
    "arithmetic",
    "channels",
    "conv",
    "elementwise",
    "linear",
    "loss",
    "norm",
    "pooling",
    "reduce",
    "resample",
    "shape",
    "view",
]
