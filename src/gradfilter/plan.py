"""Plans: which layer gets what. Plain frozen dataclasses, saved as YAML."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import yaml
from torch import nn

from gradfilter.errors import PlanError
from gradfilter.files import replace_file
from gradfilter.geometry.tiling import Pair, Tiling, make_pair, make_tiling
from gradfilter.keep import FULL, Keep, parse_keep

DEFAULT_GRID = 4
MOST_PREFIX = 16
"""So many tokens may stand in front of a grid of tokens: class and register tokens."""
LAST = re.compile(r"last ?(\d+)")
DECODER = ("decoder", "segmentation_head")
"""Names of the modules behind the encoder in our networks for segmentation, and in those of segmentation-models-pytorch."""
SHORTCUTS = ("downsample", "shortcut")
"""Names of modules whose convolutions the papers do not count among the last n: they run beside a block, not in it."""


@dataclass(frozen=True)
class Backward:
    """One layer's choices for its backward pass.

    Attributes:
        patch: Side of the square patch in pixels of the layer's own map, or `(h, w)`. 1 is exact backprop.
        grid: Patches per side, the same at every resolution, or `(h, w)`. The default is 4.
        kernel: "lift" for the best coarse kernel, "lumped" for the kernel's sum, as in the gradient-filtering paper.
        tokens: Size of the grid of tokens, a side or `(h, w)`: filters the Linear layers of vision transformers and mixers,
            which see tokens [N, L, C] or maps [N, H, W, C]. Up to `MOST_PREFIX` tokens in front of the grid (a class token)
            are patches by themselves. Without it a Linear layer is filtered inside a region that a convolution has entered.
        keep: How the layer's (pooled) input is held until backward. At run time its name will do: "int8", "hosvd:0.8".
    """

    patch: int | Pair | None = None
    grid: int | Pair | None = None
    kernel: Literal["lift", "lumped"] = "lift"
    tokens: int | Pair | None = None
    keep: Keep = FULL

    def __post_init__(self) -> None:
        """Check the choices, and fill in the default grid."""
        if self.patch is not None and self.grid is not None:
            raise PlanError(
                f"Backward got patch={self.patch} and grid={self.grid}. Each sets the resolution of the gradient: give one."
            )
        if self.patch is None and self.grid is None:
            object.__setattr__(self, "grid", DEFAULT_GRID)
        for name in ("patch", "grid", "tokens"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_size(name, value))
        if self.kernel not in ("lift", "lumped"):
            raise PlanError(f"Backward got kernel={self.kernel!r}. The kernels are 'lift' and 'lumped'.")
        object.__setattr__(self, "keep", parse_keep(self.keep))

    def make_tiling(self, image: Pair) -> Tiling:
        """Return how maps are cut in a network that sees inputs of size `image`."""
        if self.patch is not None:
            return make_tiling(patch=make_pair(self.patch))
        assert self.grid is not None
        return make_tiling(grid=make_pair(self.grid), image=image)

    def __str__(self) -> str:
        """Return the choices as a user would write them."""
        size = f"patch {self.patch}" if self.patch is not None else f"grid {self.grid}"
        size += f" tokens {self.tokens}" if self.tokens is not None else ""
        size = size if self.kernel == "lift" else f"{size} {self.kernel}"
        return size if self.keep == FULL else f"{size} {self.keep}"


def check_size(name: str, value: Any) -> int | Pair:
    """Return a patch or grid size, checked."""
    sides = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(sides) not in (1, 2) or any(not isinstance(n, Integral) or isinstance(n, bool) or n < 1 for n in sides):
        raise PlanError(f"Backward got {name}={value!r}. Give a whole number of at least 1, or a pair (h, w) of such numbers.")
    h, w = int(sides[0]), int(sides[-1])
    return h if h == w else (h, w)


@dataclass(frozen=True)
class Plan:
    """Which layers are trained, and how their gradient is filtered.

    Attributes:
        layers: From shell globs on dotted module names to `Backward`. A container covers everything below it, the first
            match wins. "last 4", or "last4", stands for the last four convolutions, counted as the papers do (shortcut
            projections left out), and the classifier, whose input, as in the papers, is held as it is.
        rest: What becomes of the other layers: "frozen", or "exact" for training with exact backprop.
        batch_norm: For the batch norms of trained layers: "eval" keeps their statistics and trains their affine, "train"
            lets the statistics move too, "frozen" trains neither. Those of frozen layers never move.
        trunk: What the frozen layers before the first trained one compute in while the model is trained: "float32", that is
            as the model does, or "bfloat16".
    """

    layers: Mapping[str, Backward] = field(default_factory=dict)
    rest: Literal["frozen", "exact"] = "frozen"
    batch_norm: Literal["eval", "train", "frozen"] = "eval"
    trunk: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        """Check the plan as far as that goes without a model."""
        if not isinstance(self.layers, Mapping) or any(
            not isinstance(k, str) or not isinstance(v, Backward) for k, v in self.layers.items()
        ):
            raise PlanError(f"Plan got layers={self.layers!r}. Give a mapping from layer patterns to Backward.")
        object.__setattr__(self, "layers", dict(self.layers))
        choices = {"rest": ("frozen", "exact"), "batch_norm": ("eval", "train", "frozen"), "trunk": ("float32", "bfloat16")}
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise PlanError(f"Plan got {name}={value!r}. The choices are {', '.join(map(repr, allowed))}.")

    @classmethod
    def last(cls, n: int, backward: Backward | None = None, **options: Any) -> Plan:
        """Return the plan that trains the last n convolutions and the classifier."""
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise PlanError(f"Plan.last got n={n!r}. Give how many convolutions to train, a whole number of at least 0.")
        return cls({f"last {n}": backward or Backward()}, **options)

    @classmethod
    def all(cls, backward: Backward | None = None, **options: Any) -> Plan:
        """Return the plan that trains every layer."""
        return cls({"*": backward or Backward()}, **options)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan that a word names, "all", "head", "decoder" or "last4", or that a YAML file or the text holds."""
        last = LAST.fullmatch(text)
        if is_plan_file(text):
            return cls.load(text)
        if text.startswith("{"):
            return cls.from_yaml(text)
        if text == "all":
            return cls.all()
        if text == "decoder":
            return cls(dict.fromkeys(DECODER, Backward()))
        if text == "head" or last:
            return cls.last(int(last[1]) if last else 0)
        raise PlanError(
            f"{text!r} is no plan. Give 'all', 'head', 'last4' for the last four convolutions and the classifier, 'decoder' "
            "for all behind the encoder of a segmentation network, or a file that ends in .yaml."
        )

    def override(self, **choices: Any) -> Plan:
        """Return the plan with other choices for all layers that it names; None says nothing."""
        given = {name: value for name, value in choices.items() if value is not None}
        if given.keys() & {"patch", "grid"}:
            given = {"patch": None, "grid": None, **given}  # one takes the place of the other
        layers = {pattern: dataclasses.replace(backward, **given) for pattern, backward in self.layers.items()}
        return dataclasses.replace(self, layers=layers)

    def to_yaml(self) -> str:
        """Return the plan as YAML; the trunk is left out where it is as ever."""
        layers = {pattern: backward_to_dict(backward) for pattern, backward in self.layers.items()}
        data = {"layers": layers, "rest": self.rest, "batch_norm": self.batch_norm}
        data |= {} if self.trunk == "float32" else {"trunk": self.trunk}
        return yaml.safe_dump(data, sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> Plan:
        """Read a plan from YAML."""
        try:
            data = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:
            raise PlanError(f"the plan is not YAML: {error}") from error
        known = {"layers", "rest", "batch_norm", "trunk"}
        if not isinstance(data, dict) or set(data) - known or not isinstance(data.get("layers", {}), dict):
            raise PlanError(f"a plan is a YAML mapping with the keys {', '.join(sorted(known))}; got {text.strip()[:200]!r}.")
        layers = {str(pattern): backward_from_dict(pattern, choices) for pattern, choices in data.pop("layers", {}).items()}
        return cls(layers, **data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a YAML file: whole, or not at all."""
        try:
            replace_file(path, self.to_yaml())
        except OSError as error:
            raise PlanError(f"cannot write the plan file {os.fspath(path)!r}: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a YAML file."""
        try:
            return cls.from_yaml(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"cannot read the plan file {os.fspath(path)!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise PlanError(f"the plan file {os.fspath(path)!r} is not text: {error}") from error


def is_plan_file(text: str) -> bool:
    """Tell whether what names a plan is a file."""
    return Path(text).suffix.lower() in (".yaml", ".yml")


def backward_to_dict(backward: Backward) -> dict[str, Any]:
    """Return a `Backward` as plain data, defaults left out."""
    data = {key: getattr(backward, key) for key in ("patch", "grid", "tokens")}
    data = {key: list(value) if isinstance(value, tuple) else value for key, value in data.items() if value is not None}
    data |= {} if backward.kernel == "lift" else {"kernel": backward.kernel}
    return data | ({} if backward.keep == FULL else {"keep": str(backward.keep)})


def backward_from_dict(pattern: Any, choices: Any) -> Backward:
    """Return a `Backward` from plain data."""
    known = {"patch", "grid", "kernel", "tokens", "keep"}
    if not isinstance(choices, (dict, type(None))) or set(choices or {}) - known:
        raise PlanError(
            f"plan pattern {pattern!r} has the choices {choices!r}. Give a mapping with {', '.join(sorted(known))}."
        )
    return Backward(**(choices or {}))


@dataclass(frozen=True)
class Resolved:
    """A plan spelled out for one model, by dotted names.

    Attributes:
        convs: The convolutions that run at patch resolution, and how.
        linears: The Linear layers that do so where their input is a map or a grid of tokens, and how.
        trained: The modules whose own parameters are trained.
        frozen_norms: The batch norms whose statistics do not move.
    """

    convs: dict[str, Backward]
    linears: dict[str, Backward]
    trained: frozenset[str]
    frozen_norms: tuple[str, ...]

    @property
    def layers(self) -> dict[str, Backward]:
        """All layers with choices."""
        return {**self.convs, **self.linears}


Conv = nn.Conv2d | nn.ConvTranspose2d
"""The layers at which a region is entered."""


def find_layers(model: nn.Module) -> dict[str, Conv | nn.Linear]:
    """List the layers a plan can name, in the order of registration."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Conv | nn.Linear)}


def find_norms(model: nn.Module) -> dict[str, str]:
    """Pair norms with the convolutions they stand behind: norm name to convolution name.

    Within one parent each convolution claims the next unclaimed norm with as many channels.
    """
    pairs: dict[str, str] = {}
    for parent, module in model.named_modules():
        prefix = f"{parent}." if parent else ""
        waiting: list[tuple[str, int]] = []
        for name, child in module.named_children():
            if isinstance(child, Conv):
                waiting.append((prefix + name, child.out_channels))
            channels = getattr(child, "num_features", getattr(child, "num_channels", None))
            claim = next((pair for pair in waiting if pair[1] == channels), None)
            if claim and not isinstance(child, Conv):
                waiting.remove(claim)
                pairs[prefix + name] = claim[0]
    return pairs


def find_last(model: nn.Module, n: int) -> frozenset[str]:
    """Return the last n convolutions, shortcut projections left out, and the classifier.

    That is the last Linear, or, in a network that has none, the last convolution.
    """
    layers = find_layers(model)
    convs = [k for k, m in layers.items() if isinstance(m, Conv) and not set(k.split(".")) & set(SHORTCUTS)]
    if n > len(convs):
        raise PlanError(
            f"the plan asks for the last {n} convolutions; the model has {len(convs)}. Use Plan.all to train them all."
        )
    classifier = [k for k, m in layers.items() if isinstance(m, nn.Linear)][-1:]
    return frozenset([*convs[len(convs) - n :], *(classifier or convs[-1:])])


def containers(name: str) -> list[str]:
    """List a module's dotted name and those of the containers around it."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def find_covered(pattern: str, model: nn.Module) -> set[str]:
    """Return the modules that a pattern covers: those it matches and all below them."""
    if last := is_last(pattern, model):
        return find_below(find_last(model, int(last[1])), model)
    names = [name for name, _ in model.named_modules()]
    return {name for name in names if any(fnmatchcase(part, pattern) for part in containers(name))}


def is_last(pattern: str, model: nn.Module) -> re.Match[str] | None:
    """Return the match of a pattern that stands for the last n convolutions; a model may have a module of that name."""
    last = LAST.fullmatch(pattern)
    return None if last is None or pattern in dict(model.named_modules()) else last


def find_below(names: Collection[str], model: nn.Module) -> set[str]:
    """Return modules by name, with what is below them (a parametrised weight is)."""
    return {name for name, _ in model.named_modules() if any(part in names for part in containers(name))}


def resolve(plan: Plan, model: nn.Module) -> Resolved:
    """Spell a plan out for a model.

    Raises:
        PlanError: The plan names layers that the model does not have, or there is nothing to filter.
    """
    layers = find_layers(model)
    has_conv = any(isinstance(m, Conv) for m in layers.values())
    if not has_conv and not any(b.tokens or b.keep != FULL for b in plan.layers.values()):
        raise PlanError(
            f"{type(model).__name__} has no Conv2d. gradfilter filters the gradients of 2-D convolutions, and of Linear layers "
            "on a grid of tokens where the plan says how large that is: Backward(tokens=14). What other Linear layers hold is "
            "compressed where the plan says how: Backward(patch=1, keep='int8')."
        )
    if not plan.layers and plan.rest == "frozen":
        raise PlanError("the plan names no layers and freezes the rest: it trains nothing. Name layers, or use Plan.last(n).")
    modules = dict(model.named_modules())
    matches = dict.fromkeys(modules, Backward(patch=1) if plan.rest == "exact" else None)
    for pattern, backward in reversed(list(plan.layers.items())):  # the first match wins: it is written last
        names = find_covered(pattern, model)
        if not any(True for name in names for _ in modules[name].parameters(recurse=False)):
            raise PlanError(explain_no_match(pattern, layers))
        matches.update(dict.fromkeys(names, backward))
        if is_last(pattern, model) and any(isinstance(layers.get(name), Conv) for name in names):
            # The input of a classifier is small, and its gradient is worth more than any other's.
            whole = dataclasses.replace(backward, keep=FULL)
            matches.update({name: whole for name in names if isinstance(layers.get(name), nn.Linear)})
    behind = find_norms(model)
    trained = {name for name, backward in matches.items() if backward is not None}
    trained |= find_below({norm for norm, conv in behind.items() if conv in trained}, model)
    norms = [name for name, m in modules.items() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if plan.batch_norm == "frozen":
        trained -= set(norms)
    frozen = tuple(name for name in norms if name not in trained or plan.batch_norm != "train")
    planned = {name: b for name in layers if (b := matches[name]) is not None}
    convs = {name: b for name, b in planned.items() if isinstance(layers[name], Conv)}
    linears = {name: b for name, b in planned.items() if name not in convs}
    return Resolved(convs, linears, frozenset(trained), frozen)


def explain_no_match(pattern: str, layers: Mapping[str, nn.Module]) -> str:
    """Return the error text for a pattern that matches no layer."""
    names = list(layers)
    known = dict.fromkeys(part for name in names for part in containers(name))
    near = difflib.get_close_matches(pattern, known, 3, 0.5) or names[:1]
    return (
        f"plan pattern {pattern!r} matches no Conv2d, Linear or other layer with parameters. The model has {len(names)} Conv2d "
        f"and Linear layers, e.g. {', '.join(map(repr, dict.fromkeys([*near, names[-1]])))}."
    )
