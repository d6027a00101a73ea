"""A budget in, a plan out: which layers to train, at which resolution of the gradient, and how their inputs are held."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradfilter.apply import apply_, remove_
from gradfilter.cost import measure_saved_bytes, predict_saved_bytes
from gradfilter.errors import BudgetError, ExitWarning, InputError, PlanError, TrunkWarning
from gradfilter.fidelity import Batch, Loss, is_pair, without_trace
from gradfilter.keep import FULL, Keep, parse_keep
from gradfilter.meter import BACKWARD, FORWARD, predict_step
from gradfilter.options import KINDS
from gradfilter.outputs import copy_model, explain_failure, find_logits
from gradfilter.plan import Plan
from gradfilter.search import Front, search
from gradfilter.shapes import on_shapes, to_meta
from gradfilter.survey import FLOPS, MEMORY, TIME, Survey, sum_outputs, survey, time_step
from gradfilter.table import Table
from gradfilter.units import parse_amount, show_amount

TRIES = 24
"""So many plans are tried where measured costs are above what the survey lets expect."""
MOST_IMAGES = 16
"""Usefulness is measured on so many images of each batch: more change little, and take longer."""
NAMES = {MEMORY: "bytes held by autograd", FLOPS: "flops of a step", TIME: "seconds of a step"}

Budget = str | float | None


@dataclass(frozen=True)
class Chosen:
    """A plan that was chosen, and what it was chosen from.

    Attributes:
        plan: The plan.
        budgets: By resource.
        costs: What the plan costs: bytes and flops as predicted, which is exact; time as measured.
        cosine: The cosine to the whole gradient that the survey lets expect, layers that are not trained counting as zero.
        gap: The share of the gradient's energy by which a plan within the budgets could at most be better, by the survey.
        choices: The option of each layer of the survey, −1 for not trained.
        survey: What is known of the layers.
        front: The plans that were looked at.
    """

    plan: Plan
    budgets: dict[str, float]
    costs: dict[str, float]
    cosine: float
    gap: float
    choices: tuple[int, ...]
    survey: Survey
    front: Front

    def to_table(self) -> Table:
        """Return a row for each layer behind the first that is trained."""
        kinds: dict[str, Any] = {"layer": str, "backward": str, "share of the gradient": "{:.1%}".format}
        kinds |= {"found of it": "{:.1%}".format, "held": lambda value: show_amount(MEMORY, value) if value else "0 B"}
        table = Table(f"Plan for {self.describe_budgets()}: expected cosine {self.cosine:.4f}", kinds)
        gains, energies, latest = self.survey.gains, self.survey.energies, -1
        memory = self.survey.costs[MEMORY]
        for row, (layer, choice) in enumerate(zip(self.survey.layers, self.choices, strict=True)):
            latest = choice if choice >= 0 else latest
            if latest < 0:
                continue
            held = memory.trained[row, choice] if choice >= 0 else memory.passed[row, latest]
            found = gains[row, choice] / energies[row] if choice >= 0 and energies[row] else None
            backward = str(self.survey.options[row][choice]) if choice >= 0 else "frozen"
            table.rows.append((layer, backward, energies[row] / self.survey.total, found, held))
        table.remarks = [
            "; ".join(f"{NAMES[r]}: {show_amount(r, cost)}" for r, cost in self.costs.items()) + ".",
            f"No plan within the budget finds more than {self.gap:.2%} more of the gradient's energy, by what was measured.",
        ]
        return table

    def describe_budgets(self) -> str:
        """Return the budgets in words."""
        return ", ".join(f"{name} {show_amount(name, amount)}" for name, amount in self.budgets.items())

    def __str__(self) -> str:
        return self.to_table().to_markdown()


def plan_for(
    model: nn.Module,
    sample: Any,
    loss: Loss | None = None,
    *,
    memory: Budget = None,
    time: Budget = None,
    flops: Budget = None,
    batch: int | None = None,
    keep: Keep | str | None = None,
    **options: Any,
) -> Plan:
    """Choose what to train, and how, to get the most useful gradient within a budget.

    That is: which layers, at which resolution of the gradient each, and how its input is held until backward.

    Args:
        model: The model, which is left as it is. Parameters with requires_grad=False stay frozen.
        sample: A pair of inputs and targets, several pairs, or inputs alone: usefulness is then measured on targets drawn at
            random, as it is for a fresh classifier.
        loss: From outputs and targets to a scalar; cross-entropy where not given.
        memory: What autograd may hold between forward and backward, e.g. "64MB". It is never exceeded.
        time: What a step may take, e.g. "200ms", as measured here and now.
        flops: What a step may compute, forward and backward, e.g. "20G".
        batch: Images of a training step; as many as in the (first) sample where not given.
        keep: How inputs are held, "full" say, for all layers alike; chosen for each layer where not given. Without a budget of
            bytes there is nothing to choose: inputs are held whole.
        options: Of the plan, e.g. `batch_norm="train"`.

    Raises:
        BudgetError: No budget, a malformed one, or one that no plan keeps: the text has the smallest that one does.
        InputError: The sample does not fit the model, or the loss is no scalar.
    """
    budgets = {MEMORY: memory, TIME: time, FLOPS: flops}
    given = {kind: value for kind, value in budgets.items() if value is not None}
    return choose_plan(model, sample, loss, given, batch, keep, **options).plan


def choose_plan(
    model: nn.Module,
    sample: Any,
    loss: Loss | None,
    budgets: Mapping[str, str | float],
    batch: int | None = None,
    keep: Keep | str | None = None,
    **options: Any,
) -> Chosen:
    """Choose a plan as `plan_for` does; return what it was chosen from, too."""
    limits = {kind: parse_amount(kind, value) for kind, value in budgets.items()}
    if not limits:
        raise BudgetError('there is no budget to plan for. Give memory="64MB", time="200ms" or flops="20G", or several.')
    return Outlook.make(model, sample, loss, tuple(limits), batch, keep, **options).choose(limits)


@dataclass(frozen=True)
class Outlook:
    """All that is known of a model before a budget is given: plans for many budgets can be had of it.

    Attributes:
        model: The model, which is left as it is.
        inputs: What a training step is called with.
        survey: What is known of the layers.
        front: The plans to choose from.
        options: Of the plans.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    survey: Survey
    front: Front
    options: dict[str, Any]

    @classmethod
    def make(
        cls,
        model: nn.Module,
        sample: Any,
        loss: Loss | None,
        resources: tuple[str, ...],
        batch: int | None = None,
        keep: Keep | str | None = None,
        **options: Any,
    ) -> Outlook:
        """Survey a model for budgets of some resources, see `plan_for`."""
        if torch.is_inference_mode_enabled():
            raise InputError("a plan is chosen by gradients, which torch.inference_mode() forbids. Call this outside of it.")
        if unknown := options.keys() - {"rest", "batch_norm", "trunk"}:
            names = ", ".join(sorted(unknown))
            raise PlanError(f"{names} is no option of a chosen plan. The options are rest, batch_norm and trunk.")
        kinds = (parse_keep(keep),) if keep is not None else KINDS if MEMORY in resources else (FULL,)
        batches, inputs = find_samples(model, sample, batch)
        known = survey(model, batches, loss, inputs, tuple(dict.fromkeys((MEMORY, *resources))), kinds, **options)
        return cls(model, inputs, known, search(known, resources), options)

    def choose(self, limits: dict[str, float]) -> Chosen:
        """Return the best plan within budgets of all resources that were surveyed for."""
        twin = remove_(copy_model(self.model)).train()
        front, allowed = self.front, dict(limits)
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ExitWarning)  # whoever applies the plan is told
            warnings.simplefilter("ignore", TrunkWarning)
            for _ in range(TRIES):
                feasible = front.find_feasible(allowed)
                if not len(feasible):
                    break
                place = feasible[0]
                choices = tuple(front.choices[place].tolist())
                plan = self.survey.make_plan(choices, **self.options)
                costs = find_costs(apply_(twin, plan), self.inputs, limits)
                if all(costs[kind] <= limit for kind, limit in limits.items()):
                    gap = max(0.0, front.find_bound(limits) - float(front.gains[place]))
                    return Chosen(plan, limits, costs, float(front.cosines[place]), gap, choices, self.survey, front)
                # What is measured, time or bytes under autocast, may be above what the survey says: the next try allows less.
                for kind, limit in limits.items():
                    allowed[kind] *= min(1.0, 0.98 * limit / costs[kind])
        raise BudgetError(explain_least(front, limits))


