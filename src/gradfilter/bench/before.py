"""This version of the package against an older one: steps in turns in one process, saved bytes, gradients.

The older one is a folder that pip has made from the sources of a commit, with its C library built:

    git worktree add /tmp/before-src 244ea6e        # or: git archive 244ea6e | tar -x -C /tmp/before-src
    pip install --no-deps --target /tmp/before /tmp/before-src
    echo 244ea6e > /tmp/before/COMMIT               # or: --commit 244ea6e
    python -m gradfilter.bench --save docs/results before --package /tmp/before
"""

from __future__ import annotations

import copy
import logging
import math
import re
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradfilter.apply import freeze_
from gradfilter.bench.coverage import find_difference
from gradfilter.bench.fresh import answer, run_fresh
from gradfilter.bench.older import (
    ALIAS,
    NAME,
    Version,
    check_loaded,
    find_commit_of,
    import_current,
    import_older,
    is_native,
    renamed,
)
from gradfilter.bench.price import describe_case
from gradfilter.bench.report import Report
from gradfilter.bench.setup import shake_
from gradfilter.bench.sides import Side
from gradfilter.bench.step import Case, Stage, set_up
from gradfilter.cost_table import show_bytes
from gradfilter.errors import GradFilterError, SettingsError
from gradfilter.loss import StepLoss, cross_entropy
from gradfilter.outputs import sum_outputs

T = TypeVar("T")
MODELS = ("mobilenet_v2", "mcunet-in3", "efficientnet-lite0", "resnet18")
PLANS = ("all:grid4", "last4:patch2", "all:patch1")
BATCHES = (1, 8, 32)
THREADS = (1, 2)
ROUNDS = 15
WARM = 1
MOST, SHORT = 4, 3.0
PLAN = re.compile(r"(all|last\d+):(patch|grid)(\d+)")
BEFORE, NOW = "before", "now"
FLOOR = 1e-6
"""Of the largest gradient norm: what a difference in float32 is related to where the gradient is smaller."""


@dataclass(frozen=True)
class Choices:
    """What is run: each model with each plan, batch and number of threads; images of so many pixels; rounds of steps."""

    models: Sequence[str] = MODELS
    plans: Sequence[str] = PLANS
    batches: Sequence[int] = BATCHES
    threads: Sequence[int] = THREADS
    pixels: int = 224
    rounds: int = ROUNDS

    def __post_init__(self) -> None:
        """Check the choices."""
        for name in ("batches", "threads"):
            if min(getattr(self, name)) < 1:
                raise SettingsError(f"{name} are {list(getattr(self, name))}, but each must be at least 1.")
        if self.pixels < 1 or self.rounds < 2:
            raise SettingsError(f"--pixels is {self.pixels} and --rounds {self.rounds}. Give at least 1 pixel and 2 rounds.")
        for plan in self.plans:
            parse_plan(plan)

    def to_options(self) -> str:
        """Return the options that make these choices."""
        lists = {"model": self.models, "plan": self.plans, "batch": self.batches, "threads": self.threads}
        words = [f"--{name} {shlex.join(map(str, values))}" for name, values in lists.items()]
        return " ".join([*words, f"--pixels {self.pixels} --rounds {self.rounds}"])


def make_choices(quick: bool = False, **given: Any) -> Choices:
    """Return the choices that were made, and for the others the usual ones; `quick` makes those few."""
    usual = {"models": MODELS[:1], "batches": BATCHES[:2], "threads": THREADS[:1]} if quick else {}
    return Choices(**{**usual, **{name: value for name, value in given.items() if value is not None}})


def parse_plan(text: str) -> tuple[str, str, int]:
    """Return what `Version.make_plan` takes."""
    match = PLAN.fullmatch(text)
    if match is None or int(match[3]) < 1:
        raise SettingsError(f"--plan is {text!r}. Give layers and a patch or grid, such as {', '.join(PLANS)}.")
    return match[1], match[2], int(match[3])


def show_pair(show: Callable[[Any], str]) -> Callable[[Sequence[Any]], str]:
    """Return how a value of each version is shown: once where they are equal."""
    return lambda pair: show(pair[0]) if pair[0] == pair[1] else f"{show(pair[0])} → {show(pair[1])}"


def show_byte_pair(pair: Sequence[int]) -> str:
    """Return the bytes of both versions, and by how many they differ."""
    return show_pair(show_bytes)(pair) + (f" ({pair[1] - pair[0]:+d} B)" if pair[0] != pair[1] else "")


COLUMNS: dict[str, Callable[[Any], str]] = {
    "model": str,
    "plan": str,
    "batch": str,
    "threads": str,
    "ms": show_pair(lambda value: f"{value:.0f}" if value >= 100 else f"{value:.1f}"),
    "now / before": lambda value: f"{value:.3f}",
    "quartiles": lambda pair: f"{pair[0]:.3f} to {pair[1]:.3f}",
    "saved bytes": show_byte_pair,
    "predicted bytes": show_byte_pair,
    "gradients": lambda found: "bit-equal" if found["bit-equal"] else f"{found['difference']:.0e}",
    "error at patch 1": show_pair(lambda value: f"{value:.0e}"),
}
"""Where a cell has a value of each version, that of the older one is first."""


