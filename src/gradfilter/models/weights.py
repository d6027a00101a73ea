"""Where weights come from: random ones, files, packages and the hub; loaded strictly: every tensor is used and found."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradfilter.errors import GradFilterError, MissingExtraError, WeightsError
from gradfilter.models.extras import import_extra
from gradfilter.models.registry import Entry, find_packages

_SHOWN = 3
_log = logging.getLogger(__name__)

Shapes = dict[str, torch.Size]


class Weights(NamedTuple):
    """Hold tensors by key, and what to call their source in an error."""

    source: str
    tensors: dict[str, Tensor]


@contextmanager
def random_weights_from(generator: torch.Generator | None) -> Iterator[None]:
    """Let modules built inside draw their weights from `generator`, and restore the global random state after."""
    generator = torch.Generator() if generator is None else generator
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    # torch.manual_seed would reseed the accelerators too, which an empty `devices` does not restore.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def find_weights(entry: Entry, weights: str | os.PathLike[str]) -> Weights:
    """Read what the `weights` argument of `make_model` names."""
    if weights != "pretrained":
        return Weights(f"Weight file '{os.fspath(weights)}'", read_weights(Path(weights)))
    path = entry.package.find_file() if entry.package else None
    if path is not None:
        _log.info("weights of %s: %s", entry.info.name, path)
        return Weights(f"Weight file '{path}'", read_weights(path))
    return Weights(f"What weights='pretrained' gives for {entry.info.name!r}", download_weights(entry))


def download_weights(entry: Entry) -> dict[str, Tensor]:
    """Return published weights from the hub: from its local cache, or else through the network."""
    name = entry.info.name
    given = f"weights='pretrained' was given for {name!r}"
    if entry.download is None:
        raise WeightsError(
            f"{given}, but no pip package and no hub carries its weights. Give the path of a local file instead: "
            f"{entry.info.weights_from}. {list_offline()}"
        )
    _log.info("weights of %s: from the hub's cache, or through the network", name)
    try:
        return entry.download().state_dict()
    except MissingExtraError:
        raise
    except Exception as error:  # each hub fails in ways of its own, and they all mean the same to the user
        reason = (str(error).splitlines() or [""])[0]
        package = f"install the package that carries them ({entry.package.install}), or " if entry.package else ""
        raise WeightsError(
            f"{given}, but they could not be fetched ({type(error).__name__}: {reason}). Is there a network? Without one, "
            f"{package}give the path of a local file, a .safetensors or .pth from {entry.info.weights_from}. {list_offline()}"
        ) from error


def list_offline() -> str:
    """Name the models whose pretrained weights need no network."""
    return "Pretrained without a network: " + ", ".join(f"{n} ({p.install})" for n, p in find_packages().items()) + "."


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a weight file, by key; a `state_dict` inside is taken out of its wrapper. Nothing is unpickled."""
    if not path.is_file():
        raise WeightsError(
            f"Weight file '{path}' does not exist. Check the path, or give weights='pretrained' for published ones."
        )
    is_safe = path.suffix == ".safetensors"
    try:
        content = _read_safetensors(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    except MissingExtraError:
        raise
    except Exception as error:  # a damaged file fails in many ways, and each of them means the same to the user
        raise WeightsError(
            f"Weight file '{path}' cannot be read as {'safetensors' if is_safe else 'torch weights'} ({type(error).__name__}). "
            "It is damaged, or another kind of file: fetch it again."
        ) from error
    state = content.get("state_dict", content) if isinstance(content, Mapping) else content
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise WeightsError(
            f"Weight file '{path}' holds no state_dict (a mapping of names to tensors). Save one with "
            "torch.save(model.state_dict(), path)."
        )
    return dict(state)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    import_extra("safetensors", f"Weight file '{path}'")
    return import_extra("safetensors.torch", f"Weight file '{path}'").load_file(path)


def build_with_weights(entry: Entry, weights: Weights, classes: int | None) -> nn.Module:
    """Build a model, load weights into it, and leave its classifier fresh where `classes` is not what they were made for.

    Raises:
        WeightsError: One error that names every kind of misfit.
    """
    shapes = find_shapes(entry, None)
    classifier = find_classifier(entry, shapes)
    pairs = pair_keys(entry, list(shapes), weights.tensors)
    held = [weights.tensors[pairs[key]] for key in classifier if pairs.get(key) in weights.tensors]
    outputs = held[0].shape[0] if held and held[0].numel() else None
    if outputs is None:
        shapes = {key: shape for key, shape in shapes.items() if key not in classifier}
    elif outputs != shapes[classifier[0]][0]:
        shapes = find_shapes(entry, outputs)
    tensors = fit_tensors(entry, shapes, pairs, weights)
    if classifier and outputs is None and classes is None:
        raise WeightsError(
            f"{weights.source} holds no classifier of {entry.info.name!r}. Give classes, the number of outputs of a fresh one."
        )
    model = entry.build(outputs if classes is None else classes)
    kept = {key: value for key, value in tensors.items() if classes in (None, outputs) or key not in classifier}
    model.load_state_dict({**model.state_dict(), **kept})
    return model


def find_shapes(entry: Entry, classes: int | None) -> Shapes:
    """Return the shapes of all tensors of a model, without computing its weights where that can be avoided."""
    model = None
    if entry.on_meta:
        # Some constructors compute with tensors, which have no values on the meta device.
        with suppress(NotImplementedError), torch.device("meta"):
            model = entry.build(classes)
    model = entry.build(classes) if model is None else model
    return {key: value.shape for key, value in model.state_dict().items()}


def find_classifier(entry: Entry, shapes: Shapes) -> list[str]:
    """Return the keys of the tensors whose shape follows from the number of classes."""
    other = 1 + max((size for shape in shapes.values() for size in shape), default=0)
    try:
        others = find_shapes(entry, other)
    except GradFilterError:
        return []  # a user's model without a classifier that could be replaced
    return [key for key, shape in shapes.items() if others[key] != shape]


def pair_keys(entry: Entry, own: list[str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map the keys of a model to those of a file, in the naming that finds the most: the published one, ours, a wrapper's."""
    published = entry.pair_keys(own, list(tensors))
    wrapped = {key: f"module.{key}" for key in own}  # as a DataParallel saves it
    namings = [published, {key: key for key in own}, wrapped]
    return max(namings, key=lambda pairs: sum(key in tensors for key in pairs.values()))


def fit_tensors(entry: Entry, shapes: Shapes, pairs: Mapping[str, str], weights: Weights) -> dict[str, Tensor]:
    """Return the tensors of a file under the model's keys; raise one error that names every kind of misfit."""
    found: dict[str, Tensor] = {}
    missing, misshapen = [], []
    for key, shape in shapes.items():
        public = pairs.get(key, key)
        if key in pairs and public in weights.tensors:
            found[key] = weights.tensors[public]
            if found[key].shape != shape:
                misshapen.append(f"{public} is {list(found[key].shape)}, not {list(shape)}")
        elif not key.endswith("num_batches_tracked"):  # older files lack this counter, and it does not enter the output
            missing.append(public)
    used = set(pairs.values())
    misfits = [
        *_name_some("missing", missing),
        *_name_some("unexpected", [key for key in weights.tensors if key not in used]),
        *_name_some("of another shape", misshapen),
    ]
    if misfits:
        raise WeightsError(
            f"{weights.source} does not fit model {entry.info.name!r}: {'; '.join(misfits)}. "
            f"Is it the file of another model? This one takes {entry.info.weights_from}."
        )
    return found


def _name_some(what: str, keys: list[str]) -> list[str]:
    """Describe a list of offending keys by its length and its first few; nothing for an empty list."""
    if not keys:
        return []
    more = ", ..." if len(keys) > _SHOWN else ""
    return [f"{len(keys)} {what} ({', '.join(keys[:_SHOWN])}{more})"]
