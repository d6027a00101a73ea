"""Small runs of `gradfilter train` to test on, and what to compare of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import gradfilter
from gradfilter.report import Epoch
from gradfilter.train import Settings, lock
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
    """Return the contents of all files below a folder, but for the lock, which is there while a run is at work."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != lock.NAME]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def make_environment() -> dict[str, str]:
    """Return the environment for a process of its own that imports what this one does."""
    paths = [str(Path(gradfilter.__file__).parents[1]), str(Path(__file__).parent)]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def make_command(*arguments: str) -> list[str]:
    """Return the command line of a real `gradfilter`."""
    return [sys.executable, "-m", "gradfilter", *arguments]


class Process:
    """A real `gradfilter train` that waits in the middle of a step."""

    def __init__(self, folder: Path, command: list[str], inputs: int) -> None:
        self.gate = folder / "gate"
        self.gate.write_text(str(inputs))
        environment = {**make_environment(), "TRAIN_GATE": str(self.gate)}
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Tests that run in the background of a shell have Ctrl-C ignored, and their children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.wait_for("reached")

    def wait_for(self, what: str) -> None:
        while not self.gate.with_name(f"gate.{what}").exists():
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)  # as a terminal does: the workers get it too

    def finish(self) -> tuple[int, str]:
        for path in self.gate.parent.glob("gate*"):
            path.unlink()
        _, errors = self.process.communicate()
        return self.process.returncode, errors