def measure(folder: Path, commit: str | None = None, choices: Choices | None = None) -> Report:
    """Return the table: a row for each model, plan, batch and number of threads.

    Args:
        folder: What `pip install --no-deps --target` has made of an older commit.
        commit: The older commit; without it the file COMMIT in the folder names it.
        choices: What to run.

    Raises:
        SettingsError: The folder holds no package, or one without its C library.
        GradFilterError: A version fails.
    """
    choices = choices or Choices()
    commit = find_commit_of(folder, commit)
    report = Report(
        f"before-{re.sub('[^A-Za-z0-9_.-]', '-', commit)}",
        f"Before and now: training steps of commit {commit} and of this one, random weights, {choices.pixels} px",
        f"python -m gradfilter.bench --save docs/results before --package FOLDER --commit {commit} {choices.to_options()}",
        COLUMNS,
    )
    rows: list[dict[str, Any]] = []
    cases = [
        Case(model, None, batch, choices.pixels, threads)
        for model in choices.models
        for threads in choices.threads
        for batch in choices.batches
    ]
    with renamed(folder) as place:
        for number, case in enumerate(cases, 1):
            exact = (case.batch, case.threads) == (choices.batches[0], choices.threads[0])
            order = {"case": asdict(case), "plans": list(choices.plans), "rounds": choices.rounds, "exact": exact}
            what = f"measures {case.model}, {describe_case(case)}"
            found = run_fresh("gradfilter.bench.before", {**order, "folder": str(place)}, what)
            rows += found
            said = ", ".join(f"{row['plan']} {row['now / before']:.3f}" for row in found)
            print(f"{number}/{len(cases)} {case.model}, {describe_case(case)}: {said}", file=sys.stderr, flush=True)
    report.rows = [[row[name] for name in COLUMNS] for row in rows]
    report.remarks = make_remarks(rows, choices.rounds)
    return report


def make_remarks(rows: Sequence[Mapping[str, Any]], rounds: int) -> list[str]:
    """Return what the table says as a whole, and what its columns are."""
    ratios = [row["now / before"] for row in rows]
    apart = sum(not row["quartiles"][0] <= 1 <= row["quartiles"][1] for row in rows)
    same = sum(row["saved bytes"][0] == row["saved bytes"][1] for row in rows)
    predicted = sum(row["predicted bytes"] == row["saved bytes"] for row in rows)
    equal = sum(row["gradients"]["bit-equal"] for row in rows)
    largest = max(row["gradients"]["difference"] for row in rows)
    errors = [error for row in rows for error in row["error at patch 1"] or ()]
    return [
        f"Of {len(rows)} rows. Now / before: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to "
        f"{max(ratios):.3f}; 1 is outside of the quartiles in {apart}. Saved bytes: equal in {same}, predicted to the byte by "
        "both versions in "
        f"{predicted}. Gradients: bit-equal in {equal}, difference {largest:.0e} at most. Error at patch 1: {max(errors):.0e} "
        "at most.",
        "Both versions run in one process, each with "
        + ("its own C library" if is_native() else "torch alone")
        + " and its own copy of the same model. Each model, batch and number of threads has a process of its own. Where a cell "
        "has two values, the older version's is first.",
        f"Ms: forward and loss, backward and SGD update, median of {rounds} steps, of more where they are short. Now / before: "
        "median of the ratios of two steps that follow each other; which version is first changes from round to round, and "
        "a first round warms up. Quartiles are those of these ratios.",
        "Saved bytes: what autograd holds after forward and loss, the labels with it, measured by each version; predicted: on "
        "shapes alone. Gradients: float32, largest over all parameters of the relative difference of the two versions, by "
        f"norm; a gradient below {FLOOR:.0e} of the network's largest is held against that. Error at patch 1: the same layers "
        "at patch 1 against torch's own autograd, the same measure in float64, on one image, for the first batch and threads.",
    ]


