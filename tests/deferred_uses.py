"""What forwards do with the maps between their layers, as small programs on `deferred_nets.Parts`."""

# ruff: noqa: E501 (a program is a line)

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint


@torch.jit.script
def scripted(a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(a + b) * torch.sigmoid(a)


@torch.jit.script
def scripted_inplace(a: Tensor) -> Tensor:
    a.mul_(2.0)
    return a


class Square(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


class Negated(Function):
    """An identity whose gradient is turned round, and that returns its very input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class Doubled(Function):
    """A function that works in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


USES = {
    "plain": "return F.relu(net.norm(net.conv(x)))",
    "conv_twice": "c = net.conv(x); return F.relu(net.norm(c)) + F.relu6(net.deep_norm(c)) + c.mean()",
    "conv_stats": "c = net.conv(x); y = net.norm(c); net.seen += [c.mean().detach(), c.std().detach()]; return F.relu(y)",
    "norm_twice": "b = net.norm(net.conv(x)); return F.relu(b) + b",
    "norm_twice_inplace": "b = net.norm(net.conv(x)); r = F.relu(b); b.mul_(2); return r + b",
    "relu_inplace_conv_while_norm_waits": "c = net.conv(x); b = net.norm(c); c.relu_(); return F.relu(b) + c",
    "relu_inplace_wide_while_norm_waits": "c = net.wide(x); b = net.norm(c); c.relu_(); return F.relu(b) + c",
    "source_changed": "x = F.relu(x); c = net.conv(x); b = net.norm(c); x.mul_(3.0); return F.relu(b) + x",
    "residual_changed": "i = F.relu(x - 0.1); s = net.norm(net.wide(x)) + i; i.mul_(3.0); return F.relu(s) + i",
    "residual_changed_frac": "i = F.relu(x - 0.1); s = net.norm(net.wide(x)) + i; i.frac_(); return F.relu(s)",
    "residual_view_changed": "i = F.relu(x - 0.1); s = net.norm(net.wide(x)) + i; i[:, :4].mul_(3.0); return F.relu(s)",
    "residual_data_changed": "i = F.relu(x - 0.1); s = net.norm(net.wide(x)) + i; i.data.mul_(3.0); return F.relu(s)",
    "residual_detached_changed": "i = F.relu(x - 0.1); d = i.detach(); s = net.norm(net.wide(x)) + i; d.mul_(3.0); return F.relu(s)",
    "iadd": "b = net.norm(net.conv(x)); b += x; return F.relu(b)",
    "iadd_inplace_relu": "b = net.norm(net.conv(x)); b += x; return F.relu(b, inplace=True)",
    "iadd_used": "b = net.norm(net.conv(x)); k = b; b += x; return F.relu(k) + b",
    "identity_iadd": "i = F.relu(x - 0.1); b = net.norm(net.conv(i)); i += b; return F.relu(i)",
    "two_deferred": "return F.relu(net.norm(net.conv(x)) + net.deep_norm(net.deep(x)))",
    "two_deferred_conv": "return F.relu(net.conv(x) + net.deep(x))",
    "add_self": "b = net.norm(net.conv(x)); return F.relu(b + b)",
    "iadd_self": "b = net.norm(net.conv(x)); b += b; return F.relu(b)",
    "add_broadcast": "b = net.norm(net.conv(x)); return F.relu(b + x.mean((2, 3), keepdim=True)) + F.relu(b + torch.ones(16, 1, 1))",
    "add_double": "b = net.norm(net.conv(x)); return F.relu(b + x.double()).float()",
    "add_scalar": "b = net.norm(net.conv(x)); return F.relu(b + 1) - F.relu(2 - b) * 0.5",
    "add_alpha": "b = net.norm(net.conv(x)); return F.relu(torch.add(b, x, alpha=0.5)) + F.relu(x - b)",
    "add_plain_const": "b = net.norm(net.conv(x)); return F.relu(b + torch.ones(x.shape))",
    "chunk_inplace": "b = net.norm(net.conv(x)); u, v = b.chunk(2, 1); u.relu_(); return F.relu(b)",
    "chunk_inplace_cat": "b = net.norm(net.conv(x)); u, v = b.chunk(2, 1); u.relu_(); return torch.cat([v, u], 1)",
    "slice_inplace": "b = net.norm(net.conv(x)); b[:, :1] = 0; return F.relu(b)",
    "slice_inplace_conv": "b = net.conv(x); b[:, :1] = 0; return F.relu(net.norm(b))",
    "crop": "b = net.norm(net.conv(x)); return F.relu(b[:, :, 1:-1, 1:-1])",
    "view_waits": "c = net.wide(x); v = c[:, :8]; b = net.norm(c); v.mul_(2.0); return F.relu(b)",
    "data_read": "b = net.norm(net.conv(x)); net.seen.append(b.data.clone()); return F.relu(b)",
    "data_write": "b = net.norm(net.conv(x)); b.data.clamp_(max=1.0); return F.relu(b)",
    "data_write_after": "b = net.norm(net.conv(x)); d = b.data; y = F.relu(b); d.clamp_(max=1.0); return y + b",
    "data_set": "b = net.norm(net.conv(x)); b.data = torch.ones_like(b.data); return F.relu(b)",
    "data_set_source": "i = F.relu(x); b = net.norm(net.wide(i)); i.data = torch.ones(i.shape); return F.relu(b) + net.deep(i)",
    "detach_read": "b = net.norm(net.conv(x)); d = b.detach(); net.seen.append(d * 2); return F.relu(b) * torch.sigmoid(d.mean())",
    "detach_write": "b = net.norm(net.conv(x)); d = b.detach(); d.mul_(0.5); return net.deep(F.relu(b))",
    "detach_write_conv": "b = net.norm(net.conv(x)); d = b.detach(); d.mul_(0.5); return net.deep(b)",
    "detach": "b = net.norm(net.conv(x)); b.detach_(); return F.relu(b) + x",
    "numpy_write": "b = net.norm(net.conv(x)); b.detach().numpy()[:] *= 0.5; return F.relu(b)",
    "clone": "b = net.norm(net.conv(x)); k = b.clone(); k.relu_(); return F.relu(b) + k * 2",
    "copy": "b = net.norm(net.conv(x)); c = net.deep_norm(net.deep(x)); b.copy_(c); return F.relu(b) + c",
    "copy_to": "b = net.norm(net.conv(x)); e = torch.empty(b.shape); e.copy_(b); return F.relu(e) + b",
    "jit": "return scripted(net.norm(net.conv(x)), x)",
    "jit_inplace": "b = net.norm(net.conv(x)); scripted_inplace(b); return F.relu(b)",
    "jit_inplace_source": "i = F.relu(x - 0.1); b = net.norm(net.wide(i)); scripted_inplace(i); return F.relu(b) + i",
    "custom": "b = net.norm(net.conv(x)); return F.relu(Square.apply(b)) + b",
    "custom_saved_changed": "b = net.norm(net.conv(x)); y = Square.apply(b); b.relu_(); return y + b",
    "custom_saved_changed2": "b = net.norm(net.conv(x)); y = Square.apply(b); b.frac_(); return y + b",
    "custom_identity": "b = net.norm(net.conv(x)); return F.relu(Negated.apply(b))",
    "custom_dirty": "b = net.norm(net.conv(x)); Doubled.apply(b); return F.relu(b)",
    "custom_dirty_waiting": "c = net.wide(x); b = net.norm(c); Doubled.apply(c); return F.relu(b) + c",
    "checkpoint": "return checkpoint(lambda t: F.relu(net.norm(net.conv(t)) + t), x, use_reentrant=False)",
    "checkpoint_reentrant": "return checkpoint(lambda t: F.relu(net.norm(net.conv(t)) + t), x, use_reentrant=True)",
    "checkpoint_deferred_in": "return checkpoint(lambda t: F.relu(net.deep(t)), net.norm(net.conv(x)), use_reentrant=False)",
    "checkpoint_reentrant_deferred_in": "return checkpoint(lambda t: F.relu(net.deep(t)), net.norm(net.conv(x)), use_reentrant=True)",
    "checkpoint_deferred_out": "return F.relu(checkpoint(lambda t: net.norm(net.conv(t)), x, use_reentrant=False))",
    "checkpoint_reentrant_deferred_out": "return F.relu(checkpoint(lambda t: net.norm(net.conv(t)), x, use_reentrant=True))",
    "smooth": "return F.hardswish(net.norm(net.conv(x))) + F.silu(net.deep_norm(net.deep(x))) + F.gelu(net.wide_norm(net.wide(x)))",
    "leaky": "b = net.norm(net.conv(x)); return F.leaky_relu(b, 0.2) + F.leaky_relu(b, 2.0) + F.leaky_relu(b, -0.5)",
    "hardtanh": "b = net.norm(net.conv(x)); return F.hardtanh(b, -0.3, 0.4) + F.hardtanh(b, 0.5, 2.0)",
    "hardtanh_upside_down": "b = net.norm(net.conv(x)); return F.hardtanh(b, 0.5, 0.2)",
    "vgg": "return F.relu(net.conv(x)) + F.relu(net.deep(x), inplace=True)",
    "basic_block": "y = F.relu(net.norm(net.three(x))); return F.relu(net.three_norm(net.three(y)) + x)",
    "three_inplace": "c = net.three(x); b = net.three_norm(c); c.mul_(2); x = x + 1; return F.silu(b) + c + x",
    "linear_bottleneck": "return net.norm(net.conv(x)) + x",
    "inverted_residual": "return x + net.deep_norm(net.deep(F.relu(net.norm(net.conv(x)))))",
    "both_wait": "return net.deep(net.norm(net.conv(x)) + net.deep_norm(net.deep(x)))",
    "kept_before_norm": "y = net.wide(x); net.seen.append(y); return F.relu_(net.wide_norm(y))",
    "read_after_norm": "y = net.wide(x); z = F.relu_(net.wide_norm(y)); return z + y",
    "alias_before_norm": "y = net.wide(x); d = y.detach(); z = F.relu_(net.wide_norm(y)); del y; return z + d",
    "alias_after_norm": "y = net.wide(x); n = net.wide_norm(y); d = y.detach(); del y; return F.relu_(n) + d",
    "view_after_norm": "y = net.wide(x); n = net.wide_norm(y); v = y[:, :8]; del y; return F.relu_(n) + torch.cat([v, v], 1)",
    "two_norms_inplace": "y = net.wide(x); a = net.wide_norm(y); b = net.norm(y); del y; return F.relu_(a) + F.relu_(b)",
    "norm_read_again": "n = net.wide_norm(net.wide(x)); a = F.relu(n); return a + n",
    "sum_inplace_of_norm": "n = net.wide_norm(net.wide(x)); n += x; return F.relu_(n)",
    "linear_bottleneck2": "return net.deep(net.norm(net.conv(x)))",
    "gate": "b = net.norm(net.conv(x)); return F.relu(b * torch.sigmoid(b.mean((2, 3), keepdim=True)))",
    "squeeze_excite": "b = net.norm(net.conv(x)); b *= torch.sigmoid(net.deep_norm(net.last(F.adaptive_avg_pool2d(b, 1)))); return F.relu(b)",
    "concatenated": "y = torch.cat([net.norm(net.conv(x)), net.deep(x), x], 1); return F.relu(y[:, :16] + y[:, 16:32] + y[:, 32:])",
    "shared_module": "a = net.norm(net.conv(x)); b = net.norm(net.conv(F.relu(a))); return F.relu(a + b)",
    "shared_train_eval": "net.deep_norm.train(); return F.relu(net.norm(net.wide(x))) + F.relu(net.deep_norm(net.wide(x)))",
    "beta_data_changed": "a = net.norm(net.wide(x)); net.norm.bias.data.add_(2.0); return F.relu(a)",
    "weight_data_changed": "a = net.norm(net.conv(x)); net.conv.weight.data.mul_(2.0); return F.relu(a)",
    "weight_data_set": "a = net.norm(net.conv(x)); net.conv.weight.data = net.conv.weight.data * 2; return F.relu(a)",
    "stats_data_changed": "a = net.norm(net.wide(x)); net.norm.running_mean.data.add_(2.0); return F.relu(a)",
    "wrong_norm": "return F.relu(F.batch_norm(net.wide(x), torch.zeros(8), torch.ones(8), torch.ones(8), torch.zeros(8)))",
    "wrong_norm_gamma": "return F.relu(F.batch_norm(net.wide(x), torch.zeros(16), torch.ones(16), torch.ones(8), torch.zeros(16)))",
    "norm_double": "return F.relu(F.batch_norm(net.wide(x), torch.zeros(16).double(), torch.ones(16).double()))",
    "wrong_conv": "return F.relu(F.conv2d(x, torch.ones(16, 8, 1, 1)))",
    "wrong_depthwise": "return F.relu(F.conv2d(x, torch.ones(16, 2, 3, 3), groups=16, padding=1))",
    "wrong_bias": "return F.relu(F.conv2d(x, torch.ones(16, 16, 1, 1), torch.ones(8)))",
    "bias_double": "return F.relu(F.conv2d(x, torch.ones(16, 16, 1, 1), torch.ones(16).double()))",
    "negative_padding": "return F.relu(F.conv2d(x, net.deep.weight, padding=-1, groups=16))",
    "nan_input": "c = net.conv(x) * torch.where(torch.arange(x.shape[3]) == 1, torch.nan, 1.0); y = F.relu(net.norm(c)); return y.nan_to_num(9.0)",
    "inf_norm": "c = net.conv(x) * 1e+38 * 1000.0; y = F.relu6(net.norm(c)); return y",
    "strides": "c = net.conv(x); b = net.norm(c); y = F.relu(b); net.seen += [tuple(t.stride()) for t in (c, b, y, x)]; return y",
    "viewed": "b = net.norm(net.conv(x)).permute(0, 2, 3, 1); return F.relu(b.flatten(1, 2)).reshape(b.shape).permute(0, 3, 1, 2)",
    "hook_tensor2": "b = net.norm(net.conv(x)); b.register_hook(lambda g: g * 2); return F.relu(b)",
    "inplace_frac_after_conv": "b = net.norm(net.conv(x)); y = net.deep(b); b.frac_(); return y + b",
    "inplace_relu_after_conv": "b = net.norm(net.conv(x)); y = net.deep(b); b.relu_(); return y + b",
    "inplace_zero_after_conv": "b = net.norm(net.conv(x)); y = net.deep(b); b.zero_(); return y + b",
    "save": "b = net.norm(net.conv(x)); f = io.BytesIO(); torch.save(b.detach(), f); f.seek(0); net.seen.append(torch.load(f)); return b",
    "where": "b = net.norm(net.conv(x)); return torch.where(b > 0, b, b * 0.1) + torch.maximum(b, x)",
    "resnet_block": "o = F.relu(net.norm(net.conv(x)), inplace=True); o = net.wide_norm(net.wide(o)); o += x; return F.relu(o, inplace=True)",
    "before_the_conv": "o = net.conv(F.relu(net.norm(x))); o = net.wide(F.relu(net.wide_norm(o))); return x + o",
    "preact_inplace": "r = net.norm(x); o = net.conv(F.relu(r, inplace=True)); return r + o",
    "norm_of_deferred_norm": "return F.relu(net.deep_norm(net.norm(net.conv(x))))",
    "norm_of_sum": "return F.relu(net.deep_norm(net.norm(net.conv(x)) + x))",
    "triple_sum": "return F.relu(net.norm(net.conv(x)) + x + net.deep(x))",
    "stride_pad": "return F.relu(F.conv2d(x, net.deep.weight, net.deep.bias, 2, 2, 2, 16))",
    "pad_conv": "return F.relu(net.deep_norm(F.conv2d(F.pad(x, (0, 1, 0, 1)), net.deep.weight, net.deep.bias, 2, 0, 1, 16)))",
    "same_pad": "return F.relu(net.deep_norm(F.conv2d(x, net.deep.weight, net.deep.bias, 1, 'same', 1, 16)))",
    "pool_behind": "return F.max_pool2d(net.norm(net.conv(x)), 2) + F.avg_pool2d(net.deep(x), 2)",
    "interp": "return F.interpolate(net.norm(net.conv(x)), scale_factor=2)",
    "add_then_add_inplace": "b = net.norm(net.conv(x)); s = b + x; s += net.deep(x); b.relu_(); return F.relu(s) + b",
    "add_inplace_then_source_changes": "i = F.relu(x - 0.1); b = net.norm(net.conv(x)); b += i; i.mul_(0.5); return F.relu(b) + i",
    "add_inplace_then_view": "i = F.relu(x - 0.1); b = net.norm(net.conv(x)); b += i; i[:, :2] = 0; b[:, :3].relu_(); return F.relu(b) + i",
    "sum_used_twice": "i = F.relu(x - 0.1); b = net.norm(net.conv(i)); s = b + i; t = F.relu(s); u = b + t; return F.relu(u) + s",
    "view_frac_after_conv": "b = net.norm(net.conv(x)); y = net.deep(b); b[:, :4].frac_(); return y + b",
    "view_relu_after_conv": "b = net.norm(net.conv(x)); y = net.deep(b); b[:, :4].relu_(); return y + b",
    "detach_zero_after_conv": "b = net.norm(net.conv(x)); d = b.detach(); y = net.deep(b); d.zero_(); return y + b",
    "detach_zero_after_conv2": "b = net.norm(net.conv(x)); y = net.deep(b); d = b.detach(); d.zero_(); return y + b",
    "custom_dirty_after_conv": "b = net.norm(net.conv(x)); y = net.deep(b); Doubled.apply(b); return y + b",
    "means_after_detach_write": "b = net.norm(net.conv(x)); y = net.deep(b); d = b.detach(); d.mul_(0.5); return y + net.wide(b)",
    "as_strided": "b = net.norm(net.conv(x)); return F.relu(torch.as_strided(b, b.shape, b.stride()))",
    "unfold": "b = net.norm(net.conv(x)); return F.relu(F.fold(F.unfold(b, 3, padding=1), b.shape[2:], 3, padding=1))",
    "index_put": "b = net.norm(net.conv(x)); b[:, [1, 2]] = 0.5; b[b > 1] = 1; return F.relu(b)",
    "masked": "b = net.norm(net.conv(x)); b.masked_fill_(b < -1, -1.0); return F.relu(b)",
    "multi_handles": "b = net.norm(net.conv(x)); bs = [b]; bs.append(F.relu_(bs[0])); net.seen.append(bs[0] is bs[1]); return bs[0] + bs[1]",
    "torch_func_grad": "b = net.norm(net.conv(x)); g = torch.func.grad(lambda t: (t ** 2).sum())(b); return F.relu(b) + g.detach() * 0.1",
    "torch_func_vjp": "y, f = torch.func.vjp(torch.relu, net.norm(net.conv(x))); net.seen.append(f(torch.ones(y.shape))[0].detach()); return y",
    "torch_func_jvp": "y, t = torch.func.jvp(torch.relu, (net.norm(net.conv(x)),), (torch.ones(x.shape),)); return y * t.detach()",
    "tolist": "b = net.norm(net.conv(x)); net.seen.append(torch.tensor(b.tolist())); return F.relu(b)",
    "repr": "b = net.norm(net.conv(x)); net.seen.append('nan' in repr(b)); return F.relu(b)",
    "hook_keeps": "net.norm.register_forward_hook(lambda m, i, o: net.seen.append(o)); return F.relu(net.norm(net.conv(x)))",
    "hook_changes": "net.conv.register_forward_hook(lambda m, i, o: o.mul_(3)); return F.relu(net.norm(net.conv(x)))",
    "hook_replaces": "net.norm.register_forward_hook(lambda m, i, o: o.detach() * 2 + o); return F.relu(net.norm(net.conv(x)))",
    "add_out": "b = net.norm(net.conv(x)); s = torch.empty(0); torch.add(b.detach(), 1, out=s); net.seen.append(s); return F.relu(b)",
    "momentum_stats": "s = net.norm.running_mean, net.norm.running_var; a = F.batch_norm(net.wide(x), *s); return F.relu(a) + F.batch_norm(x, *s, training=True)",
    "dropout": "return F.dropout(net.norm(net.conv(x)), 0.5, True) + F.dropout2d(F.relu(net.deep(x)), 0.3, True, True)",
    "no_grad_inside": "b = net.norm(net.conv(x))\nwith torch.no_grad(): m = F.relu(b).amax()\nreturn F.relu(b) / (m + 1)",
    "inference_inside": "b = net.norm(net.conv(x))\nwith torch.inference_mode(): net.seen.append(round(float(b.sum())))\nreturn F.silu(b) * b + net.deep(b)",
    "autocast_inside": "b = net.norm(net.conv(x))\nwith torch.autocast('cpu', torch.bfloat16): y = net.deep(F.relu(b))\nreturn y.float()",
    "weight_changed": "a = net.norm(net.conv(x))\nwith torch.no_grad(): net.conv.weight.mul_(2.0)\nreturn F.relu(a)",
    "statistics_changed": "a = net.norm(net.wide(x))\nwith torch.no_grad(): net.norm.running_mean.add_(2.0)\nreturn F.relu(a)",
    "set": "b = net.norm(net.conv(x))\nwith torch.no_grad(): b.set_(torch.ones(b.shape))\nreturn F.relu(b)",
    "out_into_deferred": "b = net.norm(net.conv(x))\nwith torch.no_grad(): torch.mul(x, 2, out=b)\nreturn F.relu(b)",
    "numpy": "b = net.norm(net.conv(x))\nwith torch.no_grad(): net.seen.append(torch.tensor(b.detach().numpy()))\nreturn F.relu(b)",
}
"""Programs of a network `net` and a map x, for trained and for frozen layers."""

WAITS = "net.norm(net.conv(x))"
EXPANDED = {
    f"{name}-{way}": program.replace(WAITS, f"net.{way}(x)")
    for way in ("hide", "expand", "pad", "frame")
    for name, program in USES.items()
    if WAITS in program
} | {
    "mobile": "return net.last(F.relu6(net.expand(x))) + x",
    "mobile_residual": "return F.relu(net.expand(x) + x)",
    "mobile_no_norm": "return F.relu(net.taps(net.hide(x)))",
    "mobile_no_act": "return net.expand(net.expand(x))",
    "hidden_is_seen": "h = net.hide(x); y = F.relu(net.taps_norm(net.taps(h))); net.seen.append(h); return y",
    "hidden_is_used": "h = net.hide(x); y = F.relu(net.taps_norm(net.taps(h))); return y + h",
    "hidden_is_changed": "h = net.hide(x); y = net.taps_norm(net.taps(h)); h.mul_(2.0); return F.relu(y) + h",
    "hidden_is_changed_by_relu": "h = net.hide(x); y = net.taps_norm(net.taps(h)); F.relu_(h); return F.relu(y) + h",
    "hidden_is_changed_in_part": "h = net.hide(x); y = net.taps_norm(net.taps(h)); h[:, :3] = 0; return F.relu(y) + h",
    "hidden_data_is_changed": "h = net.hide(x); y = net.taps_norm(net.taps(h)); h.data.mul_(2.0); return F.relu(y)",
    "read_by_two": "h = net.hide(x); return F.relu(net.taps_norm(net.taps(h))) + F.relu(net.deep_norm(net.deep(h)))",
    "read_by_others": "h = net.hide(x); return F.relu(net.norm(net.conv(h))) + net.taps(h) + net.wide(h) + F.silu(h)",
    "source_of_both_changed": "i = F.relu(net.narrow(x)); h = F.relu6(net.grow(i)); y = net.taps(h); i.mul_(3.0); return F.relu(y) + i.mean()",
    "source_of_hidden_changed": "i = F.relu(net.narrow(x)); h = F.relu6(net.grow(i)); i.mul_(3.0); return F.relu(net.taps(h)) + i.mean()",
    "weights_of_both_changed": "y = net.expand(x); net.grow.weight.data.mul_(2.0); net.taps.weight.data.mul_(2.0); return F.relu(y)",
    "stride": "return F.relu(F.conv2d(net.hide(x), net.taps.weight, None, 2, 1, 1, 16))",
    "pad": "return F.relu(F.conv2d(F.pad(net.hide(x), (0, 1, 0, 1)), net.taps.weight, None, 2, 0, 1, 16))",
    "same": "return F.relu(F.conv2d(net.hide(x), net.taps.weight, None, 1, 'same', 1, 16))",
    "pad_before_taps": "return net.last(F.relu6(net.taps_norm(net.taps(net.frame(x))))) + x",
    "pad_before_strided_taps": "return F.relu(F.conv2d(net.frame(x), net.taps.weight, None, (2, 1), (0, 1), (1, 2), 16))",
    "pad_before_same": "return F.relu(F.conv2d(net.frame(x), net.taps.weight, None, 1, 'same', 1, 16)) + net.pad(x)",
    "pad_before_all": "p = net.pad(x); return net.conv(p) + net.deep(p) + net.wide(p) + F.relu(net.three_norm(net.three(p)))",
    "pad_around_hidden_before_all": "p = net.frame(x); return net.conv(p) + net.taps(p) + net.wide(p) + F.relu(net.three_norm(net.three(p)))",
    "pad_before_one_tap": "return F.conv2d(net.frame(x), net.conv.weight, None, 1, 1)[:, :, 1:-1, 1:-1] + net.taps(net.frame(x))",
    "pad_of_pad": "return F.conv2d(F.pad(net.frame(x), (1, 0, 2, 0)), net.taps.weight, None, 1, (0, 1), 1, 16)[:, :, :, 1:]",
    "pad_by_nothing": "return net.taps(F.pad(net.hide(x), (0, 0, 0, 0))) + net.three(F.pad(x, (0, 0)))",
    "pad_by_ones": "return F.conv2d(F.pad(net.hide(x), (1, 1, 1, 1), value=1.0), net.taps.weight, groups=16)",
    "pad_by_reflection": "return F.conv2d(F.pad(net.hide(x), (1, 1, 1, 1), 'reflect'), net.taps.weight, groups=16)",
    "pad_and_crop": "return F.conv2d(F.pad(net.hide(x), (2, -1, 2, -1)), net.taps.weight, None, 1, 0, 1, 16) + net.last(x)[:, :, 1:, 1:]",
    "pad_channels": "return F.pad(net.hide(x), (0, 0, 0, 0, 1, 1))[:, 2:] + net.taps(net.hide(x))",
    "pad_before_pool": "return F.max_pool2d(net.frame(x), 3, 1, 1) + F.avg_pool2d(net.pad(x), 3, 1, 1)",
    "pad_is_seen": "p = net.frame(x); y = F.relu(net.taps_norm(net.taps(p))); net.seen.append(p); return y",
    "pad_is_used": "p = net.frame(x); y = F.relu(net.taps_norm(net.taps(p))); return y + p",
    "pad_is_changed": "p = net.frame(x); y = net.taps_norm(net.taps(p)); p.mul_(2.0); return F.relu(y) + p",
    "pad_is_changed_before": "p = net.frame(x); p.mul_(2.0); return F.relu(net.taps(p)) + p",
    "pad_data_is_set": "p = net.frame(x); p.data = torch.ones(p.shape); return net.taps(p)",
    "inside_is_used": "h = net.hide(x); p = F.pad(h, (1, 1, 1, 1)); y = F.conv2d(p, net.taps.weight, groups=16); return F.relu(y) + h",
    "inside_is_used_too": "h = net.hide(x); p = F.pad(h, (1, 1, 1, 1)); y = net.taps(h); return F.relu(F.conv2d(p, net.taps.weight, groups=16)) + y",
    "inside_is_changed": "h = net.hide(x); p = F.pad(h, (1, 1, 1, 1)); h.mul_(2.0); return F.conv2d(p, net.taps.weight, groups=16) + h",
    "inside_is_changed_by_relu": "h = net.conv(x); p = F.pad(h, (1, 1, 1, 1)); F.relu_(h); return F.conv2d(p, net.three.weight) + h",
    "inside_is_changed_later": "h = net.hide(x); y = F.conv2d(F.pad(h, (1, 1, 1, 1)), net.taps.weight, groups=16); h.mul_(2.0); return F.relu(y) + h",
    "inside_is_changed_in_part": "h = F.relu(net.conv(x)); p = F.pad(h, (1, 1, 1, 1)); h[:, :3] = 0; return F.conv2d(p, net.three.weight) + h",
    "inside_data_is_set": "h = F.relu(net.conv(x)); p = F.pad(h, (1, 1, 1, 1)); h.data = torch.ones(h.shape); return F.conv2d(p, net.three.weight)",
    "inside_alias_is_changed": "h = F.relu(net.conv(x)); d = h.detach(); p = F.pad(h, (1, 1, 1, 1)); d.mul_(2.0); return F.conv2d(p, net.three.weight)",
    "source_of_inside_changed": "i = F.relu(net.narrow(x)); p = F.pad(F.relu6(net.grow(i)), (1, 1, 1, 1)); i.mul_(3.0); return F.conv2d(p, net.taps.weight, groups=16) + i.mean()",
    "pad_never_read": "net.frame(x); net.pad(x); return x",
    "pad_read_by_its_gradient": "y = net.frame(x); (g,) = torch.autograd.grad(y, net.grow.weight, torch.ones(y.shape), retain_graph=True); net.seen.append(g); return y",
    "pad_saved_on_disk": "p = net.frame(x)\nwith torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t): y = net.taps_norm(net.taps(p))\nreturn F.relu(y)",
    "pad_checkpoint_between": "return checkpoint(lambda t: F.relu(net.taps(t)), net.frame(x), use_reentrant=False)",
    "dilation": "return F.relu(F.conv2d(net.hide(x), net.taps.weight, net.deep.bias, 1, 2, 2, 16))",
    "one_tap": "return F.relu(F.conv2d(net.hide(x), net.taps.weight[:, :, :1, :1], None, 2, 0, 1, 16))",
    "wrong_taps": "return F.relu(F.conv2d(net.hide(x), torch.ones(16, 2, 3, 3), groups=16, padding=1))",
    "wrong_taps_bias": "return F.relu(F.conv2d(net.hide(x), net.taps.weight, torch.ones(8), groups=16, padding=1))",
    "taps_double": "return F.relu(F.conv2d(net.hide(x), net.taps.weight.double(), groups=16, padding=1))",
    "leaky_between": "return F.relu(net.taps(F.leaky_relu(net.grow_norm(net.grow(net.narrow(x))), 0.2)))",
    "smooth_between": "return F.relu(net.taps(F.silu(net.grow_norm(net.grow(net.narrow(x))))))",
    "smooth_between_inplace": "return F.relu(net.taps(F.hardswish(net.grow_norm(net.grow(net.narrow(x))), inplace=True)))",
    "smooth_is_used": "h = F.silu(net.grow_norm(net.grow(net.narrow(x)))); return F.silu(net.taps_norm(net.taps(h))) + h",
    "smooth_is_changed": "h = F.silu(net.grow_norm(net.grow(net.narrow(x)))); y = net.taps(h); h.mul_(2.0); return F.silu(y) + h",
    "checkpoint_between": "return checkpoint(lambda t: F.relu(net.taps(t)), net.hide(x), use_reentrant=False)",
    "checkpoint_around": "return checkpoint(lambda t: F.relu(net.expand(t)), x, use_reentrant=False)",
    "saved_on_disk": "with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone() * 1, lambda t: t): y = F.relu(net.expand(x))\nreturn y",
    "saved_on_disk_behind": "h = net.hide(x)\nwith torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t): y = net.taps_norm(net.taps(h))\nreturn F.relu(y)",
    "norm_saved_on_disk": "y = net.taps(net.hide(x))\nwith torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t): z = net.taps_norm(y)\nreturn F.relu(z)",
    "padded_expansion": "h = F.relu6(net.grow_norm(F.conv2d(net.narrow(x), net.grow.weight, padding=1))); return F.relu(F.conv2d(h, net.taps.weight, groups=16))",
    "hidden_data_is_set": "h = net.hide(x); h.data = torch.ones(h.shape); return net.taps(h)",
    "taps_data_are_set": "y = net.taps(net.hide(x)); y.data = torch.ones(y.shape); return y",
    "never_read": "net.expand(x); net.hide(x); return x",
    "read_by_its_gradient": "y = net.expand(x); (g,) = torch.autograd.grad(y, net.grow.weight, torch.ones(y.shape), retain_graph=True); net.seen.append(g); return y",
    "hidden_read_by_its_gradient": "y = net.hide(x); (g,) = torch.autograd.grad(y, net.grow.weight, torch.ones(y.shape), retain_graph=True); net.seen.append(g); return y",
}
"""The same with what waits around an expansion, its activation or the depthwise convolution behind that, and with zeros."""

FROZEN_USES = {
    "trained_twice": "h = F.relu(net.norm(net.conv(x))); h.add_(net.last(h)); return F.relu(net.last_norm(net.last(x)) + h)",
    "trained_gate": "h = F.relu(net.norm(net.conv(x))); h.add_(net.last(h)); return torch.cat([net.last(x) * h, h], 1)[:, 8:24]",
    "no_grad_sum": "h = net.norm(net.conv(x))\nwith torch.no_grad(): t = net.last(x).detach(); t += h; h += t\nreturn F.relu(t) + h",
    "requires_grad": "h = F.relu(net.norm(net.conv(x))); h.requires_grad_(); net.seen.append(h.requires_grad); return h",
    "requires_grad_before_frozen": "h = F.relu(net.norm(net.conv(x))); h.requires_grad_(); y = net.deep_norm(net.deep(h)); net.seen.append(y.requires_grad); return y",
    "requires_grad_set": "h = net.norm(net.conv(x)); h.requires_grad = True; y = net.deep(h); net.seen += [h.is_leaf, y.requires_grad]; return F.relu(y)",
    "add_trained_inplace": "h = F.relu(net.norm(net.conv(x))); h.add_(net.last(h)); return F.relu(net.deep_norm(net.deep(h)))",
    "iadd_trained": "h = F.relu(net.norm(net.conv(x))); h += net.last(h); return F.relu(net.deep_norm(net.deep(h)))",
    "iadd_trained_waiting": "h = net.norm(net.conv(x)); h += net.last(h); return F.relu(net.deep_norm(net.deep(h)))",
    "trained_iadd": "h = net.norm(net.conv(x)); t = net.last_norm(net.last(x)); t += h; h.mul_(2.0); return F.relu(t) + h",
    "trained_add": "h = net.norm(net.wide(x)); s = net.last_norm(net.last(x)) + h; h.relu_(); return F.relu(s) + h",
    "trained_mul": "h = net.norm(net.wide(x)); s = net.last_norm(net.last(x)) * h; h.frac_(); return F.relu(s) + h",
    "trained_cat": "h = net.norm(net.wide(x)); s = torch.cat([h, net.last(x)], 1); h.zero_(); return F.relu(s[:, :16] + s[:, 16:])",
    "copy_of_trained": "h = net.norm(net.wide(x)); h.copy_(net.last_norm(net.last(x))); return F.relu(net.deep(h))",
    "slice_of_trained": "h = net.norm(net.wide(x)); h[:, :4] = net.last(x)[:, :4]; return F.relu(net.deep_norm(net.deep(h)))",
    "view_of_trained": "h = net.norm(net.wide(x)); v = h[:, :4]; v.copy_(net.last(x)[:, :4]); return F.relu(net.deep_norm(net.deep(h)))",
    "changed_behind": "h = F.relu(net.norm(net.conv(x))); t = net.last(h); h.mul_(2.0); return F.relu(t) + h",
    "trained_where": "h = net.norm(net.wide(x)); return torch.where(h > 0, h, net.last_norm(net.last(x)))",
    "trained_weight": "return F.relu(F.conv2d(input=net.norm(net.wide(x)), weight=net.last.weight, bias=None))",
    "out": "h = net.norm(net.wide(x)); o = torch.empty(0); torch.mul(h, 2, out=o); torch.mul(x, 3, out=h); return F.relu(h) + o",
    "numpy_shares": "h = net.norm(net.wide(x)); a = h.numpy(); y = F.relu(h); a *= 2; return y + h",
    "pickled": "h = net.norm(net.wide(x)); return F.relu(pickle.loads(pickle.dumps(h)) + copy.deepcopy(h) + copy.copy(h))",
    "metadata": "h = net.norm(net.wide(x)); net.seen += [h.is_leaf, h.requires_grad, h.grad, h.is_contiguous(), h.dtype, h.shape]; return h",
    "same_object": "h = net.norm(net.wide(x)); net.seen += [F.relu_(h) is h, h.mul_(2) is h, h.add_(x) is h]; return h",
    "custom_of_two": "h = net.norm(net.wide(x)); return Square.apply(h) + Negated.apply(h)",
    "trained_checkpoint": "return checkpoint(lambda t: F.relu(net.last(t)), net.norm(net.wide(x)), use_reentrant=False)",
    "loss_on_features": "h = net.norm(net.conv(x)); return F.relu(h) * F.mse_loss(net.last(h), h)",
}
"""Programs in which frozen layers meet `last`, a trained one."""


def make_use(program: str) -> Any:
    """Return a program as a function."""
    names = {**globals(), "copy": copy, "io": io, "pickle": pickle, "checkpoint": checkpoint, "F": F}
    exec("def use(net, x):\n    " + program.replace("\n", "\n    "), names)
    return names["use"]
