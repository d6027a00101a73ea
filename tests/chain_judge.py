"""A judge of what the C library makes of chains of layers.

A chain is run three times: in single precision with the library, in single precision by torch alone, and in double precision
by torch alone, which is the truth. Both single runs must be as close to the truth as rounding allows (`TOLERANCE`), with one
exception. Where a pixel lies within rounding of a kink of its activation, either side of the kink is right, and so is either
of two equal maxima of a pooling. A gradient counts those pixels, so it changes by a finite step, however small the rounding.

No looser tolerance tells such a step from a defect. So the judge finds these pixels (`find_close`), in double precision and
with an estimate of the rounding of each number. Then it either moves the biases until there are none, which leaves nothing
but rounding, or sets the truth to the other side of kinks (`Sides`), pixel by pixel, until it is what a single run computes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

import gradfilter as gf
from chain_networks import LEAST, UNIT, ConvPart, Network, Pixel, Probe, find_close, make_network
from gradfilter.ops import native
from layer_chains import Chain

TOLERANCE = 256 * UNIT
"""How far a gradient of a single run may be from the truth, relative to the sum of absolute values that it is a sum of.

A bound of rounding would be `UNIT` times the number of terms of all sums that a gradient comes through, some thousands.
Rounding errors have either sign, so they add up as the root of that: half of all chains stay below 6 `UNIT`, of 1000 one comes
to more than 72, and of 4700 none to more than 152, by torch alone as with the library. What one pixel on the other side of a
kink adds is its share of a sum over pixels and channels: 3,000 to 400,000 `UNIT` there.
"""
CONDITIONS = 16
"""How far it may be where layers multiply rounding errors: relative to what rounding of the parameters alone does.

All other numbers are rounded, too, of which there are more; six times as much is the most that was seen.
"""
MOVES = 30
"""So many times biases are moved, at most."""
FEW_SIDES = 5
"""Up to so many close pixels that differ, all combinations of sides are tried."""
HEAD = 0
"""The number of the head; parts count from 1."""


class Sides(Probe):
    """Put pixels on the other side of their kink, and note how large the sums are that gradients are made of.

    Attributes:
        others: The pixels.
        close: All pixels that are close to a kink: a step of one of them must not take another to its other side.
        inputs: Per layer, the largest absolute values of its input's channels.
        sums: Per layer, the sums over pixels of the absolute gradient of its output, per channel.
    """

    def __init__(self, others: Sequence[Pixel] = (), close: Sequence[Pixel] = ()) -> None:
        self.others, self.close = others, close
        self.inputs: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}

    def read(self, part: int, x: Tensor) -> Tensor:
        mine = [p for p in self.close if p.part == part]
        if not mine:
            return x
        value, steps = x.detach() * 1, torch.zeros(x.shape, dtype=x.dtype)
        for pixel in mine:
            is_other, above = pixel in self.others, (pixel.step > 0) == (pixel in self.others)
            if pixel.kink is None:
                steps[pixel.at] = pixel.step if is_other else 0
            elif (float(value[pixel.at]) > pixel.kink) != above:
                steps[pixel.at] = pixel.kink - float(value[pixel.at]) + (LEAST if above else -LEAST)
        return x + steps

    def layer(self, part: ConvPart, x: Tensor, y: Tensor) -> None:
        self.inputs[part.number] = largest(x.detach() * 1)
        carrier = getattr(y, "carrier", y)
        if carrier.requires_grad:
            carrier.register_hook(lambda g: self.sums.__setitem__(part.number, level(g.abs().sum((0, 2, 3)))))

    def head(self, x: Tensor) -> None:
        self.inputs[HEAD] = largest(x.detach() * 1)


def level(sums: Tensor) -> Tensor:
    """Return sums per channel, none smaller than their mean: a channel's own may cancel, its rounding does not."""
    return sums.maximum(sums.mean())


def largest(x: Tensor) -> Tensor:
    """Return the largest absolute values of the channels, by `level`."""
    return level(x.abs().amax((0, 2, 3)))


Run = dict[str, Tensor]
"""The output "y" and the gradients of a step; those of parameters that are not trained are left out."""


