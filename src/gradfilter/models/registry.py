"""The table of our own model names: what each expects of its input, how it is built, how its weight files name things."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor, nn

from gradfilter.errors import ModelNameError

Build = Callable[[int | None], nn.Module]
Triple = tuple[float, float, float]
PairKeys = Callable[[Sequence[str], Sequence[str]], dict[str, str]]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ModelInfo:
    """Say what a model expects and where its weights come from.

    Attributes:
        name: The name that `make_model` takes.
        resolution: Height and width of the images it was trained on, in pixels.
        mean: Per channel, to subtract from images in [0, 1].
        std: Per channel, to divide by afterwards.
        classes: Number of outputs of the published weights; None where it has none, or where only building it tells.
        weights_from: Where the published weights are found; "none" where nobody is known to publish them.
    """

    name: str
    resolution: int
    mean: Triple
    std: Triple
    classes: int | None
    weights_from: str


@dataclass(frozen=True)
class Package:
    """Name a pip package that carries a weight file. It is never imported: only the file is read.

    Attributes:
        module: The name it is imported by.
        file: The weight file, within the package.
        install: The command that installs it.
    """

    module: str
    file: str
    install: str

    def find_file(self) -> Path | None:
        """Return the weight file, or None where the package is not installed."""
        spec = find_spec(self.module)
        path = Path(spec.origin).parent / self.file if spec and spec.origin else None
        return path if path and path.is_file() else None


@dataclass(frozen=True)
class Entry:
    """Hold all that building a model takes.

    Attributes:
        info: What users see.
        build: Makes the model with random weights for a number of classes; for its own number where that is None.
        pair_keys: Maps our state_dict keys to those of its public weight files; takes both lists of keys, in order.
        package: The pip package that carries weights, if there is one.
        download: Makes the model with its published weights, from the local cache or the network; None where nobody
            publishes them that way.
        on_meta: Whether `build` may run on the meta device, where only shapes are computed.
        complete: Makes the tensors of the model of those that were found; None where these are all there is to it.
    """

    info: ModelInfo
    build: Build
    pair_keys: PairKeys
    package: Package | None = None
    download: Callable[[], nn.Module] | None = None
    on_meta: bool = True
    complete: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None

    @property
    def is_carried(self) -> bool:
        """Tell whether a package or a hub carries weights, for weights="pretrained"."""
        return self.package is not None or self.download is not None


_entries: dict[str, Entry] = {}
_aliases: dict[str, str] = {}


def register(entry: Entry, *aliases: str) -> None:
    """Add a model, under further names too; a name that is taken is refused."""
    name = entry.info.name
    for alias in (name, *aliases):
        if _squash(alias) in _aliases:
            raise ModelNameError(f"A model named {alias!r} is registered already. Choose another name.")
    _entries[name] = entry
    _aliases.update((_squash(alias), name) for alias in (name, *aliases))


def find_models() -> dict[str, ModelInfo]:
    """List our own models by name: the first choices of what `make_model` builds."""
    return {name: _entries[name].info for name in sorted(_entries)}


def find_registered(name: str) -> Entry | None:
    """Look up one of our own models; dashes and underscores do not count."""
    own = _aliases.get(_squash(name))
    return None if own is None else _entries[own]


def find_packages() -> dict[str, Package]:
    """List the packages that carry weights, by the name of the model."""
    return {name: package for name in sorted(_entries) if (package := _entries[name].package)}


def pair_plainly(own: Sequence[str], _public: Sequence[str]) -> dict[str, str]:
    """Map every key to itself: the weight files name things as the model does."""
    return {key: key for key in own}


def pair_by_order(own: Sequence[str], public: Sequence[str]) -> dict[str, str]:
    """Map the n-th key to the n-th, whatever its name.

    A pair whose last parts differ (say weight and running_mean) is no pair: left out, both of its keys are reported.
    """
    pairs = zip(own, public, strict=False)
    return {ours: theirs for ours, theirs in pairs if ours.rpartition(".")[2] == theirs.rpartition(".")[2]}


def _squash(name: str) -> str:
    return name.replace("-", "").replace("_", "").lower()