def explain_least(front: Front, limits: Mapping[str, float]) -> str:
    """Return the error text for budgets that no plan keeps."""
    useful = front.cosines > 0
    least = [f"{kind} {show_least(kind, float(front.costs[kind][useful].min()))}" for kind in limits]
    asked = ", ".join(f"{kind} {show_amount(kind, limit)}" for kind, limit in limits.items())
    each = "each taken alone, " if len(least) > 1 else ""
    return f"no plan keeps to {asked}: {each}the smallest possible budget is {', '.join(least)}. Give more, or a smaller batch."


def show_least(kind: str, amount: float) -> str:
    """Return an amount that is enough as it is written: bytes to the byte, the others rounded up."""
    return f"{int(amount)} B ({show_amount(kind, amount)})" if kind == MEMORY else show_amount(kind, 1.01 * amount)


def find_costs(model: nn.Module, inputs: tuple[Tensor, ...], limits: Mapping[str, float]) -> dict[str, float]:
    """Return what a model under a plan costs, of each resource with a limit, and the bytes that it holds."""
    # Shapes know nothing of autocast, under which activations are smaller, and copies of weights are held.
    find_bytes = measure_saved_bytes if torch.is_autocast_enabled(inputs[0].device.type) else predict_saved_bytes
    costs = {MEMORY: float(find_bytes(model, *inputs))}
    if FLOPS in limits:
        step = predict_step(model, inputs, sum_outputs)
        costs[FLOPS] = float(step.count(FORWARD) + step.count(BACKWARD))
    if TIME in limits:
        with without_trace(model):
            costs[TIME] = float(np.median([sum(time_step(model, inputs)) for _ in range(3)]))
    return costs


