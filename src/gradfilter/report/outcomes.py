"""What came of several methods: accuracy or mIoU, the difference to one of them, paired by seed, and the cost."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradfilter.keep import FULL
from gradfilter.plan import Plan
from gradfilter.report.results import Cost, Results
from gradfilter.report.text import half_interval
from gradfilter.table import Table, is_nothing

Runs = Mapping[str, Sequence[Results | None]]
"""From a method to its runs, one for each seed, in the same order; None for a run that diverged."""
ACCURACY = "accuracy"
"""The score that has an interval: the share of held-out images classified rightly."""
FILTERED, EXACT, COMPRESSED, BOTH = KINDS = ("filtered", "exact backprop", "compressed", "filtered and compressed")
"""How a method makes its gradient: coarse, from inputs held compressed, both or neither."""


@dataclass(frozen=True)
class Outcome:
    """Hold what came of one method; what is not known is NaN.

    Args:
        method: Its name.
        accuracy: Share of held-out images classified rightly after the last epoch, or mIoU, 0 to 1, mean over seeds.
        interval: Wilson's 95 % interval of it; that of mIoU is not known.
        difference: What it is less the reference's, mean over seeds; NaN for the reference itself.
        error: Standard error of the difference, paired by seed; NaN for one seed.
        saved_bytes: What autograd held for a batch.
        fewer: How many times fewer that is than exact backprop of the reference's layers.
        step_ratio: Time of a training step beside an exact one of the reference's layers.
        kind: How it makes its gradient, one of `KINDS`; training the classifier alone is exact backprop of that.
        mean_accuracy: mAcc after the last epoch, 0 to 1, mean over seeds, where the score is mIoU.
        metric: What the score is called.
    """

    method: str
    accuracy: float
    interval: tuple[float, float]
    difference: float
    error: float
    saved_bytes: float
    fewer: float
    step_ratio: float
    kind: str
    mean_accuracy: float = math.nan
    metric: str = "accuracy"


def find_outcomes(runs: Runs, reference: str, measure: Callable[[str], Cost | None] = lambda method: None) -> list[Outcome]:
    """Return what came of each method, beside the reference.

    Args:
        runs: The runs of each method.
        reference: The method to compare with.
        measure: Returns the cost of an exact method, where no run that trains the same layers has measured it.
    """
    costs = {method: find_cost(runs, method) or (measure(method) if is_exact(runs[method]) else None) for method in runs}
    theirs = find_accuracies(runs[reference])
    outcomes: list[Outcome] = []
    for method in runs:
        ours = find_accuracies(runs[method])
        differences = [a - b for a, b in zip(ours, theirs, strict=True)] if method != reference else [math.nan]
        accuracy, metric = statistics.fmean(ours), find_metric(runs)
        count = sum(run.val_images for run in runs[method] if run) if metric == ACCURACY else 0
        is_paired = len(differences) > 1 and all(map(math.isfinite, differences))
        error = statistics.stdev(differences) / math.sqrt(len(ours)) if is_paired else math.nan
        is_same = trains_same(find_first(runs[method]), find_first(runs[reference]))
        outcomes.append(
            Outcome(
                method,
                accuracy,
                find_interval(accuracy, count),
                statistics.fmean(differences),
                error,
                *compare_costs(costs[method], costs[reference], is_same),
                kind=find_kind(runs[method]),
                mean_accuracy=math.nan if metric == ACCURACY else statistics.fmean(find_mean_accuracies(runs[method])),
                metric=metric,
            )
        )
    return outcomes


def compare_costs(cost: Cost | None, base: Cost | None, is_same: bool) -> tuple[float, float, float]:
    """Return a method's bytes, how many times fewer they are than those of exact backprop of the base, and its step time.

    Where both train the same layers, the two steps took turns in one process. Where they do not, each took turns with a forward
    pass, which is the same for both: so a machine that was slower for a while does not show.
    """
    if cost is None:
        return math.nan, math.nan, math.nan
    if base is None:
        return cost.saved_bytes, math.nan, math.nan
    in_passes, exact_in_passes = cost.step_seconds / cost.inference_seconds, base.exact_step_seconds / base.inference_seconds
    step_ratio = cost.step_ratio if is_same else in_passes / exact_in_passes
    return cost.saved_bytes, base.exact_saved_bytes / max(1, cost.saved_bytes), step_ratio


def find_cost(runs: Runs, method: str) -> Cost | None:
    """Return what a run of the method has measured; that of an exact one, which measures nothing, a run beside it has."""
    run = find_first(runs[method])
    if not is_exact(runs[method]):
        return next((run.cost for run in runs[method] if run and run.cost), None)
    twins = (twin for others in runs.values() for twin in others if twin and twin.cost and trains_same(twin, run))
    twin = next((twin.cost for twin in twins), None)
    return None if twin is None else to_exact(twin)


def to_exact(cost: Cost) -> Cost:
    """Return the cost of exact backprop that another was measured beside."""
    changes = {"saved_bytes": cost.exact_saved_bytes, "step_ratio": 1.0, "step_seconds": cost.exact_step_seconds}
    return dataclasses.replace(cost, **changes)


def trains_same(one: Results | None, other: Results | None) -> bool:
    """Tell whether two runs train the same layers, whatever their plans are called."""
    if one is None or other is None:
        return False
    layers, norms = zip(*((find_trained(run), Plan.from_yaml(run.plan).batch_norm) for run in (one, other)), strict=True)
    return layers[0] == layers[1] and norms[0] == norms[1]


def find_trained(run: Results) -> frozenset[str]:
    """Return the layers that a run trains."""
    return frozenset(layer.name for layer in run.layers if layer.trained)


def find_first(runs: Sequence[Results | None]) -> Results | None:
    """Return the first run that did not diverge."""
    return next((run for run in runs if run is not None), None)


def is_exact(runs: Sequence[Results | None]) -> bool:
    """Tell whether a method is exact backprop."""
    first = find_first(runs)
    return first is not None and bool(first.settings["exact"])


def find_kind(runs: Sequence[Results | None]) -> str:
    """Return how a method makes its gradient."""
    first = find_first(runs)
    if first is None or is_exact(runs):
        return EXACT
    is_filtered = any(layer.trained and tuple(layer.patch or (1, 1)) != (1, 1) for layer in first.layers)
    is_compressed = any(backward.keep != FULL for backward in Plan.from_yaml(first.plan).layers.values())
    return (BOTH if is_filtered else COMPRESSED) if is_compressed else FILTERED if is_filtered else EXACT


def find_accuracies(runs: Sequence[Results | None]) -> list[float]:
    """Return the accuracy after the last epoch, run by run: unlike the best epoch's, it was not chosen by its accuracy."""
    return [math.nan if run is None else run.history[-1].val_accuracy for run in runs]


