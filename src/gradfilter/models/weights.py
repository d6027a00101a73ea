"""Load weights into models, strictly: every tensor is used, and every tensor is found."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from gradfilter.errors import GradFilterError, WeightsError
from gradfilter.models.registry import Entry
from gradfilter.models.sources import Weights

_SHOWN = 3

Shapes = dict[str, torch.Size]


@contextmanager
def random_weights_from(generator: torch.Generator | None) -> Iterator[None]:
    """Let modules built inside draw their weights from `generator`, and restore the global random state after."""
    generator = torch.Generator() if generator is None else generator
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    # torch.manual_seed would reseed the accelerators too, which an empty `devices` does not restore.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def build_with_weights(entry: Entry, weights: Weights, classes: int | None) -> nn.Module:
    """Build a model, load weights into it, and leave its classifier fresh where `classes` is not what they were made for.

    Raises:
        WeightsError: One error that names every kind of misfit.
    """
    shapes = find_shapes(entry, None)
    others = find_other_shapes(entry, shapes)
    classifier = [key for key, shape in others.items() if shape != shapes.get(key)]
    pairs = pair_keys(entry, list(others), weights.tensors)
    held = [weights.tensors[pairs[key]] for key in classifier if pairs.get(key) in weights.tensors]
    outputs = held[0].shape[0] if held and held[0].ndim and held[0].numel() else None
    if outputs is None:
        shapes = {key: shape for key, shape in shapes.items() if key not in classifier}
    else:
        shapes = find_shapes(entry, outputs)
    tensors = fit_tensors(entry, shapes, pairs, weights)
    if classifier and outputs is None and classes is None:
        raise WeightsError(
            f"{weights.source} holds no classifier of {entry.info.name!r}. Give classes, the number of outputs of a fresh one."
        )
    model = entry.build(outputs if classes is None else classes)
    kept = {key: value for key, value in tensors.items() if classes in (None, outputs) or key not in classifier}
    model.load_state_dict({**model.state_dict(), **kept})
    start_small(model, [key for key in classifier if key not in kept])
    return model


def start_small(model: nn.Module, classifier: list[str]) -> None:
    """Let a fresh classifier behind trained layers start with weights of standard deviation 0.01 and no bias.

    Its first gradients reach the trained layers through those weights: larger ones, as some networks' own initialisation
    gives (timm's EfficientNets divide by the number of classes, not of features), spoil in a few steps what was learnt.
    Not zero, which would be the end of a classifier with a ReLU behind it (SqueezeNet).
    """
    for key, parameter in model.named_parameters():
        if key in classifier and parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.01)
        elif key in classifier and key.endswith("bias"):
            nn.init.zeros_(parameter)


def find_shapes(entry: Entry, classes: int | None) -> Shapes:
    """Return the shapes of all tensors of a model."""
    return {key: value.shape for key, value in build_shapes(entry, classes).state_dict().items()}


def build_shapes(entry: Entry, classes: int | None = None) -> nn.Module:
    """Build a model for its shapes: on the meta device, where that works."""
    if entry.on_meta:
        # Some constructors compute with tensors, which have no values on the meta device.
        with suppress(NotImplementedError), torch.device("meta"):
            return entry.build(classes)
    return entry.build(classes)


def find_other_shapes(entry: Entry, shapes: Shapes) -> Shapes:
    """Return the shapes for another number of classes: those that differ are of the classifier, whatever it is called."""
    other = 1 + max((size for shape in shapes.values() for size in shape), default=0)
    try:
        return find_shapes(entry, other)
    except GradFilterError:
        return shapes  # a user's model without a classifier that could be replaced


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
            f"Is it the file of another model? Published for this one: {entry.info.weights_from}."
        )
    return found


def _name_some(what: str, keys: list[str]) -> list[str]:
    """Describe a list of offending keys by its length and its first few; nothing for an empty list."""
    if not keys:
        return []
    more = ", ..." if len(keys) > _SHOWN else ""
    return [f"{len(keys)} {what} ({', '.join(keys[:_SHOWN])}{more})"]
