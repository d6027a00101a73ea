"""Fidelity: how close the gradients under a plan are to exact ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gradfilter.errors import InputError
from gradfilter.geometry.tiling import Pair, Tiling
from gradfilter.hooks import PlannedLayer, exactly, find_applied, find_hooks, find_states
from gradfilter.loss import Loss, check_scalar, cross_entropy, explain_loss
from gradfilter.outputs import explain_failure
from gradfilter.plan import Conv, containers, find_layers, find_norms
from gradfilter.spectrum import divide, find_dc_ratio, find_energy, record_snr, to_db
from gradfilter.table import Table

Batch = tuple[Any, Any] | list[Any]


@dataclass(frozen=True)
class Closeness:
    """How close a filtered gradient ĝ is to the exact one g, on one batch.

    Attributes:
        cosine: ⟨ĝ, g⟩ / (|ĝ|·|g|).
        snr_db: 10·log10(|g|² / |g − ĝ|²); infinite where they are equal.
        norm_ratio: |ĝ| / |g|.
    """

    cosine: float
    snr_db: float
    norm_ratio: float


@dataclass(frozen=True)
class Spread:
    """A number over several batches."""

    mean: float
    smallest: float
    largest: float

    @classmethod
    def over(cls, values: Iterable[float]) -> Spread:
        """Return mean and extremes; batches where there is no such number (NaN) are left out."""
        known = [value for value in values if not math.isnan(value)]
        return cls(statistics.fmean(known), min(known), max(known)) if known else cls(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class LayerFidelity:
    """How close the gradient of one layer is to the exact one, or that of all.

    Attributes:
        cosine: See `Closeness`.
        snr_db: See `Closeness`.
        norm_ratio: See `Closeness`.
        patch: Side of the layer's patches `(h, w)`; none where its gradient is not filtered.
        gy_snr_db: What patches keep of the exact gradient at the layer's output: 10·log10(Σgy² / Σ(gy − mean of its patch)²).
            None where that is no map, or the layer is not filtered.
        dc_ratio: DC energy of the layer's kernels against the largest other, see `gradfilter.spectrum.find_dc_ratio`. None
            where there is no other.
    """

    cosine: Spread
    snr_db: Spread
    norm_ratio: Spread
    patch: Pair | None = None
    gy_snr_db: Spread | None = None
    dc_ratio: float | None = None


@dataclass(frozen=True)
class Fidelity:
    """How close the gradients of a model under a plan are to exact ones.

    Attributes:
        layers: By name: convolutions and Linear layers, each with the affine of its norm; other trained parameters under the
            name of their module.
        overall: Of all trained parameters as one vector.
        depth: The layers with a `gy_snr_db`, from the loss to the input.
        batches: Over how many batches.
    """

    layers: Mapping[str, LayerFidelity]
    overall: LayerFidelity
    depth: tuple[str, ...]
    batches: int

    @property
    def rising_share(self) -> float:
        """The share of consecutive layers, from the loss to the input, in which the SNR of gy does not fall.

        What Proposition 1 of the gradient-filtering paper leads one to expect is 1. Layers where patches lose nothing are
        left out; NaN where no two layers are left.
        """
        known = [s.mean for name in self.depth if (s := self.layers[name].gy_snr_db) and math.isfinite(s.mean)]
        rises = [after >= before for before, after in pairwise(known)]
        return statistics.fmean(rises) if rises else math.nan

    def to_table(self) -> Table:
        """Return a row for each layer, and one for all."""
        table = Table(
            f"Fidelity to exact backprop, {self.batches} batch{'es' * (self.batches != 1)}",
            {
                "layer": str,
                "patch": str,
                "cosine": lambda value: show(value, 4),
                "SNR (dB)": lambda value: show(value, 1),
                "norm ratio": lambda value: show(value, 3),
                "SNR of gy (dB)": lambda value: show(value, 1),
                "DC ratio": lambda value: f"{value:.2f}",
            },
        )
        for name, layer in (*self.layers.items(), ("all", self.overall)):
            patch = layer.patch and (str(layer.patch[0]) if layer.patch[0] == layer.patch[1] else "{}x{}".format(*layer.patch))
            spreads = [asdict(s) if s else None for s in (layer.cosine, layer.snr_db, layer.norm_ratio, layer.gy_snr_db)]
            table.rows.append((name or "(model)", patch, *spreads, layer.dc_ratio))
        if self.batches > 1:
            table.remarks.append("Mean over batches [smallest, largest].")
        if self.depth:
            table.remarks.append(
                "SNR of gy: what patches keep of the exact gradient at the layer's output. DC ratio: energy of the kernels at "
                "DC against the largest at another frequency."
            )
        if not math.isnan(self.rising_share):
            table.remarks.append(
                f"From the loss to the input the SNR of gy does not fall in {self.rising_share:.0%} of the steps from layer to "
                "layer."
            )
        return table

    def __str__(self) -> str:
        return self.to_table().to_markdown()


def show(spread: Mapping[str, float], digits: int) -> str:
    """Return a spread for the table."""
    mean, smallest, largest = (f"{value:.{digits}f}".replace("inf", "∞") for value in spread.values())
    return mean if smallest == largest else f"{mean} [{smallest}, {largest}]"


def fidelity(model: nn.Module, batches: Batch | Iterable[Batch], loss: Loss | None = None) -> Fidelity:
    """Compare the gradients of a model under its plan with exact backprop of the same layers.

    Each batch runs twice, under the plan and by torch's own backward; both draw alike what they draw at random. The model comes
    out as it was, the plan in force, also after an error.

    Args:
        model: Under a plan, in the mode in which it is to run: that of training, most likely.
        batches: A pair of inputs and targets, or several.
        loss: From outputs and targets to a scalar; cross-entropy of the (first) output where not given.

    Raises:
        InputError: No plan is applied, there is no batch, or there is no gradient, see `find_gradients`.
        GradFilterError: The model or the loss fails on a batch.
    """
    applied = find_applied(model)
    if applied is None:
        raise InputError(
            f"{type(model).__name__} runs under no plan, so there is nothing to compare. Call gradfilter.apply_(model, plan) "
            "first, on this very module."
        )
    if not isinstance(batches, Iterable):
        raise InputError(f"the batches are a {type(batches).__name__}. Give a pair of inputs and targets, or several.")
    several: Any = [batches] if is_pair(batches) and not is_pair(batches[0]) else batches  # type: ignore[index]
    found: dict[str, list[Closeness]] = {}
    overall: list[Closeness] = []
    snr: dict[str, list[float]] = {}
    order: list[str] = []
    for batch in several:
        filtered = find_gradients(model, batch, loss)
        with exactly(applied), record_snr(model, find_tilings(model)) as record:
            exact = find_gradients(model, batch, loss)
        for layer, names in group(model, {**exact, **filtered}).items():
            found.setdefault(layer, []).append(compare(filtered, exact, names))
        overall.append(compare(filtered, exact))
        for layer in record.order:
            snr.setdefault(layer, []).append(to_db(record.snr.get(layer, math.nan)))
        order = order or record.order
    if not overall:
        raise InputError("there is no batch to compare gradients on. Give a pair of inputs and targets, or several.")
    layers = {
        name: LayerFidelity(
            *summarise(values),
            patch=applied.patches.get(name),
            gy_snr_db=Spread.over(snr[name]) if name in snr else None,
            dc_ratio=find_layer_dc_ratio(model.get_submodule(name)),
        )
        for name, values in found.items()
    }
    depth = tuple(name for name in reversed(order) if name in layers)
    return Fidelity(layers, LayerFidelity(*summarise(overall)), depth, len(overall))


def summarise(values: list[Closeness]) -> tuple[Spread, Spread, Spread]:
    """Return cosine, SNR and norm ratio over several batches."""
    cosines, snrs, ratios = ([getattr(v, name) for v in values] for name in ("cosine", "snr_db", "norm_ratio"))
    return Spread.over(cosines), Spread.over(snrs), Spread.over(ratios)


def compare(filtered: Mapping[str, Tensor], exact: Mapping[str, Tensor], names: Iterable[str] | None = None) -> Closeness:
    """Compare gradients of the same parameters, all of them or some, as one vector.

    A gradient that only one side has counts as zero on the other. Where the exact one is zero, there is nothing to compare
    with: NaN.
    """
    dot = square = exact_square = lost = 0.0
    for name in exact.keys() | filtered.keys() if names is None else names:
        a, b = (side.get(name, torch.zeros(())).detach().to("cpu", torch.float64) for side in (filtered, exact))
        dot += float((a * b).sum())
        square, exact_square, lost = square + find_energy(a), exact_square + find_energy(b), lost + find_energy(a - b)
    if not exact_square:
        return Closeness(math.nan, math.nan, math.nan)
    # A norm of zero has no direction: such a gradient is at right angles to any other.
    cosine = max(-1.0, min(1.0, dot / math.sqrt(square * exact_square))) if square else 0.0
    return Closeness(cosine, to_db(divide(exact_square, lost)), math.sqrt(square / exact_square))


def group(model: nn.Module, names: Iterable[str]) -> dict[str, list[str]]:
    """Sort parameters by layer: those of a norm go to the convolution before it, others that are no layer's to their module."""
    layers, norms = find_layers(model), find_norms(model)
    groups: dict[str, list[str]] = {}
    order = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    for name in sorted(names, key=order.__getitem__):
        module = name.rpartition(".")[0]
        # A parametrised weight lies below its layer.
        owner = next((part for part in reversed(["", *containers(module)]) if part in layers or part in norms), module)
        groups.setdefault(norms.get(owner, owner), []).append(name)
    return groups


