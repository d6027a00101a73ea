"""Types of what operators take and return: activations, and results with their patch means and slopes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gradfilter.geometry.tiling import Pair


class Act(NamedTuple):
    """An activation.

    Attributes:
        kind: One of the kinds below.
        lo: Lower bound of CLAMP.
        hi: Upper bound of CLAMP.
        slope: Slope of LEAKY below 0.
    """

    kind: int
    lo: float = 0.0
    hi: float = math.inf
    slope: float = 0.0


def act_from(numbers: Sequence[float]) -> Act:
    """Return the activation with these numbers."""
    kind = int(numbers[0])
    if kind != numbers[0]:
        raise ValueError(f"an activation's kind is a whole number, not {numbers[0]}")
    return Act(kind, *numbers[1:])


CLAMP, LEAKY = 1, 2
IDENTITY, HARDSWISH, SILU = Act(0), Act(3), Act(4)
RELU, RELU6 = Act(CLAMP), Act(CLAMP, 0.0, 6.0)


class Fused(NamedTuple):
    """A map that ends in an activation, with what its backward needs.

    Attributes:
        y: The map.
        mean: Its patch means [N, C, H', W']; `None` at patch 1.
        slope: Of a clamp or leaky activation, how many pixels of each patch are on the steep piece, where the slope is 1; of a
            smooth one, the mean of the derivative. `None` at patch 1 and for the identity.
    """

    y: Tensor
    mean: Tensor | None
    slope: Tensor | None


class Ending(NamedTuple):
    """What follows a convolution: act(conv(x) · scale + shift), pooled.

    Attributes:
        bias: The convolution's own bias, or `None`.
        scale: One factor per channel, or `None` for 1.
        shift: One term per channel, or `None` for 0.
        act: The activation.
        patch: The patch `(h, w)`.
    """

    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    act: Act
    patch: Pair


class Cells(NamedTuple):
    """The patch means and slopes of a `Fused`, without the map."""

    mean: Tensor | None
    slope: Tensor | None


NO_CELLS = Cells(None, None)
"""Those at patch 1."""


class Expanded(NamedTuple):
    """The result of two convolutions without the map between them.

    Attributes:
        hidden: What is left of that map.
        out: The second one's.
    """

    hidden: Cells
    out: Fused


def is_smooth(act: Act) -> bool:
    """Tell whether the slope is a mean of derivatives instead of a count."""
    return act.kind > LEAKY
