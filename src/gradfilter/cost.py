"""Saved bytes: what autograd holds between forward and backward, measured and predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from gradfilter.meter import Saved
from gradfilter.shapes import on_shapes


def count_saved(run: Callable[[], Any], exclude: Iterable[Tensor] = ()) -> int:
    """Return the bytes that autograd holds after `run()`, deduplicated by storage.

    Args:
        run: A forward pass; its result keeps the graph alive while it is counted.
        exclude: Tensors that are there anyway, such as parameters and buffers.
    """
    saved = Saved()
    with saved:
        result = run()
    held = sum(saved.count(exclude).values())
    del result
    return held


def measure_saved_bytes(model: nn.Module, *inputs: Any) -> int:
    """Return the bytes that autograd really holds after `model(*inputs)`, parameters and buffers excluded."""
    return count_saved(lambda: model(*inputs), [*model.parameters(), *model.buffers()])


def predict_saved_bytes(model: nn.Module, *inputs: Any) -> int:
    """Return the bytes that autograd would hold after `model(*inputs)`, without computing or allocating anything.

    The same forward runs on shapes alone, as `on_shapes` does.
    """
    with on_shapes(model) as (run, state):
        return count_saved(lambda: run(*inputs), state.values())
