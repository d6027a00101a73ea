"""Drawn views: the same shape in memory of another order, offset or stride, expanded, negated."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st

from gradfilter.ops import native

ORDERS = {
    "first axis first": lambda axes: axes,
    "channels last": lambda axes: [axes[0], *axes[2:], *axes[1:2]],
    "transposed": lambda axes: [*axes[:-2], *axes[:-3:-1]],
    "last axis first": lambda axes: axes[::-1],
}


class View(NamedTuple):
    """How to place a tensor in memory; call it with one to get a view of its numbers.

    Attributes:
        order: The order of the axes in memory: a key of ORDERS.
        offset: Numbers in memory before the first.
        step: Steps in memory from one number to the next along the axis `stepped`.
        stepped: That axis.
        expanded: The axis along which there is one number, again and again; `None` for no such axis.
        stride: What axes of size 1 say their stride is; `None` for what it would be.
        negated: Whether memory holds the negated numbers.
    """

    order: str = "first axis first"
    offset: int = 0
    step: int = 1
    stepped: int = 0
    expanded: int | None = None
    stride: int | None = None
    negated: bool = False

    def __call__(self, x):
        shape, axes = x.shape, list(range(x.dim()))
        if self.expanded is not None:
            x = x.narrow(self.expanded % len(axes), 0, 1)
        order = ORDERS[self.order](axes)
        x = x.permute(order)
        axis = self.stepped % len(axes)
        sizes = [n * self.step if i == axis else n for i, n in enumerate(x.shape)]
        memory = x.new_full((self.offset + torch.Size(sizes).numel(),), 99)  # what no view shows
        view = memory[self.offset :].view(sizes)[(slice(None),) * axis + (slice(None, None, self.step),)]
        view.copy_(-x if self.negated else x)
        view = view.permute([order.index(i) for i in axes])
        if self.stride is not None:
            strides = [self.stride if n == 1 else s for n, s in zip(view.shape, view.stride(), strict=True)]
            view = view.as_strided(view.shape, strides)
        view = view.expand(shape)
        return torch._neg_view(view) if self.negated else view


def builds(**fields):
    """Draw views with these fields; `st.builds` alone would draw the others, too."""
    return st.builds(lambda **drawn: View(**drawn), **fields)


orders = st.sampled_from(["channels last", "channels last", "first axis first"])
offsets, strides = st.integers(0, 3), st.sampled_from([None, None, 0, 7])
dense = builds(order=orders, offset=offsets, stride=strides)
"""Those whose memory the library can read."""
negated = builds(order=orders, offset=offsets, stride=strides, negated=st.just(True))
odd = builds(
    order=st.sampled_from([*ORDERS]),
    offset=offsets,
    step=st.integers(1, 2),
    stepped=st.integers(0, 3),
    stride=strides,
    negated=st.booleans(),
)
expanded = builds(order=st.sampled_from([*ORDERS]), offset=offsets, expanded=st.integers(0, 3), negated=st.booleans())
places = dense | negated | odd
"""Those that can be written to."""
views = places | expanded


@st.composite
def some(draw, count):
    """Draw several views of which the library can read all but one, or all: two others would hide each other."""
    drawn = [draw(dense) for _ in range(count)]
    strange = draw(st.integers(0, count))
    return [draw(views) if i == strange else view for i, view in enumerate(drawn)]


def run_both(run):
    """Return what a function returns with the library and without, as two lists of tensors."""
    got = list(flatten(run()))
    with native.off():
        return got, list(flatten(run()))


def flatten(values):
    """List all tensors of nested tuples."""
    for value in values if isinstance(values, tuple | list) else [values]:
        if isinstance(value, tuple | list):
            yield from flatten(value)
        else:
            yield value


def compare(run, tolerance=1e-5):
    """Check that a function returns the same with the library and without: integers equal, others to rounding."""
    for got, expected in zip(*run_both(run), strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            exact = not got.is_floating_point()
            most = float(expected.abs().max()) if expected.numel() else 0.0
            slack = 0.0 if exact else tolerance if got.dtype is not torch.bfloat16 else 8e-3
            torch.testing.assert_close(got, expected, rtol=slack, atol=slack * (1 + most), check_stride=False)
