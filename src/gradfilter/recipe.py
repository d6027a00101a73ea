"""Recipes: how a map that is not computed yet will be, so that one pass does what several functions ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter import native
from gradfilter.errors import InputError
from gradfilter.native import IDENTITY, Act, Fused
from gradfilter.patches import Pair

KERNELS = {"dense": native.dense, "depthwise": native.depthwise}
"""The library's convolutions by name."""
Sources = tuple[tuple[Tensor, int], ...]
"""Tensors, each with the version that is meant."""


@dataclass(frozen=True)
class Convolution:
    """A convolution that the library computes, with copies of its parameters: hooks may change those before it runs.

    Attributes:
        kernel: Which of the library's functions does.
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
        self, x: Tensor, scale: Tensor | None, shift: Tensor | None, act: Act, patch: Pair, residual: Tensor | None
    ) -> Fused:
        """Compute act(conv(x)·scale + shift + residual)."""
        where = self.stride, self.padding, self.dilation, self.size
        return KERNELS[self.kernel](x, self.w, self.b, *where, scale, shift, act, patch, residual)


@dataclass(frozen=True)
class Norm:
    """A batch norm in eval mode, (x − μ)·γ/σ + β, with copies of its parameters and statistics."""

    mu: Tensor
    var: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    eps: float


@dataclass(frozen=True)
class Recipe:
    """A map as a function of tensors that are there: y = norm(conv(x)) + residual, each of the three where there is one.

    Attributes:
        x: The value that it starts from [N, C, H, W].
        sources: The maps that it reads.
        conv: The convolution.
        norm: The batch norm.
        residual: A value of the same shape as the result.
    """

    x: Tensor
    sources: Sources
    conv: Convolution | None = None
    norm: Norm | None = None
    residual: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return tuple(self.x.shape) if self.conv is None else (len(self.x), len(self.conv.w), *self.conv.size)

    @property
    def is_native(self) -> bool:
        """Tell whether one pass computes it, with any activation behind it."""
        return native.can_run(self.x)

    def normalise(self, norm: Norm) -> Recipe:
        """Return the recipe of a batch norm of this map."""
        return replace(self, norm=norm)

    def add(self, source: Tensor, residual: Tensor) -> Recipe:
        """Return the recipe of the sum with a residual, which is the value of `source`."""
        return replace(self, residual=residual, sources=(*self.sources, *watch(source)))

    def run(self, act: Act = IDENTITY, patch: Pair = (1, 1)) -> Fused:
        """Compute the map, or an activation of it where the pass is native, and what the pass tells beside it."""
        for source, version in self.sources:
            if source._version != version:
                raise InputError(
                    f"a tensor of shape {list(source.shape)} was changed in place between a layer that reads it and the "
                    "function behind that layer, by code that by-passes torch's functions. Use the out-of-place function."
                )
        norm = self.norm
        if self.is_native:
            scale = shift = None
            if norm is not None:
                scale, shift = native.fold(norm.gamma, norm.beta, norm.mu, norm.var, norm.eps)
            if self.conv is None:
                return native.norm_act(self.x, scale, shift, act, patch, self.residual)
            return self.conv.run(self.x, scale, shift, act, patch, self.residual)
        assert act == IDENTITY
        y, conv = self.x, self.conv
        if conv is not None:
            y = F.conv2d(y, conv.w, conv.b, conv.stride, conv.padding, conv.dilation, conv.groups)
        if norm is not None:
            y = F.batch_norm(y, norm.mu, norm.var, norm.gamma, norm.beta, False, 0.0, norm.eps)
        return Fused(y if self.residual is None else y + self.residual, None, None)


def watch(*tensors: Tensor | None) -> Sources:
    """Return tensors with their versions."""
    return tuple((x, x._version) for x in tensors if x is not None)


def find_convolution(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair | None, dilation: Pair, groups: int
) -> Convolution | None:
    """Return a convolution of x as the library computes it, `None` where it has no kernel that is faster than torch's."""
    if padding is None or not native.can_run(x) or w.dim() != 4 or x.shape[1] != w.shape[1] * groups:
        return None
    if min(padding) < 0 or min(stride) < 1 or min(dilation) < 1 or not fits(b, len(w), x.dtype):
        return None  # torch says what is wrong
    kernel = native.can_convolve(x, w, stride, padding, dilation, groups)
    if kernel is None or not native.prefers(w, stride, groups):
        return None
    h, width = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(x.shape[2:], padding, dilation, w.shape[2:], stride, strict=True)
    )
    if min(h, width) < 1:
        return None
    return Convolution(kernel, copy(w), b if b is None else copy(b), stride, padding, dilation, groups, (h, width))


def find_norm(x: Tensor, mu: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Norm | None:
    """Return a batch norm of x that can wait, `None` where torch refuses it."""
    given = (mu, var, gamma, beta)
    single = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    if not any(all(fits(v, x.shape[1], dtype) for v in given) for dtype in (x.dtype, single)):
        return None
    mu, var, gamma, beta = (v if v is None else copy(v) for v in given)  # type: ignore[assignment]
    return Norm(mu, var, gamma, beta, eps)


def fits(values: Tensor | None, channels: int, dtype: torch.dtype) -> bool:
    """Tell whether there is one number per channel, or none at all."""
    return values is None or (values.shape == (channels,) and values.dtype is dtype)


def copy(x: Tensor) -> Tensor:
    """Return a copy that nobody else can change."""
    with torch.no_grad():
        return x.detach().clone()
