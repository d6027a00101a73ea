"""Fidelity: how close the gradients under a plan are to exact ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfilter.errors import GradFilterError, InputError
from gradfilter.outputs import explain_failure, find_logits

Loss = Callable[[Any, Any], Tensor]
Batch = tuple[Any, Any] | list[Any]


def find_gradients(model: nn.Module, batch: Batch, loss: Loss | None = None) -> dict[str, Tensor]:
    """Return the gradients of the model's trained parameters as it stands, whatever plan is in force.

    The model runs without a trace: the parameters' own `.grad`, hooks on them, buffers, modes and the global random state
    stay as they are. What draws at random, such as dropout, draws from the same seed in every call.

    Args:
        model: In the mode in which it is to run.
        batch: Inputs and targets: the model is called with the former, the loss with its outputs and the latter.
        loss: From outputs and targets to a scalar; cross-entropy of the (first) output where not given.

    Returns:
        The gradients by parameter name. A parameter that took no part in the loss has none, as with `backward`.

    Raises:
        InputError: The batch is no pair, the loss is no finite scalar or has no gradient, or a gradient is not finite.
        GradFilterError: The model or the loss fails on the batch.
    """
    if not is_pair(batch):
        raise InputError(f"the batch is a {type(batch).__name__}. Give a pair of inputs and targets: (images, labels).")
    inputs, targets = batch
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise InputError(
            f"{type(model).__name__} has no parameter to train: all have requires_grad=False. Call model.requires_grad_(True)."
        )
    with without_trace(model), torch.enable_grad():
        value = run_loss(model, inputs, targets, loss)
        # Not backward: that would add to .grad, and set off what others have hooked to it (an optimizer's step, say).
        found = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    gradients = {name: g.detach() for name, g in zip(trained, found, strict=True) if g is not None}
    if not gradients:
        raise InputError(
            f"no trained parameter takes part in the loss, e.g. {next(iter(trained))!r} does not. Check that the loss is made "
            "of the model's outputs."
        )
    wrong = [name for name, g in gradients.items() if not bool(g.isfinite().all())]
    if wrong:
        raise InputError(
            f"the gradient of {wrong[0]!r} is not finite{f', nor are {len(wrong) - 1} more' if wrong[1:] else ''}. Check the "
            "inputs and the weights, or use a smaller loss."
        )
    return gradients


def run_loss(model: nn.Module, inputs: Any, targets: Any, loss: Loss | None) -> Tensor:
    """Run the model and the loss; return what the loss says, which is a finite scalar with a gradient."""
    if isinstance(inputs, Tensor):
        with explain_failure(inputs, "when its gradients are computed"):
            outputs = model(inputs)
    else:
        outputs = model(inputs)
    with explain_loss(outputs, targets):
        value = (loss or cross_entropy)(outputs, targets)
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise InputError(f"the loss is {what}. A gradient needs a single number: take the mean, e.g. loss(...).mean().")
    if not value.requires_grad:
        raise InputError(
            "the loss has no gradient: it does not depend on a trained parameter, or was detached on the way (.item(), "
            ".detach(), numpy, torch.no_grad()). Make it of the model's outputs by torch functions."
        )
    if not bool(value.isfinite()):
        raise InputError(f"the loss is {value.item()}. Check the inputs and the weights: no gradient can be had of that.")
    return value


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Return the cross-entropy of a model's output, or of the first of several."""
    return F.cross_entropy(find_logits(outputs), targets)


def is_pair(value: Any) -> bool:
    """Tell whether this is a tuple or list of two."""
    return isinstance(value, tuple | list) and len(value) == 2


@contextmanager
def explain_loss(outputs: Any, targets: Any) -> Iterator[None]:
    """Turn what a loss raises into one line."""
    try:
        yield
    except GradFilterError:
        raise
    except Exception as error:
        shapes = [f"{list(v.shape)}" if isinstance(v, Tensor) else f"a {type(v).__name__}" for v in (outputs, targets)]
        raise InputError(
            f"the loss fails on outputs of shape {shapes[0]} and targets of shape {shapes[1]}. Give targets, or a loss, that "
            f"fit the model. It says {type(error).__name__}: {error}"
        ) from error


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Let a model run on copies of its buffers and from a fixed seed; buffers, modes and random state are as before then."""
    modules = list(model.modules())
    modes, buffers = [m.training for m in modules], [dict(m._buffers) for m in modules]
    copies: dict[Tensor, Tensor] = {}  # buffers may be shared
    devices = {p.device for p in model.parameters() if p.is_cuda}
    try:
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(buffer, buffer.clone())
        with torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(0)
            for device in devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(0)
            yield
    finally:
        for module, mode, own in zip(modules, modes, buffers, strict=True):
            module.training = mode
            module._buffers.clear()
            module._buffers.update(own)
