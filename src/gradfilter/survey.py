"""What a model's layers cost and give at every resolution of the gradient and in every keep: a run per family, not per plan.

A *family* is a plan that treats all layers alike: `Backward(grid=4)` everywhere, say. For each family the model runs on shapes
alone, which tells to the byte what autograd holds for a layer that is trained, and for one that only passes the gradient on;
and on a few images, which tells how much of a layer's exact gradient the family finds. An *option* is a family and a keep.
"""

from __future__ import annotations

import glob
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradfilter.apply import apply_, remove_
from gradfilter.errors import ExitWarning, PlanError
from gradfilter.fidelity import Batch, find_gradients, group, run_loss, take_gradients, without_trace
from gradfilter.geometry.tiling import Pair
from gradfilter.keep import FULL, Keep
from gradfilter.loss import Loss, StepLoss
from gradfilter.meter import BACKWARD, FORWARD, LOSS, Saved, follow, predict_step, run_forward
from gradfilter.options import Candidates, Kind, Several, Switch, stand_for
from gradfilter.outputs import copy_model, explain_failure, sum_outputs
from gradfilter.plan import Backward, Conv, Plan, find_layers
from gradfilter.shapes import on_shapes, to_meta
from gradfilter.spectrum import find_energy

Array = NDArray[np.float64]
MEMORY, FLOPS, TIME = "memory", "flops", "time"
GRIDS = (1, 2, 3, 4, 5, 7, 10, 14, 28, 56)
"""Patches per side of the families, from the coarsest to the finest; the last family is exact."""


@dataclass
class Costs:
    """What layers cost of one resource, by layer and option.

    Attributes:
        trained: Where the layer is trained; infinite where it has no such option.
        passed: Where it only passes the gradient on to layers before it, of which the latest trained one has the option.
        base: What a step costs whatever is trained.
    """

    trained: Array
    passed: Array
    base: float = 0.0


@dataclass
class Survey:
    """What a planner needs to know of a model.

    Attributes:
        layers: Names, in the order in which they run.
        options: What may be done to a layer, by layer and option, none where it has no such option. Families go from the
            coarsest to the finest, which is exact; within a family the keeps go from the smallest to the largest.
        families: The family of each option.
        found: ⟨ĝ, g⟩ by layer and option, summed over batches.
        squares: |ĝ|², likewise.
        energies: |g|² by layer.
        total: |g|² of everything that could be trained.
        costs: By resource.
    """

    layers: tuple[str, ...]
    options: tuple[tuple[Backward | None, ...], ...]
    families: tuple[int, ...]
    found: Array
    squares: Array
    energies: Array
    total: float
    costs: dict[str, Costs] = field(default_factory=dict)

    @property
    def gains(self) -> Array:
        """The energy of the exact gradient that a layer finds in an option: ⟨ĝ, g⟩² / |ĝ|², nothing where they point apart.

        A gain is at most the layer's energy |g|², by the Cauchy-Schwarz inequality: ⟨ĝ, g⟩² ≤ |ĝ|²·|g|². That holds for sums
        over batches as well, because all three run over the same batches. So no plan gains more than `total`.
        """
        return np.where(self.found > 0, self.found**2 / np.maximum(self.squares, 1e-300), 0.0)

    def cosine(self, choices: NDArray[np.int64]) -> Array:
        """Return the cosine to the whole gradient of choices [..., layers]: an option for each layer, −1 for not trained."""
        chosen, rows = choices >= 0, np.arange(len(self.layers))
        found = np.where(chosen, self.found[rows, choices], 0).sum(-1)
        squares = np.where(chosen, self.squares[rows, choices], 0).sum(-1)
        return found / np.sqrt(np.maximum(squares * self.total, 1e-300))

    def make_plan(self, choices: Sequence[int], **options: Any) -> Plan:
        """Return the plan of choices: an option for each layer, −1 for not trained; what has no gradient is left out."""
        layers: dict[str, Backward] = {}
        for layer, choice, own, energy in zip(self.layers, choices, self.options, self.energies, strict=True):
            if choice >= 0 and energy > 0:
                backward = own[choice]
                assert backward is not None
                layers[glob.escape(layer)] = backward
        return Plan(layers, **options)


