"""Find torch's functions, and what a call of one of them means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gradfilter.errors import RuleError


def find_functions(*names: str, inplace: bool = True) -> set[Any]:
    """List torch's functions of these names, as functions and as methods, those that work in place too or not."""
    spaces, endings = (F, torch, Tensor), ("", "_") if inplace else ("",)
    if unknown := [name for name in names if not any(hasattr(space, name) for space in spaces)]:
        raise RuleError(f"torch has no function named {', '.join(unknown)}. A rule needs the name of one.")
    return {getattr(space, name + e) for name in names for e in endings for space in spaces if hasattr(space, name + e)}


def is_inplace(func: Any, kwargs: dict[str, Any]) -> bool:
    """Tell whether a call writes into its first argument."""
    name = func.__name__
    return bool(kwargs.get("inplace")) or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def differentiate(func: Callable[[], Any], values: Sequence[Tensor]) -> tuple[Any, Sequence[Tensor | None]]:
    """Return what a function gives, and its derivative by each of the values at every pixel, which autograd itself gives.

    Without derivatives where the result has no gradient.
    """
    # What autograd saves here is gone a line later: checkpoints and offloaders that watch saved tensors need not see it.
    with torch.enable_grad(), saved_tensors_hooks(unchanged, unchanged):
        y = func()
        if not isinstance(y, Tensor) or not y.requires_grad:
            return y, ()
        return y, torch.autograd.grad(y, values, torch.ones_like(y), allow_unused=True)


def unchanged(x: Tensor) -> Tensor:
    """Return x."""
    return x
