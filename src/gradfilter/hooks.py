"""What a plan leaves on a model: hooks in front of modules."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves, tree_map_only

import gradfilter.rules  # noqa: F401  (registers the rules)
from gradfilter.applied import Applied, Hook
from gradfilter.carriers import is_exit
from gradfilter.deferred import Handle
from gradfilter.emit import enter, regrid
from gradfilter.errors import ExitWarning, InputError
from gradfilter.frozen import FrozenTensor, can_freeze, freeze_map, give
from gradfilter.geometry.tiling import MAP, PIXELS, Layout, Pair, make_pair, map_size
from gradfilter.keep import FULL, State
from gradfilter.marks import OUTPUT, check_not_traced, mark, mark_input
from gradfilter.ops.operator import is_recorded
from gradfilter.plan import MOST_PREFIX, Backward, Conv
from gradfilter.regions import Choices, count_inner_frames
from gradfilter.tensor import PatchTensor, is_live, leave, plain_torch


@dataclass
class WholeModel(Hook):
    """Forward pre-hook and hook on the model.

    Before each forward it notes the size of the network's input, to which a grid refers; after the first one it looks for what
    the user should know: exits that no torch function has told of, and a grid of tokens that fits nothing.
    """

    def attach(self, module: nn.Module) -> None:
        super().attach(module)
        self.handles.append(module.register_forward_hook(self.look_back))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_dynamo_compiling():  # as a part of something larger that is compiled; a model alone has its hooks called
            return None if self.applied.paused else mark_input(self.key, args, kwargs, is_image)
        if torch.is_grad_enabled() and not self.applied.paused:
            check_not_traced()
            for value in (*args, *kwargs.values()):
                if is_image(value):
                    self.applied.image = map_size(value)
                    break
            self.applied.log.start()
        return None

    def act(self, key: str, x: Tensor) -> Any:
        if key == self.key:
            return super().act(key, x)
        y = self.look_back(self.owner.find(), None, x)  # type: ignore[arg-type]
        return x if y is None else y

    def look_back(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Find what the user should know; return features as plain tensors, which is what the user expects."""
        if is_dynamo_compiling():
            if self.applied.paused:
                return None
            return tree_map_only(Tensor, lambda y: mark(y, self.key + OUTPUT), output)
        self.applied.log.finish()
        if not torch.is_grad_enabled() or self.applied.paused or is_recorded():
            return None
        if self.applied.log.bypasses is None:
            self.find_bypasses(output)
        if any((is_live(x) and x.choices.features) or isinstance(x, FrozenTensor) for x in tree_leaves(output)):
            with plain_torch():
                return tree_map_only(Handle, make_plain, output)
        return None

    def find_bypasses(self, output: Any) -> None:
        """Record the exits by code that by-passes torch functions: they are right, but nobody would know of them."""
        log = self.applied.log
        asked = [name for name, backward in self.applied.resolved.linears.items() if backward.tokens is not None]
        misfits = [f"{name} got {self.applied.exact[name]}" for name in asked if name in self.applied.exact]
        if misfits and not log.warned and not any(name in self.applied.patches for name in asked):
            log.warned = True
            warnings.warn(
                f"no Linear layer sees the grid of tokens that the plan names: {misfits[0]}. They are all trained exactly. "
                "Give the size of the grid at this image size, Backward(tokens=(h, w)).",
                ExitWarning,
                stacklevel=count_inner_frames() + 1,
            )
        if log.regions:
            log.bypasses = {}
            for name, node in find_exits(output):
                if not hasattr(node, "noted"):
                    reason = CHANGED if name.rpartition("::")[2] in ("CopySlices", "AsStrided") else BY_PASS
                    log.bypasses.setdefault((node.choices.layer, name), reason)
            for (layer, name), reason in log.bypasses.items():
                log.note(layer, name, reason)


def is_image(x: Any) -> bool:
    """Tell whether an input of the model is a batch of maps."""
    return isinstance(x, Tensor) and x.dim() == 4


def make_plain(x: Handle) -> Tensor:
    """Return an output of the model as the user expects it: features and frozen maps as plain tensors."""
    if isinstance(x, FrozenTensor):
        return give(x)
    return leave(x) if is_live(x) and x.choices.features else x


BY_PASS = "it is no torch function, but code with a backward of its own"
CHANGED = "a view of an activation was changed in place, and the activation used after that"


def find_exits(output: Any) -> list[tuple[str, Any]]:
    """List the places in the graph of an output where a region ends, each with the name of the function it ends at."""
    # What becomes of a PatchTensor that is an output is for the loss to say.
    tensors = [value.carrier if is_live(value) else value for value in tree_leaves(output) if isinstance(value, Tensor)]
    todo = [(tensor.grad_fn, "") for tensor in tensors if tensor.grad_fn is not None]
    seen, found = {node for node, _ in todo}, []
    while todo:
        node, user = todo.pop()
        consumer = user or re.sub(r"Backward\d*$", "", node.name())
        for child, output in node.next_functions:
            ends = is_exit(child, output)
            if ends:
                found.append((consumer, child))
            if child is not None and child not in seen:
                seen.add(child)
                # A view of a PatchTensor is an alias of torch's own view. Not that ended the region, but who uses the view.
                in_view = child.name() == "AliasBackward0" or (user and not ends)
                todo.append((child, consumer if in_view else ""))
    return found