def survey(
    model: nn.Module,
    batches: Sequence[Batch],
    loss: Loss | None,
    inputs: tuple[Tensor, ...],
    resources: Sequence[str] = (MEMORY,),
    kinds: tuple[Kind, ...] = (FULL,),
    step_loss: StepLoss | None = None,
    **options: Any,
) -> Survey:
    """Survey a model, which is left as it is.

    Args:
        model: With or without a plan, which does not count. Parameters that are frozen without one are not candidates.
        batches: Pairs of inputs and targets on which usefulness is measured.
        loss: From outputs and targets to a scalar; None for cross-entropy.
        inputs: What a training step is called with: costs are those of such a step. Meta tensors will do.
        resources: Which costs to find.
        kinds: The keeps to choose from, from the smallest to the largest.
        step_loss: The loss of that training step, which has its costs, too; None where it is not to count.
        options: Of the plan, e.g. `batch_norm="train"`.
    """
    twin = remove_(copy_model(model)).train()
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ExitWarning)  # whoever applies the plan is told
        check_trainable(twin)
        apply_(twin, Plan.all(Backward(patch=1), **options))  # for its batch norms: one image has no statistics
        with explain_failure(inputs[0], "already without gradients"):
            layers = find_order(twin, inputs)
            families = find_families(twin, inputs)
        trial = Trial(twin, layers, families, kinds, inputs, step_loss, options)
        result = measure_gains(trial, batches, loss)
        for resource in resources:
            result.costs[resource] = COSTS[resource](trial, result)
            result.costs[resource].trained[np.equal(np.array(result.options), None)] = np.inf  # type: ignore[call-overload]
    return result


@dataclass
class Trial:
    """A model that is surveyed, and what all parts of the survey need.

    Attributes:
        model: The model, which takes one plan after the other.
        layers: Names, in the order in which they run.
        families: What each does to a layer, from the coarsest to the finest, which is exact.
        kinds: The keeps to choose from.
        inputs: What a training step is called with.
        loss: That of such a step; None where it does not count.
        options: Of the plan.
        candidates: By family and layer, what was found of the layer's input.
    """

    model: nn.Module
    layers: tuple[str, ...]
    families: tuple[Backward, ...]
    kinds: tuple[Kind, ...]
    inputs: tuple[Tensor, ...]
    loss: StepLoss | None
    options: dict[str, Any]
    candidates: list[dict[str, Candidates]] = field(default_factory=list)

    def add_loss(self, costs: Mapping[str, int]) -> dict[str, float]:
        """Return what layers cost, the last one with what the loss does: that depends on the resolution of its gradient."""
        last = self.layers[-1]
        return {**costs, last: costs.get(last, 0) + costs.get(LOSS, 0)}

    @property
    def columns(self) -> list[tuple[int, int]]:
        """The places of the family and of the kind of each option."""
        return list(product(range(len(self.families)), range(len(self.kinds))))

    def apply(self, family: int, keep: Keep) -> None:
        """Apply a family with one keep to all layers."""
        apply_(self.model, Plan.all(replace(self.families[family], keep=keep), **self.options))

    def apply_option(self, survey: Survey, column: int) -> None:
        """Apply an option to all layers; those that do not have it get one that treats what is around them alike."""
        family, kind = self.columns[column]
        given = replace(self.families[family], keep=stand_for(self.kinds[kind]))
        own = zip(self.layers, survey.options, strict=True) if not isinstance(self.kinds[kind], Keep) else ()
        layers = {glob.escape(layer): options[column] or given for layer, options in own}
        apply_(self.model, Plan({**layers, "*": given}, **self.options))


