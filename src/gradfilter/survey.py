"""What a model's layers cost and give at every resolution of the gradient: one run per family of plans, not one per plan.

A *family* is a plan that treats all layers alike: `Backward(grid=4)` everywhere, say. For each family the model runs on shapes
alone, which tells to the byte what autograd holds for a layer that is trained, and for one that only passes the gradient on;
and on a few images, which tells how much of a layer's exact gradient the family finds.
"""

from __future__ import annotations

import glob
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradfilter.apply import apply_, remove_
from gradfilter.errors import ExitWarning, PlanError
from gradfilter.fidelity import Batch, Loss, find_gradients, group, without_trace
from gradfilter.meter import BACKWARD, FORWARD, Saved, follow, predict_step
from gradfilter.outputs import copy_model, explain_failure, sum_outputs
from gradfilter.patches import Pair
from gradfilter.plan import Backward, Conv, Plan, find_layers
from gradfilter.shapes import on_shapes, to_meta

Array = NDArray[np.float64]
MEMORY, FLOPS, TIME = "memory", "flops", "time"
GRIDS = (1, 2, 3, 4, 5, 7, 10, 14, 28, 56)
"""Patches per side of the families, from the coarsest to the finest; the last family is exact."""


@dataclass
class Costs:
    """What layers cost of one resource, by layer and family.

    Attributes:
        trained: Where the layer is trained.
        passed: Where it only passes the gradient on to layers before it.
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
        families: What each family does to a layer, from the coarsest to the finest, which is exact.
        found: ⟨ĝ, g⟩ by layer and family, summed over batches.
        squares: |ĝ|², likewise.
        total: |g|² of everything that could be trained.
        costs: By resource.
    """

    layers: tuple[str, ...]
    families: tuple[Backward, ...]
    found: Array
    squares: Array
    total: float
    costs: dict[str, Costs] = field(default_factory=dict)

    @property
    def gains(self) -> Array:
        """The energy of the exact gradient that a layer finds in a family: ⟨ĝ, g⟩² / |ĝ|², nothing where they point apart."""
        return np.where(self.found > 0, self.found**2 / np.maximum(self.squares, 1e-300), 0.0)

    def cosine(self, choices: NDArray[np.int64]) -> Array:
        """Return the cosine to the whole gradient of choices [..., layers]: a family for each layer, −1 for not trained."""
        chosen, rows = choices >= 0, np.arange(len(self.layers))
        found = np.where(chosen, self.found[rows, choices], 0).sum(-1)
        squares = np.where(chosen, self.squares[rows, choices], 0).sum(-1)
        return found / np.sqrt(np.maximum(squares * self.total, 1e-300))

    def make_plan(self, choices: Sequence[int], **options: Any) -> Plan:
        """Return the plan of choices: a family for each layer, −1 for not trained; what has no gradient is left out."""
        chosen = zip(self.layers, choices, self.found[:, -1] > 0, strict=True)
        return Plan(
            {glob.escape(n): self.families[choice] for n, choice, trains in chosen if choice >= 0 and trains}, **options
        )


def survey(
    model: nn.Module,
    batches: Sequence[Batch],
    loss: Loss | None,
    inputs: tuple[Tensor, ...],
    resources: Sequence[str] = (MEMORY,),
    **options: Any,
) -> Survey:
    """Survey a model, which is left as it is.

    Args:
        model: With or without a plan, which does not count. Parameters that are frozen without one are not candidates.
        batches: Pairs of inputs and targets on which usefulness is measured.
        loss: From outputs and targets to a scalar; None for cross-entropy.
        inputs: What a training step is called with: costs are those of such a step. Meta tensors will do.
        resources: Which costs to find.
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
        result = measure_gains(twin, layers, families, batches, loss, options)
        for resource in resources:
            result.costs[resource] = COSTS[resource](twin, result, inputs, options)
    return result


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


def measure_gains(
    model: nn.Module,
    layers: tuple[str, ...],
    families: tuple[Backward, ...],
    batches: Sequence[Batch],
    loss: Loss | None,
    options: dict[str, Any],
) -> Survey:
    """Return how much of each layer's exact gradient each family finds: one backward for each family and batch."""
    found, squares = np.zeros((2, len(layers), len(families)))
    total = 0.0
    for batch in batches:
        exact: dict[str, Tensor] = {}
        for column in reversed(range(len(families))):  # the last is exact
            apply_(model, Plan.all(families[column], **options))
            gradients = find_gradients(model, batch, loss)
            if not exact:
                exact = gradients
                total += sum(float(g.double().square().sum()) for g in exact.values())
            groups = group(model, exact)
            for row, layer in enumerate(layers):
                names = [name for name in groups.get(layer, []) if name in gradients]
                found[row, column] += sum(float((gradients[n].double() * exact[n].double()).sum()) for n in names)
                squares[row, column] += sum(float(gradients[n].double().square().sum()) for n in names)
    return Survey(layers, families, found, squares, total)