@dataclass
class PlannedLayer(Hook):
    """Forward pre-hook on a planned layer: brings its input to patch resolution, under the layer's choices.

    A convolution enters a region, or joins the one its input comes from. A Linear layer joins, and enters where the plan says
    how large the grid of its tokens is.
    """

    layer: str
    backward: Backward
    choices: Choices | None = None
    images: dict[Pair, Pair] = field(default_factory=dict)
    state: State = field(default_factory=State)

    @property
    def name(self) -> str:
        return self.layer or "(model)"

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.applied.paused:
            return None
        if is_dynamo_compiling():
            return mark_input(self.key, args, kwargs)
        with torch._C.DisableTorchFunction():  # what a hook does is no call of the model's: modes need not know
            key = None if args else next((k for k, v in kwargs.items() if isinstance(v, Tensor)), "input")
            x = args[0] if key is None else kwargs.get(key)
            if not isinstance(x, Tensor):
                return None  # not for us: the layer itself says what is wrong
            if isinstance(x, FrozenTensor):
                x = give(x)
            live = x if is_live(x) else None
            layout = self.find_layout(module, x, live)
            if isinstance(layout, Layout) and self.applied.image and not is_in_backward():
                self.images[layout.size(x.shape)] = self.applied.image
            if not torch.is_grad_enabled():
                return None
            if not x.requires_grad and not any(p.requires_grad for p in module.parameters()):
                return None
            if not isinstance(layout, Layout):
                self.applied.exact[self.layer] = layout
                return None
            self.check(module, x)
            size = layout.size(x.shape)
            choices = self.choose(live, size, isinstance(module, Conv))
            patch = choices.tiling.patch_for(size)
            self.applied.patches[self.layer] = patch
            self.applied.log.join(choices.region, self.layer)
            if live is None:
                x = enter(x, choices, layout)
            elif patch == live.patch and reads_input(module):
                live.appointed = module.weight, choices  # type: ignore[assignment]
                return None
            else:
                x = regrid(live, patch, choices)
        return ((x, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: x})

    def find_layout(self, module: nn.Module, x: Tensor, live: PatchTensor | None) -> Layout | str:
        """Return which axes of x are rows and columns, or what x is, where the layer runs exactly."""
        is_conv = isinstance(module, Conv)
        if live is not None:
            return live.spatial if is_conv or x.dim() - 1 not in live.spatial.axes else "the places of a map, which it mixes"
        if is_conv:
            # Squeeze-excite: nothing to pool, and torch's own graph is the lighter one.
            is_pixel = x.dim() == 4 and map_size(x) == (1, 1) and not is_recorded()
            return "one pixel" if is_pixel and self.backward.keep == FULL else MAP
        if self.backward.tokens is None:
            return find_features(x) if self.backward.keep != FULL else "features outside of a region"
        h, w = make_pair(self.backward.tokens)
        if x.dim() == 4 and is_multiple(x.shape[1:3], (h, w)):
            return Layout(1, 2)
        if x.dim() == 3 and 0 <= x.shape[1] - h * w <= MOST_PREFIX:
            return Layout(1, 1, (h, w), x.shape[1] - h * w)
        return f"{list(x.shape)}, which is no grid of {h}×{w} tokens"

    def choose(self, live: PatchTensor | None, size: Pair, is_conv: bool) -> Choices:
        """Return the layer's choices for the image at hand.

        That is the image from which its input comes: a checkpoint may run a part again when the next image has passed. A plain
        tensor says nothing of its image, but a map of its size was seen in the forward. A part called on its own takes its
        own input for the image.
        """
        before = None if live is None else live.choices
        image = None if before is None else before.tiling.image
        features = not is_conv and (self.backward.tokens is None if before is None else before.features)
        tiling = PIXELS if features else self.backward.make_tiling(image or self.images.get(size, size))
        region = self.layer if before is None else before.region
        if self.choices is None or self.choices.tiling is not tiling or self.choices.region != region:
            kernel, keep = self.backward.kernel, self.backward.keep
            self.choices = Choices(self.layer, tiling, kernel, self.applied.log, region, keep, self.state, features)
        return self.choices

    def check(self, module: nn.Module, x: Tensor) -> None:
        """Refuse what cannot be pooled over space."""
        if x.dim() != 4 and isinstance(module, Conv):
            raise InputError(
                f"layer '{self.layer}' got a tensor of shape {list(x.shape)}. Patches need a batch of maps [N, C, H, W]: "
                "add the missing axes, e.g. x[None] for a single image."
            )
        if torch.autograd.forward_ad._current_level >= 0:
            raise InputError(
                f"layer '{self.layer}' runs under forward-mode differentiation, which a filtered gradient does not have. Use "
                "backward(), or gradfilter.remove_(model) first."
            )
        if torch._C._functorch.maybe_current_level() is not None:  # type: ignore[attr-defined]
            raise InputError(
                f"layer '{self.layer}' runs under a transform of torch.func (grad, vmap, …), which a filtered gradient does "
                "not have. Use backward(), or gradfilter.remove_(model) first."
            )
        if 0 in x.shape[1:]:
            raise InputError(
                f"layer '{self.layer}' got a tensor of shape {list(x.shape)}, which is empty. Check the size of the images: "
                "they may be too small for this network."
            )
        if not x.is_floating_point():
            raise InputError(
                f"layer '{self.layer}' got a tensor of dtype {x.dtype}. A convolution with a gradient takes floating point "
                "numbers: convert the images first, e.g. x.float() / 255."
            )
        if is_recorded() and not self.backward.keep.traceable:
            raise InputError(
                f"layer '{self.layer}' keeps its input as '{self.backward.keep}', which reads values or remembers some: no "
                "graph of it can be recorded. Use full, bfloat16 or int8:nearest there."
            )


