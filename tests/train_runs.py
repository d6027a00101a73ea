"""Small runs of `gradfilter train` to test on, and what to compare of them."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import gradfilter
from gradfilter.report import Epoch
from gradfilter.train import Settings
from gradfilter.train.checkpoint import load_checkpoint

CLASSES = ("apple", "pear", "plum")
SMALL: dict[str, Any] = {
    "model": "train_nets:small",
    "weights": "random",
    "resolution": 12,
    "plan": "all",
    "patch": 2,
    "epochs": 3,
    "batch": 4,
    "lr": 0.05,
    "measure": False,
    "device": "cpu",
}
"""A run of a few milliseconds per step, with everything random in it: weights, order, augmentation, dropout."""
CLOCK = ("images_per_second", "seconds")
"""What two runs of the same settings may differ in."""


def make_photos(folder: Path, classes: tuple[str, ...] = CLASSES, each: int = 8, seed: int = 0) -> Path:
    """Write noisy images, of another colour for each class."""
    generator = np.random.default_rng(seed)
    for i, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(each):
            pixels = generator.integers(0, 120, (10, 12, 3))
            pixels[..., i % 3] += 80
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:02}.png")
    return folder


def make_settings(photos: Path, out: Path, **changes: Any) -> Settings:
    return Settings(**{**SMALL, "data": str(photos), "out": str(out), **changes})


def find_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a run: the best weights, the last, and the optimizer's state."""
    best, _, _ = load_checkpoint(folder / "best.safetensors")
    last, extra, _ = load_checkpoint(folder / "last.safetensors")
    files = {"best": best, "last": last, "extra": extra}
    return {f"{file}: {name}": tensor for file, tensors in files.items() for name, tensor in tensors.items()}


def find_history(folder: Path) -> list[dict[str, str]]:
    """Return the epochs of a run without their times; numbers as text, which tells NaN from others and is exact."""
    _, _, about = load_checkpoint(folder / "last.safetensors")
    epochs = [Epoch(**epoch) for epoch in about["state"]["history"]]
    return [{key: repr(value) for key, value in vars(epoch).items() if key not in CLOCK} for epoch in epochs]


def assert_same_run(folder: Path, expected: Path) -> None:
    """Assert that two runs ended with the same bits: weights, optimizer, losses, accuracies."""
    ours, theirs = find_weights(folder), find_weights(expected)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert find_history(folder) == find_history(expected)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def make_environment() -> dict[str, str]:
    """Return the environment for a process of its own that imports what this one does."""
    paths = [str(Path(gradfilter.__file__).parents[1]), str(Path(__file__).parent)]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def make_command(*arguments: str) -> list[str]:
    """Return the command line of a real `gradfilter`."""
    return [sys.executable, "-m", "gradfilter", *arguments]


def skip_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs end without drawing their report, where a test does not look at it."""
    monkeypatch.setattr("gradfilter.train.run.write_report", lambda *arguments: None)
