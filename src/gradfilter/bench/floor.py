"""A training step and its floor, in inferences of ONNX Runtime.

The floor of a step is what its kernels take: the C library's calls alone, replayed, with loss and optimizer.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from gradfilter.bench import onnx_runtime
from gradfilter.bench.before import Choices, alternate, parse_plan
from gradfilter.bench.fresh import answer, run_fresh
from gradfilter.bench.older import import_current
from gradfilter.bench.price import describe_case, show_ratio
from gradfilter.bench.replay import load, record
from gradfilter.bench.report import Report
from gradfilter.bench.setup import shake_
from gradfilter.bench.sides import NotAvailableError, Side, apply_plan, freeze_exactly
from gradfilter.bench.step import Case, Stage, refuse_large, set_up
from gradfilter.cost import Trial
from gradfilter.errors import ExitWarning, GradFilterError
from gradfilter.loss import StepLoss
from gradfilter.measure import silent
from gradfilter.meter import predict_step
from gradfilter.outputs import find_logits
from gradfilter.plan import Plan

MODELS = ("mobilenet_v2", "efficientnet-lite0", "mcunet-in3", "resnet18", "efficientnet_b0")
PLANS = ("all:grid4", "last4:grid4")
BATCHES = (1, 8, 32)
THREADS = (1, 2)
ROUNDS = 15
EXACT_ROUNDS, EXACT_SECONDS = 5, 20.0
"""Exact steps take many times as long as the others: after so many seconds, so many rounds of them are enough."""
PROFILED = 5
"""Steps whose operators are timed by torch's profiler."""
BACKEND = "gradfilter"

INFERENCE, STEP, COMPILED, EXACT = "inference", "step", "compiled", "exact"
JOINED, SINGLY, LOSS, UPDATE = "library", "library, call by call", "loss", "optimizer"
FLOOR, PRODUCTS = "floor", "torch's products"
PRODUCT_OPERATORS = ("mm", "mv", "linear")
"""Ends of the names of torch's operators that multiply matrices."""

COLUMNS: dict[str, Callable[[Any], str]] = {
    "model": str,
    "plan": str,
    "batch": str,
    "threads": str,
    "inference ms": lambda value: f"{value:.0f}" if value >= 100 else f"{value:.1f}",
    STEP: show_ratio,
    COMPILED: show_ratio,
    EXACT: show_ratio,
    FLOOR: show_ratio,
    JOINED: show_ratio,
    SINGLY: show_ratio,
    LOSS: lambda value: f"{value:.3f}",
    UPDATE: lambda value: f"{value:.3f}",
    PRODUCTS: show_ratio,
    "calls": str,
    f"{STEP} / {FLOOR}": show_ratio,
    f"{COMPILED} / {FLOOR}": show_ratio,
}


def make_choices(**given: Any) -> Choices:
    """Return the choices that were made, and for the others the usual ones."""
    usual = {"models": MODELS, "plans": PLANS, "batches": BATCHES, "threads": THREADS, "rounds": ROUNDS}
    return Choices(**{**usual, **{name: value for name, value in given.items() if value is not None}})


