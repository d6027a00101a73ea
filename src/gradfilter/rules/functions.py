"""Find torch's functions, and what a call of one of them means."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def find_functions(*names: str, inplace: bool = True) -> set[Any]:
    """List torch's functions of these names, as functions and as methods, those that work in place too or not."""
    spaces, endings = (F, torch, Tensor), ("", "_") if inplace else ("",)
    return {getattr(space, name + e) for name in names for e in endings for space in spaces if hasattr(space, name + e)}


def is_inplace(func: Any, kwargs: dict[str, Any]) -> bool:
    """Tell whether a call writes into its first argument."""
    name = func.__name__
    return bool(kwargs.get("inplace")) or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
