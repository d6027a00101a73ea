"""Kill training runs at random moments, many times, and resume each until it is done: `python killed_runs.py FOLDER`.

One process imports everything once, then forks a child for every attempt. What is on disk is looked at after every kill, and
what a run ends with is compared with a run that nobody interrupted. Prints how often it killed as JSON.
"""

import contextlib
import csv
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import yaml

from gradfilter.report import Epoch, Results
from gradfilter.train import run, train
from gradfilter.train.checkpoint import load_checkpoint
from gradfilter.train.watch import Step, Watch
from train_runs import CLASSES, assert_same_run, make_photos, make_settings

KILLS = 7
"""At least so many for each kind of run."""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"save_every": 1},
    "moving statistics, adamw": {"batch_norm": "train", "optimizer": "adamw", "lr": 0.01, "save_every": 2, "val_every": 2},
    "cache in memory": {"plan": "last1", "cache": "memory", "views": 2, "save_every": 1},
    "cache on disk": {"plan": "last1", "cache": "disk", "views": 2, "batch_norm": "train", "save_every": 2},
    "subspaces": {"keep": "subspace:0.9", "save_every": 1},
    "stochastic rounding": {"keep": "int8", "patch": 1, "save_every": 2},
}


class Pipe(Watch):
    """Writes a byte for all that happens."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def tell(self, text: str) -> None:
        os.write(self.handle, b"t")

    def step(self, step: Step) -> None:
        os.write(self.handle, b"s")

    def epoch(self, epoch: Epoch, epochs: int, is_best: bool) -> None:
        os.write(self.handle, b"e")


def attempt(photos: Path, folder: Path, choices: dict[str, Any], moment: random.Random | None) -> bool:
    """Train in a child, which is killed after some of what it does, and a random while; tell whether it was done before."""
    is_resumed = (folder / "config.yaml").exists()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            train(make_settings(photos, folder, resume=is_resumed, **choices), Pipe(writing))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    wait_for(reading, moment)
    if moment is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    os.close(reading)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run failed"
    return os.WIFEXITED(status)


def wait_for(reading: int, moment: random.Random | None) -> None:
    """Wait for some of what a child tells and a random while, or until it ends."""
    for _ in range(moment.randrange(12) if moment else sys.maxsize):
        if not os.read(reading, 1):
            return
    if moment:
        time.sleep(moment.random() ** 3 * 0.1)


def check_folder(folder: Path, counts: Counter[str]) -> None:
    """Assert that every file is whole, and that at most the last process has left a draft."""
    for name in ("last", "best"):
        if (folder / f"{name}.safetensors").exists():
            weights, _, about = load_checkpoint(folder / f"{name}.safetensors")
            assert tuple(about["classes"]) == CLASSES
            assert all(tensor.isfinite().all() for tensor in weights.values())
            counts[name] += 1
    if (folder / "config.yaml").exists():
        assert yaml.safe_load((folder / "config.yaml").read_text())["out"] == str(folder)
    if (folder / "metrics.csv").exists():
        rows = list(csv.reader((folder / "metrics.csv").read_text().splitlines()))
        assert {len(row) for row in rows} == {len(fields(Epoch))}
    if (folder / "results.json").exists():
        Results.from_dict(json.loads((folder / "results.json").read_text()))
    drafts = {path.name.split(".")[-2] for path in folder.rglob(".*.tmp")}
    assert len(drafts) <= 1, drafts
    counts["drafts"] += len(drafts)


def main(root: Path) -> None:
    torch.set_num_threads(1)
    photos, counts = make_photos(root / "photos"), Counter[str]()
    moment = random.Random(0)
    for kind, choices in KINDS.items():
        sys.stderr.write(f"{kind}\n")
        expected = root / kind / "expected"
        train(make_settings(photos, expected, **choices))  # here, so that everything is imported before the first fork
        run.write_report = lambda *arguments: None  # drawn once
        kills = 0
        while kills < KILLS:
            folder = root / kind / f"killed{kills}"
            while not attempt(photos, folder, choices, moment):
                kills += 1
                check_folder(folder, counts)
            check_folder(folder, counts)
            assert not list(folder.rglob(".*.tmp"))
            assert_same_run(folder, expected)
            counts["runs"] += 1
        counts["kills"] += kills
    sys.stdout.write(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
