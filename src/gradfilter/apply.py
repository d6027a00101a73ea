"""Apply a plan to a model: the only file that changes a model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor, nn

from gradfilter.environment import has_bfloat16
from gradfilter.errors import PlanError, TrunkWarning
from gradfilter.hooks import (
    Applied,
    Frozen,
    FrozenLayer,
    FrozenStatistics,
    PlannedLayer,
    WholeModel,
    find_applied,
    find_hooks,
    find_states,
)
from gradfilter.keep import State
from gradfilter.marks import forget_compiled
from gradfilter.plan import Plan, resolve


def apply_(model: nn.Module, plan: Plan) -> nn.Module:
    """Apply a plan to a model, in place: all or nothing.

    Layers outside the plan are frozen (or trained exactly, as the plan says); nothing that was frozen before is made
    trainable. Object identity, parameters, state_dict keys and other people's hooks stay as they are; a plan that was
    applied before is replaced.

    Returns:
        The same model.

    Raises:
        PlanError: The plan does not fit the model, which is left untouched.
    """
    applied = freeze(model, plan, is_exact=False)
    WholeModel(applied).attach(model)
    for name, backward in applied.resolved.layers.items():
        PlannedLayer(applied, name, backward, state=State(name)).attach(model.get_submodule(name))
    layers = applied.resolved.layers
    frozen = [m for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and name not in layers]
    for module in frozen:
        FrozenLayer(applied).attach(module)
    if plan.trunk == "bfloat16" and frozen and not has_bfloat16():
        warnings.warn(
            "the plan has a trunk in bfloat16, for which this processor shows no instructions (avx512_bf16, amx_bf16, bf16): "
            "frozen layers run in single precision on rounded numbers, and take longer. Use trunk='float32' here.",
            TrunkWarning,
            stacklevel=2,
        )
    return model


def freeze_(model: nn.Module, plan: Plan) -> nn.Module:
    """Freeze what a plan freezes, in place, and train the rest with torch's own backward: the exact twin of `apply_`.

    Freezing is all that this does: sizes of patches and the like are not looked at. `remove_` undoes it.

    Returns:
        The same model.

    Raises:
        PlanError: The plan does not fit the model, which is left untouched.
    """
    freeze(model, plan, is_exact=True)
    return model


def freeze(model: nn.Module, plan: Plan, is_exact: bool) -> Applied:
    """Check a plan, take an earlier one off, freeze parameters and statistics; return what was done."""
    verb = "freeze_" if is_exact else "apply_"
    if not isinstance(model, nn.Module):
        raise PlanError(f"{verb} got a {type(model).__name__} where it takes a model, a torch.nn.Module.")
    if not isinstance(plan, Plan):
        raise PlanError(
            f"{verb} got {type(plan).__name__} where it takes a Plan, e.g. Plan.last(4) or Plan.all(Backward(patch=4))."
        )
    before = find_applied(model)
    check_not_nested(model, before)
    resolved = resolve(plan, model)
    trained = {p for name in resolved.trained for p in model.get_submodule(name).parameters(recurse=False)}
    was_frozen = set(before.frozen) if before else set()
    trainable = [p for p in model.parameters() if p.requires_grad or p in was_frozen]
    if not trained.intersection(trainable):
        raise PlanError(
            f"the plan trains nothing: all parameters of the layers it names have requires_grad=False. {verb} freezes, it "
            "never un-freezes: call model.requires_grad_(True), or set it on those layers, first."
        )
    remove_(model)
    applied = Applied(plan, resolved, [p for p in trainable if p not in trained], is_exact)
    for parameter in applied.frozen:
        parameter.requires_grad_(False)
    Frozen(applied).attach(model)
    for name in resolved.frozen_norms:
        FrozenStatistics(applied).attach(model.get_submodule(name))
    forget_compiled()
    return applied


def keep_state(model: nn.Module) -> dict[str, Tensor]:
    """Return what the keeps of a model under a plan remember (factors, calibrated ranks, counters), by name.

    It is no part of the model's state_dict: save it beside that, and give it back with `load_keep_state_`.
    """
    return {f"{layer}.{name}": x for layer, state in find_states(model).items() for name, x in state.tensors.items()}


def load_keep_state_(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Let the keeps of a model under a plan go on from what `keep_state` returned; what they remembered is forgotten.

    Returns:
        The same model.

    Raises:
        PlanError: The tensors belong to layers that the model's plan does not have; nothing is changed.
    """
    states = find_states(model)
    found: dict[str, dict[str, Tensor]] = {layer: {} for layer in states}
    for key, tensor in tensors.items():
        layer, _, name = key.rpartition(".")
        if layer not in found:
            raise PlanError(
                f"the state of a keep is of layer '{layer}', which the plan of this {type(model).__name__} does not name. "
                "Apply the plan with which it was saved first."
            )
        found[layer][name] = tensor
    for layer, state in states.items():
        state.tensors = found[layer]
    return model


def check_not_nested(model: nn.Module, applied: Applied | None) -> None:
    """Refuse a model of which a part, or which as a part of another, has a plan already."""
    for name, module in model.named_modules():
        for hook in find_hooks(module):
            if hook.applied is not applied:
                raise PlanError(
                    f"module '{name or '(model)'}' already runs under a plan that was applied to a part of this model, or to a "
                    "model around it. One plan holds for the whole: call remove_ on that module first."
                )


def remove_(model: nn.Module) -> nn.Module:
    """Take a plan off a model, or off a part of one, again: hooks go, and what `apply_` froze is trainable as before.

    Returns:
        The same model.
    """
    here = set(model.parameters())
    hooks = [hook for module in model.modules() for hook in find_hooks(module)]
    for hook in hooks:
        hook.detach()
        for parameter in here.intersection(hook.applied.frozen):
            parameter.requires_grad_(True)
        hook.applied.frozen = [p for p in hook.applied.frozen if p not in here]
    if hooks:
        forget_compiled()
    return model
