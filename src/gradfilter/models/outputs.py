"""What a network returns: a tensor, or several in any structure."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradfilter.errors import InputError


def find_outputs(result: Any) -> list[Tensor]:
    """List the tensors that a loss can be made of in a network's output: a tensor, or a tuple, list or dict that holds some."""
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not outputs:
        raise InputError(f"the model returned a {type(result).__name__} without a floating point tensor to train on.")
    return outputs