def find_mean_accuracies(runs: Sequence[Results | None]) -> list[float]:
    """Return mAcc after the last epoch, run by run."""
    return [math.nan if run is None else run.history[-1].val_mean_accuracy for run in runs]


def find_metric(runs: Runs) -> str:
    """Return what the score of runs is called."""
    return next((run.metric for these in runs.values() for run in these if run), ACCURACY)


def find_interval(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of `count` images."""
    half, z = half_interval(share, count), 1.96
    if math.isnan(half):
        return math.nan, math.nan
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    return centre - half, centre + half


def make_table(title: str, outcomes: Sequence[Outcome], reference: str) -> Table:
    """Return the outcomes as a table, without the columns that nothing is known for, as standard errors of one seed."""
    columns: dict[str, tuple[Callable[[Any], str], Callable[[Outcome], Any]]] = {
        "method": (str, lambda one: one.method),
        f"{outcomes[0].metric}, %": ("{:.2f}".format, lambda one: 100 * one.accuracy),
        "mAcc, %": ("{:.2f}".format, lambda one: 100 * one.mean_accuracy),
        "95 % interval": (lambda shares: "–".join(f"{share:.2f}" for share in shares), find_percentages),
        f"less {reference}, paired": ("{:+.2f}".format, lambda one: 100 * one.difference),
        "± s.e.": ("{:.2f}".format, lambda one: 100 * one.error),
        "MB held": ("{:.2f}".format, lambda one: one.saved_bytes / 1e6),
        "times fewer": ("{:.1f}".format, lambda one: one.fewer),
        "step / exact": ("{:.2f}".format, lambda one: one.step_ratio),
    }
    values = {name: [find(one) for one in outcomes] for name, (_, find) in columns.items()}
    for name in ("mAcc, %", "95 % interval", "± s.e."):
        if all(map(is_nothing, values[name])):
            del values[name]
    table = Table(title, {name: columns[name][0] for name in values})
    table.rows += zip(*values.values(), strict=True)
    return table


def find_percentages(outcome: Outcome) -> list[float] | None:
    """Return the interval of a score in percent; None where it is not known."""
    return None if math.isnan(outcome.interval[0]) else [100 * share for share in outcome.interval]


def find_front(outcomes: Sequence[Outcome], cost: Callable[[Outcome], float]) -> list[Outcome]:
    """Return the Pareto front, cheapest first: no other method is better than these and costs no more."""
    known = [one for one in outcomes if math.isfinite(one.accuracy) and math.isfinite(cost(one))]
    front = [
        one
        for one in known
        if not any(
            other.accuracy >= one.accuracy
            and cost(other) <= cost(one)
            and (other.accuracy, cost(other)) != (one.accuracy, cost(one))
            for other in known
        )
    ]
    return sorted(front, key=cost)
