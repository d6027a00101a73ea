"""The headline of a report: accuracy, saved bytes and step time, beside exact."""

import math
from typing import NamedTuple

from gradfilter.report.results import Cost, Results
from gradfilter.report.text import NOTHING, byte_size, duration, half_interval, how_many_fewer, percent, ratio
from gradfilter.scores import find_mean_accuracy


class Fact(NamedTuple):
    """Hold one number of the headline: its name, the number itself, and what it is measured by."""

    name: str
    value: str
    remark: str


def make_headline(results: Results) -> tuple[Fact, Fact, Fact]:
    """Return the three numbers that matter most."""
    return (_accuracy(results), _saved_bytes(results.cost), _step_time(results.cost))


def _accuracy(results: Results) -> Fact:
    if results.metric == "mIoU":
        return _mean_iou(results)
    best = results.best
    images = sum(map(sum, results.confusion))
    half = half_interval(best.val_accuracy, images)
    interval = f"± {100 * half:.1f} on " if math.isfinite(half) else ""
    remark = f"{interval}{images:,} held-out images, epoch {best.epoch} of {results.history[-1].epoch}"
    if results.beside is not None:
        remark = f"{results.beside.name} {percent(results.beside.accuracy)}; {remark}"
    return Fact("accuracy", percent(best.val_accuracy), remark)


def _mean_iou(results: Results) -> Fact:
    best, confusion = results.best, results.confusion
    remark = f"mAcc {percent(find_mean_accuracy(confusion))} on {results.val_images:,} held-out images"
    remark += f", epoch {best.epoch} of {results.history[-1].epoch}"
    if results.beside is not None:
        remark = f"{results.beside.name} {percent(results.beside.accuracy)}; {remark}"
    return Fact("mIoU", percent(best.val_accuracy), remark)


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
