"""The table of a training step beside inference: time, flops and bytes of all sides, taking turns in one process."""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradfilter.bench.setup import EXACT, INFERENCE, make_images
from gradfilter.bench.sides import CHECKPOINTED, COMPILED, FOLDED, NotAvailableError, Side
from gradfilter.cost import Trial, measure_saved_bytes
from gradfilter.cost_table import Seconds
from gradfilter.environment import find_free_memory
from gradfilter.errors import ExitWarning, GradFilterError
from gradfilter.loss import StepLoss
from gradfilter.measure import MOST_SHARE, find_time, measure_peak, take_turns
from gradfilter.meter import BACKWARD, Meter, follow, predict_step
from gradfilter.models import make_model
from gradfilter.outputs import find_logits
from gradfilter.units import show_amount

LAYOUTS = {"channels last": torch.channels_last, "contiguous": torch.contiguous_format}
SMALL_SIDE = 32
"""Images of this side take next to no time to compute: what a step takes on one of them is the price of its calls."""


@dataclass(frozen=True)
class Case:
    """What is run: a model, its weights (None for random ones), images per step, their side in pixels, threads."""

    model: str
    weights: str | None
    batch: int
    pixels: int
    threads: int


@dataclass
class Found:
    """What was found of one side.

    Attributes:
        reason: Why it was not timed, where it was not.
        times: Of each round.
        small: Of each round on a single image of `SMALL_SIDE`.
        backward_flops: Counted on shapes; None where nobody can.
        saved_bytes: What autograd holds after forward and loss; measured, or predicted where a step was not run.
        peak_bytes: Most bytes that torch's allocator gives out at once in a step; None where it was not run.
        joules: Of a step; None where nothing counts them.
        resident_bytes: Most that a process has resident in a step above its libraries; None where not measured.
    """

    reason: str = ""
    times: list[Seconds] = field(default_factory=list)
    small: list[Seconds] = field(default_factory=list)
    backward_flops: int | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    joules: float | None = None
    resident_bytes: int | None = None


@dataclass
class Stage:
    """A case with its network and batch, ready for sides to be made.

    Attributes:
        layout: A name of `LAYOUTS`: the one in which inference is faster.
        layout_ratio: Time of contiguous inference to channels-last; None where that was not tried.
    """

    case: Case
    network: nn.Module
    images: Tensor
    labels: Tensor | None
    layout: str = "channels last"
    layout_ratio: float | None = None

    def make(self, side: Side) -> nn.Module:
        """Return the model of a side."""
        return side.make(copy.deepcopy(self.network).train(), self.images)

    def make_run(self, side: Side, model: nn.Module, images: Tensor | None = None) -> Callable[[], Seconds]:
        """Return a function that does one step, or one forward pass, and tells how long its parts took."""
        images = self.images if images is None else images
        if not side.trains:
            return partial(infer, model, images)
        labels = None if self.labels is None else self.labels[: len(images)]
        trained = [p for p in model.parameters() if p.requires_grad]
        # At a learning rate of zero an update costs the same, and nothing can diverge.
        return Trial(model, images, StepLoss(None, labels), torch.optim.SGD(trained, lr=0.0)).step


def infer(model: nn.Module, images: Tensor) -> Seconds:
    """Run a forward pass; tell how long it took."""
    start = find_time(images)
    with torch.inference_mode():
        model(images)
    return Seconds(find_time(images) - start, 0.0, 0.0)


def set_up(case: Case, layout: str | None = None, rounds: int = 7) -> Stage:
    """Return a case ready to run: on its threads, in the given layout or the one in which inference is faster."""
    torch.set_num_threads(case.threads)
    network = make_model(case.model, weights=case.weights)
    images = make_images(case.batch, case.pixels)
    try:
        with torch.inference_mode():
            logits = find_logits(copy.deepcopy(network).eval()(images[:1]))
    except GradFilterError:
        raise
    except Exception as error:
        raise GradFilterError(
            f"model {case.model!r} fails on images of {case.pixels}×{case.pixels} px. It says {type(error).__name__}: {error}"
        ) from error
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(logits.shape[1], (case.batch,), generator=generator) if logits.dim() == 2 else None
    stage = Stage(case, network, images, labels)
    if layout is None:
        runs = {name: partial(infer, lay_out(network, name).eval(), lay_out(images, name)) for name in LAYOUTS}
        turns = take_turns(runs, rounds)
        stage.layout_ratio = find_ratio(turns, "contiguous", "channels last")
        layout = "contiguous" if stage.layout_ratio and stage.layout_ratio < 1 else "channels last"
    stage.layout, stage.network, stage.images = layout, lay_out(network, layout), lay_out(images, layout)
    return stage


def lay_out(what: Any, layout: str) -> Any:
    """Return a copy of a model or a batch in a layout."""
    return copy.deepcopy(what).to(memory_format=LAYOUTS[layout])


