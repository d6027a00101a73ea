"""Refuse arguments that an operator cannot mean, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from gradfilter.errors import InputError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that torch computes in: of smaller ones it knows little more than how to convert them."""
COUNTS = (torch.uint8, torch.int16, torch.int32)
"""The integers that count pixels."""


class Check:
    """Check the arguments of one operator; each method raises an `InputError` that names the operator and the argument."""

    def __init__(self, operator: str) -> None:
        """Begin with the operator's name."""
        self.operator = operator

    def refuse(self, name: str, given: str, wanted: str) -> NoReturn:
        """Raise the error."""
        raise InputError(f"gradfilter::{self.operator} got {name} {given}. {wanted}")

    def tensor(self, name: str, x: Tensor, like: Tensor | None = None) -> None:
        """Check that x is a dense tensor of floating point numbers, and of the dtype and device of `like`."""
        if not isinstance(x, Tensor):
            self.refuse(name, f"of type {type(x).__name__}", "Give a tensor.")
        if x.dtype not in FLOATS:
            self.refuse(name, f"of dtype {x.dtype}", "Give floating point numbers, e.g. x.float().")
        if x.layout is not torch.strided:
            self.refuse(name, f"of layout {x.layout}", "Give a dense tensor, e.g. x.to_dense().")
        if like is not None and x.dtype is not like.dtype:
            self.refuse(name, f"of dtype {x.dtype}", f"Give {like.dtype}, as the first argument has.")
        if like is not None:
            self.device(name, x, like)

    def device(self, name: str, x: Tensor, like: Tensor) -> None:
        """Check that x is where `like` is."""
        if x.device != like.device:
            self.refuse(name, f"on {x.device}", f"Move it to {like.device}, where the first argument is.")

    def counts(self, name: str, x: Tensor, like: Tensor) -> None:
        """Check that x is a dense tensor of numbers of pixels, where `like` is."""
        if not isinstance(x, Tensor):
            self.refuse(name, f"of type {type(x).__name__}", "Give a tensor.")
        if x.dtype not in COUNTS or x.layout is not torch.strided:
            self.refuse(
                name, f"of dtype {x.dtype} and layout {x.layout}", "Give the counts that the forward operator returned."
            )
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

    def row(self, name: str, x: Tensor | None, channels: int, like: Tensor) -> None:
        """Check that x, if it is there, has one number per channel, any floating point dtype and the device of `like`."""
        self.addend(name, x, (channels,), like)

    def pair(self, name: str, pair: Sequence[int], least: int = 1) -> None:
        """Check that both numbers of a pair `(h, w)` are at least `least`."""
        if len(pair) != 2 or min(pair) < least:
            self.refuse(name, f"= {tuple(pair)}", f"Give two numbers (h, w) of at least {least}.")
