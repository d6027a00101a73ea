"""The gradient-filtering paper's own accounting: backward FLOPs and activation bytes by formula, as in its tables.

From *Efficient On-device Training via Gradient Filtering* (CVPR 2023, arXiv 2301.00330), for one image. With Cx and Cy channels
in and out (of a group), a k×k kernel, H×W the output of a layer and Ph×Pw its patches, ⌈H/r⌉×⌈W/r⌉:

    exact     gx  2·Cx·Cy·H·W·k²                         gw  Cx·Cy·(k²·H·W + H·W − 1)
    filtered  gx  Ph·Pw·Cx·(2·Cy − 1) + (k² − 1)·Cx·Cy   gw  Cx·Cy·(2·Ph·Pw − 1)        mean of gy  Cy·H·W

The earliest trained layer has no gx. A classifier is a layer with H = W = k = 1: 3·C·classes. Bytes are those of the inputs of
trained convolutions, four a number: Cx·Hx·Wx, or Cx·Ph·Pw where filtered. Norms, activations and pooling count nothing: what a
step really takes is for `gradfilter.cost` to say.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from gradfilter.cost_table import show_bytes, show_flops, show_patch
from gradfilter.errors import ExitWarning, InputError
from gradfilter.geometry.tiling import Pair, Tiling, map_size
from gradfilter.hooks import PlannedLayer, exactly, find_applied, find_hooks
from gradfilter.outputs import copy_model, explain_failure
from gradfilter.plan import Conv, find_layers
from gradfilter.shapes import on_shapes, to_meta
from gradfilter.table import Table

FLOAT = 4
"""Bytes of a number."""


@dataclass(frozen=True)
class PaperLayer:
    """One layer as the paper counts it; zero where the layer is not trained and passes no gradient on.

    Attributes:
        flops: Of the backward pass, under the plan.
        exact_flops: Of exact backprop.
        input_bytes: Of the layer's input as it is kept, under the plan.
        exact_input_bytes: By exact backprop.
        patch: Side of the patches of its output; None where it is not filtered.
    """

    flops: int
    exact_flops: int
    input_bytes: int
    exact_input_bytes: int
    patch: Pair | None = None


@dataclass(frozen=True)
class PaperCost:
    """A model under a plan as the paper counts it, for one image.

    Attributes:
        layers: By name, in the order in which they run, as far as anything counts for them.
        resolution: Size of the image `(h, w)`.
    """

    layers: Mapping[str, PaperLayer]
    resolution: Pair

    @property
    def total(self) -> PaperLayer:
        """The sum over layers."""
        rows = self.layers.values()
        return PaperLayer(
            sum(row.flops for row in rows),
            sum(row.exact_flops for row in rows),
            sum(row.input_bytes for row in rows),
            sum(row.exact_input_bytes for row in rows),
        )

    def to_table(self) -> Table:
        """Return a row for each layer, and one for all."""
        table = Table(
            "A training step as the gradient-filtering paper counts it, one image of {}×{} px".format(*self.resolution),
            {
                "layer": str,
                "patch": str,
                "backward flops": show_flops,
                "exact backward flops": show_flops,
                "input bytes": show_bytes,
                "exact input bytes": show_bytes,
            },
        )
        for name, row in (*self.layers.items(), ("total", self.total)):
            patch = row.patch and show_patch(row.patch)
            numbers = row.flops, row.exact_flops, row.input_bytes, row.exact_input_bytes
            table.rows.append((name or "(model)", patch, *numbers))
        table.remarks.append(
            "By the formulas of arXiv 2301.00330, for its lumped kernel: backward of convolutions and Linear layers, inputs of "
            "trained convolutions, nothing else. gradfilter.cost has all that a step takes."
        )
        return table

    def __str__(self) -> str:
        return self.to_table().to_markdown()


@dataclass
class Seen:
    """What a layer had in a forward pass: sizes of one image's maps, and whether its input needs a gradient."""

    size_in: Pair
    size_out: Pair
    channels: int
    needs_gx: bool


