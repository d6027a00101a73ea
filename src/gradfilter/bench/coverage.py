"""Every family of networks that timm and torchvision have: does a plan apply, is the gradient right, what does it save?"""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from gradfilter.apply import apply_, remove_
from gradfilter.bench.report import Report
from gradfilter.bench.setup import freeze_statistics_, shake_
from gradfilter.cost import measure_saved_bytes, predict_saved_bytes
from gradfilter.hooks import find_applied
from gradfilter.models.extras import import_extra
from gradfilter.models.network import make_listed
from gradfilter.models.weights import random_weights_from
from gradfilter.outputs import find_outputs
from gradfilter.plan import Backward, Plan

BATCH = 2
PATCH = 4
CLASSES = 10
MOST_PARAMETERS = 150_000_000
"""Larger networks are left out: five copies of the weights have to fit in memory."""
LARGEST_ERROR = 1e-8
"""What a gradient at patch 1 may differ from the exact one, relatively: rounding in float64."""
FLOOR = 1e-9
"""Of the largest gradient norm: what a difference is related to where the exact gradient is smaller, down to nothing but
rounding (that of a bias in front of a softmax is zero)."""
TIMM_NAMED = {
    "resnet": "resnet18 resnet18d resnetrs50 resnext50_32x4d",
    "resnetv2": "resnetv2_50x1_bit",
    "regnet": "regnety_002",
    "efficientnet": "mobilenetv1_100 mobilenetv2_050 efficientnet_b0 efficientnet_lite0 mnasnet_050",
    "mobilenetv3": "mobilenetv3_large_075 mobilenetv4_conv_small_050 mobilenetv4_hybrid_medium",
    "byobnet": "repvgg_a0",
    "convnext": "convnext_atto",
    "cspnet": "cspresnet50",
}
"""Networks that people name, in families of which the smallest member is another."""
SEGMENTATION = "lraspp_mobilenet_v3_large fcn_resnet50 deeplabv3_mobilenet_v3_large".split()
UNET = "gradfilter.bench.unet:UNet"
OPTIONS: dict[str, dict[str, Any]] = {
    UNET: {},
    # Its second classifier pools by more than a small image leaves.
    "torchvision/inception_v3": {"num_classes": CLASSES, "aux_logits": False},
}
"""Constructor arguments, where they are not just the number of classes."""
TRIES = 5
"""How many members of a family are tried, smallest first, until one runs on small images."""
COLUMNS = (
    *("family", "network", "parameters", "convolutions", "unexpected exits", "expected exits", "patch-1 error"),
    *("saved MB exact", f"saved MB patch {PATCH}", "ratio"),
)


class CannotRunError(Exception):
    """Say why a network is not in the table."""


@dataclass
class Row:
    """What the table says of one network."""

    family: str
    network: str
    parameters: int = 0
    convolutions: int = 0
    unexpected: dict[tuple[str, str], str] = field(default_factory=dict)
    expected: dict[tuple[str, str], str] = field(default_factory=dict)
    predicted: int | None = None
    error: float = 0.0
    exact: int = 0
    filtered: int = 0
    failure: str = ""

    def to_cells(self) -> tuple[str, ...]:
        """Return the row as text."""
        if self.failure:
            return (self.family, self.network, f"{self.parameters / 1e6:.2f} M", "-", self.failure, *("-" * 5))
        exits = Counter(function.rpartition("torch.")[2] for _, function in self.unexpected)
        return (
            *(self.family, self.network, f"{self.parameters / 1e6:.2f} M", str(self.convolutions)),
            ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in exits.most_common()) or "none",
            *(str(len(self.expected)), f"{self.error:.0e}"),
            *(f"{self.exact / 1e6:.1f}", f"{self.filtered / 1e6:.1f}", f"{self.exact / self.filtered:.1f}x"),
        )


@dataclass(frozen=True)
class Candidate:
    """A row to be: a family, and how to find its network.

    Attributes:
        family: Package and module, e.g. "timm resnet".
        members: The networks among which the smallest is taken.
    """

    family: str
    members: Sequence[str]


