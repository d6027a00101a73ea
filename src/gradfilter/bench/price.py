"""The price of a training step in inference passes: the table of all sides, for any model, plans, batches and threads."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from gradfilter.bench.allocator import DEFAULT, REMARKS, set_allocator
from gradfilter.bench.energy import Counter, find_counter
from gradfilter.bench.fresh import answer, pack_plans, run_fresh, tell, unpack_plans
from gradfilter.bench.memory import measure_resident
from gradfilter.bench.picture import make_bars
from gradfilter.bench.report import Report
from gradfilter.bench.sides import COMPILED, DEFAULT_PLANS, describe_sides, make_sides
from gradfilter.bench.step import SMALL_SIDE, Case, find_row, run_sides, set_up
from gradfilter.cost_table import show_bytes, show_flops
from gradfilter.measure import median, take_turns
from gradfilter.plan import Plan

LEAST_SECONDS = 1.0
"""Energy is counted over so long at least: counters move a thousand times a second at best."""


ALONE = (
    "Inference and gradfilter alone: no other training in the process, whose freed gigabytes would spare inference the page "
    "faults that it takes by itself."
)
FRESH = "Each batch and number of threads has a process of its own: nothing of one is left in the allocator of another."


def make_name(model: str) -> str:
    """Return the name of a model's report, of which files are named."""
    return f"bench-{re.sub('[^A-Za-z0-9_.-]', '-', model)}"


def show_ratio(value: float) -> str:
    """Return a ratio of times or amounts."""
    return f"{value:.2f}"


COLUMNS: dict[str, Callable[[Any], str]] = {
    "batch": str,
    "threads": str,
    "method": str,
    "step / inference": show_ratio,
    "step / folded": show_ratio,
    "step / exact": show_ratio,
    "forward / inference": show_ratio,
    "backward / inference": show_ratio,
    "ms": lambda value: f"{value:.0f}" if value >= 100 else f"{value:.1f}",
    "backward flops": show_flops,
    "saved bytes": show_bytes,
    "peak bytes": show_bytes,
}
SOMETIMES: dict[str, Callable[[Any], str]] = {
    f"{SMALL_SIDE} px / inference": show_ratio,
    "resident bytes": show_bytes,
    "resident / inference": show_ratio,
    "joules": lambda value: f"{value:.3g}",
    "joules / inference": show_ratio,
}
"""Columns that are there where something was measured."""


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        rounds: Of which medians are taken.
        compile_seconds: How long torch.compile may take for each batch and number of threads; 0 leaves that row out.
        memory: Whether to measure the peak of fresh processes too.
        allocator: "default" or "keep"; it is for whoever calls to have set it.
        picture: Whether to draw.
        watch: Told what is being done.
        peers: Whether others that train are measured, too. Their gigabytes change what the C library keeps for later, and with
            that the time of inference.
        fresh: Whether each case has a process of its own. Cases before it, too, change what the C library keeps.
    """

    rounds: int = 7
    compile_seconds: float = 300
    memory: bool = False
    allocator: str = DEFAULT
    picture: bool = False
    watch: Callable[[str], None] = lambda _: None
    peers: bool = True
    fresh: bool = False


OPTIONS = Options()


def measure(
    cases: Sequence[Case], plans: Mapping[str, Plan] = DEFAULT_PLANS, options: Options = OPTIONS, command: str = ""
) -> Report:
    """Return the table: for each case a row for every side."""
    model, before = cases[0].model, torch.get_num_threads()
    title = f"The price of a training step: {model}, {cases[0].weights or 'random'} weights, {cases[0].pixels} px"
    kind = ("" if options.peers else "-alone") + ("" if options.allocator == DEFAULT else f"-{options.allocator}")
    report = Report(make_name(model) + kind, title, command, COLUMNS)
    rows: list[dict[str, Any]] = []
    remarks: list[str] = []
    try:
        for case in cases:
            found, told = (measure_fresh if options.fresh else measure_case)(case, plans, options)
            rows += found
            remarks += [remark for remark in told if remark not in remarks]
            if any(COMPILED in remark for remark in told):  # once is enough to wait
                options = replace(options, compile_seconds=0)
    finally:
        torch.set_num_threads(before)
    report.columns = COLUMNS | {name: show for name, show in SOMETIMES.items() if any(row[name] is not None for row in rows)}
    report.rows = [[row[name] for name in report.columns] for row in rows]
    fresh = [FRESH] if options.fresh and len(cases) > 1 else []
    report.remarks = [explain(options.rounds), *fresh, *remarks, REMARKS[options.allocator], find_counter()[1]]
    if options.picture:
        report.picture = make_bars(title, rows, set(plans))
    return report


def measure_fresh(case: Case, plans: Mapping[str, Plan], options: Options) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what `measure_case` returns, from a process of its own."""
    given = {field.name: getattr(options, field.name) for field in fields(options) if field.name != "watch"}
    order = {"case": asdict(case), "plans": pack_plans(plans), "options": {**given, "fresh": False}}
    rows, remarks = run_fresh("gradfilter.bench.price", order, f"measures {describe_case(case)}", options.watch)
    return rows, remarks