def run_step(model: Network, x: Tensor, probe: Probe | None = None) -> Run:
    """Run a step of training on a network under a plan."""
    model.zero_grad()
    y = model(x, probe)
    (y * make_weights(y)).sum().backward()
    return {"y": y.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def make_weights(y: Tensor) -> Tensor:
    """Return what outputs are multiplied with: the loss is a sum without kinks."""
    return torch.linspace(-1, 1.5, y.numel(), dtype=y.dtype).cos().reshape(y.shape)


class Judge:
    """A chain's network in single and double precision, and the truth.

    Attributes:
        chain: The chain, with its moves.
        close: The pixels that are within rounding of a kink.
        truth: What a step gives in double precision.
        scales: By name, the sums of absolute values that output and gradients are sums of.
    """

    def __init__(self, chain: Chain, away: bool = False) -> None:
        """Make the networks; `away` from kinks, by moves of the biases as long as pixels are close to one."""
        for moves in range(MOVES):
            self.chain = replace(chain, moves=chain.moves + moves)
            self.network, self.x = make_network(self.chain)
            self.exact = copy.deepcopy(self.network).double()
            self.close = find_close(self.exact, self.x.double())
            if not (away and self.close):
                break
        else:
            raise AssertionError(f"pixels stay close to kinks: {chain}")
        for network in (self.network, self.exact):
            gf.apply_(network, chain.make_plan())
        seen = Sides()
        self.truth = self.run_exact(seen)
        self.scales = find_scales(self.exact, seen, self.truth["y"])

    def run_exact(self, sides: Sides) -> Run:
        """Return the truth for some sides of the close pixels."""
        with native.off():
            return run_step(self.exact, self.x.double(), sides)

    def run_library(self) -> Run:
        """Return what the library computes."""
        return run_step(self.network, self.x)

    def run_torch(self) -> Run:
        """Return what torch computes in single precision."""
        with native.off():
            return run_step(self.network, self.x)

    def error(self, run: Run, truth: Run | None = None) -> tuple[float, str]:
        """Return the largest error of a run relative to the sums of absolute values, and of what it is."""
        truth, errors = self.truth if truth is None else truth, {}
        assert run.keys() == truth.keys()
        for name, value in truth.items():
            off = (run[name].double() - value).abs().nan_to_num(torch.inf)
            errors[name] = float((off / self.scales[name]).where(off > 0, 0).max())  # where all is zero, nothing is rounded
        worst = max(errors, key=errors.__getitem__)
        return errors[worst], worst

    def agrees(self, run: Run) -> bool:
        """Tell whether a run is the truth but for rounding."""
        error = self.error(run)[0]
        return error <= TOLERANCE or error <= CONDITIONS * self.measure_condition()

    def measure_condition(self, tries: int = 3) -> float:
        """Return the error of the truth where each parameter has an error like that of one rounding; 0 beside a kink."""
        if self.close:
            return 0.0
        parameters, found = list(self.exact.parameters()), 0.0
        own = [p.detach().clone() for p in parameters]
        for seed in range(tries):
            generator = torch.Generator().manual_seed(seed)
            for p, values in zip(parameters, own, strict=True):
                p.data = values * (1 + UNIT * torch.randn(values.shape, dtype=values.dtype, generator=generator))
            found = max(found, self.error(self.run_exact(Sides()))[0])
        for p, values in zip(parameters, own, strict=True):
            p.data = values
        return found

    def run_other_sides(self, pixels: Sequence[Pixel]) -> list[Run]:
        """Return the truth with some pixels below their kinks, and above."""
        return [self.run_exact(Sides([p for p in pixels if (p.step > 0) == above], pixels)) for above in (False, True)]

    def group_close(self) -> list[list[Pixel]]:
        """Return the close pixels; those of one channel that are the same number, as where it reads zeros, together."""
        groups: dict[tuple[int, int, float], list[Pixel]] = {}
        for pixel in self.close:
            groups.setdefault((pixel.part, pixel.at[1], pixel.step), []).append(pixel)
        return list(groups.values())

    def find_sides(self, run: Run) -> tuple[float, list[Pixel]]:
        """Return the error of a run for the sides that it has taken, and which pixels are on the other side there."""

        def attempt(groups: Sequence[list[Pixel]]) -> tuple[float, list[list[Pixel]]]:
            truth = self.run_exact(Sides([p for group in groups for p in group], self.close))
            return self.error(run, truth)[0], list(groups)

        groups = self.group_close()
        best = attempt([])
        if len(groups) <= FEW_SIDES:
            flags = product((False, True), repeat=len(groups))
            choices = [[g for g, other in zip(groups, others, strict=True) if other] for others in flags]
            best = min(map(attempt, choices), key=lambda pair: pair[0])
        else:  # one after the other
            for group in groups:
                best = min(best, attempt([*best[1], group]), key=lambda pair: pair[0])
        return best[0], [p for group in best[1] for p in group]


def find_conv_scales(part: ConvPart, seen: Sides) -> dict[str, Tensor]:
    """Return, by parameter, the sums of absolute values that its gradient is a sum of."""
    conv, norm = part.conv, part.norm
    total, x = seen.sums[part.number], seen.inputs[part.number]
    factor, found = torch.ones_like(total), {}
    x = x.reshape(conv.groups, -1).amax(1).repeat_interleave(len(total) // conv.groups)[:, None] if conv.groups > 1 else x
    folded = (total[:, None] * x)[..., None, None].expand_as(conv.weight)
    if norm is not None:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        inverse = (norm.running_var + norm.eps).rsqrt()
        factor = (norm.weight * inverse).abs()
        mean = norm.running_mean if conv.bias is None else norm.running_mean - conv.bias
        found["norm.weight"] = level(((folded * conv.weight).abs().sum((1, 2, 3)) + mean.abs() * total) * inverse)
        found["norm.bias"] = total
    found["conv.weight"] = folded * factor[:, None, None, None]
    found["conv.bias"] = total * factor
    return found


def find_scales(exact: Network, seen: Sides, y: Tensor) -> dict[str, Tensor]:
    """Return, by name, the sums of absolute values that output and gradients are sums of."""
    scales: dict[str, Tensor] = {}
    for name, part in exact.named_modules():
        if isinstance(part, ConvPart) and part.number in seen.sums:
            scales |= {f"{name}.{key}": value.detach() for key, value in find_conv_scales(part, seen).items()}
    head, total, means = exact.head, make_weights(y).abs().sum(0), seen.inputs[HEAD]  # means are no larger than pixels
    scales["head.weight"], scales["head.bias"] = level(total)[:, None] * means, level(total)
    scales["y"] = ((head.weight.abs() * means).sum(1) + head.bias.abs()).detach()
    return scales
