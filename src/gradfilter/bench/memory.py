"""The peak memory of a process that does nothing else than steps, or passes, of one side."""

from __future__ import annotations

import dataclasses
import resource
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradfilter.bench.allocator import set_allocator
from gradfilter.bench.fresh import answer, pack_plans, run_fresh, unpack_plans
from gradfilter.bench.sides import make_sides
from gradfilter.bench.step import Case, set_up
from gradfilter.errors import ExitWarning
from gradfilter.plan import Plan

STEPS = 3


def measure_resident(case: Case, layout: str, allocator: str, plans: Mapping[str, Plan], side: str) -> int:
    """Return the most bytes that a fresh process has resident in a side's steps, above what its imports take."""
    order = {
        "case": dataclasses.asdict(case),
        "layout": layout,
        "allocator": allocator,
        "plans": pack_plans(plans),
        "side": side,
    }
    return run_fresh("gradfilter.bench.memory", order, f"measures the memory of {side!r}")


def run_steps(order: Mapping[str, Any]) -> int:
    """Run a few steps; return the peak of this process above its libraries.

    Those are read in while the model is built. So the peak is found above libraries, model and batch, and the bytes of
    model and batch, which are known, are added.
    """
    set_allocator(order["allocator"])
    sides = make_sides(unpack_plans(order["plans"]))
    side = sides[order["side"]]
    stage = set_up(Case(**order["case"]), order["layout"])
    model = stage.make(side)
    run = stage.make_run(side, model)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), stage.images))
    reset_peak()
    baseline = find_peak()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExitWarning)
        for _ in range(STEPS):
            run()
    return find_peak() - baseline + held


def reset_peak() -> None:
    """Let the system forget the highest resident memory so far, which building a model may have raised; on Linux."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def find_peak() -> int:
    """Return the highest resident memory of this process so far, in bytes."""
    try:  # ru_maxrss would start at what the process that started this one held
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    answer(run_steps)
