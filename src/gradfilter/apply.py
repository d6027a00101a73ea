"""Apply a plan to a model: the only file that changes a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import gradfilter.rules  # noqa: F401  (registers the rules)
from gradfilter.errors import InputError, PlanError
from gradfilter.patches import Pair, map_size
from gradfilter.plan import Backward, Plan, Resolved, resolve
from gradfilter.tensor import Choices, Log, enter, is_live, is_traced, plain_torch, regrid


@dataclass
class Applied:
    """What `apply_` has done to a model: all that `describe` and `remove_` need."""

    plan: Plan
    resolved: Resolved
    frozen: list[nn.Parameter]
    log: Log = field(default_factory=Log)
    image: Pair | None = None
    patches: dict[str, Pair] = field(default_factory=dict)


@dataclass
class Hook(ABC):
    """What `apply_` leaves on a module. A class at module level, so that models still copy and pickle."""

    applied: Applied
    handles: list[RemovableHandle] = field(default_factory=list, kw_only=True)

    def attach(self, module: nn.Module) -> None:
        """Put the hook in front of a module's forward."""
        self.handles.append(module.register_forward_pre_hook(self, with_kwargs=True))

    @abstractmethod
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run before the module's forward."""

    def detach(self) -> None:
        """Take the hook off again."""
        for handle in self.handles:
            handle.remove()


@dataclass
class ImageSize(Hook):
    """Forward pre-hook on the model: notes the size of the network's input, to which a grid refers."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and value.dim() == 4:
                    self.applied.image = map_size(value)
                    break
            self.applied.log.exits.clear()


@dataclass
class PlannedConv(Hook):
    """Forward pre-hook on a planned convolution: brings its input to patch resolution, under the layer's choices."""

    layer: str
    backward: Backward
    choices: Choices | None = None
    images: dict[Pair, Pair] = field(default_factory=dict)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        with plain_torch():
            key = None if args else next((k for k, v in kwargs.items() if isinstance(v, Tensor)), "input")
            x = args[0] if key is None else kwargs.get(key)
            if not isinstance(x, Tensor):
                return None  # not for us: the layer itself says what is wrong
            if self.applied.image and x.dim() == 4 and not is_in_backward():
                self.images[map_size(x)] = self.applied.image
            if not torch.is_grad_enabled():
                return None
            if not x.requires_grad and not any(p.requires_grad for p in module.parameters()):
                return None
            self.check(x)
            if map_size(x) == (1, 1) and not is_live(x) and not is_traced():
                return None  # One pixel (squeeze-excite): nothing to pool, and torch's own graph is the lighter one.
            choices = self.choose(x)
            patch = choices.tiling.patch_for(map_size(x))
            self.applied.patches[self.layer] = patch
            x = regrid(x, patch, choices) if is_live(x) else enter(x, choices)
        return ((x, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: x})

    def choose(self, x: Tensor) -> Choices:
        """Return the layer's choices for the image at hand.

        That is the image from which x comes: a checkpoint may run a part again when the next image has passed. A plain
        tensor says nothing of its image, but a map of its size was seen in the forward. A part called on its own takes its
        own input for the image.
        """
        image = x.choices.tiling.image if is_live(x) else None
        tiling = self.backward.make_tiling(image or self.images.get(map_size(x), map_size(x)))
        if self.choices is None or self.choices.tiling != tiling:
            self.choices = Choices(self.layer, tiling, self.backward.kernel, self.applied.log)
        return self.choices

    def check(self, x: Tensor) -> None:
        """Refuse what cannot be pooled over space."""
        if x.dim() != 4:
            raise InputError(
                f"layer '{self.layer}' got a tensor of shape {list(x.shape)}. Patches need a batch of maps [N, C, H, W]: "
                "add the missing axes, e.g. x[None] for a single image."
            )
        if torch.autograd.forward_ad._current_level >= 0:
            raise InputError(
                f"layer '{self.layer}' runs under forward-mode differentiation, which a filtered gradient does not have. Use "
                "backward(), or gradfilter.remove_(model) first."
            )
        if not x.is_floating_point():
            raise InputError(
                f"layer '{self.layer}' got a tensor of dtype {x.dtype}. A convolution with a gradient takes floating point "
                "numbers: convert the images first, e.g. x.float() / 255."
            )