def find_samples(model: nn.Module, sample: Any, batch: int | None) -> tuple[Sequence[Batch], tuple[Tensor, ...]]:
    """Return the batches on which usefulness is measured, and the inputs of a training step."""
    if isinstance(sample, Tensor) and sample.dim() and len(sample):
        pairs: list[Any] = [(sample, draw_targets(model, sample))]
    elif is_pair(sample) and isinstance(sample[0], Tensor):
        pairs = [sample]
    else:
        pairs = list(sample) if isinstance(sample, Iterable) and not isinstance(sample, Tensor) else []
    if not pairs or not all(is_pair(p) and isinstance(p[0], Tensor) and p[0].dim() and len(p[0]) for p in pairs):
        raise InputError("the sample is no batch. Give images, a pair (images, targets), or a list of such pairs.")
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise InputError(f"batch is {batch!r}. Give the number of images of a training step, at least 1.")
    images = pairs[0][0]
    count = len(images) if batch is None else batch
    inputs = images[torch.arange(count, device=images.device) % len(images)] if count != len(images) else images
    whole = any(not isinstance(y, Tensor) or len(y) != len(x) for x, y in pairs)  # targets that we cannot cut
    return pairs if whole else [(x[:MOST_IMAGES], y[:MOST_IMAGES]) for x, y in pairs], (inputs,)


def draw_targets(model: nn.Module, images: Tensor) -> Tensor:
    """Return a class for each image, drawn at random, always the same ones."""
    twin = remove_(copy_model(model)).eval()
    with explain_failure(images, "when it is asked for its classes"), on_shapes(twin) as (run, _), torch.no_grad():
        logits = find_logits(run(to_meta(images)))
    if logits.dim() != 2:
        raise InputError(
            f"the model gives an output of shape {list(logits.shape)}, for which no targets can be drawn. Give a pair (images, "
            "targets), and a loss."
        )
    return torch.randint(logits.shape[1], (len(images),), generator=torch.Generator().manual_seed(0)).to(images.device)
