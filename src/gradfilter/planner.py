"""A budget in, a plan out: which layers to train, at which resolution of the gradient, and how their inputs are held."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gradfilter.apply import apply_, remove_
from gradfilter.cost import measure_saved_bytes, predict_saved_bytes
from gradfilter.errors import BudgetError, ExitWarning, InputError, PlanError, TrunkWarning
from gradfilter.fidelity import Batch, is_pair, without_trace
from gradfilter.keep import FULL, Keep, parse_keep
from gradfilter.loss import Loss, StepLoss, draw_targets, find_score_shape
from gradfilter.meter import BACKWARD, FORWARD, predict_step
from gradfilter.options import KINDS
from gradfilter.outputs import copy_model, explain_failure, sum_outputs
from gradfilter.plan import Backward, Plan
from gradfilter.search import Choices, Front, search
from gradfilter.survey import FLOPS, MEMORY, TIME, Survey, check_trainable, survey, time_step
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
        counts_loss: Whether costs are with those of the loss, which a loss that looks at values does not tell on shapes alone.
    """

    plan: Plan
    budgets: dict[str, float]
    costs: dict[str, float]
    cosine: float
    gap: float
    choices: tuple[int, ...]
    survey: Survey
    front: Front
    counts_loss: bool = True

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
            "What the loss holds counts with the last layer."
            if self.counts_loss
            else "What the loss holds is not counted: it looks at values, and so cannot run on shapes alone.",
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
        loss: That of such a step; None where it cannot run on shapes alone, and does not count.
        survey: What is known of the layers.
        front: The plans to choose from.
        options: Of the plans.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: StepLoss | None
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
        batches, inputs, targets = find_samples(model, sample, batch)
        step_loss = find_step_loss(model, inputs, StepLoss(loss, targets))
        wanted = tuple(dict.fromkeys((MEMORY, *resources)))
        known = survey(model, batches, loss, inputs, wanted, kinds, step_loss, **options)
        return cls(model, inputs, step_loss, known, search(known, resources), options)

    def choose(self, limits: dict[str, float]) -> Chosen:
        """Return the best plan within budgets of all resources that were surveyed for."""
        twin = remove_(copy_model(self.model)).train()
        places = self.front.find_feasible(limits)
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ExitWarning)  # whoever applies the plan is told
            warnings.simplefilter("ignore", TrunkWarning)
            found = self.find_best(places, lambda plan: find_costs(apply_(twin, plan), self.inputs, self.loss, limits), limits)
        if found is None:
            raise BudgetError(explain_least(self.front, limits))
        place, plan, costs = found
        gap = max(0.0, self.front.find_bound(limits) - float(self.front.gains[place]))
        cosine, choices = float(self.front.cosines[place]), tuple(self.front.choices[place].tolist())
        return Chosen(plan, limits, costs, cosine, gap, choices, self.survey, self.front, self.loss is not None)

    def find_best(
        self, places: Choices, measure: Callable[[Plan], dict[str, float]], limits: Mapping[str, float]
    ) -> tuple[int, Plan, dict[str, float]] | None:
        """Return the first of these plans, the best first, that really keeps to its budgets, with what it costs.

        Time, bytes under autocast, and those of Linear layers on tokens that no region reaches may be above what the survey
        says. Then a plan that fits is sought further down in steps that double, and the first one by halving what lies between.
        """
        above, below, at, found = -1, len(places), 0, None
        for _ in range(TRIES):
            if above + 1 >= below:
                break
            plan = self.survey.make_plan(tuple(self.front.choices[places[at]].tolist()), **self.options)
            costs = measure(plan)
            if all(costs[kind] <= limit for kind, limit in limits.items()):
                below, found = at, (int(places[at]), plan, costs)
            else:
                above = at
            at = (above + below) // 2 if found else min(len(places) - 1, 2 * at + 1)
        return found


def explain_least(front: Front, limits: Mapping[str, float]) -> str:
    """Return the error text for budgets that no plan keeps."""
    least = [f"{kind} {show_least(kind, front.find_least(kind))}" for kind in limits]
    asked = ", ".join(f"{kind} {show_amount(kind, limit)}" for kind, limit in limits.items())
    each = "each taken alone, " if len(least) > 1 else ""
    return f"no plan keeps to {asked}: {each}the smallest possible budget is {', '.join(least)}. Give more, or a smaller batch."


