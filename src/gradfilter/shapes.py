"""Run a model on shapes alone: nothing is computed, nothing is allocated, and autograd saves what it saves on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gradfilter.tensor import find_live, note_exit, plain_torch


@contextmanager
def on_shapes(model: nn.Module) -> Iterator[tuple[Callable[..., Any], dict[str, Tensor]]]:
    """Yield a function that runs the model on shapes (torch's meta device), and the state it runs with, by name.

    A batch that does not fit can be asked about too; the inputs may themselves be meta tensors. Parameters, buffers and
    statistics of the model are not touched, nor are other attributes: gradients go to the tensors of the state.
    """
    state = {name: to_meta(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    # Some models keep what they make, a grid of positions say, for the next forward: it must not be one without content.
    kept = [(module, dict(module.__dict__)) for module in model.modules()]
    for module, attributes in kept:
        tensors = {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
        module.__dict__.update({name: to_meta(x) for name, x in tensors.items() if x.is_floating_point()})  # indices are read

    def run(*inputs: Any) -> Any:
        return functional_call(model, state, tree_map_only(Tensor, lambda x: x if x.is_meta else to_meta(x), inputs))

    try:
        with CpuOperators(), CpuAttention():
            yield run, state
    finally:
        for module, attributes in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)


class CpuOperators(TorchDispatchMode):
    """Let operators on shapes give what they give on a CPU.

    Batch norm in eval mode saves no statistics of the batch; convolutions keep maps channels-last.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operator; correct its result."""
        if func is torch.ops.aten.native_batch_norm.default and not args[5]:
            x = args[0]
            return torch.empty_like(x), x.new_empty(0), x.new_empty(0)
        if func is torch.ops.aten.hardtanh_.default:  # torch takes many steps on shapes to say so
            return args[0]
        if func is torch.ops.aten.hardtanh_backward.default:
            return torch.empty_like(args[0])
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default and result.dim() == 4 and any(map(is_channels_last, args[:2])):
            return torch.empty_like(result, memory_format=torch.channels_last)
        return result


def is_channels_last(x: Tensor) -> bool:
    """Tell whether a map is channels-last, and not in torch's default layout too."""
    return suggest_memory_format(x) is torch.channels_last


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
