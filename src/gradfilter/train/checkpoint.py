"""Checkpoints: one safetensors file each, with everything that is no tensor as JSON in its header.

One file, because two cannot be replaced in one step. The model's tensors have their own names, so that the best weights load
into a plain model; what else a run needs to go on has names that begin with "/", which no module name does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfilter.apply import keep_state, load_keep_state_
from gradfilter.errors import CheckpointError
from gradfilter.files import replace_file
from gradfilter.models.extras import import_extra

FORMAT = "gradfilter"
"""Key of the JSON in the header."""
VERSION = 1
RUN = "/"
"""What the names of tensors begin with that are not the model's."""
KEEPS = f"{RUN}keep/"
"""What the names of those begin with that keeps remember."""


def save_checkpoint(path: Path, model: nn.Module, extra: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a checkpoint, in place of the one that is there: whole, or not at all.

    Args:
        path: The file.
        model: Its parameters and buffers are written under their own names.
        extra: Other tensors; their names begin with "/".
        about: What is no tensor, as plain data.
    """
    safetensors = import_extra("safetensors.torch", "Writing checkpoints")
    tensors = {**model.state_dict(), **extra}
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    data = safetensors.save(tensors, {FORMAT: json.dumps({"version": VERSION, **about})})
    try:
        replace_file(path, data)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint '{path}' ({len(data) / 1e6:.1f} MB) cannot be written: {error.strerror or error}. "
            + ("The one before it is untouched. " if path.exists() else "")
            + "Make room or give the folder write permission, then go on with --resume."
        ) from error


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint: the model's tensors, the run's own, and what is no tensor."""
    safetensors = import_extra("safetensors", "Reading checkpoints")
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint '{path}'. Check the folder; 'gradfilter train' makes one in it.")
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(FORMAT, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint '{path}' cannot be read: {error}. It is damaged, or another kind of file."
        ) from error
    if not isinstance(about, dict) or about.get("version") != VERSION:
        raise CheckpointError(
            f"'{path}' is no checkpoint of this version of gradfilter. Give a file that 'gradfilter train' has written; plain "
            "weights are for --weights."
        )
    model = {name: tensor for name, tensor in tensors.items() if not name.startswith(RUN)}
    return model, {name: tensor for name, tensor in tensors.items() if name.startswith(RUN)}, about


def pack_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's state as named tensors."""
    state = optimizer.state_dict()["state"]
    return {
        f"{RUN}optimizer/{index}/{key}": torch.as_tensor(value)
        for index, values in state.items()
        for key, value in values.items()
        if value is not None
    }


def unpack_optimizer_(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimizer its state back."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, *rest = name.removeprefix(RUN).split("/")
        if kind == "optimizer":
            state.setdefault(int(rest[0]), {})[rest[1]] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def pack_keeps(model: nn.Module) -> dict[str, Tensor]:
    """Return what the keeps of a model remember, as named tensors."""
    return {f"{KEEPS}{name}": tensor for name, tensor in keep_state(model).items()}


def unpack_keeps_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let the keeps of a model remember again; nothing, where a checkpoint is from before there were any."""
    load_keep_state_(model, {name.removeprefix(KEEPS): x for name, x in tensors.items() if name.startswith(KEEPS)})


def check_folder(folder: Path, needed: int) -> None:
    """Find out before training whether checkpoints can be written: space on the disk, the folder, its permissions."""
    place = folder.absolute()
    try:
        free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
        if free < needed:
            raise CheckpointError(
                f"the checkpoints need {needed / 1e6:.1f} MB, and the disk of '{folder}' has {free / 1e6:.1f} MB free. Make "
                "room, or give a folder on another disk with --out."
            )
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        replace_file(probe, b"")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"the folder '{folder}' cannot be written to: {error.strerror or error}. Give another one with --out."
        ) from error
