"""A loss as a training step has it: bound to the targets of a batch, from outputs to a scalar, on shapes alone too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gradfilter.errors import GradFilterError, InputError
from gradfilter.outputs import explain_failure, find_logits, find_outputs, sum_outputs
from gradfilter.shapes import on_shapes, to_meta

Loss = Callable[[Any, Any], Tensor]


class StepLoss:
    """The loss of one step: a function from a model's outputs to a scalar, which knows the targets of the batch.

    On outputs without content it compares with targets without content, so that one object serves to predict and to measure.
    """

    def __init__(self, loss: Callable[..., Tensor] | None = None, targets: Any = None) -> None:
        """Bind a loss.

        Args:
            loss: From outputs and targets, or from outputs alone where there are no targets. Where not given: cross-entropy of
                the (first) output with targets, the mean square of the outputs without.
            targets: Those of the batch: a tensor, or a tuple, list or dict that holds some.
        """
        self.loss: Callable[..., Tensor] = loss or (sum_outputs if targets is None else cross_entropy)
        self.targets, self.shapes = targets, tree_map_only(Tensor, to_meta, targets)

    def __call__(self, outputs: Any) -> Tensor:
        """Return what can be trained on."""
        targets = self.shapes if find_outputs(outputs)[0].device.type == "meta" else self.targets
        with explain_loss(outputs, targets):
            value = self.loss(outputs) if targets is None else self.loss(outputs, targets)
        check_scalar(value)
        return value


def find_targets(loss: Any) -> list[Tensor]:
    """List the targets that a loss is bound to, with content and without: they are part of the batch."""
    bound = (loss.targets, loss.shapes) if isinstance(loss, StepLoss) else ()
    return [leaf for leaf in tree_leaves(bound) if isinstance(leaf, Tensor)]


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Return the cross-entropy of a model's output, or of the first of several."""
    return F.cross_entropy(find_logits(outputs), targets)


def find_score_shape(model: nn.Module, images: Tensor) -> torch.Size | None:
    """Return the shape of a model's (first) output, from shapes alone.

    None where that is no scores of at least two classes, [N, classes] or [N, classes, H, W].
    """
    with explain_failure(images, "when it is asked for its classes"), on_shapes(model) as (run, _), torch.no_grad():
        shape = find_logits(run(to_meta(images))).shape
    return shape if len(shape) in (2, 4) and shape[1] > 1 else None


def draw_targets(shape: torch.Size, device: torch.device) -> Tensor:
    """Return a class for each image, or for each of its pixels, as scores of a shape have it; always the same random ones."""
    return torch.randint(shape[1], (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(0)).to(device)


def check_scalar(value: Any) -> None:
    """Refuse what a loss must not be: anything but a single number with a gradient."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise InputError(f"the loss is {what}. A gradient needs a single number: take the mean, e.g. loss(...).mean().")
    if not value.requires_grad:
        raise InputError(
            "the loss has no gradient: it does not depend on a trained parameter, or was detached on the way (.item(), "
            ".detach(), numpy, torch.no_grad()). Make it of the model's outputs by torch functions."
        )


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
