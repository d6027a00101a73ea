"""What came of several methods, by hand; the Pareto front and its picture."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from gradfilter.keep import parse_keep
from gradfilter.plan import Backward, Plan
from gradfilter.report import Cost, Epoch, Layer, Results, pareto
from gradfilter.report.outcomes import KINDS, find_front, find_interval, find_outcomes, make_table

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PNG = b"\x89PNG\r\n\x1a\n"


def make_results(accuracy: float, *, exact: bool = False, trained: bool = True, cost: Cost | None = None) -> Results:
    history = tuple(Epoch(n, 1, 1, 1, value, 0.1, 1, 1) for n, value in ((1, 0.99), (2, accuracy)))
    layers = (Layer("conv", "patch 2", (2, 2), trained, 9), Layer("fc", "exact", None, True, 9))
    none: dict[str, Any] = {"skipped": (), "environment": {}, "weights_file": ""}
    return Results(
        "net", "data", ("a",), (9,), (100,), {"exact": exact}, Plan.all().to_yaml(), history, 1, ((9,),), layers, cost, **none
    )


COST = Cost(
    4, 12, saved_bytes=10, exact_saved_bytes=40, step_ratio=0.5, step_seconds=6, exact_step_seconds=9, inference_seconds=3
)
HEAD = Cost(
    4, 12, saved_bytes=2, exact_saved_bytes=2, step_ratio=1.1, step_seconds=4, exact_step_seconds=4, inference_seconds=4
)


def test_outcomes_by_hand():
    runs = {
        "head": [make_results(0.5, trained=False, cost=HEAD), make_results(0.6, trained=False)],
        "exact": [make_results(0.8, exact=True), make_results(0.9, exact=True)],
        "patch": [make_results(0.8, cost=COST), make_results(0.8)],
    }
    head, exact, patch = find_outcomes(runs, "exact")
    assert (patch.accuracy, patch.difference, patch.error) == pytest.approx((0.8, -0.05, 0.05))
    assert patch.interval == pytest.approx(find_interval(0.8, 200))
    assert (patch.saved_bytes, patch.fewer, patch.step_ratio) == (10, 4, 0.5)
    assert (exact.saved_bytes, exact.fewer, exact.step_ratio) == (40, 1, 1)
    assert (head.kind, exact.kind, patch.kind) == ("exact backprop", "exact backprop", "filtered")
    assert (head.fewer, head.step_ratio) == pytest.approx((20, (4 / 4) / (9 / 3)))  # by way of inference
    assert [outcome.method for outcome in find_front([head, exact, patch], lambda one: one.saved_bytes)] == [
        *("head", "patch", "exact")
    ]
    assert [outcome.method for outcome in find_front([head, exact, patch], lambda one: -one.saved_bytes)] == ["exact"]
    assert make_table("t", [head, exact, patch], "exact").to_cells()[2] == [
        *("patch", "80.00", "73.91–84.95", "-5.00", "5.00", "0.00", "4.0", "0.50")
    ]


def test_without_exact_the_first_is_compared_with():
    runs = {"grid": [make_results(0.5, cost=COST)], "patch": [make_results(0.6, cost=COST)]}
    grid, patch = find_outcomes(runs, "grid")
    assert (grid.fewer, grid.step_ratio, patch.fewer) == (4, 0.5, 4)
    assert math.isnan(grid.difference)
    assert patch.difference == pytest.approx(0.1)
    assert "± s.e." not in make_table("t", [grid, patch], "grid").columns


def test_the_interval_is_wilsons():
    assert find_interval(0.9, 100) == pytest.approx((0.8256, 0.9448), abs=1e-4)


def test_pictures_of_all_kinds():
    """One point twice, a method without accuracy, one without time, many; none that can be drawn is no picture."""
    (first,) = find_outcomes({"patch": [make_results(0.6, cost=COST)]}, "patch")
    lost = dataclasses.replace(first, method="lost", accuracy=math.nan)
    untimed = dataclasses.replace(first, method="untimed", step_ratio=math.nan, saved_bytes=0)
    many = [dataclasses.replace(first, method=f"a $long$ name {n}" * 3, saved_bytes=10 + n) for n in range(20)]
    for outcomes in ([first, first], [first, lost], [untimed, lost], [*many, untimed]):
        picture = pareto.make_pareto("title", outcomes)
        assert picture is not None
        assert picture.startswith(PNG)
    assert pareto.make_pareto("title", [lost]) is None


@pytest.mark.parametrize("is_paired", [False, True])
def test_no_label_covers_another(monkeypatch, is_paired):
    """The methods of docs/results, some of which lie close together."""
    rows = json.loads((RESULTS / "accuracy-cifar10-mcunet-in3-all.json").read_text("utf-8"))["rows"]
    (first,) = find_outcomes({"patch": [make_results(0.6, cost=COST)]}, "patch")
    outcomes = [
        dataclasses.replace(
            first,
            method=row["method"],
            accuracy=float(row["accuracy, %"]) / 100,
            interval=tuple(float(share) / 100 for share in row["95 % interval"].split("–")),
            difference=float(row["less exact, paired"].replace("–", "nan")) / 100,
            error=float(row["± s.e."].replace("–", "nan")) / 100,
            saved_bytes=1e6 * float(row["MB held"]),
            step_ratio=float(row["step / exact"]),
            kind=kind,
        )
        for row, kind in zip(rows, itertools.cycle(KINDS), strict=False)
    ]
    boxes: dict[Any, list[Any]] = {}
    place = pareto.place_label

    def remember(axes: Any, *rest: Any) -> Any:
        boxes.setdefault(axes, []).append(place(axes, *rest))
        return boxes[axes][-1]

    monkeypatch.setattr(pareto, "place_label", remember)
    if is_paired:
        assert pareto.make_paired_pareto("title", outcomes, "exact") is not None
        assert [len(these) for these in boxes.values()] == [10]
    else:
        assert pareto.make_pareto("title", outcomes) is not None
        assert [len(these) for these in boxes.values()] == [10, 10]
    for axes, these in boxes.items():
        assert not any(one.overlaps(other) for one, other in itertools.combinations(these, 2))
        assert all(axes.get_window_extent().fully_containsx(x) for box in these for x in (box.x0, box.x1))


def test_paired_by_hand():
    """The reference is at nothing; one seed has no standard error."""
    runs = {"exact": [make_results(0.8, exact=True)], "patch": [make_results(0.75, cost=COST)]}
    exact, patch = (pareto.pair(outcome, "exact") for outcome in find_outcomes(runs, "exact"))
    assert (exact.accuracy, exact.interval) == (0, (0, 0))
    assert (patch.accuracy, *patch.interval) == pytest.approx((-0.05, -0.05, -0.05))
    more = find_outcomes({name: [*these, *these] for name, these in runs.items()}, "exact")[1]
    low, high = pareto.pair(dataclasses.replace(more, error=0.01), "exact").interval
    assert (low, high) == pytest.approx((-0.06, -0.04))
    assert pareto.make_paired_pareto("title", [exact], "exact") is not None
    assert pareto.make_paired_pareto("title", [dataclasses.replace(exact, saved_bytes=math.nan)], "exact") is None


@pytest.mark.parametrize(
    ("patch", "keep", "kind"),
    [((1, 1), "hosvd:0.8", "compressed"), ((2, 2), "int8", "filtered and compressed"), ((2, 2), "full", "filtered")],
)
def test_kinds(patch, keep, kind):
    results = make_results(0.5, cost=COST)
    layers = tuple(dataclasses.replace(layer, patch=patch if layer.name == "conv" else None) for layer in results.layers)
    results = dataclasses.replace(results, layers=layers, plan=Plan.all(Backward(patch=patch, keep=parse_keep(keep))).to_yaml())
    assert find_outcomes({"one": [results]}, "one")[0].kind == kind
