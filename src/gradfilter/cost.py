"""Saved bytes: what autograd holds between forward and backward, measured and predicted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from gradfilter.tensor import find_live, note_exit, plain_torch


class Held:
    """A saved tensor, alive as long as the graph that saved it."""

    def __init__(self, tensor: Tensor) -> None:
        """Hold a tensor."""
        self.tensor = tensor


def count_saved(run: Callable[[], Any], exclude: Iterable[Tensor] = ()) -> int:
    """Return the bytes that autograd holds after `run()`, deduplicated by storage.

    Args:
        run: A forward pass; its result keeps the graph alive while it is counted.
        exclude: Tensors that are there anyway, such as parameters and buffers.
    """
    held: weakref.WeakSet[Held] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Held:
        with plain_torch():
            entry = Held(tensor.detach())  # without its place in the graph: a function that saves its result would hold itself
        held.add(entry)
        return entry

    with saved_tensors_hooks(pack, lambda entry: entry.tensor):
        result = run()
    with plain_torch():
        known = {tensor.untyped_storage()._cdata for tensor in exclude}
        storages = {s._cdata: s.nbytes() for entry in held if (s := entry.tensor.untyped_storage())._cdata not in known}
    del result
    return sum(storages.values())


def measure_saved_bytes(model: nn.Module, *inputs: Any) -> int:
    """Return the bytes that autograd really holds after `model(*inputs)`, parameters and buffers excluded."""
    return count_saved(lambda: model(*inputs), [*model.parameters(), *model.buffers()])


def predict_saved_bytes(model: nn.Module, *inputs: Any) -> int:
    """Return the bytes that autograd would hold after `model(*inputs)`, without computing or allocating anything.

    The same forward runs on shapes alone (torch's meta device), so a batch that does not fit can be asked about too; the
    inputs may themselves be meta tensors. Parameters, buffers and statistics are not touched.
    """
    state = {name: to_meta(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    shapes = tree_map(lambda value: to_meta(value) if isinstance(value, Tensor) else value, inputs)
    with CpuNorm(), CpuAttention():
        return count_saved(lambda: functional_call(model, state, shapes), state.values())


class CpuNorm(TorchDispatchMode):
    """Let batch norm on shapes save what it saves on a CPU: no statistics of the batch in eval mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operator; empty the two results that a CPU leaves empty."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_batch_norm.default and not args[5]:
            return result[0], *(r.new_empty(0) for r in result[1:])
        return result


class CpuAttention(TorchFunctionMode):
    """Let attention on shapes save what it saves on a CPU, where torch's fused kernel runs if it can."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the function; in place of attention the kernel that a CPU takes."""
        if func is F.scaled_dot_product_attention:
            return run_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def run_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention by the kernel that torch chooses on a CPU."""
    fused = query.dim() == key.dim() == value.dim() == 4 and query.shape[-1] == value.shape[-1] and not dropout_p
    fused = fused and query.shape[:2] == key.shape[:2] == value.shape[:2]
    trained_mask = attn_mask is not None and attn_mask.requires_grad  # the fused kernel has no gradient for it
    if not fused or trained_mask or enable_gqa:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if live := find_live((query, key, value)):
        note_exit(live, F.scaled_dot_product_attention)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with plain_torch():
        return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def to_meta(tensor: Tensor) -> Tensor:
    """Return a tensor with the same shape, strides, dtype and need for a gradient, and no data."""
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
