"""Refuse arguments that an operator cannot mean, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from gradfilter.errors import InputError
from gradfilter.geometry.tiling import LIMIT

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that torch computes in: of smaller ones it knows little more than how to convert them."""
COUNTS = (torch.uint8, torch.int16, torch.int32)
"""The integers that count pixels."""
WIDEST = 1 << 63
"""Whole numbers from here on are not ones of 64 bits with a sign."""


class Check:
    """Check the arguments of one operator; each method raises an `InputError` that names the operator and the argument."""

    def __init__(self, operator: str) -> None:
        """Begin with the operator's name."""
        self.operator = operator

    def refuse(self, name: str, given: str, wanted: str) -> NoReturn:
        """Raise the error."""
        raise InputError(f"gradfilter::{self.operator} got {name} {given}. {wanted}")

    def instance(self, name: str, value: Any, kind: type) -> None:
        """Check that a value is an object of some class, whose own constructor has checked what it holds."""
        if not isinstance(value, kind):
            self.refuse(name, f"of type {type(value).__name__}", f"Give a {kind.__name__}.")

    def tensor(self, name: str, x: Tensor, like: Tensor | None = None) -> None:
        """Check that x is a dense tensor of floating point numbers, and of the dtype and device of `like`."""
        if not isinstance(x, Tensor):
            self.refuse(name, f"of type {type(x).__name__}", "Give a tensor.")
        dtype = x.dtype
        if dtype not in FLOATS:
            self.refuse(name, f"of dtype {dtype}", "Give floating point numbers, e.g. x.float().")
        self.dense(name, x)
        if like is not None:
            if dtype is not like.dtype:
                self.refuse(name, f"of dtype {dtype}", f"Give {like.dtype}, as the first argument has.")
            if x.device != like.device:
                self.device(name, x, like)

    def dense(self, name: str, x: Tensor) -> None:
        """Check that x is a dense tensor, and has memory where it should: torch itself crashes where that was freed."""
        if x.layout is not torch.strided:
            self.refuse(name, f"of layout {x.layout}", "Give a dense tensor, e.g. x.to_dense().")
        if type(x) not in (Tensor, Parameter):
            return
        try:
            address = x.data_ptr()
        except RuntimeError:  # a transform's tensor, around another one
            return
        if x.is_nested:
            self.refuse(name, "as a nested tensor", "Give a dense tensor, e.g. x.to_padded_tensor(0).")
        if not address and has_no_memory(x):
            self.refuse(name, "without memory", "Give a tensor whose numbers are in memory, e.g. torch.zeros.")

    def device(self, name: str, x: Tensor, like: Tensor) -> None:
        """Check that x is where `like` is."""
        if x.device != like.device:
            self.refuse(name, f"on {x.device}", f"Move it to {like.device}, where the first argument is.")

    def counts(self, name: str, x: Tensor, like: Tensor) -> None:
        """Check that x is a dense tensor of numbers of pixels, where `like` is."""
        if not isinstance(x, Tensor):
            self.refuse(name, f"of type {type(x).__name__}", "Give a tensor.")
        if x.dtype not in COUNTS:
            self.refuse(name, f"of dtype {x.dtype}", "Give the counts that the forward operator returned.")
        self.dense(name, x)
        self.device(name, x, like)

    def map(self, name: str, x: Tensor, like: Tensor | None = None) -> tuple[int, int, int, int]:
        """Check that x is a map [N, C, H, W], not empty but for N; return its sizes."""
        self.tensor(name, x, like)
        if x.dim() != 4:
            self.refuse(name, f"of shape {list(x.shape)}", "Give a batch of maps [N, C, H, W].")
        n, c, h, w = x.shape
        if 0 in (c, h, w):
            self.refuse(name, f"of shape {list(x.shape)}, which is empty", "Give maps of at least one channel and pixel.")
        return n, c, h, w

    def weight(self, name: str, w: Tensor, like: Tensor | None = None) -> tuple[int, int, int, int]:
        """Check that w is a weight [Co, Ci, kh, kw], not empty; return its sizes."""
        sizes = self.map(name, w, like)
        if sizes[0] == 0:
            self.refuse(name, f"of shape {list(w.shape)}, which is empty", "Give a weight of at least one output channel.")
        return sizes

    def shape(self, name: str, x: Tensor | None, shape: Sequence[int], like: Tensor | None = None) -> None:
        """Check that x, if it is there, has this shape, and the dtype and device of `like`."""
        if x is None:
            return
        self.tensor(name, x, like)
        if x.shape != tuple(shape):
            self.refuse(name, f"of shape {list(x.shape)}", f"Give one of shape {list(shape)}.")

    def addend(self, name: str, x: Tensor | None, shape: Sequence[int], like: Tensor) -> None:
        """Check that x, if it is there, has this shape, any floating point dtype and the device of `like`."""
        if x is not None:
            self.shape(name, x, shape)
            self.device(name, x, like)

    def target(self, name: str, x: Tensor | None, shape: Sequence[int], like: Tensor) -> None:
        """Check that x, if it is there, has this shape and can be written to, also by torch."""
        if x is None:
            return
        self.shape(name, x, shape, like)
        self.apart(name, x)
        if x.is_inference() and not torch.is_inference_mode_enabled():
            self.refuse(name, "that was made in inference mode", "Give one that was not, or call it in inference mode, too.")

    def apart(self, name: str, x: Tensor) -> None:
        """Check that no two numbers of x share their memory."""
        end = 1
        for step, n in sorted((step, n) for step, n in zip(x.stride(), x.shape, strict=True) if n > 1):
            if step < end:
                self.refuse(name, f"with strides {list(x.stride())}", "Give a tensor that does not overlap itself.")
            end = step * (n - 1) + end

    def row(self, name: str, x: Tensor | None, channels: int, like: Tensor) -> None:
        """Check that x, if it is there, has one number per channel, any floating point dtype and the device of `like`."""
        if x is not None:
            self.tensor(name, x)
            if x.shape != (channels,):
                self.refuse(name, f"of shape {list(x.shape)}", f"Give one of shape {[channels]}.")
            if x.device != like.device:
                self.device(name, x, like)

    def pair(self, name: str, pair: Sequence[int], least: int = 1) -> None:
        """Check that a pair `(h, w)` is two whole numbers of at least `least`, and below `LIMIT`."""
        if not isinstance(pair, tuple) or len(pair) != 2:
            self.refuse(name, f"= {pair!r:.80}", f"Give a tuple of two whole numbers (h, w) of at least {least}.")
        h, w = pair
        if not (is_whole(h) and is_whole(w) and least <= h < LIMIT and least <= w < LIMIT):
            self.refuse(name, f"= {pair!r:.80}", f"Give two whole numbers (h, w) of at least {least}, and less than {LIMIT}.")

    def whole(self, name: str, value: int) -> None:
        """Check that a value is a whole number of at most 64 bits."""
        if not is_whole(value) or not -WIDEST <= value < WIDEST:
            self.refuse(name, f"= {value!r:.80}", "Give a whole number.")

    def number(self, name: str, value: float) -> None:
        """Check that a value is a number."""
        if not is_number(value):
            self.refuse(name, f"= {value!r:.80}", "Give a number.")

    def slopes(self, name: str, slopes: tuple[float, float]) -> None:
        """Check that slopes are two numbers."""
        if not isinstance(slopes, tuple) or len(slopes) != 2 or not all(map(is_number, slopes)):
            self.refuse(name, f"= {slopes!r:.80}", "Give a tuple of two numbers, the slopes off and on the steep piece.")


def is_whole(value: Any) -> bool:
    """Tell whether a value is a whole number, which in a graph may be a symbol. The first test is the quick one.

    `True` is none: torch's own functions refuse it as a size.
    """
    return type(value) is int or (isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool))


def is_number(value: Any) -> bool:
    """Tell whether a value is a number that torch takes, which in a graph may be a symbol: whole ones signed or not."""
    if type(value) is float or isinstance(value, (float, torch.SymFloat, torch.SymInt)):
        return True
    return isinstance(value, int) and -WIDEST <= value < 2 * WIDEST


def has_no_memory(x: Tensor) -> bool:
    """Tell whether a tensor without an address has numbers that nobody holds: freed ones, or zeros that torch never wrote.

    The tensors of functionalisation have no address either, and are whole.
    """
    if x.numel() == 0:
        return False
    return x._is_zerotensor() or (x.is_cpu and not torch._is_functional_tensor(x) and x.untyped_storage().nbytes() == 0)
