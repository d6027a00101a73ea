"""Forward passes written to break a record: each replays to the last bit, or is refused with a reason.

A program is a function of a `Net`, whose layers `a` and `b` are frozen and whose others are trained, and of images.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Program = Callable[["Net", Tensor], Any]
EQUAL: dict[str, Program] = {}
REFUSED: dict[str, tuple[Program, str]] = {}


class Net(nn.Module):
    """Layers and buffers for a program."""

    count: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, program: Program) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.a = nn.Conv2d(3, 4, 3, padding=1).requires_grad_(False)
            self.b = nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False)
            self.position = nn.Parameter(torch.randn(1, 4, 3, 3), requires_grad=False)
            self.stem = nn.Conv2d(3, 4, 1)
            self.t, self.u, self.pair = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Conv2d(2, 4, 1)
            self.bias, self.table = nn.Parameter(torch.randn(4, 1, 1)), nn.Embedding(4, 4)
            self.head = nn.Linear(4, 5)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.turn, self.memory = 0, torch.zeros(4, 1, 1)
        self.program = program

    def forward(self, x: Tensor) -> Any:
        return self.program(self, x)

    def end(self, x: Tensor) -> Tensor:
        return self.head(x.mean((2, 3)))


def equal(program: Program) -> Program:
    EQUAL[program.__name__] = program
    return program


def refused(reason: str) -> Callable[[Program], Program]:
    def register(program: Program) -> Program:
        REFUSED[program.__name__] = program, reason
        return program

    return register


# What is read, and by whom.


@equal
def chain(net, x):
    return net.end(net.t(net.b(net.a(x)).relu()))


@equal
def residual(net, x):
    f = net.b(net.a(x))
    return net.end(net.t(f) + f)


@equal
def frozen_layers_behind_the_frontier(net, x):
    f = net.a(x)
    return net.end(net.b(net.t(f)) * net.b(f))


@equal
def image_read_by_a_trained_layer(net, x):
    return net.end(net.t(net.a(x)) + net.stem(x))


@equal
def nothing_frozen(net, x):
    return net.end(net.t(net.stem(x)))


@equal
def unused_branch(net, x):
    f = net.a(x)
    net.b(f).relu_()
    return net.end(net.t(f))


@equal
def layer_used_twice(net, x):
    f = net.b(net.b(net.a(x)))
    return net.end(net.b(net.t(net.t(f))))


@equal
def several_outputs(net, x):
    f = net.a(x)
    return {"logits": net.end(net.t(f)), "others": (net.end(f), f.mean(1), 3)}


@equal
def containers_and_keywords(net, x):
    maps = {"f": net.a(x), "pair": (x, [x])}
    f = torch.cat(
        tensors=[maps["f"], F.conv2d(input=maps["pair"][1][0], weight=net.a.weight)[:, :, :1, :1].expand_as(maps["f"])]
    )
    return net.end(net.t(input=f.chunk(2)[1] + f.chunk(2)[0]))


@equal
def sizes_asked_for(net, x):
    f = net.a(x)
    n, c, h, w = f.shape
    f = f.view(n, 2, c // 2, h * w).transpose(1, 2).reshape(n, c, h, w)
    return net.end(net.t(f) / (f.numel() / len(f)) * (2 if f.is_floating_point() else 3))


# Views, and functions that give several tensors.


@equal
def chunks(net, x):
    p, q = net.a(x).chunk(2, 1)
    return net.end(net.pair(p) - net.pair(q))


@equal
def views_of_views(net, x):
    f = net.a(x)
    last = f.split([1, 3], 1)[1].unbind(2)[-1]
    return net.head(f.flatten(2).transpose(1, 2)).mean(1) + last.sum((1, 2))[:, None] * net.bias[0]


@equal
def a_view_and_a_placeholder_together(net, x):
    f = net.a(x)
    _, g = torch.broadcast_tensors(f.mean((2, 3), keepdim=True), f)
    return net.end(net.t(g))


@equal
def one_of_several_results(net, x):
    values, places = net.a(x).max(1, keepdim=True)
    return net.end((values + places.float()).sin() * net.bias)


@equal
def all_of_several_results(net, x):
    values, places = net.a(x).topk(3, 1)
    return net.end(values.sum(1, keepdim=True) * net.bias) + net.head(net.table(places).mean((1, 2, 3)))


@equal
def integers_and_bools(net, x):
    f = net.a(x)
    return net.head(net.table(f.argmax(1)).mean((1, 2))) + net.end(torch.where(f > 0, net.t(f), -1.0))


@equal
def low_precision_and_complex(net, x):
    f = net.a(x)
    return net.end(net.bias * f.bfloat16()) + net.end((net.bias * torch.fft.rfft2(f)).abs())


# In place.


@equal
def in_place_before_it_is_read(net, x):
    f = net.a(x)
    f.relu_()
    f += net.b(f)
    f[:, 0] = 0.5
    return net.end(net.t(F.hardtanh(f, inplace=True)))


@equal
def in_place_on_a_view(net, x):
    f = net.a(x)
    f[:, :2].mul_(2)
    f.view(len(f), -1).clamp_(-1, 1)
    return net.end(net.t(f))


@equal
def out_argument(net, x):
    f = net.a(x)
    g = torch.empty_like(f)
    torch.mul(f, 2, out=g)
    return net.end(net.t(g))


@equal
def copy_before_the_change(net, x):
    f = net.a(x)
    g = f.clone()
    f.relu_()
    return net.end(net.t(f) + net.u(g))


@equal
def trained_values_written_in_place(net, x):
    f = net.a(x)
    v = f[:, 1:]
    f.add_(net.bias)
    return net.end(net.u(net.t(f)) + v.sum(1, keepdim=True))


@equal
def first_trained_function_in_place(net, x):
    f = net.a(x)
    f.add_(net.bias).relu_()
    return net.end(net.t(f))


@equal
def images_changed_in_place(net, x):
    x.sub_(0.5).div_(2)
    return net.end(net.t(net.a(x)) + net.stem(x))


@refused("add_ changes an activation in place that trained layers have read")
def in_place_after_it_was_read(net, x):
    f = net.a(x)
    y = f + net.bias
    f.add_(1)
    return net.end(y + net.b(f))


@refused("relu_ changes an activation in place that trained layers have read")
def in_place_on_a_view_after_it_was_read(net, x):
    f = net.a(x)
    y = f[:, :2] + net.bias[:2]
    f[:, 2:].relu_()
    return net.end(y) if y.shape[1] == 4 else net.end(torch.cat([y, net.b(f)[:, :2]], 1))


@refused("changes a tensor that is no activation of the frozen layers in place")
def written_into_a_new_tensor(net, x):
    f = torch.zeros(len(x), 4, *x.shape[2:])
    f[:] = net.a(x)
    return net.end(net.t(f))


@refused("unsqueeze_ gives a tensor another shape")
def another_shape_in_place(net, x):
    f = net.a(x)
    return net.end(net.t(f.unsqueeze_(0)[0]))


@refused("gives a tensor another shape or other memory")
def other_memory_in_place(net, x):
    f, g = net.a(x), net.a(-x)
    f.data = g.data
    return net.end(net.t(f))


# Randomness.


@equal
def dropout_in_the_trunk(net, x):
    return net.end(net.t(net.b(F.dropout(net.a(x), 0.5, net.training))))


@equal
def dropout_in_place(net, x):
    return net.end(net.t(net.b(F.dropout(net.a(x), 0.5, net.training, inplace=True))))


@equal
def noise(net, x):
    f = net.a(x)
    return net.end(net.t(f + 0.1 * torch.randn_like(f)) + torch.rand(4, 1, 1))


@equal
def dropped_path(net, x):
    f = net.a(x)
    keep = f.new_empty(len(f), 1, 1, 1).bernoulli_(0.5)
    return net.end(net.t(f + net.b(f) * keep))


@refused("reads trained or random values, on which frozen layers may then depend")
def layer_skipped_at_random(net, x):
    f = net.a(x)
    return net.end(net.t(net.b(f) if torch.rand(()) < 2 else f))


@refused("conv2d does not get or give the same for all images")
def layers_by_turns(net, x):
    net.turn += 1
    f = net.a(x)
    return net.end(net.t(F.conv2d(f, net.b.weight, net.b.bias if net.turn % 2 else net.mean)))


@refused("where its first forward pass came to")
def layer_skipped_by_turns(net, x):
    net.turn += 1
    f = net.a(x)
    return net.end(net.t(f.relu() if net.turn % 2 else f))


@refused("mul does not get or give the same for all images")
def number_from_outside(net, x):
    net.turn += 1
    return net.end(net.t(net.a(x) * (1 + net.turn)))


# Values that steer.


@refused("reads values of an activation")
def branch_on_a_value(net, x):
    f = net.a(x)
    return net.end(net.t(f if f.mean() > 0 else -f))


@refused("item reads values of an activation")
def number_of_a_value(net, x):
    f = net.a(x)
    return net.end(net.t(f) * f.mean().item())


@refused("__int__ reads values of an activation")
def integer_of_a_value(net, x):
    return net.end(net.t(net.a(x)) * int(x.sum()))


@refused("__contains__ reads values of an activation")
def value_looked_for(net, x):
    f = net.a(x)
    return net.end(net.t(f) * (1.0 in f))


@refused("numpy reads values of an activation")
def through_numpy(net, x):
    return net.end(net.t(torch.from_numpy(np.tanh(net.a(x).detach().numpy()))))


@refused("does not get or give the same for all images")
def size_that_depends_on_values(net, x):
    f = net.a(x)
    return net.end(net.t(f)) / (1 + len(f[f > 0.2]))


@equal
def branch_on_a_trained_value(net, x):
    y = net.t(net.a(x))
    return net.end(y * 2 if y.sum() > -1e9 else y)


@refused("reads trained or random values, on which frozen layers may then depend")
def frozen_layers_behind_a_branch_on_a_trained_value(net, x):
    f = net.a(x)
    y = net.t(f)
    return net.end(y + net.b(f if y.sum() > 0 else -f))


# Code that torch functions do not show, or show otherwise.


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.relu() * 2

    @staticmethod
    def backward(ctx, gy):
        return 2 * gy


class Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b):
        return F.relu(x) + b

    @staticmethod
    def backward(ctx, gy):
        return None, gy.sum((0, 2, 3))[:, None, None]


@torch.jit.script
def scripted(x):
    return x.relu() + 1


@equal
def own_function_in_the_trunk(net, x):
    return net.end(net.t(Double.apply(net.a(x))))


@equal
def own_function_with_a_trained_parameter(net, x):
    return net.end(net.u(net.b(Shift.apply(net.a(x), net.bias))))


@equal
def trained_layer_without_gradient(net, x):
    f = net.a(x)
    with torch.no_grad():
        g = net.b(net.t(f)).mean((2, 3), keepdim=True)
    return net.end(net.t(f) + net.b(f * g))


@equal
def trained_weights_detached(net, x):
    f = net.a(x)
    return net.end(net.t(f) + F.conv2d(f, net.u.weight.detach()) + net.b(f * net.bias.data))


@equal
def trunk_without_gradient(net, x):
    with torch.no_grad():
        f = net.b(net.a(x)).data
    return net.end(net.t(f.detach()))


@equal
def trunk_in_inference_mode(net, x):
    with torch.inference_mode():
        f = net.b(net.a(x).relu_())
    return net.end(net.t(f.clone()))


@equal
def checkpoints(net, x):
    f = checkpoint(lambda z: net.b(z).relu(), net.a(x), use_reentrant=False)
    return net.end(checkpoint(lambda z: net.u(net.t(z)).relu(), f, use_reentrant=False))


@equal
def errors_caught_within(net, x):
    try:
        f = net.b(net.a(x))
    except Exception:
        f = net.a(x)
    return net.end(net.t(f))


@equal
def scripted_code_amid_the_trunk(net, x):
    f = net.a(x)
    return net.end(net.t(f + scripted(f)))


@refused("gives other results|reads anything of the images")
def scripted_code_before_trained_layers(net, x):
    return net.end(net.t(scripted(net.a(x))))


@refused("computes? frozen layers again in its backward pass|compute by other means")
def checkpoint_across_the_frontier(net, x):
    return net.end(checkpoint(lambda z: net.t(net.a(z)).relu(), x, use_reentrant=False))


@refused("no memory that could be followed|gives other results")
def batched_by_torch_func(net, x):
    return net.end(net.t(torch.func.vmap(lambda z: z.relu() + 1)(net.a(x))))


# Weights of weights, constants, buffers.


@equal
def standardised_weights(net, x):
    w = net.b.weight
    w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 0.1)
    return net.end(net.t(F.conv2d(net.a(x), w, padding=1)))


@equal
def position_resized_to_the_map(net, x):
    f = net.a(x)
    return net.end(net.t(f + F.interpolate(net.position, f.shape[2:], mode="bicubic")))


@equal
def constant_made_on_the_way(net, x):
    mask = torch.zeros(x.shape[2:])
    mask[2:] = 1
    return net.end(net.t(net.a(x) * mask))


@equal
def counter(net, x):
    net.count.add_(1)
    return net.end(net.t(net.a(x)))


@equal
def statistics_of_trained_layers(net, x):
    y = net.t(net.a(x))
    return net.end(F.batch_norm(y, net.mean, net.var, training=net.training))


@refused("changes 'count' each time it runs")
def counter_that_counts(net, x):
    net.count += 1
    return net.end(net.t(net.a(x) * net.count))


@refused("batch_norm changes 'mean' in place")
def statistics_of_frozen_layers(net, x):
    return net.end(net.t(F.batch_norm(net.a(x), net.mean, net.var, training=True)))


@refused("changes 'mean' each time it runs")
def average_of_what_is_trained(net, x):
    f = net.a(x) - net.mean[:, None, None]
    y = net.t(net.b(f))
    with torch.no_grad():
        net.mean.lerp_(y.mean((0, 2, 3)), 0.1)
    return net.end(y)


@refused("depend on what is trained")
def memory_of_what_is_trained(net, x):
    y = net.t(net.b(net.a(x) - net.memory))
    net.memory = 0.9 * net.memory + 0.1 * y.detach().mean((0, 2, 3))[:, None, None]
    return net.end(y)


# Images that are not alone, tensors without a share for each.


@refused("mix the images of a batch")
def centred_over_the_batch(net, x):
    f = net.a(x)
    return net.end(net.t(net.b(f - f.mean(0))))


@refused("mix the images of a batch")
def next_image(net, x):
    return net.end(net.t(net.a(x).roll(1, 0)))


@refused("other results for the same images in a batch of 3")
def depends_on_the_size_of_the_batch(net, x):
    return net.end(net.t(net.a(x) / len(x)))


@refused(r"a tensor of shape \[4\]")
def mean_over_the_batch(net, x):
    return net.end(net.t(net.a(x)) + (net.a(x).mean((0, 2, 3)) * net.bias[:, 0, 0])[:, None, None])


@refused("no share for each image in front")
def batch_behind(net, x):
    tokens = net.a(x).flatten(2).permute(2, 0, 1).contiguous()
    return net.head(tokens).mean(0)


@refused("no share for each image in front")
def batch_folded_into_another_axis(net, x):
    rows = net.a(x).permute(0, 2, 3, 1).reshape(-1, 4)
    return net.head(rows).view(len(x), -1, 5).mean(1)


@equal
def batch_last_in_memory(net, x):
    f = net.a(x).permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2).relu()
    return net.end(net.t(f))


Pair = collections.namedtuple("Pair", "first second")


@equal
def named_tuples(net, x):
    pair = Pair(net.a(x), net.b(net.a(x)))
    return Pair(net.end(net.t(pair.second)), net.end(pair.first))