def is_in_backward() -> bool:
    """Tell whether autograd is running backward: what runs forward then, a checkpoint runs again."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class FrozenStatistics(Hook):
    """Forward pre-hook and hook on a batch norm: it runs in eval mode, whatever `model.train()` says."""

    was_training: bool | None = None

    def attach(self, module: nn.Module) -> None:
        super().attach(module)
        self.handles.append(module.register_forward_hook(self.restore, always_call=True))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.was_training = module.training
        module.training = False

    def restore(self, module: nn.Module, *_: Any) -> None:
        """Give the module its mode back after its forward, also after one that failed."""
        if self.was_training is not None:
            module.training, self.was_training = self.was_training, None


def find_applied(model: nn.Module) -> Applied | None:
    """Return what `apply_` has done to this model, if it has."""
    return next((hook.applied for hook in find_hooks(model) if isinstance(hook, ImageSize)), None)


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
    if not isinstance(model, nn.Module):
        raise PlanError(f"apply_ got a {type(model).__name__} where it takes a model, a torch.nn.Module.")
    if not isinstance(plan, Plan):
        raise PlanError(
            f"apply_ got {type(plan).__name__} where it takes a Plan, e.g. Plan.last(4) or Plan.all(Backward(patch=4))."
        )
    before = find_applied(model)
    check_not_nested(model, before)
    resolved = resolve(plan, model)
    trained = {p for name in resolved.trained for p in model.get_submodule(name).parameters(recurse=False)}
    was_frozen = set(before.frozen) if before else set()
    trainable = [p for p in model.parameters() if p.requires_grad or p in was_frozen]
    if not trained.intersection(trainable):
        raise PlanError(
            "the plan trains nothing: all parameters of the layers it names have requires_grad=False. apply_ freezes, it never "
            "un-freezes: call model.requires_grad_(True), or set it on those layers, first."
        )
    remove_(model)
    applied = Applied(plan, resolved, [p for p in trainable if p not in trained])
    for parameter in applied.frozen:
        parameter.requires_grad_(False)
    ImageSize(applied).attach(model)
    for name, backward in resolved.convs.items():
        PlannedConv(applied, name, backward).attach(model.get_submodule(name))
    for name in resolved.frozen_norms:
        FrozenStatistics(applied).attach(model.get_submodule(name))
    return model


def find_hooks(module: nn.Module) -> list[Hook]:
    """List what `apply_` has left on one module."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Hook)]


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
    for hook in [hook for module in model.modules() for hook in find_hooks(module)]:
        hook.detach()
        for parameter in here.intersection(hook.applied.frozen):
            parameter.requires_grad_(True)
        hook.applied.frozen = [p for p in hook.applied.frozen if p not in here]
    return model


def describe(model: nn.Module) -> str:
    """Return the plan in force as a table: layer, backward, patch, trained parameters; then every exit and its cause.

    Patch sizes and exits are those of the latest forward pass with gradients.
    """
    applied = find_applied(model)
    if applied is None:
        return f"{type(model).__name__}: no plan applied."
    plan = applied.plan
    count = len(applied.resolved.convs)
    title = f"{type(model).__name__}: {count} convolution{'s' * (count != 1)} at patch resolution, rest {plan.rest}, "
    rows = [("layer", "backward", "patch", "trained")]
    for name, backward in applied.resolved.convs.items():
        own = model.get_submodule(name).named_parameters(recurse=False)
        trained = " ".join(key for key, p in own if p.requires_grad) or "-"
        rows.append((name or "(model)", str(backward), describe_patch(backward, applied.patches.get(name)), trained))
    for name, module in model.named_modules():
        if name in applied.resolved.trained and name not in applied.resolved.convs:
            trained = " ".join(key for key, p in module.named_parameters(recurse=False) if p.requires_grad)
            if trained:
                rows.append((name or "(model)", "-", "-", trained))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines.insert(0, f"{title}batch norm {plan.batch_norm}")
    if not applied.patches:
        lines.append("exits: none seen yet; run a forward pass")
    for (layer, function), reason in applied.log.exits.items():
        lines.append(f"exit behind {layer}: {function} ({reason})")
    return "\n".join(lines)


def describe_patch(backward: Backward, patch: Pair | None) -> str:
    """Return a patch size for the table; flag a grid so fine that the layer's gradient is exact."""
    if patch is None:
        return "?"
    text = str(patch[0]) if patch[0] == patch[1] else f"{patch[0]}x{patch[1]}"
    return f"{text} (exact: the map is no larger than the grid)" if backward.grid and patch == (1, 1) else text