def find_memory(model: nn.Module, survey: Survey, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Costs:
    """Return the bytes that autograd holds for each layer."""

    def run(inputs: tuple[Tensor, ...]) -> dict[str, float]:
        with on_shapes(model) as (forward, state), follow(model) as places:
            saved = Saved(places)
            with saved:
                outputs = forward(*inputs)
            held = saved.count(state.values(), shared=False)
        del outputs
        return dict(held)

    return find_costs(model, survey, inputs, options, run)


def find_flops(model: nn.Module, survey: Survey, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Costs:
    """Return the backward flops of each layer, and those of forward as the base."""
    forward: list[int] = []

    def run(inputs: tuple[Tensor, ...]) -> dict[str, float]:
        step = predict_step(model, inputs, sum_outputs)
        forward.append(step.count(FORWARD))
        return dict(step.flops[BACKWARD])

    costs = find_costs(model, survey, inputs, options, run)
    costs.base = max(forward)
    return costs


def find_time(model: nn.Module, survey: Survey, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Costs:
    """Return the seconds of each layer: a family's backward, as measured, shared out in proportion to flops."""
    flops = find_flops(model, survey, inputs, options)
    forward = []
    for column, family in enumerate(survey.families):
        apply_(model, Plan.all(family, **options))
        with without_trace(model):
            seconds = [time_step(model, inputs) for _ in range(3)]
        forward.append(min(s[0] for s in seconds))
        rate = min(s[1] for s in seconds) / flops.trained[:, column].sum()
        flops.trained[:, column] *= rate
        flops.passed[:, column] *= rate
    flops.base = max(forward)
    return flops


def time_step(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[float, float]:
    """Return the seconds of forward and of backward."""
    start = time.perf_counter()
    value = sum_outputs(model(*inputs))
    middle = time.perf_counter()
    value.backward()
    end = time.perf_counter()
    model.zero_grad()
    return middle - start, end - middle


def find_costs(
    model: nn.Module,
    survey: Survey,
    inputs: tuple[Tensor, ...],
    options: dict[str, Any],
    run: Callable[[tuple[Tensor, ...]], dict[str, float]],
) -> Costs:
    """Return what `run` says of each layer under each family, with all layers trained, and with none."""
    shape = len(survey.layers), len(survey.families)
    costs = Costs(np.zeros(shape), np.zeros(shape))
    trainable = [p for p in model.parameters() if p.requires_grad]
    for column, family in enumerate(survey.families):
        apply_(model, Plan.all(family, **options))
        trained = run(inputs)
        for parameter in trainable:
            parameter.requires_grad_(False)
        try:
            passed = run(tuple(to_meta(x).requires_grad_(x.is_floating_point()) for x in inputs))
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)
        costs.trained[:, column] = [trained.get(layer, 0) for layer in survey.layers]
        costs.passed[:, column] = [passed.get(layer, 0) for layer in survey.layers]
    return costs


COSTS: dict[str, Callable[..., Costs]] = {MEMORY: find_memory, FLOPS: find_flops, TIME: find_time}
"""How to find the costs of each resource that a budget can be given for."""
