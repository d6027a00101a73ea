"""Cost: what a training step under a plan takes, beside exact backprop of the same layers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradfilter.cost_table import Cost, LayerCost, Seconds, StepCost, show_bytes
from gradfilter.environment import find_free_memory
from gradfilter.errors import ExitWarning, InputError
from gradfilter.fidelity import group, is_pair
from gradfilter.hooks import exactly, find_applied
from gradfilter.loss import StepLoss, draw_targets, find_score_shape, find_targets
from gradfilter.measure import MOST_SHARE, find_time, measure_peak, measure_rss, median, take_turns
from gradfilter.meter import BACKWARD, FORWARD, UPDATE, MakeOptimizer, Saved, Step, follow, predict_step, run_forward
from gradfilter.outputs import copy_model, explain_failure
from gradfilter.shapes import on_shapes, to_meta

T = TypeVar("T")
PLAN, EXACT = "plan", "exact"


def run_exactly(model: nn.Module, run: Callable[[], T]) -> T:
    """Run something while a model under a plan has torch's own backward."""
    applied = find_applied(model)
    assert applied is not None
    with exactly(applied):
        return run()


SIDES: dict[str, Callable[[nn.Module, Callable[[], Any]], Any]] = {PLAN: lambda _, run: run(), EXACT: run_exactly}
"""How to run something on each side of the comparison."""


def count_saved(run: Callable[[], Any], exclude: Iterable[Tensor] = ()) -> int:
    """Return the bytes that autograd holds after `run()`, deduplicated by storage.

    Args:
        run: A forward pass; its result keeps the graph alive while it is counted.
        exclude: Tensors that are there anyway, such as parameters and buffers.
    """
    return sum(find_saved(Saved(), run, exclude).values())


def find_saved(saved: Saved, run: Callable[[], Any], exclude: Iterable[Tensor], given: Iterable[Tensor] = ()) -> dict[str, int]:
    """Return the bytes that autograd holds after `run()` by layer, as far as `saved` knows places."""
    with saved:
        result = run()
    held = saved.count(exclude, given=given)
    del result
    return held


def measure_saved_bytes(model: nn.Module, *inputs: Any, loss: Callable[[Any], Tensor] | None = None) -> int:
    """Return the bytes that autograd really holds after `model(*inputs)`, parameters and buffers excluded.

    Args:
        model: With or without a plan.
        inputs: What it is called with.
        loss: From its outputs to a scalar, a `StepLoss` say: what the loss holds counts too then.
    """
    return sum(measure_saved_by_layer(model, *inputs, loss=loss).values())


def measure_saved_by_layer(model: nn.Module, *inputs: Any, loss: Callable[[Any], Tensor] | None = None) -> dict[str, int]:
    """Return what `measure_saved_bytes` does, by the layer that saved it; "(loss)" is the loss's own."""
    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    with follow(model) as places:
        run = partial(run_forward, lambda: model(*inputs), loss, places)
        there = [*model.parameters(), *model.buffers()]
        return find_saved(Saved(places), run, there, [*given, *find_targets(loss)])


def predict_saved_bytes(model: nn.Module, *inputs: Any, loss: Callable[[Any], Tensor] | None = None) -> int:
    """Return the bytes that autograd would hold after `model(*inputs)`, without computing or allocating anything.

    The same forward runs on shapes alone, as `on_shapes` does. See `measure_saved_bytes` for the arguments.
    """
    with on_shapes(model) as (run, state):
        return count_saved(partial(run_forward, lambda: run(*inputs), loss), state.values())


