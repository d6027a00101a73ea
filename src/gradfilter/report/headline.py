"""The headline of a report: accuracy, saved bytes and step time, beside exact."""

import math
from typing import NamedTuple

from gradfilter.report.results import Cost, Results
from gradfilter.report.subject import find_subject
from gradfilter.report.text import NOTHING, byte_size, duration, how_many_fewer, percent, ratio


class Fact(NamedTuple):
    """Hold one number of the headline: its name, the number itself, and what it is measured by."""

    name: str
    value: str
    remark: str


def make_headline(results: Results) -> tuple[Fact, Fact, Fact]:
    """Return the three numbers that matter most."""
    return (_score(results), _saved_bytes(results.cost), _step_time(results.cost))


def _score(results: Results) -> Fact:
    best = results.best
    beside = f"{results.beside.name} {percent(results.beside.accuracy)}; " if results.beside is not None else ""
    images = f"on {results.val_images:,} held-out images, epoch {best.epoch} of {results.history[-1].epoch}"
    remark = find_subject(results).remark(results)
    return Fact(results.metric, percent(best.val_accuracy), f"{beside}{remark}{images if remark else images[3:]}")


def _saved_bytes(cost: Cost | None) -> Fact:
    if cost is None:
        return Fact("saved bytes", NOTHING, "not measured")
    fewer = how_many_fewer(cost.saved_bytes, cost.exact_saved_bytes)
    return Fact(
        "saved bytes",
        byte_size(cost.saved_bytes),
        f"exact {byte_size(cost.exact_saved_bytes)}" + (f", {fewer}" if fewer else ""),
    )


def _step_time(cost: Cost | None) -> Fact:
    if cost is None:
        return Fact("step time", NOTHING, "not measured")
    if not math.isfinite(cost.step_ratio):
        return Fact("step time", duration(cost.step_seconds), "exact not measured")
    times = f"{duration(cost.step_seconds)}, exact {duration(cost.exact_step_seconds)}"
    return Fact("step time", f"{ratio(cost.step_ratio)} exact", times)
