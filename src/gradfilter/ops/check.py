"""Refuse arguments that an operator cannot mean, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from gradfilter.errors import InputError


class Check:
    """Check the arguments of one operator; each method raises an `InputError` that names the operator and the argument."""

    def __init__(self, operator: str) -> None:
        """Begin with the operator's name."""
        self.operator = operator

    def refuse(self, name: str, given: str, wanted: str) -> NoReturn:
        """Raise the error."""
        raise InputError(f"gradfilter::{self.operator} got {name} {given}. {wanted}")

    def tensor(self, name: str, x: Tensor, like: Tensor | None = None) -> None:
        """Check that x is a tensor of floating point numbers, and of the dtype and device of `like`."""
        if not isinstance(x, Tensor):
            self.refuse(name, f"of type {type(x).__name__}", "Give a tensor.")
        if not x.is_floating_point():
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

    def row(self, name: str, x: Tensor | None, channels: int, like: Tensor) -> None:
        """Check that x, if it is there, has one number per channel, of any floating point dtype."""
        if x is not None:
            self.shape(name, x, (channels,))
            self.device(name, x, like)

    def pair(self, name: str, pair: Sequence[int], least: int = 1) -> None:
        """Check that both numbers of a pair `(h, w)` are at least `least`."""
        if len(pair) != 2 or min(pair) < least:
            self.refuse(name, f"= {tuple(pair)}", f"Give two numbers (h, w) of at least {least}.")
