"""The lumped filter applied layer by layer, as the papers do it: the peer to whole regions at patch resolution."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from gradfilter.apply import freeze_
from gradfilter.errors import GradFilterError
from gradfilter.geometry.axes import Axis
from gradfilter.geometry.convolution import Geometry, make_geometry
from gradfilter.geometry.tiling import Pair, Tiling, map_size
from gradfilter.ops.constants import make_areas
from gradfilter.ops.conv_backward import conv_gradients
from gradfilter.ops.pooling import apply_axes, pool_mean, pool_sum
from gradfilter.plan import Plan, resolve
from gradfilter.rules.conv import as_pair, resolve_padding


class LumpedConv(Function):
    """A convolution that filters its own gradient, and takes and gives gradients at pixel resolution.

    Equation (gradient filtering, CVPR 2023): with G the patch sums of gy and x̄ the patch means of x,
        gx = Σ_uv w[u,v]ᵀ G / |I|, the same at every pixel of patch I,        gw[u,v] = Σ G · x̄, the same at every tap.
    Cost: the coarse products, and a pass over gy and gx each. Saves x̄; whatever stands between two layers saves its own maps.
    Exact when: the patch is 1 and the kernel 1×1.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, layer: nn.Conv2d, tiling: Tiling) -> Tensor:
        """Return the convolution of x."""
        y = F.conv2d(x, w, b, layer.stride, layer.padding, layer.dilation, layer.groups)
        ctx.geometry = geometry = find_geometry(layer, tiling, map_size(x), map_size(y))
        ctx.save_for_backward(apply_axes(pool_mean(x, find_in_patch(geometry)), *geometry.stacked), w)
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:  # type: ignore[override]
        """Return the gradients of x, w and b."""
        x_bar, w = ctx.saved_tensors
        geometry: Geometry = ctx.geometry
        g = pool_sum(gy, geometry.out_patch)
        need_gx, need_gw, need_gb = ctx.needs_input_grad[:3]
        gx, gw = conv_gradients(g, x_bar if need_gw else None, w, geometry, need_gx=need_gx)
        if gx is not None:
            size, patch = (geometry.rows.in_size, geometry.columns.in_size), find_in_patch(geometry)
            gx = gx / make_areas(size, patch, gx)
            # This way of repeating cells keeps maps channels-last, as the layers before want them.
            gx = F.interpolate(gx, scale_factor=patch, mode="nearest")[..., : size[0], : size[1]] if patch != (1, 1) else gx
        return gx, gw, g.sum((0, 2, 3)) if need_gb else None, None, None


def find_in_patch(geometry: Geometry) -> Pair:
    """Return the patch of the input."""
    return geometry.rows.in_patch, geometry.columns.in_patch


def find_geometry(layer: nn.Conv2d, tiling: Tiling, in_size: Pair, out_size: Pair) -> Geometry:
    """Return the shape of a convolution between tiled maps of these sizes, its kernel lumped."""
    kernel, stride, dilation = as_pair(layer.kernel_size), as_pair(layer.stride), as_pair(layer.dilation)
    before = resolve_padding(layer.padding, kernel, dilation, (0, 0, 0, 0))
    in_patch, out_patch = tiling.patch_for(in_size), tiling.patch_for(out_size)
    rows, columns = (
        Axis(kernel[i], stride[i], dilation[i], before[i], in_size[i], out_size[i], in_patch[i], out_patch[i]) for i in (0, 1)
    )
    return make_geometry(rows, columns, layer.groups, True)


def filter_layers_(model: nn.Module, plan: Plan, image: Pair) -> nn.Module:
    """Train what a plan trains, in place, with each convolution that it names filtering its own gradient.

    A convolution with a forward of its own, or that pads with anything but zeros, stays exact.
    """
    convs: dict[str, Any] = {name: model.get_submodule(name) for name in resolve(plan, model).convs}
    if not any(map(is_plain, convs.values())):
        raise GradFilterError("no convolution of the plan is torch's own with zeros around")
    freeze_(model, plan)
    for name, backward in resolve(plan, model).convs.items():
        if is_plain(convs[name]):
            convs[name].forward = partial(run_lumped, convs[name], backward.make_tiling(image))
    return model


def is_plain(layer: nn.Module) -> bool:
    """Tell whether a layer is a convolution that runs as torch's own does, with zeros around."""
    return isinstance(layer, nn.Conv2d) and type(layer).forward is nn.Conv2d.forward and layer.padding_mode == "zeros"


def run_lumped(layer: nn.Conv2d, tiling: Tiling, x: Tensor) -> Tensor:
    """Run a convolution, to filter its gradient where it has one."""
    if not torch.is_grad_enabled() or not (x.requires_grad or layer.weight.requires_grad):
        return F.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    return LumpedConv.apply(x, layer.weight, layer.bias, layer, tiling)  # type: ignore[return-value]
