"""A user's network: what it returns, a copy of it, and what it raises as one line."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradfilter.errors import GradFilterError, InputError


def find_outputs(result: Any) -> list[Tensor]:
    """List the tensors that a loss can be made of in a network's output: a tensor, or a tuple, list or dict that holds some."""
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not outputs:
        raise InputError(f"the model returned a {type(result).__name__} without a floating point tensor to train on.")
    return outputs


def find_logits(output: Any) -> Tensor:
    """Return the class scores in a model's output: it, or the first tensor of several (others are auxiliary heads')."""
    return output if isinstance(output, Tensor) else find_outputs(output)[0]


def sum_outputs(outputs: Any) -> Tensor:
    """Return a scalar that depends on all outputs: a loss for those who ask for cost alone."""
    return torch.stack([y.square().mean() for y in find_outputs(outputs)]).sum()


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model, its plan and hooks included."""
    if not isinstance(model, nn.Module):
        raise InputError(f"a {type(model).__name__} was given where a model is asked for, a torch.nn.Module.")
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise GradFilterError(
            f"{type(model).__name__} cannot be copied, which is needed to try things out on it. A weight that is no parameter, "
            "as the old torch.nn.utils.weight_norm leaves it, is a common cause: use torch.nn.utils.parametrizations. It says "
            f"{type(error).__name__}: {error}"
        ) from error


@contextmanager
def explain_failure(images: Tensor, where: str) -> Iterator[None]:
    """Turn what a user's model raises into one line."""
    try:
        yield
    except GradFilterError:
        raise
    except Exception as error:
        raise GradFilterError(
            f"the model fails on images of shape {list(images.shape)} {where}. It says {type(error).__name__}: {error}"
        ) from error
