"""Recipes: how a map that is not computed yet will be, so that one pass does what several functions ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from sys import getrefcount
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter import ops
from gradfilter.errors import InputError
from gradfilter.geometry.tiling import Pair
from gradfilter.keep.base import Promise
from gradfilter.ops import IDENTITY, Act, Cells, Ending, Fused, native

Sources = tuple[tuple[Tensor, int], ...]
"""Tensors, each with the version that is meant."""
Zeros = tuple[int, int, int, int]
"""Zeros around a map: left, right, top, bottom, as `F.pad` has them."""


class Convolution(NamedTuple):
    """A convolution that the library computes, with copies of its parameters: hooks may change those before it runs.

    Attributes:
        kernel: Which of the library's kernels does.
        size: Size `(h, w)` of the output.
    """

    kernel: str
    w: Tensor
    b: Tensor | None
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    size: Pair

    def run(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        act: Act = IDENTITY,
        patch: Pair = (1, 1),
        residual: Tensor | None = None,
        cells: Cells | None = None,
    ) -> Fused:
        """Compute act(conv(x)·scale + shift + residual)."""
        where = self.stride, self.padding, self.dilation, self.groups, self.size
        return ops.convolve(x, self.w, self.b, *where, scale, shift, act, patch, residual, cells)


class Ended(NamedTuple):
    """The activation with which a recipe ends.

    Attributes:
        act: The activation.
        patch: The patch.
        cells: Where its patch means and slopes go.
        promise: Who is told when they are there.
    """

    act: Act
    patch: Pair
    cells: Cells
    promise: Promise


class Padding(NamedTuple):
    """Zeros around a map, for a convolution to take in.

    Attributes:
        zeros: How many.
        x: The map.
        read: Gives its value, which may have to be computed.
    """

    zeros: Zeros
    x: Tensor
    read: Callable[[Tensor], Tensor]


class Recipe(NamedTuple):
    """A map as a function of tensors that are there: y = conv(x)·scale + shift + residual, each of them where there is one.

    A pointwise convolution with many more outputs than inputs may end in its activation, and wait with that for a depthwise
    convolution: the library computes both without the map between them, the largest of a mobile network. Zeros around a map
    wait by themselves.

    Attributes:
        x: The value that it starts from [N, C, H, W].
        sources: The maps that it reads.
        shape: The shape of the result.
        conv: The convolution.
        scale: γ/σ of a batch norm in eval mode, per channel.
        shift: Its β − μ·γ/σ.
        residual: A value of the same shape as the result.
        ended: The activation behind all that, where nothing but a depthwise convolution may join any more.
        before: The recipe of the map that the convolution reads, where that is not computed; x is then that one's.
        padding: Zeros around x, and nothing else.
    """

    x: Tensor
    sources: Sources
    shape: tuple[int, ...]
    conv: Convolution | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    residual: Tensor | None = None
    ended: Ended | None = None
    before: Recipe | None = None
    padding: Padding | None = None

    @property
    def is_open(self) -> bool:
        """Whether norms, residuals and activations may join."""
        return self.ended is None and self.padding is None

    @property
    def may_expand(self) -> bool:
        """Whether the convolution has so many more outputs than inputs that a depthwise one is likely to follow and join."""
        conv = self.conv
        return (
            conv is not None
            and conv.kernel == "dense"
            and conv.w.shape[2:] == conv.stride == (1, 1)
            and conv.padding == (0, 0)
            and conv.w.shape[0] >= 2 * conv.w.shape[1]
            and self.residual is None
            and self.ended is None
            and native.prefers_expand(self.x.shape, conv.w.shape)
        )

    @property
    def promise(self) -> Promise | None:
        """Who is told when this is computed."""
        last = self if self.before is None else self.before
        return None if last.ended is None else last.ended.promise

    def normalise(self, mu: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Recipe | None:
        """Return the recipe of a batch norm of this map, `None` where torch refuses it.

        Hooks may change parameters before it runs: what it needs of them is computed here.
        """
        # Behind bfloat16, parameters are in that or in single precision.
        dtype = torch.float32 if self.x.dtype is torch.bfloat16 and mu.dtype is torch.float32 else self.x.dtype
        channels = self.shape[1]
        if not (fits(mu, channels, dtype) and fits(var, channels, dtype)):
            return None
        if not (fits(gamma, channels, dtype) and fits(beta, channels, dtype)):
            return None
        scale, shift = ops.fold_norm(gamma, beta, mu, var, eps)
        return Recipe(*self[:4], scale, shift, *self[6:])  # `_replace` takes three times as long

    def add(self, source: Tensor, residual: Tensor) -> Recipe:
        """Return the recipe of the sum with a residual, which is the value of `source`."""
        return self._replace(residual=residual, sources=(*self.sources, (source, source._version)))

    def check_sources(self) -> None:
        """Refuse to read sources that are not what they were."""
        for source, version in self.sources:
            if source._version != version:
                raise InputError(
                    f"a tensor of shape {list(source.shape)} was changed in place between a layer that reads it and the "
                    "function behind that layer, by code that by-passes torch's functions. Use the out-of-place function."
                )

    def is_unseen(self) -> bool:
        """Tell whether nobody but this recipe can still see the value that it starts from.

        That is held by this tuple and by its source, the source by the tuple of sources; the third reference that Python
        counts here is the question itself. Tensors in torch's own hands, and others on the same storage, torch counts.
        """
        source = self.sources[0][0]
        return (
            getrefcount(source) <= 3
            and getrefcount(self.x) <= 3
            and source._use_count() == self.x._use_count() == 1  # type: ignore[attr-defined]
            and torch._C._storage_Use_Count(self.x.untyped_storage()._cdata) <= 3
        )

    def run(self, act: Act = IDENTITY, patch: Pair = (1, 1), *, last: bool = False) -> Fused:
        """Compute an activation of the map, or the map itself, and what the pass tells beside it.

        Args:
            act: The activation.
            patch: The patch.
            last: Whether it will not run again: then the result may take the place of what it starts from.
        """
        self.check_sources()
        if self.padding is not None:
            return Fused(F.pad(self.padding.read(self.padding.x), self.padding.zeros), None, None)
        if self.conv is None:
            out = self.x if last and self.is_unseen() else None
            return ops.norm_act(self.x, self.scale, self.shift, act, patch, self.residual, out)
        if self.before is not None:
            return self.run_both(self.before, self.conv, act, patch)
        if self.ended is None:
            return self.conv.run(self.x, self.scale, self.shift, act, patch, self.residual)
        fused = self.conv.run(self.x, self.scale, self.shift, *self.ended[:2], cells=self.ended.cells)
        self.ended.promise.kept = True
        return fused

    def run_both(self, before: Recipe, conv: Convolution, act: Act, patch: Pair) -> Fused:
        """Compute an activation of the map together with the one before it, or after it where there is a residual."""
        first, ended = before.conv, before.ended
        assert first is not None
        assert ended is not None
        if self.residual is not None:
            return conv.run(before.run().y, self.scale, self.shift, act, patch, self.residual)
        middle = Ending(first.b, before.scale, before.shift, ended.act, ended.patch)
        end = Ending(conv.b, self.scale, self.shift, act, patch)
        where = conv.stride, conv.padding, conv.dilation, conv.size
        expanded = ops.expand(self.x, first.w, middle, conv.w, *where, end, ended.cells)
        ended.promise.kept = True
        return expanded.out

    def follow(
        self, w: Tensor, b: Tensor | None, stride: Pair, zeros: Zeros | None, dilation: Pair, groups: int
    ) -> Recipe | None:
        """Return the recipe of a depthwise convolution of this map, which has ended; `None` where the two do not join."""
        if zeros is None or self.conv is None or w.shape[2:] == (1, 1) or not native.can_expand(self.x, self.conv.w, w):
            return None
        conv = make_convolution(self.shape, w, b, stride, zeros, dilation, groups)
        if conv is None or conv.kernel != "depthwise":
            return None
        return Recipe(self.x, self.sources, (*self.shape[:2], *conv.size), conv, before=self)


def start(value: Tensor, source: Tensor, conv: Convolution | None = None) -> Recipe:
    """Return the recipe of a map that is the value of `source`, or a convolution of it."""
    shape = value.shape if conv is None else (value.shape[0], conv.w.shape[0], *conv.size)
    return Recipe(value, ((source, source._version),), shape, conv)


def surround(padding: Pair, zeros: Zeros = (0, 0, 0, 0)) -> Zeros:
    """Return the zeros around a map where a convolution pads the zeros that are there already."""
    (h, w), (left, right, top, bottom) = padding, zeros
    return left + w, right + w, top + h, bottom + h


def find_convolution(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, zeros: Zeros, dilation: Pair, groups: int
) -> Convolution | None:
    """Return a convolution of x as the library computes it, `None` where it has no kernel that is faster than torch's."""
    if not native.can_read(x, w):
        return None
    return make_convolution(x.shape, w, b, stride, zeros, dilation, groups)