def find_tilings(model: nn.Module) -> dict[str, Tiling]:
    """Return how the outputs of convolutions are cut, as far as those ran at patch resolution."""
    hooks = [hook for m in model.modules() if isinstance(m, Conv) for hook in find_hooks(m) if isinstance(hook, PlannedLayer)]
    return {hook.layer: hook.choices.tiling for hook in hooks if hook.choices is not None}


def find_layer_dc_ratio(layer: nn.Module) -> float | None:
    """Return the DC ratio of a convolution's kernels, none for what has no other frequency."""
    if not isinstance(layer, Conv):
        return None
    ratio = find_dc_ratio(layer.weight)
    return None if math.isnan(ratio) else ratio


def find_gradients(model: nn.Module, batch: Batch, loss: Loss | None = None) -> dict[str, Tensor]:
    """Return the gradients of the model's trained parameters as it stands, whatever plan is in force.

    The model runs without a trace: the parameters' own `.grad`, hooks on them, buffers, modes and the global random state
    stay as they are. What draws at random, such as dropout, draws from the same seed in every call.

    Args:
        model: In the mode in which it is to run.
        batch: Inputs and targets: the model is called with the former, the loss with its outputs and the latter.
        loss: From outputs and targets to a scalar; cross-entropy of the (first) output where not given.

    Returns:
        The gradients by parameter name. A parameter that took no part in the loss has none, as with `backward`.

    Raises:
        InputError: The batch is no pair, the loss is no finite scalar or has no gradient, or a gradient is not finite.
        GradFilterError: The model or the loss fails on the batch.
    """
    if not is_pair(batch):
        raise InputError(f"the batch is a {type(batch).__name__}. Give a pair of inputs and targets: (images, labels).")
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(
            f"{type(model).__name__} has no parameter to train: all have requires_grad=False. Call model.requires_grad_(True)."
        )
    inputs, targets = batch
    with without_trace(model), torch.enable_grad():
        return take_gradients(model, run_loss(model, inputs, targets, loss))