def run_order(order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of one case, in the process that `measure` starts for it."""
    versions = {BEFORE: import_older(Path(order["folder"])), NOW: import_current()}
    torch.manual_seed(0)
    stage = set_up(Case(**order["case"]), "channels last")
    shake_(stage.network)
    rows = []
    with warnings.catch_warnings(), refuse_complaints():
        warnings.simplefilter("ignore")  # exits of regions, in the classes of either version
        for text in order["plans"]:
            try:
                rows.append(measure_plan(stage, versions, text, order["rounds"], order["exact"]))
            except GradFilterError:
                raise
            except Exception as error:  # of the older version, whose errors are of other classes, or which lacks something
                raise GradFilterError(
                    f"{stage.case.model}, plan {text}, {describe_case(stage.case)}: {type(error).__name__}: {error}"
                ) from error
    return rows


class Complaints(logging.Handler):
    """Collect what the versions have to complain of, a C library that does not fit above all."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Remember a message."""
        self.texts.append(record.getMessage())


@contextmanager
def refuse_complaints() -> Iterator[None]:
    """Raise what either version has logged as a warning: what it falls back to is not what is to be compared."""
    complaints = Complaints()
    for name in (ALIAS, NAME):
        logging.getLogger(name).addHandler(complaints)
    try:
        yield
    finally:
        for name in (ALIAS, NAME):
            logging.getLogger(name).removeHandler(complaints)
    if complaints.texts:
        raise GradFilterError(complaints.texts[0])


def measure_plan(stage: Stage, versions: Mapping[str, Version], text: str, rounds: int, exact: bool) -> dict[str, Any]:
    """Return the row of a plan.

    Args:
        stage: Model and batch.
        versions: Both of them, the older one first.
        text: The plan.
        rounds: How many steps of each.
        exact: Whether to hold gradients at patch 1 against torch's own.
    """
    plan, loss = parse_plan(text), partial(find_loss, stage.labels)
    sides = {name: Side(partial(apply_plan, version, plan)) for name, version in versions.items()}
    models = {name: stage.make(side) for name, side in sides.items()}
    gradients = [find_gradients(model, stage.images, stage.labels) for model in models.values()]
    check_loaded(*versions.values())
    turns = alternate({name: stage.make_run(side, models[name]) for name, side in sides.items()}, rounds)
    ratios = [now.step / before.step for before, now in zip(turns[BEFORE], turns[NOW], strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    pairs = [(versions[name].cost, model) for name, model in models.items()]
    return {
        "model": stage.case.model,
        "plan": text,
        "batch": stage.case.batch,
        "threads": stage.case.threads,
        "ms": [1e3 * statistics.median(step.step for step in turn) for turn in turns.values()],
        "now / before": statistics.median(ratios),
        "quartiles": [lower, upper],
        "saved bytes": [cost.measure_saved_bytes(model, stage.images, loss=loss) for cost, model in pairs],
        "predicted bytes": [cost.predict_saved_bytes(model, stage.images, loss=loss) for cost, model in pairs],
        "gradients": {
            "bit-equal": all(torch.equal(g, gradients[1][name]) for name, g in gradients[0].items()),
            "difference": find_difference(gradients[0], gradients[1], FLOOR),
        },
        "error at patch 1": find_errors(stage, versions, plan[0]) if exact else None,
    }


def apply_plan(version: Version, plan: tuple[str, str, int], model: nn.Module, _: Tensor) -> nn.Module:
    """Return the model under a plan of a version."""
    return version.package.apply_(model, version.make_plan(*plan))


def find_loss(labels: Tensor | None, outputs: Any) -> Tensor:
    """Return the loss for counting bytes: a plain function, for a `StepLoss` of one version is a stranger to the other."""
    return sum_outputs(outputs) if labels is None else cross_entropy(outputs, labels.to(outputs.device))


def alternate(
    runs: Mapping[str, Callable[[], T]], rounds: int, fewest: int | None = None, longest: float = math.inf
) -> dict[str, list[T]]:
    """Return what each run says, round by round; who is first changes in every round, and a first round warms up.

    In this way each follows the other as often as itself, and none always finds the caches as the other has left them. Short
    steps, which vary most, get more rounds: up to `MOST` times as many, for `SHORT` seconds.

    Args:
        runs: What takes turns, by name.
        rounds: How many rounds.
        fewest: How many are enough after `longest` seconds; without it `rounds`.
        longest: Seconds after which fewer rounds are enough.
    """
    turns: list[dict[str, T]] = []
    names, start, needed = list(runs), math.inf, math.inf
    while len(turns) < WARM + needed:
        if len(turns) == WARM:
            start = time.perf_counter()
        turns.append({name: runs[name]() for name in (names if len(turns) % 2 else names[::-1])})
        seconds = time.perf_counter() - start
        needed = MOST * rounds if seconds < SHORT else rounds if seconds < longest or fewest is None else fewest
    return {name: [turn[name] for turn in turns[WARM:]] for name in names}


def find_gradients(model: nn.Module, images: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    """Return the gradients of all parameters, of those that are frozen zeros, and leave the model without any."""
    StepLoss(None, labels)(model(images)).backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def find_errors(stage: Stage, versions: Mapping[str, Version], layers: str) -> list[float]:
    """Return for each version the largest relative difference at patch 1 to torch's own gradients, in float64, on one image."""
    images, labels = stage.images[:1].double(), None if stage.labels is None else stage.labels[:1]
    network = copy.deepcopy(stage.network).train().double()
    plan = import_current().make_plan(layers, "patch", 1)
    exact = find_gradients(freeze_(copy.deepcopy(network), plan), images, labels)
    models = [apply_plan(version, (layers, "patch", 1), copy.deepcopy(network), images) for version in versions.values()]
    return [find_difference(exact, find_gradients(model, images, labels)) for model in models]


if __name__ == "__main__":
    answer(run_order)