def make_convolution(
    x: tuple[int, ...], w: Tensor, b: Tensor | None, stride: Pair, zeros: Zeros, dilation: Pair, groups: int
) -> Convolution | None:
    """Return a convolution of a map of this shape; `None` also where anything is wrong: torch says what."""
    found = find_kernel(x, w.shape, stride, zeros, dilation, groups)
    if found is None or not fits(b, w.shape[0], w.dtype):
        return None
    return Convolution(found[0], copy(w), b if b is None else copy(b), stride, (zeros[2], zeros[0]), dilation, groups, found[1])


@lru_cache(maxsize=4096)
def find_kernel(
    x: tuple[int, ...], w: tuple[int, ...], stride: Pair, zeros: Zeros, dilation: Pair, groups: int
) -> tuple[str, Pair] | None:
    """Return the library's kernel for an input and a weight of these shapes, and the size of the output."""
    if len(w) != 4 or x[1] != w[1] * groups or min(zeros) < 0 or min(stride) < 1 or min(dilation) < 1:
        return None
    left, right, top, bottom = zeros
    kernel = native.find_kernel(w, x[1], stride, (max(top, bottom), max(left, right)), dilation, groups)
    sizes = x[2] + top + bottom, x[3] + left + right
    h, width = ((n - d * (k - 1) - 1) // s + 1 for n, d, k, s in zip(sizes, dilation, w[2:], stride, strict=True))
    if kernel is None or min(h, width) < 1 or not native.prefers(kernel, w, stride, (h, width)):
        return None
    return kernel, (h, width)


def fits(values: Tensor | None, channels: int, dtype: torch.dtype) -> bool:
    """Tell whether there is one number per channel, or none at all."""
    return values is None or (values.shape == (channels,) and values.dtype is dtype)


def copy(x: Tensor) -> Tensor:
    """Return a copy that nobody else can change."""
    return x.data.clone()