def run_order(order: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what `measure_case` returns, in the process that `measure_fresh` starts."""
    set_allocator(order["options"]["allocator"])
    return measure_case(Case(**order["case"]), unpack_plans(order["plans"]), Options(**order["options"], watch=tell))


def describe_case(case: Case) -> str:
    """Return what sets a case apart from others of a table."""
    return f"batch {case.batch}, {case.threads} {'thread' if case.threads == 1 else 'threads'}"


def measure_case(case: Case, plans: Mapping[str, Plan], options: Options) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of one case, and what there is to say about it."""
    where, (counter, _) = describe_case(case), find_counter()
    stage = set_up(case)
    sides = make_sides(plans, options.compile_seconds, options.peers)
    found, runs = run_sides(stage, sides, options.rounds, lambda text: options.watch(f"{where}: {text}"))
    if counter is not None:
        joules = take_turns({name: partial(count_joules, counter, run) for name, run in runs.items()}, 2)
        for name, values in joules.items():
            found[name].joules = median(values)
    for name in runs if options.memory else ():
        if name != COMPILED:
            options.watch(f"{where}: resident memory, {name}")
            found[name].resident_bytes = measure_resident(case, stage.layout, options.allocator, plans, name)
    remarks = [describe_sides(stage.network, plans)] if options.peers else [ALONE]
    remarks.append(
        f"{where}: maps are {stage.layout} on all sides (contiguous inference takes {stage.layout_ratio:.2f} of the time of "
        "channels-last)."
    )
    cores = os.cpu_count() or 1
    if case.threads > cores:
        remarks.append(f"{case.threads} threads share {cores} cores: they wait for each other.")
    remarks += [f"{where}: {name}: not available: {one.reason}." for name, one in found.items() if one.reason]
    return [find_row(case, name, side, found) for name, side in sides.items()], remarks


def count_joules(counter: Counter, run: Callable[[], Any]) -> float:
    """Return the joules of one run, from as many as take a while."""
    count = 0

    def repeat() -> None:
        nonlocal count
        start = time.perf_counter()
        while time.perf_counter() - start < LEAST_SECONDS:
            run()
            count += 1

    return counter.measure(repeat) / count


def explain(rounds: int) -> str:
    """Return what the columns are."""
    return (
        "Inference: torch's eager forward of the unmodified model in eval mode, under inference_mode; folded: the same with "
        "batch norms folded into convolutions by torch's own utility. Step: forward and loss, backward, SGD update; batch-norm "
        f"statistics do not move. Ratios: medians of {rounds} rounds, each within a round in which all sides take turns in one "
        "process; a first round warms up. Step / exact: to exact backprop of the same layers; for peers, of all layers. "
        "Backward is with the update. Flops: counted, a multiply-add is two. Saved: what autograd holds after forward, "
        "measured, parameters and buffers excluded. Peak: most that torch's allocator gives out at once in a step, on top of "
        "parameters and batch."
    )


if __name__ == "__main__":
    answer(run_order)
