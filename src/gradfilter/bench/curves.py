"""How the price of a step grows: with the batch, the image, the patch and the threads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from gradfilter.bench.allocator import set_allocator
from gradfilter.bench.fresh import answer, pack_plans, run_fresh, unpack_plans
from gradfilter.bench.picture import make_curves
from gradfilter.bench.price import REMARKS, Options, make_name, show_ratio
from gradfilter.bench.report import Report
from gradfilter.bench.setup import EXACT, INFERENCE
from gradfilter.bench.sides import make_sides
from gradfilter.bench.step import Case, find_row, run_sides, set_up
from gradfilter.cost_table import show_bytes
from gradfilter.plan import Plan

VALUES: dict[str, Sequence[int]] = {
    "batch": (1, 2, 4, 8, 16, 32, 64, 128),
    "pixels": (96, 128, 160, 224, 320, 512),
    "patch": (1, 2, 4, 8, 16),
    "threads": tuple(range(1, (os.cpu_count() or 1) + 1)),
}
PLAN, OURS = "plan", "gradfilter"
COLUMNS = {
    "varied": str,
    "value": str,
    "method": str,
    "step / inference": show_ratio,
    "ms": lambda value: f"{value:.1f}",
    "saved bytes": show_bytes,
    "peak bytes": show_bytes,
}


def measure(
    case: Case,
    name: str,
    plan: Plan,
    options: Options,
    command: str = "",
    values: Mapping[str, Sequence[int]] = VALUES,
) -> Report:
    """Return how long a step takes beside inference, exactly and under a plan, while one thing varies at a time."""
    before = torch.get_num_threads()
    where = f"{case.model}, {name}; elsewhere batch {case.batch}, {case.pixels} px, {case.threads} thread(s)"
    rows: list[dict[str, Any]] = []
    remarks = [
        "As in the table of methods, and everywhere in its layout; median of "
        f"{options.rounds} rounds. The patch is varied in place of the plan's own. Exact training runs in the same process, "
        "so that inference meets few page faults, as in the table with peers.",
        REMARKS[options.allocator],
    ]
    try:
        layout = set_up(case).layout
        for varied, points in values.items():
            for value in points:
                options.watch(f"{varied} {value}")
                at = case if varied == "patch" else replace(case, **{varied: value})
                chosen = plan.override(patch=value) if varied == "patch" else plan
                order = {
                    "case": asdict(at),
                    "layout": layout,
                    "plans": pack_plans({PLAN: chosen}),
                    "rounds": options.rounds,
                    "allocator": options.allocator,
                }
                run = (
                    partial(run_fresh, "gradfilter.bench.curves", what=f"measures {varied} {value}")
                    if options.fresh
                    else run_order
                )
                for label, (row, reason) in run(order).items():
                    rows.append({**row, "varied": varied, "value": value, "method": label})
                    if reason:
                        remarks.append(f"{varied} {value}, {label}: {reason}.")
    finally:
        torch.set_num_threads(before)
    report = Report(f"{make_name(case.model)}-curves", f"How the price of a training step grows: {where}", command, COLUMNS)
    report.rows = [[row[column] for column in COLUMNS] for row in rows]
    report.remarks = remarks
    if options.picture:
        report.picture = make_curves(report.title, rows)
    return report


def run_order(order: Mapping[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the row of exact training and that of a plan, each with why there is none, by method."""
    set_allocator(order["allocator"])
    case, sides = Case(**order["case"]), make_sides(unpack_plans(order["plans"]))
    base = sides[PLAN].exact
    found, _ = run_sides(set_up(case, order["layout"]), {key: sides[key] for key in (INFERENCE, base, PLAN)}, order["rounds"])
    return {label: (find_row(case, key, sides[key], found), found[key].reason) for key, label in ((base, EXACT), (PLAN, OURS))}


if __name__ == "__main__":
    answer(run_order)