def run_sides(
    stage: Stage, sides: Mapping[str, Side], rounds: int, watch: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, Found], dict[str, Callable[[], Seconds]]]:
    """Return what is found of each side, and the runs of those that can run; all take turns."""
    found = {name: Found() for name in sides}
    runs: dict[str, Callable[[], Seconds]] = {}
    small: dict[str, Callable[[], Seconds]] = {}
    few = stage.case.batch == 1 and stage.case.pixels > SMALL_SIDE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExitWarning)  # whoever trains the model is told
        for name, side in sides.items():
            watch(name)
            try:
                model = stage.make(side)
                look(name, side, stage, model, found[name])
            except (NotAvailableError, GradFilterError) as error:
                found[name].reason = str(error).rstrip(".")
                continue
            runs[name] = stage.make_run(side, model)
            found[name].peak_bytes = measure_peak(runs[name], stage.images.device)
            if few and name != COMPILED:  # which would be compiled once more
                small[name] = stage.make_run(side, model, stage.images[:, :, :SMALL_SIDE, :SMALL_SIDE])
        watch(f"{rounds} rounds")
        for name, turns in take_turns(runs, rounds).items():
            found[name].times = turns
        for name, turns in take_turns(find_able(small), rounds).items():
            found[name].small = turns
    return found, runs


def find_able(runs: Mapping[str, Callable[[], Seconds]]) -> dict[str, Callable[[], Seconds]]:
    """Return the runs that do not fail: not every model can do with images that small."""
    able = {}
    for name, run in runs.items():
        try:
            run()
            able[name] = run
        except (RuntimeError, ValueError, GradFilterError):
            continue
    return able


def look(name: str, side: Side, stage: Stage, model: nn.Module, found: Found) -> None:
    """Find flops and bytes of a side; refuse one that might not fit into memory."""
    if not side.trains:
        found.backward_flops = found.saved_bytes = 0
        return
    loss = StepLoss(None, stage.labels)
    if name == CHECKPOINTED:  # what runs again in backward, runs with the model's own parameters: not on shapes
        found.backward_flops = count_backward(model, stage)
    elif name != COMPILED:
        step = predict_step(model, (stage.images,), loss)
        found.backward_flops, found.saved_bytes = step.count(BACKWARD), sum(step.saved_bytes.values())
        refuse_large(step.peak_bytes)
    found.saved_bytes = measure_saved_bytes(model, stage.images, loss=loss)


def refuse_large(peak_bytes: int) -> None:
    """Refuse a step that takes so many bytes, where that might not fit into memory."""
    free = find_free_memory()
    if peak_bytes > MOST_SHARE * free:
        peak, rest = (show_amount("memory", size) for size in (peak_bytes, free))
        raise NotAvailableError(f"a step would take {peak} of the {rest} that are free, so it was not run")


def count_backward(model: nn.Module, stage: Stage) -> int:
    """Return the flops of the backward pass of a real step."""
    with follow(model) as places, Meter(places) as meter:
        StepLoss(None, stage.labels)(model(stage.images)).backward()
    model.zero_grad()
    return sum(meter.flops[BACKWARD].values())


def find_ratio(
    turns: Mapping[str, Sequence[Seconds]], name: str, base: str, part: Callable[[Seconds], float] = lambda t: t.step
) -> float | None:
    """Return the median over rounds of a part of a side's step to the whole step of another; None where either has none."""
    own, others = turns.get(name), turns.get(base)
    if not own or not others:
        return None
    return statistics.median(part(a) / b.step for a, b in zip(own, others, strict=True))


def find_row(case: Case, name: str, side: Side, found: Mapping[str, Found]) -> dict[str, Any]:
    """Return the row of a side by column."""
    own, base = found[name], found[INFERENCE]
    turns: dict[str, Sequence[Seconds]] = {key: value.times for key, value in found.items()}
    row: dict[str, Any] = {
        "batch": case.batch,
        "threads": case.threads,
        "method": name,
        "step / inference": find_ratio(turns, name, INFERENCE),
        "step / folded": find_ratio(turns, name, FOLDED),
        "step / exact": find_ratio(turns, name, side.exact if side.exact in found else EXACT),
        "forward / inference": find_ratio(turns, name, INFERENCE, lambda t: t.forward),
        "backward / inference": find_ratio(turns, name, INFERENCE, lambda t: t.backward + t.update),
        "ms": 1e3 * statistics.median(t.step for t in own.times) if own.times else None,
        "backward flops": own.backward_flops,
        "saved bytes": own.saved_bytes,
        "peak bytes": own.peak_bytes,
        "32 px / inference": find_ratio({"small": own.small, INFERENCE: base.times}, "small", INFERENCE),
        "resident bytes": own.resident_bytes,
        "resident / inference": divide(own.resident_bytes, base.resident_bytes),
        "joules": own.joules,
        "joules / inference": divide(own.joules, base.joules),
    }
    return row


def divide(a: float | None, b: float | None) -> float | None:
    """Return a / b where both are known."""
    return a / b if a is not None and b else None
