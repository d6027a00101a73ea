"""What `gradfilter.cost` gives back: numbers by layer and in total, and how they read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gradfilter.geometry.tiling import Pair
from gradfilter.table import Table
from gradfilter.units import show_amount


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes in a step, or all do; what follows a layer (norm, activation, pooling) counts as that layer's.

    Attributes:
        forward_flops: Those of the forward pass.
        backward_flops: Those of the backward pass.
        saved_bytes: What autograd holds between the two, predicted: exactly, or, where the batch decides (HOSVD), at most.
        measured_saved_bytes: The same, measured; None where it was not.
        parameter_bytes: Those of the parameters.
        gradient_bytes: Those of the gradients.
        optimizer_bytes: Those of the optimizer's state.
    """

    forward_flops: int = 0
    backward_flops: int = 0
    saved_bytes: int = 0
    measured_saved_bytes: int | None = None
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """What autograd holds, as measured where it was."""
        return self.saved_bytes if self.measured_saved_bytes is None else self.measured_saved_bytes


@dataclass(frozen=True)
class Seconds:
    """How long the parts of a step take; NaN where that was not measured."""

    forward: float = math.nan
    backward: float = math.nan
    update: float = math.nan

    @property
    def step(self) -> float:
        """The whole step."""
        return self.forward + self.backward + self.update


@dataclass(frozen=True)
class StepCost:
    """What a training step takes: forward, loss, backward, update.

    Attributes:
        layers: By name, in the order in which they run. "(input)" is what comes before the first, "(loss)" behind the model.
        update_flops: Those of the optimizer.
        peak_bytes: Most bytes alive at once, on top of parameters, optimizer state and batch: predicted.
        measured_peak_bytes: The same, as torch's allocator tells; None where it was not measured.
        rss_bytes: Most bytes that the whole process had resident in a step; None where that was not measured.
        seconds: Medians over rounds.
    """

    layers: Mapping[str, LayerCost]
    update_flops: int
    peak_bytes: int
    measured_peak_bytes: int | None = None
    rss_bytes: int | None = None
    seconds: Seconds = Seconds()

    @property
    def total(self) -> LayerCost:
        """The sum over layers."""
        layers = list(self.layers.values())
        columns = {f.name: [getattr(layer, f.name) for layer in layers] for f in fields(LayerCost)}
        sums: dict[str, Any] = {name: None if None in values else sum(values) for name, values in columns.items()}
        return LayerCost(**sums)


@dataclass(frozen=True)
class Cost:
    """What a training step under a plan takes, beside exact backprop of the same layers.

    Attributes:
        plan: Under the plan.
        exact: By torch's own backward.
        patches: Side of each filtered layer's patches `(h, w)`.
        step_ratio: Time of a step, plan / exact: the median over rounds. NaN where it was not measured.
        batch: Images per step.
        resolution: Their size `(h, w)`.
        notes: What was not measured, and why.
    """

    plan: StepCost
    exact: StepCost
    patches: Mapping[str, Pair]
    step_ratio: float
    batch: int
    resolution: Pair
    notes: tuple[str, ...] = ()

    def to_table(self) -> Table:
        """Return a row for each layer that goes backward, one for the others, one for all; peak, state and time as remarks."""
        table = Table(
            "Cost of a training step beside exact backprop, batch {} at {}×{} px".format(self.batch, *self.resolution),
            {
                "layer": str,
                "patch": str,
                "forward flops": show_flops,
                "exact forward flops": show_flops,
                "backward flops": show_flops,
                "exact backward flops": show_flops,
                "saved bytes": show_bytes,
                "exact saved bytes": show_bytes,
                "parameter bytes": show_bytes,
                "gradient bytes": show_bytes,
            },
        )
        idle, rows = [], []
        for name in dict.fromkeys((*self.plan.layers, *self.exact.layers)):
            sides = self.plan.layers.get(name, LayerCost()), self.exact.layers.get(name, LayerCost())
            patch = self.patches.get(name)
            busy = any(side.backward_flops or side.saved_bytes or side.gradient_bytes for side in sides)
            (rows if busy else idle).append((name or "(model)", patch and show_patch(patch), *make_row(*sides)))
        if len(idle) > 1:
            sums = (sum(column) for column in list(zip(*idle, strict=True))[2:])
            idle = [(f"({len(idle)} without a gradient)", None, *sums)]
        table.rows += [*idle, *rows]
        table.rows.append(("total", None, *make_row(self.plan.total, self.exact.total)))
        table.remarks += make_remarks(self)
        return table

    def __str__(self) -> str:
        return self.to_table().to_markdown()


def make_row(plan: LayerCost, exact: LayerCost) -> tuple[int, ...]:
    """Return the numbers of a row, exact beside the plan."""
    pairs = [(getattr(plan, name), getattr(exact, name)) for name in ("forward_flops", "backward_flops", "held_bytes")]
    return (*(number for pair in pairs for number in pair), plan.parameter_bytes, plan.gradient_bytes)


def make_remarks(cost: Cost) -> list[str]:
    """Return the sentences below the table."""
    plan, exact, total = cost.plan, cost.exact, cost.plan.total
    fewer = f": {exact.total.held_bytes / total.held_bytes:.1f}× fewer" if total.held_bytes else ""
    remarks = [
        f"Saved: {beside(total.saved_bytes, total.measured_saved_bytes)} under the plan, "
        f"{beside(exact.total.saved_bytes, exact.total.measured_saved_bytes)} exactly{fewer}.",
        f"Peak of a step, on top of parameters, optimizer state and batch: {beside(plan.peak_bytes, plan.measured_peak_bytes)} "
        f"under the plan, {beside(exact.peak_bytes, exact.measured_peak_bytes)} exactly.",
        f"On both sides: parameters {show_bytes(total.parameter_bytes)}, gradients {show_bytes(total.gradient_bytes)} (part of "
        f"the peak), optimizer state {show_bytes(total.optimizer_bytes)}, update {show_flops(plan.update_flops)} flops.",
    ]
    if not math.isnan(plan.seconds.step):
        times = f"Step: {show_seconds(plan.seconds)} under the plan"
        known = not math.isnan(cost.step_ratio)
        remarks.append(
            f"{times}, {show_seconds(exact.seconds)} exactly: {cost.step_ratio:.2f} of its time." if known else f"{times}."
        )
    if plan.rss_bytes is not None:
        also = f", {show_bytes(exact.rss_bytes)} exactly" if exact.rss_bytes is not None else ""
        remarks.append(f"The process, all in all, had {show_bytes(plan.rss_bytes)} resident in a step under the plan{also}.")
    return [*remarks, *cost.notes]


def show_flops(number: int) -> str:
    """Return a number of flops."""
    return show_amount("flops", number) if number else "0"


def show_bytes(number: float) -> str:
    """Return a number of bytes."""
    return show_amount("memory", number) if number else "0 B"


def beside(predicted: int, measured: int | None) -> str:
    """Return predicted bytes with the measured ones behind."""
    return show_bytes(predicted) + (f" (measured {show_bytes(measured)})" if measured is not None else "")


def show_seconds(seconds: Seconds) -> str:
    """Return the time of a step and of its parts."""
    parts = seconds.step, seconds.forward, seconds.backward, seconds.update
    step, *parts = (show_amount("time", s) for s in parts)
    return "{} (forward {}, backward {}, update {})".format(step, *parts)


def show_patch(patch: Pair) -> str:
    """Return a patch in one word."""
    return str(patch[0]) if patch[0] == patch[1] else "{}x{}".format(*patch)
