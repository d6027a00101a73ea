"""Where weights come from: random ones, and local files, loaded strictly: every tensor is used, and every tensor is found."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from gradfilter.errors import WeightsError
from gradfilter.models.registry import Entry

_SHOWN = 3


@contextmanager
def random_weights_from(generator: torch.Generator | None) -> Iterator[None]:
    """Let modules built inside draw their weights from `generator`, and restore the global random state after."""
    generator = torch.Generator() if generator is None else generator
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    # torch.manual_seed would reseed the accelerators too, which an empty `devices` does not restore.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def weights_path(entry: Entry, weights: str | os.PathLike[str] | None) -> Path | None:
    """Turn the `weights` argument of `make_model` into a file to read, or None for random weights."""
    if weights is None:
        return None
    if weights != "pretrained":
        return Path(weights)
    if entry.pretrained is None:
        raise WeightsError(
            f"weights='pretrained' was given, but no pip package carries weights of {entry.info.name!r}. "
            f"Give the path of a local file instead: {entry.info.weights_from}."
        )
    return entry.pretrained()


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a torch weight file, by key; a `state_dict` inside is taken out of its wrapper."""
    if not path.is_file():
        raise WeightsError(f"Weight file '{path}' does not exist. Check the path.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails in many ways, and each of them means the same to the user
        raise WeightsError(
            f"Weight file '{path}' cannot be read as torch weights ({type(error).__name__}). "
            "It is damaged, or another kind of file: fetch it again."
        ) from error
    state = content.get("state_dict", content) if isinstance(content, Mapping) else content
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise WeightsError(
            f"Weight file '{path}' holds no state_dict (a mapping of names to tensors). Save one with "
            "torch.save(model.state_dict(), path)."
        )
    return dict(state)


def load_weights_(model: nn.Module, path: Path, entry: Entry) -> None:
    """Load a weight file into `model`; raise one error that names every kind of misfit, and change nothing then."""
    state = read_weights(path)
    own = model.state_dict()
    pairs = entry.pair_keys(list(own), list(state))
    found: dict[str, Tensor] = {}
    missing, misshapen = [], []
    for key, value in own.items():
        public = pairs.get(key, key)
        if key in pairs and public in state:
            found[key] = state[public]
            if state[public].shape != value.shape:
                misshapen.append(f"{public} is {list(state[public].shape)}, not {list(value.shape)}")
        elif key.endswith("num_batches_tracked"):
            found[key] = value  # older files lack this counter, and it does not enter the output
        else:
            missing.append(public)
    used = set(pairs.values())
    misfits = [
        *_name_some("missing", missing),
        *_name_some("unexpected", [key for key in state if key not in used]),
        *_name_some("of another shape", misshapen),
    ]
    if misfits:
        raise WeightsError(
            f"Weight file '{path}' does not fit model {entry.info.name!r}: {'; '.join(misfits)}. "
            f"Is it the file of another model? This one takes {entry.info.weights_from}."
        )
    model.load_state_dict(found)


def _name_some(what: str, keys: list[str]) -> list[str]:
    """Describe a list of offending keys by its length and its first few; nothing for an empty list."""
    if not keys:
        return []
    more = ", ..." if len(keys) > _SHOWN else ""
    return [f"{len(keys)} {what} ({', '.join(keys[:_SHOWN])}{more})"]
