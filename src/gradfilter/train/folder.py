"""The folder of a run: which files are in it, and what may be done with those of an earlier run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from gradfilter.errors import CheckpointError, SettingsError
from gradfilter.train.checkpoint import load_checkpoint
from gradfilter.train.settings import Settings

CONFIG, PLAN, METRICS, RESULTS = "config.yaml", "plan.yaml", "metrics.csv", "results.json"
LAST, BEST = "last.safetensors", "best.safetensors"
REPORTS = "report.html", "report.png"
LOGS = "tensorboard"
"""Files of a run's folder, and the folder in it for TensorBoard's."""


def check_run(settings: Settings) -> None:
    """Refuse to write over another run, or to go on with none."""
    last = settings.folder / LAST
    started = last.exists() or (settings.folder / CONFIG).exists()
    if settings.resume and not started:
        raise SettingsError(
            f"--resume was given, but the folder '{settings.folder}' holds no run to go on with. Check --out, or leave "
            "--resume out to start one."
        )
    if started and not settings.resume and not settings.overwrite:
        raise SettingsError(
            f"the folder '{settings.folder}' holds a run already. Go on with it (--resume), replace it (--overwrite), or give "
            "another folder (--out)."
        )
    if settings.resume and last.exists():
        refuse_changes(settings, settings.find_changes(load_last(settings.folder)[2]["settings"]))


def refuse_changes(settings: Settings, changes: list[str]) -> None:
    """Refuse to go on with a run that would not be the same one."""
    if changes:
        raise SettingsError(
            f"the run in '{settings.folder}' cannot be resumed: {'; '.join(changes)}. Give what it was started with (--config "
            f"{settings.folder / CONFIG}), or another --out."
        )


def remove_run(folder: Path) -> None:
    """Remove a run's files, its checkpoints first, then its settings; no others, nor its cache, which later runs can use."""
    logs = folder / LOGS
    names = (LAST, CONFIG, BEST, METRICS, RESULTS, *REPORTS)
    for path in (*(folder / name for name in names), *logs.glob("events.out.tfevents.*")):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # not there, or not empty
        logs.rmdir()


def load_last(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Read the checkpoint to go on from."""
    weights, extra, about = load_checkpoint(folder / LAST)
    if not about.keys() >= {"settings", "plan", "classes", "data", "state"}:
        raise CheckpointError(
            f"'{folder / LAST}' holds weights, but no run to go on with: it is a copy of another file. Start again with "
            "--overwrite, and --weights for these."
        )
    return weights, extra, about


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say what to do where a file of the run cannot be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write to '{folder}': {error.strerror or error}. The checkpoints there are whole. Make room, or give the "
            "folder write permission, then go on with --resume."
        ) from error
