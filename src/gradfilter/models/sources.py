"""Where weights come from: local files, installed packages, and the hubs of other packages."""

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from unittest import mock
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor

from gradfilter.errors import MissingExtraError, WeightsError
from gradfilter.models.extras import import_extra
from gradfilter.models.registry import Entry, find_packages

_log = logging.getLogger(__name__)


class Weights(NamedTuple):
    """Hold tensors by key, and what to call their source in an error."""

    source: str
    tensors: dict[str, Tensor]


def find_weights(entry: Entry, weights: str | os.PathLike[str]) -> Weights:
    """Read what the `weights` argument of `make_model` names."""
    packaged = entry.package.find_file() if entry.package else None
    path = packaged if weights == "pretrained" else Path(weights)
    if path is None:
        source, tensors = f"What weights='pretrained' gives for {entry.info.name!r}", download_weights(entry)
    else:
        _log.info("weights of %s: %s", entry.info.name, path)
        source, tensors = f"Weight file '{path}'", read_weights(path)
    return Weights(source, entry.complete(tensors) if entry.complete else tensors)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a weight file, by key; a state_dict is taken out of its wrapper. Nothing is unpickled."""
    if not path.is_file():
        raise WeightsError(f"Weight file '{path}' does not exist. Check the path; published weights are weights='pretrained'.")
    is_safe = path.suffix.lower() == ".safetensors"
    try:
        content = _read_safetensors(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    except MissingExtraError:
        raise
    except Exception as error:  # a damaged file fails in many ways, and each of them means the same to the user
        raise WeightsError(
            f"Weight file '{path}' cannot be read as {'safetensors' if is_safe else 'torch weights'} ({type(error).__name__}). "
            "It is damaged, or another kind of file: fetch it again."
        ) from error
    state = content
    for wrapper in ("state_dict", "model"):  # training scripts save one of these, among other things
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            state = content[wrapper]
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise WeightsError(
            f"Weight file '{path}' holds no state_dict (a mapping of names to tensors). Save one with "
            "torch.save(model.state_dict(), path)."
        )
    return dict(state)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    import_extra("safetensors", f"Weight file '{path}'")  # named by itself where it is missing
    tensors = import_extra("safetensors.torch", f"Weight file '{path}'").load_file(path)
    # What a run needs to go on besides the model is in its checkpoints under such names, which no module has.
    return {key: value for key, value in tensors.items() if not key.startswith("/")}


def download_weights(entry: Entry) -> dict[str, Tensor]:
    """Return published weights from a hub: from its local cache, or else through the network."""
    given = f"weights='pretrained' was given for {entry.info.name!r}"
    if entry.download is None:
        raise WeightsError(
            f"{given}, but no pip package and no hub carries its weights. Give the path of a local file instead; published: "
            f"{entry.info.weights_from}. {list_offline()}"
        )
    _log.info("weights of %s: from the hub's cache, or through the network", entry.info.name)
    try:
        with give_up_early():
            return entry.download().state_dict()
    except MissingExtraError:
        raise
    except Exception as error:  # each hub fails in ways of its own, and they all mean the same to the user
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise WeightsError(
            f"{given}, but they cannot be fetched ({type(error).__name__}: {reason}). Is there a network? Without one, give "
            f"the path of a local .safetensors or .pth file; published: {entry.info.weights_from}. {list_offline()}"
        ) from error


def list_offline() -> str:
    """Name the models whose pretrained weights need no network."""
    return "Pretrained without a network: " + ", ".join(f"{n} ({p.install})" for n, p in find_packages().items()) + "."


@contextmanager
def give_up_early() -> Iterator[None]:
    """Let the Hugging Face hub, where timm's weights and those of encoders are, serve its cache alone if it cannot be reached.

    By itself it would try again and again, for most of a minute.
    """
    if not find_spec("huggingface_hub"):
        yield
        return
    constants = import_extra("huggingface_hub.constants", "timm's hub")  # by itself, the package does not import it
    offline = constants.HF_HUB_OFFLINE or not is_reachable(urlsplit(constants.ENDPOINT).hostname)
    with mock.patch.object(constants, "HF_HUB_OFFLINE", offline):
        yield


def is_reachable(host: str | None) -> bool:
    """Tell whether a host may be reached: its name is known, or a proxy stands between."""
    if getproxies():
        return True
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False