def find_features(x: Tensor) -> Layout | str:
    """Return features [N, C], [N, L, C] or [N, H, W, C] as places of channels: at patch 1 any axes will do."""
    if x.dim() in (2, 3):
        return Layout(x.dim() - 2, x.dim() - 2, (x.shape[-2], 1))
    return Layout(1, 2) if x.dim() == 4 else f"features of shape {list(x.shape)}"


def reads_input(module: nn.Module) -> bool:
    """Tell whether a module does nothing but convolve its input with its own weight: then it needs no handle of its own."""
    return type(module) is nn.Conv2d and module.padding_mode == "zeros" and "weight" in module._parameters


def is_multiple(size: Sequence[int], grid: Pair) -> bool:
    """Tell whether a map has the size of a grid, or as many times fewer or more places per side in a stage of the network."""
    ratios = {Fraction(n, g) for n, g in zip(size, grid, strict=True)}
    return len(ratios) == 1 and 1 in (*(ratio := ratios.pop()).as_integer_ratio(), ratio)


def is_in_backward() -> bool:
    """Tell whether autograd is running backward: what runs forward then, a checkpoint runs again."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class Frozen(Hook):
    """Forward pre-hook on the model that does nothing: it holds the record of what a plan has frozen."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Leave everything as it is."""


@dataclass
class FrozenLayer(Hook):
    """Forward pre-hook on a frozen convolution: from a plain tensor on, the frozen part runs on FrozenTensors."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.applied.paused or is_dynamo_compiling() or not torch.is_grad_enabled() or len(args) != 1:
            return None
        x, trunk = args[0], self.applied.plan.trunk
        return ((freeze_map(x, trunk),), kwargs) if type(x) is Tensor and can_freeze(x, trunk) else None


@dataclass
class FrozenStatistics(Hook):
    """Forward pre-hook and hook on a batch norm: it runs in eval mode, whatever `model.train()` says."""

    was_training: bool | None = None

    def attach(self, module: nn.Module) -> None:
        super().attach(module)
        self.handles.append(module.register_forward_hook(self.restore, always_call=True))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # What `freeze_` leaves any backend may compile: then Dynamo captures the next lines as they are.
        if is_dynamo_compiling() and not self.applied.is_exact:
            return mark_input(self.key, args, kwargs)
        self.was_training = module.training
        module.__dict__["training"] = False  # as `train()` would, only that a network has many of these
        return None

    def restore(self, module: nn.Module, *_: Any) -> None:
        """Give the module its mode back after its forward, also after one that failed."""
        if self.was_training is not None:
            module.__dict__["training"], self.was_training = self.was_training, None


def find_applied(model: nn.Module) -> Applied | None:
    """Return what `apply_` or `freeze_` has done to this model, if one has."""
    return next((hook.applied for hook in find_hooks(model) if isinstance(hook, Frozen)), None)


@contextmanager
def exactly(applied: Applied) -> Iterator[None]:
    """Let a model under a plan run as `freeze_` would have it, with torch's own backward, for a while; no hook is touched."""
    before, applied.paused = applied.paused, True
    try:
        yield
    finally:
        applied.paused = before


def find_hooks(module: nn.Module) -> list[Hook]:
    """List what `apply_` has left on one module."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Hook)]


def find_states(model: nn.Module) -> dict[str, State]:
    """Return what the keeps of a model under a plan remember, by layer."""
    planned = [hook for module in model.modules() for hook in find_hooks(module) if isinstance(hook, PlannedLayer)]
    return {hook.layer: hook.state for hook in planned}
