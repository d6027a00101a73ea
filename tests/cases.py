"""Tables that the tests run over: a new row is a whole test suite."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfilter.bench.setup import shake_
from gradfilter.models import make_model
from gradfilter.models.torchvision_ops import declare_torchvision_ops


def seeded(seed: int = 0) -> torch.Generator:
    """Return a generator of its own for a test."""
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return normal float64 numbers."""
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Conv:
    """One convolution: what a layer can be, without its sizes."""

    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] | str = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    channels: tuple[int, int] = (4, 6)

    def __str__(self) -> str:
        """Return a short name for test ids."""
        kernel, stride = "x".join(map(str, self.kernel)), "x".join(map(str, self.stride))
        padding = self.padding if isinstance(self.padding, str) else "x".join(map(str, self.padding))
        return f"k{kernel}-s{stride}-p{padding}-d{'x'.join(map(str, self.dilation))}-g{self.groups}"

    def make_weight(self, seed: int = 1) -> Tensor:
        """Return a weight."""
        return draw(self.channels[1], self.channels[0] // self.groups, *self.kernel, seed=seed)

    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """Run torch's own convolution."""
        return F.conv2d(x, w, b, self.stride, self.padding, self.dilation, self.groups)


CONVS = [
    Conv(),
    Conv(kernel=(1, 1), padding=(0, 0)),
    Conv(kernel=(1, 1), padding=(0, 0), stride=(2, 2)),
    Conv(kernel=(1, 1), padding=(1, 2), stride=(2, 1)),
    Conv(stride=(2, 2)),
    Conv(stride=(3, 2), padding=(0, 2)),
    Conv(padding=(0, 0)),
    Conv(padding="same"),
    Conv(padding="valid"),
    Conv(kernel=(4, 2), padding="same"),
    Conv(dilation=(2, 2), padding=(2, 2)),
    Conv(kernel=(5, 5), padding=(2, 2), dilation=(3, 2), stride=(2, 3)),
    Conv(kernel=(1, 3), padding=(0, 1)),
    Conv(kernel=(3, 1), padding=(1, 0), stride=(1, 2)),
    Conv(kernel=(2, 2), padding=(0, 0), stride=(2, 2)),
    Conv(kernel=(7, 7), padding=(3, 3), groups=4, channels=(4, 4)),
    Conv(groups=4, channels=(4, 4), stride=(2, 2)),
    Conv(groups=4, channels=(4, 8)),
    Conv(groups=2, channels=(4, 6), kernel=(5, 3), padding=(2, 1)),
]
"""Odd sizes, unequal kernel/stride/padding per axis, groups, depthwise multipliers, dilation."""


@dataclass(frozen=True)
class Function:
    """A torch function with one spatial input and perhaps parameters [N, C, H, W] → [N, C, ...]."""

    name: str
    call: Callable[..., Tensor]
    params: tuple[tuple[int, ...], ...] = ()
    statistics: bool = False

    def __str__(self) -> str:
        """Return the test id."""
        return self.name


CHANNELS = 3


def batch_norm(training: bool) -> Callable[..., Tensor]:
    """Return a batch norm with statistics of its own, made anew at every call."""

    def call(x: Tensor, *affine: Tensor) -> Tensor:
        mu, var = draw(CHANNELS, seed=5), draw(CHANNELS, seed=6).abs() + 0.5
        return F.batch_norm(x, mu, var, *affine, training=training)

    return call


def instance_norm(use_input_stats: bool) -> Callable[..., Tensor]:
    """Return an instance norm with statistics of its own, made anew at every call."""

    def call(x: Tensor, *affine: Tensor) -> Tensor:
        mu, var = draw(CHANNELS, seed=5), draw(CHANNELS, seed=6).abs() + 0.5
        return F.instance_norm(x, mu, var, *affine, use_input_stats=use_input_stats)

    return call


def seeded_dropout(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a dropout that draws the same mask at every call and leaves the global generator alone."""

    def call(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return function(x)

    return call


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": lambda x: F.relu6(x * 4),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "relu_inplace": lambda x: F.relu(x * 1.0, inplace=True),
    "leaky_relu_inplace": lambda x: F.leaky_relu(x * 1.0, 0.3, inplace=True),
    "sigmoid_": lambda x: (x * 1.0).sigmoid_(),
    "silu_inplace": lambda x: F.silu(x * 1.0, inplace=True),
    "dropout": seeded_dropout(lambda x: F.dropout(x, 0.4)),
    "dropout_inplace": seeded_dropout(lambda x: F.dropout(x * 1.0, 0.4, inplace=True)),
    "dropout2d": seeded_dropout(lambda x: F.dropout2d(x, 0.4)),
    "alpha_dropout": seeded_dropout(lambda x: F.alpha_dropout(x, 0.4, training=True)),
    "rrelu": seeded_dropout(lambda x: F.rrelu(x, training=True)),
    "clamp": lambda x: x.clamp(-0.3, 0.4),
    "pow": lambda x: x**3,
    "threshold": lambda x: F.threshold(x, 0.1, -2.0),
    "softplus": lambda x: F.softplus(x, beta=2),
} | {
    name: getattr(F, name)
    for name in (
        "celu elu gelu hardshrink hardsigmoid hardswish logsigmoid mish selu silu softshrink softsign tanh tanhshrink sigmoid"
    ).split()
} | {name: getattr(torch, name) for name in "abs cos erf erfc exp expm1 exp2 sin sinh cosh atan sinc square neg".split()} | {
    name: lambda x, name=name: getattr(torch, name)(x * 0.1 + 2)
    for name in "log log1p log2 sqrt rsqrt reciprocal tan".split()
} | {
    "logit": lambda x: torch.logit(x * 0.05 + 0.5),
    "rpow": lambda x: 2 ** (x * 0.5),
    "rdiv": lambda x: 3 / (x * 0.1 + 2),
    "clamp_min": lambda x: x.clamp_min(0.2),
    "clamp_max": lambda x: torch.clamp_max(x, 0.2),
    "clip": lambda x: x.clip(-0.5, 0.5),
    "masked_fill": lambda x: x.masked_fill(x.detach() > 0.4, 2.0),
    "masked_fill_": lambda x: (x * 1.0).masked_fill_(torch.ones(x.shape[2:]).tril().bool(), -1.0),
}  # fmt: skip

FUNCTIONS = [
    *(Function(name, call) for name, call in ACTIVATIONS.items()),
    Function("batch_norm_eval", batch_norm(training=False), ((CHANNELS,), (CHANNELS,))),
    Function("batch_norm_eval_plain", batch_norm(training=False)),
    Function("batch_norm_train", batch_norm(training=True), ((CHANNELS,), (CHANNELS,)), statistics=True),
    Function("batch_norm_train_plain", batch_norm(training=True), statistics=True),
    Function("prelu", lambda x, w: F.prelu(x, w), ((CHANNELS,),)),
    Function("prelu_one", lambda x, w: F.prelu(x, w), ((1,),)),
    Function("mul_channel", lambda x, s: x * s, ((CHANNELS, 1, 1),)),
    Function("rmul_channel", lambda x, s: s * x, ((1, CHANNELS, 1, 1),)),
    Function("imul_channel", lambda x, s: (x * 1.0).mul_(s), ((CHANNELS, 1, 1),)),
    Function("mul_number", lambda x: 2.5 * x),
    Function("mul_frozen_map", lambda x: x * torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)),
    Function("div_number", lambda x: x / 2.5),
    Function("div_frozen", lambda x: x / torch.tensor([2.0, 3.0, 4.0], dtype=x.dtype)[:, None, None]),
    Function("add_channel", lambda x, s: x + s, ((CHANNELS, 1, 1),)),
    Function("sub_channel", lambda x, s: torch.sub(x, s, alpha=2), ((1, CHANNELS, 1, 1),)),
    Function("rsub", lambda x: 1 - x),
    Function("iadd_number", lambda x: (x * 1.0).add_(3)),
    Function("add_itself", lambda x: x + x * 2),
    Function("iadd_itself", lambda x: (x * 1.0).add_(x, alpha=-3)),
    Function("iadd_the_same", lambda x: torch.Tensor.add_(y := x * 1.5, y)),
    Function("cat_axis", lambda x: torch.cat([x, x * 2], axis=1)),  # pyright: ignore[reportCallIssue]
    Function("cat", lambda x: torch.cat([x, x * 2, torch.ones_like(x.detach())], 1)),
    Function("pad_zero", lambda x: F.pad(x, (1, 2, 0, 3))),
    Function("pad_value", lambda x: F.pad(x, (1, 0, 2, 1), value=3.0)),
    Function("pad_crop", lambda x: F.pad(x, (-1, 2, 0, -1))),
    Function("pad_reflect", lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")),
    Function("pad_replicate", lambda x: F.pad(x, (3, 1, 2, 4), mode="replicate")),
    Function("pad_circular", lambda x: F.pad(x, (1, 2, 2, 1), mode="circular")),
    Function("max_pool", lambda x: F.max_pool2d(x, 2)),
    Function("max_pool_resnet", lambda x: F.max_pool2d(x, 3, 2, 1)),
    Function("max_pool_odd", lambda x: F.max_pool2d(x, (2, 3), (1, 2), (1, 1), (2, 1), ceil_mode=True)),
    Function("max_pool_wide", lambda x: F.max_pool2d(x, 5, 1, 2)),
    Function("adaptive_max_pool", lambda x: F.adaptive_max_pool2d(x, (3, 2))),
    Function("adaptive_max_pool_rows", lambda x: F.adaptive_max_pool2d(x, (None, 2))),  # type: ignore[arg-type]
    Function("clone", lambda x: x.clone()),
    Function("contiguous", lambda x: x.contiguous(memory_format=torch.channels_last)),
    Function("avg_pool", lambda x: F.avg_pool2d(x, 2)),
    Function("avg_pool_odd", lambda x: F.avg_pool2d(x, (2, 3), (1, 2), (1, 1), ceil_mode=True)),
    Function("avg_pool_real_pixels", lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)),
    Function("avg_pool_divisor", lambda x: F.avg_pool2d(x, (3, 2), stride=2, padding=(1, 0), divisor_override=5)),
    Function("adaptive_avg_pool", lambda x: F.adaptive_avg_pool2d(x, (4, 3))),
    Function("adaptive_avg_pool_rows", lambda x: F.adaptive_avg_pool2d(x, (None, 2))),  # type: ignore[arg-type]
    Function("adaptive_avg_pool_larger", lambda x: F.adaptive_avg_pool2d(x, 19)),
    Function("nearest", lambda x: F.interpolate(x, scale_factor=2)),
    Function("nearest_size", lambda x: F.interpolate(x, size=(5, 23))),
    Function("nearest_scale", lambda x: F.interpolate(x, scale_factor=(0.6, 2.7))),
    Function("nearest_exact", lambda x: F.interpolate(x, scale_factor=(1.3, 0.4), mode="nearest-exact")),
    Function("bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    Function("bilinear_scale", lambda x: F.interpolate(x, None, (1.7, 0.6), "bilinear")),
    Function("bilinear_recompute", lambda x: F.interpolate(x, None, (1.7, 0.6), "bilinear", recompute_scale_factor=True)),
    Function("bilinear_corners", lambda x: F.interpolate(x, (9, 20), mode="bilinear", align_corners=True)),
    Function("bilinear_antialias", lambda x: F.interpolate(x, (3, 7), mode="bilinear", antialias=True)),
    Function("bicubic", lambda x: F.interpolate(x, scale_factor=(2.5, 1.2), mode="bicubic")),
    Function("bicubic_corners", lambda x: F.interpolate(x, 11, mode="bicubic", align_corners=True)),
    Function("bicubic_antialias", lambda x: F.interpolate(x, scale_factor=0.4, mode="bicubic", antialias=True)),
    Function("area", lambda x: F.interpolate(x, scale_factor=(0.5, 1.5), mode="area")),
    Function("pixel_shuffle", lambda x: F.pixel_shuffle(torch.cat([x, x * 2, x * 3, -x], 1), 2)),
    Function("pixel_unshuffle", lambda x: F.pixel_unshuffle(F.interpolate(x, scale_factor=3), 3)),
    Function("group_norm", lambda x, *affine: F.group_norm(x, 1, *affine), ((CHANNELS,), (CHANNELS,)), statistics=True),
    Function("group_norm_plain", lambda x: torch.group_norm(x, CHANNELS), statistics=True),
    Function("group_norm_groups", lambda x: F.group_norm(torch.cat([x, x * 2], 1), 2), statistics=True),
    Function("instance_norm", instance_norm(True), ((CHANNELS,), (CHANNELS,)), statistics=True),
    Function("instance_norm_eval", instance_norm(False), ((CHANNELS,), (CHANNELS,))),
    Function("pixel_shuffle_one", lambda x: F.pixel_shuffle(x, upscale_factor=1)),
]
"""Every rule but the convolution's, at least once."""


REARRANGED = {
    function.name: function
    for function in (
        Function("channel_shuffle", lambda x: x.view(len(x), 2, 3, *x.shape[2:]).transpose(1, 2).reshape(x.shape)),
        Function("channel_shuffle_torch", lambda x: F.channel_shuffle(x, 3)),
        Function("nhwc_gelu", lambda x: F.gelu(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)),
        Function("nhwc_relu", lambda x: F.relu(x.permute(0, 2, 3, 1)).movedim(-1, 1)),
        Function("nhwc_scale", lambda x, s: (x.permute(0, 2, 3, 1) * s).permute(0, 3, 1, 2), ((6,),)),
        Function("nhwc_offset", lambda x, s: (s + x.movedim(1, -1)).permute(0, 3, 1, 2), ((6,),)),
        Function("nhwc_linear", lambda x, w, b: F.linear(x.permute(0, 2, 3, 1), w, b).permute(0, 3, 1, 2), ((4, 6), (4,))),
        Function("nhwc_matmul", lambda x, w: (x.permute(0, 2, 3, 1) @ w).permute(0, 3, 1, 2), ((6, 4),)),
        Function("nhwc_pad", lambda x: F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 2, 0, 1)).permute(0, 3, 1, 2)),
        Function("nwhc_tanh", lambda x: torch.tanh(x.transpose(1, 3)).transpose(3, 1)),
        Function("einsum", lambda x, w: torch.einsum("nchw,dc->ndhw", x, w), ((4, 6),)),
        Function("einsum_nhwc", lambda x, w: torch.einsum("dc, nchw -> nhwd", w, x).permute(0, 3, 1, 2), ((4, 6),)),
        Function("tokens", lambda x: F.silu(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])),
        Function("tokens_linear", lambda x, w: F.linear(x.flatten(2).mT, w).mT.reshape(len(x), 4, *x.shape[2:]), ((4, 6),)),
        Function("heads", lambda x: torch.sigmoid(x.view(len(x), 2, 3, *x.shape[2:]).unbind(1)[1])),
        Function("batch_of_groups", lambda x: torch.tanh(x.reshape(-1, 3, *x.shape[2:])).view_as(x)),
        Function("chunk", lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
        Function("split", lambda x: torch.cat([part * i for i, part in enumerate(x.split([1, 2, 3], dim=1))], 1)),
        Function("tensor_split", lambda x: torch.cat(x.tensor_split(4, 1)[1:], 1)),
        Function("stack", lambda x: torch.stack([x, x * 2], 2).flatten(1, 2)),
        Function("stack_first", lambda x: torch.stack([x, x * 2]).transpose(0, 1)[:, 1]),
        Function("narrow", lambda x: x.narrow(1, 1, 3)),
        Function("select", lambda x: x.select(1, 2).unsqueeze(1)),
        Function("index", lambda x: x[:, 1:5:2]),
        Function("index_ellipsis", lambda x: x[:, None, 2, ..., :].squeeze(1)[:, None]),
        Function("index_list", lambda x: x[:, [3, 0, 0]]),
        Function("index_tensor", lambda x: x[:, torch.tensor([5, 1])]),
        Function("index_select", lambda x: torch.index_select(x, 1, torch.tensor([5, 1, 1]))),
        Function("strided", lambda x: x[:, :, ::2, ::2]),
        Function("crop", lambda x: x[..., 1:, :-1]),
        Function("flip", lambda x: x.flip(1)),
        Function("roll", lambda x: torch.roll(x, 2, 1)),
        Function("repeat_interleave", lambda x: torch.repeat_interleave(x, 2, dim=1)),
        Function("flatten_nothing", lambda x: F.relu((x * 1.0).flatten(1, 1), inplace=True)),
        Function("log_softmax", lambda x: F.log_softmax(x, 1)),
        Function("repeat", lambda x: x.repeat(1, 2, 1, 1)),
        Function("expand", lambda x: x[:, :1].expand(-1, 4, -1, -1)),
        Function("pad_channels", lambda x: F.pad(x, (0, 0, 0, 0, 2, 1))),
        Function("pad_channels_too", lambda x: F.pad(x, (1, 0, 0, 2, 1, 1))),
        Function("mul_one_channel", lambda x, s: x[:, :1] * s, ((1, 4, 1, 1),)),
        Function("add_one_channel", lambda x, s: x[:, 2:3] + s, ((1, 4, 1, 1),)),
        Function("div_channel", lambda x, s: x / s, ((6, 1, 1),)),
        Function("mean_channels", lambda x: x.mean(1, keepdim=True)),
        Function("sum_some", lambda x: x.view(len(x), 2, 3, *x.shape[2:]).sum(2)),
        Function("amax_channels", lambda x: torch.amax(x, 1, True)),
        Function("max_channels", lambda x: torch.max(x, dim=1, keepdim=True)[0]),
        Function("norm_channels", lambda x: x.norm(dim=1)[:, None]),
        Function("gather", lambda x: x.gather(1, x.detach().argmin(1, keepdim=True))),
        Function("std_nhwc", lambda x: x.permute(0, 2, 3, 1).std(-1).unsqueeze(1)),
        Function("relu_of_a_view", lambda x: F.relu((x * 1.0)[:, 1:], inplace=True)),
        Function("relu_of_nhwc", lambda x: F.relu((x * 1.0).permute(0, 2, 3, 1), inplace=True).permute(0, 3, 1, 2)),
    )
}
"""Functions of six channels that rearrange axes, or run on maps in another layout, and give a map [N, C, H, W] back."""

PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: torch.sub(a, b, alpha=2),
    "mul": lambda a, b: a * b,
    "imul": lambda a, b: (a * 1.0).mul_(b),
    "div": lambda a, b: a / (2 + b * 0.1),
    "maximum": torch.maximum,
    "minimum": lambda a, b: torch.minimum(b, a),
    "where": lambda a, b: torch.where(a.detach() > 0, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, a.detach(), b, value=2),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, a.detach() * 0.1 + 2),
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "xlogy": lambda a, b: torch.xlogy(a, b * 0.1 + 2),
    "nhwc_mul": lambda a, b: (a.permute(0, 2, 3, 1) * b.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
}
"""Functions of two maps."""


def make_torchvision(name: str) -> nn.Module:
    """Return a torchvision model with seeded random weights."""
    declare_torchvision_ops()
    import torchvision

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(torchvision.models, name)(num_classes=10)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: make_torchvision("resnet18"),
    "mobilenet_v2": lambda: make_torchvision("mobilenet_v2"),
    "mobilenet_v3_small": lambda: make_torchvision("mobilenet_v3_small"),
    "efficientnet-lite0": lambda: make_model("efficientnet-lite0", weights="pretrained", classes=10, generator=seeded()),
    "cifar-resnet20": lambda: make_model("cifar-resnet20", classes=10, generator=seeded()),
    "mcunet-in3": lambda: make_model("mcunet-in3", classes=10, generator=seeded()),
}
"""The networks that the whole engine must carry."""


def make_pair(name: str) -> tuple[nn.Module, nn.Module]:
    """Return a model of `MODELS` in float64 train mode, twice."""
    model = shake_(MODELS[name]()).double().train()
    return model, copy.deepcopy(model)