def show_least(kind: str, amount: float) -> str:
    """Return an amount that is enough as it is written: bytes to the byte, the others rounded up."""
    return f"{int(amount)} B ({show_amount(kind, amount)})" if kind == MEMORY else show_amount(kind, 1.01 * amount)


def find_costs(
    model: nn.Module, inputs: tuple[Tensor, ...], loss: StepLoss | None, limits: Mapping[str, float]
) -> dict[str, float]:
    """Return what a model under a plan costs, of each resource with a limit, and the bytes that it holds."""
    # Shapes know nothing of autocast, under which activations are smaller, and copies of weights are held.
    find_bytes = measure_saved_bytes if torch.is_autocast_enabled(inputs[0].device.type) else predict_saved_bytes
    costs = {MEMORY: float(find_bytes(model, *inputs, loss=loss))}
    if FLOPS in limits:
        step = predict_step(model, inputs, loss or sum_outputs)
        costs[FLOPS] = float(step.count(FORWARD) + step.count(BACKWARD))
    if TIME in limits:
        with without_trace(model):
            costs[TIME] = float(np.median([sum(time_step(model, inputs, loss)) for _ in range(3)]))
    return costs


def find_step_loss(model: nn.Module, inputs: tuple[Tensor, ...], loss: StepLoss) -> StepLoss | None:
    """Return the loss of a training step if it can run on shapes alone; one that looks at values cannot."""
    twin = remove_(copy_model(model)).train()
    check_trainable(twin)
    apply_(twin, Plan.all(Backward(patch=1)))  # for its batch norms: one image has no statistics
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore", ExitWarning)
        try:
            with explain_failure(inputs[0], "when it runs on shapes alone"):
                predict_saved_bytes(twin, *inputs, loss=loss)
        except InputError:  # what is wrong with it on values too, the survey says
            return None
    return loss


def find_samples(model: nn.Module, sample: Any, batch: int | None) -> tuple[Sequence[Batch], tuple[Tensor, ...], Any]:
    """Return the batches on which usefulness is measured, the inputs of a training step, and its targets."""
    if isinstance(sample, Tensor) and sample.dim() and len(sample):
        pairs: list[Any] = [(sample, draw(model, sample))]
    elif is_pair(sample) and isinstance(sample[0], Tensor):
        pairs = [sample]
    else:
        pairs = list(sample) if isinstance(sample, Iterable) and not isinstance(sample, Tensor) else []
    if not pairs or not all(is_pair(p) and isinstance(p[0], Tensor) and p[0].dim() and len(p[0]) for p in pairs):
        raise InputError("the sample is no batch. Give images, a pair (images, targets), or a list of such pairs.")
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise InputError(f"batch is {batch!r}. Give the number of images of a training step, at least 1.")
    images, labels = pairs[0]
    inputs, targets = resize_batch(images, labels, batch)
    whole = any(not isinstance(y, Tensor) or len(y) != len(x) for x, y in pairs)  # targets that we cannot cut
    return pairs if whole else [(x[:MOST_IMAGES], y[:MOST_IMAGES]) for x, y in pairs], (inputs,), targets


def resize_batch(images: Tensor, targets: Any, batch: int | None) -> tuple[Tensor, Any]:
    """Return a batch of another size: the first images with their targets, or all of them again and again."""
    if batch is None or batch == len(images):
        return images, targets
    places = torch.arange(batch) % len(images)

    def take(x: Tensor) -> Tensor:
        return x[places.to(x.device)] if x.dim() and len(x) == len(images) else x

    return take(images), tree_map_only(Tensor, take, targets)


def draw(model: nn.Module, images: Tensor) -> Tensor:
    """Return targets drawn at random; refuse a model whose output says nothing of them."""
    shape = find_score_shape(remove_(copy_model(model)).eval(), images)
    if shape is None:
        raise InputError(
            "the model gives no scores of classes, neither [N, classes] nor [N, classes, H, W], so that no targets can be "
            "drawn. Give a pair (images, targets), and a loss."
        )
    return draw_targets(shape, images.device)