def take_gradients(model: nn.Module, value: Tensor, *, again: bool = False) -> dict[str, Tensor]:
    """Return the gradients of a loss, see `find_gradients`.

    Args:
        model: The model whose parameters are trained.
        value: The loss.
        again: Whether the graph is to stay for another call.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Not backward: that would add to .grad, and set off what others have hooked to it (an optimizer's step, say).
    found = torch.autograd.grad(value, list(trained.values()), allow_unused=True, retain_graph=again)
    gradients = {name: g.detach() for name, g in zip(trained, found, strict=True) if g is not None}
    if not gradients:
        raise InputError(
            f"no trained parameter takes part in the loss, e.g. {next(iter(trained))!r} does not. Check that the loss is made "
            "of the model's outputs."
        )
    wrong = [name for name, g in gradients.items() if not bool(g.isfinite().all())]
    if wrong:
        raise InputError(
            f"the gradient of {wrong[0]!r} is not finite{f', nor are {len(wrong) - 1} more' if wrong[1:] else ''}. Check the "
            "inputs and the weights, or use a smaller loss."
        )
    return gradients


def run_loss(model: nn.Module, inputs: Any, targets: Any, loss: Loss | None) -> Tensor:
    """Run the model and the loss; return what the loss says, which is a finite scalar with a gradient."""
    if isinstance(inputs, Tensor):
        with explain_failure(inputs, "when its gradients are computed"):
            outputs = model(inputs)
    else:
        outputs = model(inputs)
    with explain_loss(outputs, targets):
        value = (loss or cross_entropy)(outputs, targets)
    check_scalar(value)
    if not bool(value.isfinite()):
        raise InputError(f"the loss is {value.item()}. Check the inputs and the weights: no gradient can be had of that.")
    return value


def is_pair(value: Any) -> bool:
    """Tell whether this is a tuple or list of two."""
    return isinstance(value, tuple | list) and len(value) == 2


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Let a model run on copies of its buffers and from a fixed seed; buffers, modes, keeps and seeds are as before then."""
    modules = list(model.modules())
    modes, buffers = [m.training for m in modules], [dict(m._buffers) for m in modules]
    copies: dict[Tensor, Tensor] = {}  # buffers may be shared
    states = [(state, dict(state.tensors)) for state in find_states(model).values()]
    devices = {p.device for p in model.parameters() if p.is_cuda}
    try:
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(buffer, buffer.clone())
        with torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(0)
            for device in devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(0)
            yield
    finally:
        for module, mode, own in zip(modules, modes, buffers, strict=True):
            module.training = mode
            module._buffers.clear()
            module._buffers.update(own)
        for state, tensors in states:
            state.tensors = tensors