def measure(choices: Choices) -> Report:
    """Return the table: a row for each model, plan, batch and number of threads.

    A case that fails has no row, and a sentence below the table says why.

    Raises:
        GradFilterError: A package or the C library is missing, or all cases fail.
    """
    onnx_runtime.check_packages("bench floor")
    load()
    report = Report(
        "floor",
        f"A training step and its floor, in inferences of ONNX Runtime: random weights, {choices.pixels} px",
        f"python -m gradfilter.bench --save docs/results floor {choices.to_options()}",
        COLUMNS,
    )
    cases = [
        Case(model, None, batch, choices.pixels, threads)
        for model in choices.models
        for threads in choices.threads
        for batch in choices.batches
    ]
    rows: list[dict[str, Any]] = []
    remarks: list[str] = []
    for number, case in enumerate(cases, 1):
        where, start = f"{case.model}, {describe_case(case)}", time.perf_counter()
        order = {"case": asdict(case), "plans": list(choices.plans), "rounds": choices.rounds}
        try:
            found, told = run_fresh("gradfilter.bench.floor", order, f"measures {where}")
        except GradFilterError as error:
            found, told = [], [f"{where}: not measured: {str(error).rstrip('.')}."]
        rows += found
        remarks += [remark for remark in told if remark not in remarks]
        shown = [f"{row['plan']} step {row[STEP]:.2f}, floor {row[FLOOR] and show_ratio(row[FLOOR])}" for row in found]
        said = ", ".join(shown) or told[-1]
        seconds = time.perf_counter() - start
        print(f"{number}/{len(cases)} {where}: {said} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    if not rows:
        raise GradFilterError(remarks[0])
    report.rows = [[row[name] for name in COLUMNS] for row in rows]
    report.remarks = [*explain(choices.rounds), *remarks]
    return report


def explain(rounds: int) -> list[str]:
    """Return what the columns are."""
    return [
        f"Inference: ONNX Runtime {onnx_runtime.find_version()} with all optimizations, constant weights, the same number of "
        "threads, which do not spin when idle. All columns between it and calls are ratios to it.",
        "Step: forward and loss, backward, fused SGD update, as a plan runs today. Compiled: the same by "
        f'torch.compile(model, backend="{BACKEND}"). Exact: torch\'s own backward of the same layers. Batch-norm statistics do '
        "not move.",
        "Floor: library + loss + optimizer. Library: the calls that a step makes of the C library, recorded in one step and "
        "made again as one call, or as a few where a task returns a code. Call by call: as many calls as the step makes, the "
        "number in the column calls. The memory of the recorded step is held, so no address is used twice; a step uses some "
        "again.",
        "Torch's products: convolutions and matrix products that the step leaves to torch, forward and backward: their self "
        f"times by torch's profiler, median of {PROFILED} steps. The floor does not include them, and a step cannot do without "
        "them unless the library takes them over.",
        f"Ratios: medians of {rounds} rounds (more where they are short), each within a round; all sides take turns in one "
        f"process, and a first round warms up. Exact takes turns with inference alone, afterwards; {EXACT_ROUNDS} rounds where "
        "it is slow. Each model, batch and number of threads has a process of its own.",
    ]


def run_order(order: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of one case and what there is to say of it, in the process that `measure` starts."""
    torch.manual_seed(0)
    stage = set_up(Case(**order["case"]), "channels last")
    shake_(stage.network)
    infer = onnx_runtime.make_inference(stage.network, stage.images, stage.case.threads)
    rows: list[dict[str, Any]] = []
    remarks: dict[str, None] = {}  # in order, each once
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExitWarning)
        for text in order["plans"]:
            row, told = measure_plan(stage, infer, text, order["rounds"])
            rows.append(row)
            remarks |= dict.fromkeys(told)
    return rows, list(remarks)


def measure_plan(stage: Stage, infer: Callable[[], float], text: str, rounds: int) -> tuple[dict[str, Any], list[str]]:
    """Return the row of a plan, and what there is to say of it.

    Args:
        stage: Model and batch.
        infer: Runs ONNX Runtime's inference of the model, and tells its seconds.
        text: The plan.
        rounds: How many rounds.
    """
    case, remarks = stage.case, list[str]()
    plan: Plan = import_current().make_plan(*parse_plan(text))
    where = f"{case.model}, {text}, {describe_case(case)}"
    trial = make_trial(stage, Side(partial(apply_plan, plan)))
    step = make_step(trial)
    step()  # what is computed once, is computed now
    recording = None
    try:
        recording = record(step)
    except GradFilterError as error:
        remarks.append(f"{where}: no floor: {str(error).rstrip('.')}.")
    runs: dict[str, Callable[[], float]] = {INFERENCE: infer, STEP: step}
    try:
        runs[COMPILED] = make_compiled(stage, plan)
    except NotAvailableError as error:
        remarks.append(f"Compiled: not available: {error}.")
    if recording is not None:
        runs |= {JOINED: recording.make_replay(joined=True), SINGLY: recording.make_replay(joined=False)}
    runs |= {LOSS: make_loss(trial), UPDATE: make_update(trial)}
    turns = alternate(runs, rounds)
    if recording is not None:
        turns[FLOOR] = [sum(parts) for parts in zip(turns[JOINED], turns[LOSS], turns[UPDATE], strict=True)]
    inference = statistics.median(turns[INFERENCE])
    ratios = {name: find_ratio(turn, turns[INFERENCE]) for name, turn in turns.items()}
    ended = [name for name in (STEP, COMPILED) if {name, FLOOR} <= turns.keys()]
    floors = {f"{name} / {FLOOR}": find_ratio(turns[name], turns[FLOOR]) for name in ended}
    products = measure_products(step) / inference
    calls = None if recording is None else len(recording.tasks)
    del recording, runs  # and the memory of all their tensors: an exact step needs much
    try:
        exact = {INFERENCE: infer, EXACT: make_exact(stage, plan)}
        found = alternate(exact, rounds, min(rounds, EXACT_ROUNDS), EXACT_SECONDS)
        ratios[EXACT] = find_ratio(found[EXACT], found[INFERENCE])
    except NotAvailableError as error:
        remarks.append(f"{where}: exact: not available: {error}.")
    row = {"model": case.model, "plan": text, "batch": case.batch, "threads": case.threads, "inference ms": 1e3 * inference}
    row |= {**ratios, **floors, PRODUCTS: products, "calls": calls}
    return {name: row.get(name) for name in COLUMNS}, remarks


def find_ratio(own: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over rounds of one's seconds to another's."""
    return statistics.median(a / b for a, b in zip(own, base, strict=True))


def make_trial(stage: Stage, side: Side) -> Trial:
    """Return a side's model with all that a step takes."""
    model = stage.make(side)
    # At a learning rate of zero an update costs the same, and nothing can diverge.
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0, fused=True)
    return Trial(model, stage.images, StepLoss(None, stage.labels), optimizer)


def make_step(trial: Trial) -> Callable[[], float]:
    """Return a function that does a step, and tells its seconds."""
    return lambda: trial.step().step


def make_compiled(stage: Stage, plan: Plan) -> Callable[[], float]:
    """Return the step of the compiled model; refuse to where it does not compile.

    Raises:
        NotAvailableError: There is no such backend, or it fails.
    """
    if BACKEND not in torch._dynamo.list_backends(exclude_tags=()):
        raise NotAvailableError(f'torch.compile has no backend "{BACKEND}" here')
    step = make_step(make_trial(stage, Side(partial(compile_plan, plan))))
    try:
        step()  # compiles
    except Exception as error:  # of the compiler, in as many ways as there are passes
        reason = (str(error).strip().splitlines() or [""])[0]
        raise NotAvailableError(f"it fails with {type(error).__name__}: {reason[:200]}") from error
    return step


def compile_plan(plan: Plan, model: nn.Module, images: Tensor) -> Any:
    """Return the model under a plan, to be compiled in its first step."""
    return torch.compile(apply_plan(plan, model, images), backend=BACKEND)


def make_exact(stage: Stage, plan: Plan) -> Callable[[], float]:
    """Return the step of torch's own backward of the layers that a plan trains.

    Raises:
        NotAvailableError: It might not fit into memory.
    """
    trial = make_trial(stage, Side(partial(freeze_exactly, plan)))
    refuse_large(predict_step(trial.model, (stage.images,), trial.loss).peak_bytes)
    return make_step(trial)


def make_loss(trial: Trial) -> Callable[[], float]:
    """Return a function that computes the loss of a step and its gradient of the outputs, and tells its seconds."""
    with torch.no_grad():
        outputs = find_logits(trial.model(trial.images)).clone().requires_grad_()

    def run() -> float:
        start = time.perf_counter()
        torch.autograd.grad(trial.loss(outputs), outputs)
        return time.perf_counter() - start

    return run


def make_update(trial: Trial) -> Callable[[], float]:
    """Return a function that updates as many numbers as a step, and tells its seconds."""
    twins = [p.detach().clone().requires_grad_() for group in trial.optimizer.param_groups for p in group["params"]]
    for twin in twins:
        twin.grad = torch.ones_like(twin)
    optimizer = torch.optim.SGD(twins, lr=0.0, fused=True)

    def run() -> float:
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    return run


def measure_products(step: Callable[[], float]) -> float:
    """Return the seconds of a step in which torch's own operators convolve or multiply matrices, the median of some steps."""
    found = []
    for _ in range(PROFILED):
        with silent(), profile(activities=[ProfilerActivity.CPU]) as profiled:
            step()
        operators = [event for event in profiled.key_averages() if is_product(event.key)]
        found.append(sum(event.self_cpu_time_total for event in operators) / 1e6)
    return statistics.median(found)


def is_product(operator: str) -> bool:
    """Tell whether one of torch's operators convolves or multiplies matrices."""
    return operator.startswith("aten::") and ("conv" in operator or operator.endswith(PRODUCT_OPERATORS))


if __name__ == "__main__":
    answer(run_order)