def make_sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Return SGD with momentum; it costs the same at a learning rate of zero, at which nothing can diverge."""
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)


def cost(
    model: nn.Module,
    sample: Tensor | tuple[Tensor, Any] | list[Any],
    *,
    loss: Callable[..., Tensor] | None = None,
    make_optimizer: MakeOptimizer | None = None,
    measure: bool = True,
) -> Cost:
    """Tell what a training step under the model's plan takes, beside exact backprop of the same layers.

    Flops, saved bytes and peak bytes are predicted on shapes alone. Saved bytes, peak, resident memory and time are measured
    too, on a copy of the model, plan and exact in turns; a side that might not fit into free memory is not. The model comes
    out as it was: gradients, statistics, plan, random state.

    Args:
        model: Under a plan, in the mode in which it is to run: that of training, most likely.
        sample: A batch of images, or a pair of images and targets.
        loss: From outputs and targets, or from outputs alone where there are no targets, to a scalar. Where not given:
            cross-entropy of the (first) output with the targets, or with ones drawn at random, for each image or for each
            pixel as the output has it; the mean square of outputs that are no scores of classes.
        make_optimizer: From the trained parameters to an optimizer; SGD with momentum 0.9 where not given.
        measure: Whether to run the model, or only predict. Of images on the meta device there are predictions alone.

    Raises:
        InputError: No plan is applied, the sample is no batch of images, or the loss is no scalar with a gradient.
        GradFilterError: The model fails on the sample.
    """
    if find_applied(model) is None:
        raise InputError(
            f"{type(model).__name__} runs under no plan, so there is nothing to hold beside exact backprop. Call "
            "gradfilter.apply_(model, plan) first, on this very module."
        )
    pair: Any = sample if is_pair(sample) else (sample, None)
    images, targets = pair
    if not isinstance(images, Tensor):
        raise InputError(f"the sample is a {type(sample).__name__}. Give a batch of images [N, C, H, W], or (images, targets).")
    twin = copy_model(model)
    twin.zero_grad()
    make = make_optimizer or make_sgd
    with warnings.catch_warnings(), torch.random.fork_rng([images.device] if images.is_cuda else []), torch.enable_grad():
        warnings.simplefilter("ignore", ExitWarning)  # whoever trains the model is told
        applied = find_applied(twin)
        assert applied is not None
        if measure and not images.is_meta and any(b.keep.calibrates for b in applied.resolved.layers.values()):
            with explain_failure(images, "when it sees its first batch"):
                twin(images)  # from here on it is known how much is held
        with explain_failure(images, "when a step runs on shapes alone"):
            if targets is None and loss is None and (shape := find_score_shape(twin, images)):
                targets = draw_targets(shape, images.device)
            bound = StepLoss(loss, targets)
            sides = {name: run(twin, lambda: predict_step(twin, (images,), bound, make)) for name, run in SIDES.items()}
        state = find_layer_state(twin, make)
        costs = {name: make_step_cost(step, state) for name, step in sides.items()}
        size = images.shape[-2], images.shape[-1]
        found = Cost(costs[PLAN], costs[EXACT], dict(applied.patches), math.nan, len(images), size)
        if not measure or images.is_meta:
            return found
        with explain_failure(images, "when a step is measured"):
            optimizer = make([p for p in twin.parameters() if p.requires_grad])
            return measure_sides(found, Trial(twin, images, bound, optimizer))


def measure_sides(found: Cost, trial: Trial) -> Cost:
    """Return the cost with what can be measured, on each side that fits into free memory."""
    device = trial.images.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else find_free_memory()
    costs, notes = {PLAN: found.plan, EXACT: found.exact}, list(found.notes)
    runs: dict[str, Callable[[], Seconds]] = {}
    for name, run in SIDES.items():
        side = costs[name]
        if side.peak_bytes > MOST_SHARE * free:
            notes.append(
                f"Not measured {'under the plan' if name == PLAN else 'exactly'}: a step would take "
                f"{show_bytes(side.peak_bytes)} of the {show_bytes(free)} that are free."
            )
            continue
        runs[name] = partial(run, trial.model, trial.step)
        held = run(trial.model, lambda: measure_saved_by_layer(trial.model, trial.images, loss=trial.loss))
        layers = {
            layer: replace(side.layers.get(layer, LayerCost()), measured_saved_bytes=held.get(layer, 0))
            for layer in dict.fromkeys((*side.layers, *held))
        }
        runs[name]()  # optimizer state, and what libraries make at first use, is there before the step that counts
        costs[name] = replace(
            side, layers=layers, measured_peak_bytes=measure_peak(runs[name], device), rss_bytes=measure_rss(runs[name])
        )
    turns = take_turns(runs)
    for name, seconds in turns.items():
        costs[name] = replace(
            costs[name], seconds=Seconds(*(median([getattr(s, f.name) for s in seconds]) for f in fields(Seconds)))
        )
    ratios = [a.step / b.step for a, b in zip(turns.get(PLAN, []), turns.get(EXACT, []), strict=False)]
    return replace(found, plan=costs[PLAN], exact=costs[EXACT], step_ratio=median(ratios), notes=tuple(notes))


@dataclass(frozen=True)
class Trial:
    """A model with all that a training step takes."""

    model: nn.Module
    images: Tensor
    loss: Callable[[Any], Tensor]
    optimizer: torch.optim.Optimizer

    def step(self) -> Seconds:
        """Do one step; tell how long its parts took."""
        times = [find_time(self.images)]
        outputs = self.model(self.images)  # most loops have a name for them, which keeps them until backward is done
        value = self.loss(outputs)
        times.append(find_time(self.images))
        value.backward()
        times.append(find_time(self.images))
        self.optimizer.step()
        times.append(find_time(self.images))
        self.optimizer.zero_grad()
        return Seconds(*(b - a for a, b in pairwise(times)))


def find_layer_state(model: nn.Module, make_optimizer: MakeOptimizer) -> dict[str, tuple[int, int, int]]:
    """Return the bytes of parameters, gradients and optimizer state by layer; the optimizer runs on shapes alone."""
    parameters = dict(model.named_parameters())
    twins = {name: to_meta(p) for name, p in parameters.items() if p.requires_grad}
    optimizer = make_optimizer(list(twins.values()))
    for tensor in twins.values():
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
    held = {
        name: sum(t.nbytes for t in tree_leaves(optimizer.state.get(tensor)) if isinstance(t, Tensor))
        for name, tensor in twins.items()
    }
    return {
        layer: (
            sum(parameters[name].nbytes for name in names),
            sum(twins[name].nbytes for name in names if name in twins),
            sum(held.get(name, 0) for name in names),
        )
        for layer, names in group(model, parameters).items()
    }


def make_step_cost(step: Step, state: Mapping[str, tuple[int, int, int]]) -> StepCost:
    """Return a predicted step by layer, each with its parameters."""
    forward, backward, saved = step.flops[FORWARD], step.flops[BACKWARD], step.saved_bytes
    layers: dict[str, LayerCost] = {}
    for name in dict.fromkeys((*forward, *backward, *saved, *state)):
        parameters, gradients, optimizer = state.get(name, (0, 0, 0))
        layers[name] = LayerCost(
            forward.get(name, 0), backward.get(name, 0), saved.get(name, 0), None, parameters, gradients, optimizer
        )
    return StepCost(layers, step.count(UPDATE), step.peak_bytes)
