"""Bring the arguments of a function together: one shape, one patch size, a carrier each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradfilter.carriers import Out
from gradfilter.emit import enter_carrier, rebind, regrid_carrier, wrap
from gradfilter.geometry.tiling import Layout, Pair, count_cells
from gradfilter.regions import Choices
from gradfilter.tensor import PatchTensor, find_live, is_live, leave, spatial_size


class Meeting(NamedTuple):
    """Tensors at one patch size: their carriers, and what the result of a function of them all is.

    Attributes:
        patch: The finest patch among them.
        layout: Their layout.
        choices: Those of the planned layer that ran last.
        carriers: A carrier for each tensor.
    """

    patch: Pair
    layout: Layout
    choices: Choices
    carriers: list[Tensor]

    def make_out(self, y: Tensor) -> Out:
        """Return the value of a rule's result as functions of autograd take it."""
        return Out(y, self.patch, self.choices, PatchTensor, self.layout)

    def finish(self, y: Tensor, carrier: Tensor, changed: PatchTensor | None = None) -> PatchTensor:
        """Return the result of a rule: a PatchTensor, `changed` itself where the function has worked in place on it."""
        if changed is None:
            return wrap(y, carrier, self.patch, self.choices, layout=self.layout)
        changed.patch = self.patch
        return rebind(changed, carrier)


def meet(tensors: Sequence[Tensor], shape: Sequence[int] | None = None) -> Meeting | None:
    """Bring tensors of one layout and map size to the finest patch among them; plain ones enter the region.

    So no gradient is made coarser than it was. `None` where they do not fit together, or none of them is live.

    Args:
        tensors: PatchTensors and plain tensors.
        shape: The shape to which all are broadcast; without one they keep theirs, and may differ in other axes.
    """
    first = tensors[0] if tensors else None
    if len(tensors) == 1 and is_live(first) and (shape is None or first.shape == shape):
        return Meeting(first.patch, first.spatial, first.choices, [first.carrier])
    live = find_live(tensors)
    if not live or len({t.dtype for t in tensors}) > 1:
        return None
    largest = max(live, key=spatial_size)
    size = spatial_size(largest)
    # A map of one pixel, broadcast to a larger one (a gate), acts as any tensor that is constant over space.
    tensors = [leave(t) if is_live(t) and spatial_size(t) == (1, 1) != size else t for t in tensors]
    live = [t for t in live if spatial_size(t) != (1, 1) or size == (1, 1)]
    new = 0 if shape is None else len(shape) - largest.dim()
    layout = move_layout(largest.spatial, new)
    patch = min(t.patch[0] for t in live), min(t.patch[1] for t in live)
    carriers = []
    for t in tensors:
        wanted = t.shape if shape is None else shape
        if is_live(t):
            if move_layout(t.spatial, len(wanted) - t.dim()) != layout or spatial_size(t) != size:
                return None
            carrier = regrid_carrier(t, patch)
            carriers.append(carrier if t.shape == wanted else carrier.expand(layout.resize(wanted, count_cells(size, patch))))
        else:
            if len(wanted) <= max(layout.axes) or layout.resize(wanted, size) != list(wanted):
                return None
            carriers.append(enter_carrier(t if t.shape == wanted else t.expand(wanted), patch, layout))
    return Meeting(patch, layout, max((t.choices for t in live), key=lambda choices: choices.rank), carriers)


def broadcast(*tensors: Tensor) -> torch.Size:
    """Return the shape to which tensors are broadcast; torch's own function takes its time where there is nothing to do."""
    shapes = [t.shape for t in tensors]
    return shapes[0] if all(shape == shapes[0] for shape in shapes) else torch.broadcast_shapes(*shapes)


def move_layout(layout: Layout, new: int) -> Layout:
    """Return the layout behind so many new axes in front."""
    return replace(layout, rows=layout.rows + new, columns=layout.columns + new) if new else layout