def measure(only: str = "*", sample: int | None = None, pixels: int = 96) -> Report:
    """Return the table: one row per family, then the networks that people name.

    Args:
        only: A shell glob on families and names, e.g. "timm mobile*" or "*resnet18*".
        sample: How many rows to measure, evenly spaced; all without it.
        pixels: Side of the images.
    """
    report = Report(
        "coverage",
        f"Coverage: Plan.all on networks of timm and torchvision, batch {BATCH}, {pixels} px",
        f"python -m gradfilter.bench coverage --pixels {pixels}",
        COLUMNS,
    )
    candidates = [c for c in find_candidates() if fnmatchcase(c.family, only)]
    if sample is not None:
        candidates = [candidates[i * len(candidates) // sample] for i in range(min(sample, len(candidates)))]
    rows: list[Row] = []
    left_out: list[str] = []
    for i, candidate in enumerate(candidates, 1):
        print(f"{i}/{len(candidates)} {candidate.family}", end=" ", file=sys.stderr, flush=True)
        try:
            rows.append(measure_candidate(candidate, pixels))
            print(*rows[-1].to_cells()[1:], sep=" | ", file=sys.stderr)
        except Exception as error:  # one network must not cost the table
            reason = str(error) if isinstance(error, CannotRunError) else shorten(error)
            left_out.append(f"{candidate.family}: {reason}")
            print(reason, file=sys.stderr)
        gc.collect()
    report.rows = [row.to_cells() for row in rows]
    report.remarks = [*make_remarks(rows), "Left out: " + "; ".join(left_out) if left_out else "No family was left out."]
    return report


def make_remarks(rows: Sequence[Row]) -> list[str]:
    """Return what the table says as a whole, and what its columns mean."""
    good = [row for row in rows if not row.failure]
    if not good:
        return [f"{len(rows)} networks, all of which failed."]
    unexpected, expected = (
        Counter(name for exits in table for name in {function for _, function in exits})
        for table in ([row.unexpected for row in good], [row.expected for row in good])
    )
    missed = [row.network for row in good if row.predicted not in (row.filtered, None)]
    unknown = [row.network for row in good if row.predicted is None]
    ratio = statistics.median(row.exact / row.filtered for row in good)
    return [
        f"{len(rows)} networks, {len(rows) - len(good)} of which failed; {sum(not row.unexpected for row in good)} have no "
        f"unexpected exit; largest patch-1 error {max(row.error for row in good):.0e}; median ratio {ratio:.1f}x.",
        f"Networks by unexpected exit: {list_counts(unexpected)}.",
        f"Networks by expected exit: {list_counts(expected)}.",
        f"Predicted saved bytes are the measured ones to the byte in {len(good) - len(missed) - len(unknown)} of {len(good)} "
        f"networks{'; not in ' + ', '.join(missed) if missed else ''}"
        f"{'; not predictable, for they make tensors of their own: ' + ', '.join(unknown) if unknown else ''}.",
        f"Patch-1 error: float64, largest over all parameters of |g - g_exact| / (|g_exact| + {FLOOR:.0e}·|largest|), by norm: "
        "a gradient that is zero but for rounding is held against the largest of the network. Dropout and stochastic depth are "
        "off, and a network that asks for float32 inside gets float64. Saved MB: float32, measured, batch norm in eval mode "
        "with its affine trained on both sides. Networks with standardised weights (resnetv2_50x1_bit, nfnet) hold a "
        "copy of those either way, which outweighs two small images.",
    ]


def list_counts(counts: Counter[str]) -> str:
    """Return names and how often they occur, the most frequent first."""
    return ", ".join(f"{name} {n}" for name, n in counts.most_common()) or "none"


def find_candidates() -> list[Candidate]:
    """List the rows: timm's families and the networks in them that people name, torchvision's, a U-Net."""
    timm, torchvision = (import_extra(package, "The coverage table") for package in ("timm", "torchvision"))
    found = []
    for family in timm.list_modules():
        members = [f"timm/{name}" for name in timm.list_models(module=family)]
        named = [f"timm/{name}" for name in TIMM_NAMED.get(family, "").split()]
        found.append(Candidate(f"timm {family}", members))
        found += [Candidate(f"timm {family}", [name]) for name in named]
    families: dict[str, list[tuple[int, str]]] = {}
    for name in torchvision.models.list_models(module=torchvision.models):
        family = torchvision.models.get_model_builder(name).__module__.rpartition(".")[2]
        parameters = torchvision.models.get_model_weights(name)["DEFAULT"].meta["num_params"]
        families.setdefault(family, []).append((parameters, f"torchvision/{name}"))
    found += [Candidate(f"torchvision {family}", [min(members)[1]]) for family, members in families.items()]
    found += [Candidate("torchvision segmentation", [f"torchvision/{name}"]) for name in SEGMENTATION]
    return [*found, Candidate("U-Net", [UNET])]


def is_convolutional(model: nn.Module) -> bool:
    """Tell whether a network has more convolutions than a patch embedding: two at least."""
    return sum(isinstance(m, nn.Conv2d) for m in model.modules()) >= 2


def find_by_size(members: Sequence[str]) -> dict[str, int]:
    """Return parameters by name, fewest first, of the convolutional members of one of timm's families."""
    sizes: dict[str, int] = {}
    for name in members:
        with torch.device("meta"):  # shapes only
            model = make_listed(name, num_classes=CLASSES)
        if is_convolutional(model):
            sizes[name] = sum(p.numel() for p in model.parameters())
    return dict(sorted(sizes.items(), key=lambda item: item[1]))


def make_smallest(members: Sequence[str], pixels: int) -> tuple[str, nn.Module]:
    """Return the smallest member of a family that runs on images of this size, with its name."""
    sizes = find_by_size(members) if len(members) > 1 else dict.fromkeys(members, 0)
    reasons = []
    for name in list(sizes)[:TRIES]:
        if sizes[name] > MOST_PARAMETERS:
            raise CannotRunError(f"{name} has {sizes[name] / 1e6:.0f} M parameters")
        try:
            model = make_runnable(name, pixels)
            if is_convolutional(model):
                return name, model
        except CannotRunError as error:
            reasons.append(str(error))
    raise CannotRunError(reasons[0] if reasons else "no member has two convolutions")


def make_runnable(name: str, pixels: int) -> nn.Module:
    """Return a network that runs on images of this size: built for it, where the constructor takes a size."""
    reasons = []
    sizes: list[dict[str, Any]] = [{"img_size": pixels}, {}, {"dynamic_img_size": True}]
    for size in sizes:
        try:
            with random_weights_from(None):
                model = make_listed(name, **{**OPTIONS.get(name, {"num_classes": CLASSES}), **size})
            with torch.no_grad():
                find_outputs(model.eval()(torch.zeros(BATCH, 3, pixels, pixels)))
            return model.train()
        except Exception as error:
            # A constructor that does not know an option says nothing of the network.
            if not size or not isinstance(error, TypeError):
                reasons.append(shorten(error))
    raise CannotRunError(f"{name} does not run at {pixels} px ({reasons[0]})")


def shorten(error: Exception) -> str:
    """Return an error as one short line."""
    text = f"{type(error).__name__}: {error}".splitlines()[0].replace("|", "/")
    return text if len(text) <= 120 else text[:117] + "..."


def measure_candidate(candidate: Candidate, pixels: int) -> Row:
    """Return the row of one family; what fails under a plan is part of it."""
    name, model = make_smallest(candidate.members, pixels)
    shake_(model)
    row = Row(candidate.family, name.rpartition("/")[2], sum(p.numel() for p in model.parameters()))
    images = torch.randn(BATCH, 3, pixels, pixels, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            measure_bytes(row, model, images)
            row.error = measure_error(model.double(), images.double())
        except Exception as error:
            row.failure = shorten(error)
    return row


def measure_bytes(row: Row, model: nn.Module, images: Tensor) -> None:
    """Fill in a row what both methods hold, and what the plan has met."""
    model.train()
    row.exact = measure_saved_bytes(freeze_statistics_(model), images)
    apply_(model.train(), Plan.all(Backward(patch=PATCH)))
    row.filtered = measure_saved_bytes(model, images)
    applied = find_applied(model)
    assert applied is not None
    row.convolutions = len(applied.resolved.convs)
    row.unexpected = applied.log.find_unexpected()
    row.expected = {key: reason for key, reason in applied.log.exits.items() if key not in row.unexpected}
    with suppress(Exception):  # a network that makes tensors of its own on a CPU does not run on shapes alone
        row.predicted = predict_saved_bytes(copy.deepcopy(model), images)  # some keep what they made for the next forward
    remove_(model)


def measure_error(model: nn.Module, images: Tensor) -> float:
    """Return the largest relative difference to the exact gradient at patch 1, over all parameters."""
    exact = find_gradients(freeze_statistics_(model.train()), images)
    gradients = find_gradients(apply_(model.train(), Plan.all(Backward(patch=1))), images)
    return find_difference(exact, gradients)


def find_difference(exact: Mapping[str, Tensor], gradients: Mapping[str, Tensor], floor: float = FLOOR) -> float:
    """Return the largest relative difference of gradients to the exact ones, over all parameters; see `FLOOR`."""
    largest = max(float(g.norm()) for g in exact.values())
    return max(float((gradients[k] - g).norm() / (g.norm() + floor * largest)) for k, g in exact.items())


def find_gradients(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return the gradients of all parameters; of those that none reaches, zeros."""
    model.zero_grad()
    # Some networks ask for float32 inside; under this they stay in float64.
    with torch.random.fork_rng(devices=[]), mock.patch.object(Tensor, "float", Tensor.double):
        torch.default_generator.manual_seed(0)
        outputs = find_outputs(model(images))
    generator = torch.Generator().manual_seed(1)
    losses = [(y * torch.randn(y.shape, dtype=y.dtype, generator=generator)).sum() for y in outputs]
    torch.stack(losses).sum().backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