def find_order(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[str, ...]:
    """Return the layers in the order in which they run first."""
    layers = find_layers(model)
    with on_shapes(model) as (run, _), follow(model) as places, torch.no_grad():
        run(*inputs)
    return tuple(name for name in dict.fromkeys(places.names) if name in layers)


def check_trainable(model: nn.Module) -> None:
    """Refuse a model in which there is nothing to choose from."""
    if not any(p.requires_grad for layer in find_layers(model).values() for p in layer.parameters()):
        raise PlanError(
            f"{type(model).__name__} has no Conv2d or Linear layer to train: there is none, or all have requires_grad=False. "
            "Call model.requires_grad_(True) first."
        )


def find_families(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Backward, ...]:
    """Return the families that differ on this model, from the coarsest to the finest."""
    sizes: set[Pair] = set()

    def note(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x = args[0] if args else kwargs["input"]
        sizes.add((x.shape[-2], x.shape[-1]))

    handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in find_layers(model).values() if isinstance(m, Conv)]
    with on_shapes(model) as (run, _), torch.no_grad():
        run(*inputs)
    for handle in handles:
        handle.remove()
    image = (inputs[0].shape[-2], inputs[0].shape[-1])
    exact = Backward(patch=1)
    families: dict[tuple[Pair, ...], Backward] = {}
    for family in (exact, *(Backward(grid=n) for n in GRIDS)):
        families.setdefault(tuple(family.make_tiling(image).patch_for(size) for size in sorted(sizes)), family)
    return (*(family for family in families.values() if family is not exact), exact)


def measure_gains(trial: Trial, batches: Sequence[Batch], loss: Loss | None) -> Survey:
    """Return how much of each layer's exact gradient each option finds.

    For each batch a forward for each family, and a backward for each option.
    """
    model, layers = trial.model, trial.layers
    trial.apply(-1, FULL)
    exact = [find_gradients(model, batch, loss) for batch in batches]
    groups = group(model, {name for gradients in exact for name in gradients})
    found, squares = np.zeros((2, len(layers), len(trial.columns)))
    options: list[list[Backward | None]] = [[] for _ in layers]
    scale = Fraction(len(trial.inputs[0]), len(batches[0][0]))
    for place, family in enumerate(trial.families):
        switch = Switch()
        trial.candidates.append({layer: Candidates(trial.kinds, scale) for layer in layers})
        trial.apply(place, Several(trial.candidates[-1], switch))
        for batch, true in zip(batches, exact, strict=True):
            with without_trace(model):
                value = run_loss(model, batch[0], batch[1], loss)
                switch.settled = True
                for kind in range(len(trial.kinds)):
                    switch.active = kind
                    gradients = take_gradients(model, value, again=kind < len(trial.kinds) - 1)
                    for row, layer in enumerate(layers):
                        names = [name for name in groups.get(layer, []) if name in gradients and name in true]
                        column = row, place * len(trial.kinds) + kind
                        found[column] += sum(float((gradients[n].double() * true[n].double()).sum()) for n in names)
                        squares[column] += sum(float(gradients[n].double().square().sum()) for n in names)
        for layer, own in zip(layers, options, strict=True):
            planned = trial.candidates[place][layer].find_planned()
            own.extend(None if keep is None else replace(family, keep=keep) for keep in planned)
    energies = {n: sum(find_energy(true[n]) for true in exact if n in true) for names in groups.values() for n in names}
    by_layer = np.array([sum(energies[n] for n in groups.get(layer, [])) for layer in layers])
    columns = tuple(family for family, _ in trial.columns)
    total = sum(energies.values())
    return Survey(layers, tuple(map(tuple, options)), columns, found, squares, by_layer, total)


def find_memory(trial: Trial, survey: Survey) -> Costs:
    """Return the bytes that autograd holds for each layer.

    Ranks say nothing but how a layer's own input is held. So for layers with ranks nothing runs: they hold what they hold in a
    keep that treats what is around them alike, but for the input.
    """

    def run(inputs: tuple[Tensor, ...]) -> dict[str, float]:
        with on_shapes(trial.model) as (forward, state), follow(trial.model) as places:
            saved = Saved(places)
            with saved:
                alive = run_forward(lambda: forward(*inputs), trial.loss, places)
            held = saved.count(state.values(), shared=False)
        del alive
        return trial.add_loss(held)

    like = [find_like(trial.kinds, place) for place in range(len(trial.kinds))]
    costs = find_costs(trial, survey, run, {place for place, other in enumerate(like) if place == other})
    for column, (family, kind) in enumerate(trial.columns):
        other = trial.kinds[like[kind]]
        for row, own in enumerate(survey.options if like[kind] != kind else ()):
            candidates, option = trial.candidates[family][trial.layers[row]], own[column]
            if option is not None and isinstance(other, Keep):
                difference = candidates.count_bytes(option.keep) - candidates.count_bytes(other)
                costs.trained[row, column] = costs.trained[row, column + like[kind] - kind] + difference
    return costs


def find_like(kinds: Sequence[Kind], place: int) -> int:
    """Return the place of a keep that treats what is around a layer as a kind does: its own, where that is no share."""
    around = stand_for(kinds[place]).around
    alike = [i for i, kind in enumerate(kinds) if isinstance(kind, Keep) and kind.around == around]
    return place if isinstance(kinds[place], Keep) or not alike else alike[0]


def find_flops(trial: Trial, survey: Survey) -> Costs:
    """Return the flops of each layer, backward and what it computes for that in forward; the least forward is the base."""
    forward: list[dict[str, float]] = []

    def run(inputs: tuple[Tensor, ...]) -> dict[str, float]:
        step = predict_step(trial.model, inputs, trial.loss or sum_outputs)
        flops = {part: trial.add_loss(step.flops[part]) for part in (FORWARD, BACKWARD)}
        forward.append(flops[FORWARD])
        return {layer: flops[FORWARD].get(layer, 0) + flops[BACKWARD].get(layer, 0) for layer in trial.layers}

    costs = find_costs(trial, survey, run, set(range(len(trial.kinds))))
    least = {layer: min(flops.get(layer, 0) for flops in forward) for flops in forward for layer in flops if layer != LOSS}
    own = np.array([[least.get(layer, 0)] for layer in trial.layers])
    return Costs(costs.trained - own, costs.passed - own, float(sum(least.values())))


def find_time(trial: Trial, survey: Survey) -> Costs:
    """Return the seconds of each layer: what a step takes above the fastest forward, shared out in proportion to flops."""
    costs = find_flops(trial, survey)
    seconds = np.zeros((len(trial.columns), 2))
    for column in range(len(trial.columns)):
        trial.apply_option(survey, column)
        with without_trace(trial.model):
            seconds[column] = np.min([time_step(trial.model, trial.inputs, trial.loss) for _ in range(3)], 0)
    costs.base = float(seconds[:, 0].min())
    rates = (seconds.sum(1) - costs.base) / np.maximum(costs.trained.sum(0), 1)
    return Costs(costs.trained * rates, costs.passed * rates, costs.base)


def time_step(model: nn.Module, inputs: tuple[Tensor, ...], loss: StepLoss | None) -> tuple[float, float]:
    """Return the seconds of forward, with the loss, and of backward."""
    start = time.perf_counter()
    value = (loss or sum_outputs)(model(*inputs))
    middle = time.perf_counter()
    value.backward()
    end = time.perf_counter()
    model.zero_grad()
    return middle - start, end - middle


def find_costs(trial: Trial, survey: Survey, run: Callable[[tuple[Tensor, ...]], dict[str, float]], kinds: set[int]) -> Costs:
    """Return what `run` says of each layer in each option of some kinds, with all layers trained, and with none.

    With none, what is held depends on how a kind treats what is around a layer, and is the same for all kinds that agree.
    """
    costs = Costs(np.zeros_like(survey.found), np.zeros_like(survey.found))
    trainable = [p for p in trial.model.parameters() if p.requires_grad]
    passed: dict[tuple[int, Keep], dict[str, float]] = {}
    for column, (family, kind) in enumerate(trial.columns):
        key = family, stand_for(trial.kinds[kind]).around
        if kind in kinds or key not in passed:
            trial.apply_option(survey, column)
        if kind in kinds:
            trained = run(trial.inputs)
            costs.trained[:, column] = [trained.get(layer, 0) for layer in trial.layers]
        if key not in passed:
            for parameter in trainable:
                parameter.requires_grad_(False)
            try:
                passed[key] = run(tuple(to_meta(x).requires_grad_(x.is_floating_point()) for x in trial.inputs))
            finally:
                for parameter in trainable:
                    parameter.requires_grad_(True)
        costs.passed[:, column] = [passed[key].get(layer, 0) for layer in trial.layers]
    return costs


COSTS: dict[str, Callable[[Trial, Survey], Costs]] = {MEMORY: find_memory, FLOPS: find_flops, TIME: find_time}
"""How to find the costs of each resource that a budget can be given for."""