def count_as_paper(model: nn.Module, images: Tensor) -> PaperCost:
    """Return a step of a model under a plan as the paper counts it, from shapes alone.

    Args:
        model: Under a plan; it is left as it is.
        images: A batch, of which the shape of one image matters. A meta tensor will do.

    Raises:
        InputError: No plan is applied.
        GradFilterError: The model fails on the images.
    """
    if find_applied(model) is None:
        raise InputError(
            f"{type(model).__name__} runs under no plan. Call gradfilter.apply_(model, plan) first, on this very module."
        )
    twin = copy_model(model)
    applied = find_applied(twin)
    assert applied is not None
    layers, one = find_layers(twin), to_meta(images[:1])
    seen: dict[str, Seen] = {}
    handles = [layer.register_forward_hook(partial(look, seen, name)) for name, layer in layers.items()]
    with warnings.catch_warnings(), explain_failure(images, "when it runs on shapes alone"), on_shapes(twin) as (run, _):
        warnings.simplefilter("ignore", ExitWarning)
        run(one)  # tells the patches
        with exactly(applied):
            seen.clear()
            run(one)  # tells where gradients go: at patch resolution every input of a region has one
    for handle in handles:
        handle.remove()
    found = {name: count_layer(layers[name], sight, find_tiling(layers[name])) for name, sight in seen.items()}
    return PaperCost({name: row for name, row in found.items() if row.exact_flops}, (one.shape[-2], one.shape[-1]))


def look(seen: dict[str, Seen], name: str, layer: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
    """Note what a layer had; a forward hook, but for the first two arguments."""
    x = args[0]
    if isinstance(layer, Conv):
        seen[name] = Seen(map_size(x), map_size(y), x.shape[1], x.requires_grad)
    else:  # a Linear layer is a 1×1 convolution of as many places as there are
        places = math.prod(x.shape[1:-1]), 1
        seen[name] = Seen(places, places, x.shape[-1], x.requires_grad)


def find_tiling(layer: nn.Module) -> Tiling | None:
    """Return how a layer's maps are cut; None where it runs exactly."""
    hooks = [hook for hook in find_hooks(layer) if isinstance(hook, PlannedLayer)]
    return hooks[0].choices.tiling if hooks and hooks[0].choices is not None else None


def count_layer(layer: nn.Module, seen: Seen, tiling: Tiling | None) -> PaperLayer:
    """Return one layer by the formulas of this module."""
    weight: Any = layer.weight
    taps = weight[0, 0].numel() if isinstance(layer, Conv) else 1
    pairs = weight.numel() // taps  # Cx·Cy, of all groups together
    needs_gw = weight.requires_grad
    # A transposed convolution is another's backward: it has as many products as its input has places.
    size = seen.size_in if isinstance(layer, nn.ConvTranspose2d) else seen.size_out
    places = math.prod(size)
    outputs = pairs // seen.channels  # Cy of a group
    exact = seen.needs_gx * 2 * pairs * places * taps + needs_gw * pairs * (taps * places + places - 1)
    held = FLOAT * seen.channels * math.prod(seen.size_in) if needs_gw and isinstance(layer, Conv) else 0
    patch = tiling.patch_for(size) if tiling else (1, 1)
    if patch == (1, 1) or not isinstance(layer, Conv):
        return PaperLayer(exact, exact, held, held)
    patches = math.prod(-(-n // p) for n, p in zip(size, patch, strict=True))
    gx = patches * seen.channels * (2 * outputs - 1) + (taps - 1) * pairs
    gw = pairs * (2 * patches - 1)
    mean = layer.out_channels * places if seen.needs_gx or needs_gw else 0
    kept = FLOAT * seen.channels * patches if needs_gw else 0
    return PaperLayer(seen.needs_gx * gx + needs_gw * gw + mean, exact, kept, held, patch)
