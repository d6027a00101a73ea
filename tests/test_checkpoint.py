"""Checkpoints: whole or not there, refused with a reason, and of use without gradfilter."""

import contextlib
import dataclasses
import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from gradfilter.errors import CheckpointError
from gradfilter.files import replace_file
from gradfilter.models import torchvision_ops
from gradfilter.train import train
from gradfilter.train.checkpoint import (
    FORMAT,
    VERSION,
    check_folder,
    load_checkpoint,
    pack_optimizer,
    save_checkpoint,
    unpack_optimizer_,
)
from gradfilter.train.judge import judge
from gradfilter.train.watch import Step, Watch
from train_runs import CLASSES, assert_same_run, make_settings, read_files

pytestmark = pytest.mark.usefixtures("quick")


@contextlib.contextmanager
def small_disk(size: int):
    """Let no file grow beyond a size, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fail(*arguments: Any, **others: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def broken(what: str):
    """Let a function fail, or the disk be small."""
    with small_disk(1000) if what == "disk" else contextlib.nullcontext(), pytest.MonkeyPatch.context() as patch:
        if what.startswith("os."):
            patch.setattr(what, fail)
        yield


# Files


def write_half(file):
    file.write(b"half")
    fail()


@pytest.mark.parametrize("content", [b"bytes", "täxt", lambda file: file.write(b"written")])
def test_a_file_is_replaced(tmp_path, content):
    path = tmp_path / "file"
    for _ in range(2):
        replace_file(path, content)
        assert path.read_bytes() == (content if content == b"bytes" else "täxt".encode() if content == "täxt" else b"written")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("failing", ["content", "os.fsync", "os.replace", "disk"])
@pytest.mark.parametrize("before", [None, b"before"])
def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path, failing, before):
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    with broken(failing), pytest.raises(OSError, match=r"No space|too large"):
        replace_file(path, write_half if failing == "content" else bytes(5000))
    assert read_files(tmp_path) == ({} if before is None else {"file": before})


# Writing


@pytest.mark.parametrize("failing", ["os.fsync", "os.replace", "disk"])
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path, failing):
    path, model = tmp_path / "last.safetensors", nn.Linear(20, 20)
    save_checkpoint(path, model, {}, {"number": 1})
    before = path.read_bytes()
    with broken(failing), pytest.raises(CheckpointError) as caught:
        save_checkpoint(path, model, {}, {"number": 2})
    reason = "File too large" if failing == "disk" else "No space left on device"
    assert f"'{path}' (0.0 MB) cannot be written: {reason}. The one before it is untouched. Make room" in str(caught.value)
    assert read_files(tmp_path) == {"last.safetensors": before}
    assert load_checkpoint(path)[2]["number"] == 1


class FillDisk(Watch):
    """Lets the disk be full from a step on."""

    def __init__(self, steps: int, stack: contextlib.ExitStack) -> None:
        self.steps, self.stack = steps, stack

    def step(self, step: Step) -> None:
        self.steps -= 1
        if self.steps == 0:
            self.stack.enter_context(small_disk(1000))


@pytest.mark.parametrize("steps", [5, 7], ids=["at the end of an epoch", "within one"])
def test_a_disk_that_fills_up_in_a_run(photos, tmp_path, steps):
    expected, out = tmp_path / "expected", tmp_path / "out"
    train(make_settings(photos, expected, save_every=2))
    with contextlib.ExitStack() as stack, pytest.raises(CheckpointError, match=r"safetensors' .* cannot be written: File too"):
        train(make_settings(photos, out, save_every=2), FillDisk(steps, stack))
    assert load_checkpoint(out / "last.safetensors")[2]["state"]["batch"] == (4 if steps == 5 else 1)
    assert not list(out.glob(".*"))
    train(make_settings(photos, out, save_every=2, resume=True))
    assert_same_run(out, expected)


@pytest.mark.parametrize("failing", ["write_csv", "replace_file"])
def test_other_files_that_cannot_be_written(photos, tmp_path, monkeypatch, failing):
    with monkeypatch.context() as patch:
        if failing == "replace_file":  # config.yaml is written, results.json is not
            patch.setattr(
                "gradfilter.train.run.write_csv", lambda *arguments: patch.setattr(f"gradfilter.train.run.{failing}", fail)
            )
        else:
            patch.setattr(f"gradfilter.train.run.{failing}", fail)
        with pytest.raises(CheckpointError, match=r"cannot write to '.*out': No space left.*The checkpoints there are whole"):
            train(make_settings(photos, tmp_path / "out", epochs=1))
    results = train(make_settings(photos, tmp_path / "out", epochs=1, resume=True))
    assert len(results.history) == 1


# Before training


class NoSteps(Watch):
    def step(self, step: Step) -> None:
        raise AssertionError("trained")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_to_is_found_before_training(photos, tmp_path, place):
    (tmp_path / "file").write_text("mine")
    out = tmp_path / place
    with pytest.raises(CheckpointError, match=f"the folder '{out}' cannot be written to: .* Give another one with --out"):
        train(make_settings(photos, out), NoSteps())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_made():
    with pytest.raises(CheckpointError, match="the folder '/proc/nothing/here' cannot be written to: "):
        check_folder(Path("/proc/nothing/here"), 0)


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("is_there", [False, True])
def test_too_little_space_is_found_before_training(photos, tmp_path, monkeypatch, is_there):
    out = tmp_path / "new" / "out"
    if is_there:
        train(make_settings(photos, out, epochs=1))
    before = read_files(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 9_000))
    with pytest.raises(CheckpointError, match=r"need 0\.1 MB, and the disk of '.*out' has 0\.0 MB free\. Make room"):
        train(make_settings(photos, out, overwrite=True), NoSteps())
    assert read_files(tmp_path) == before
    assert out.parent.exists() == is_there


def test_enough_space_is_enough(tmp_path, monkeypatch):
    seen: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: seen.append(path) or Usage(10**9, 10**9, 1000))
    check_folder(tmp_path / "a" / "b", 1000)
    assert seen == [tmp_path]
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_the_folder_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_folder(Path("runs") / "mine", 1)
    assert (tmp_path / "runs" / "mine").is_dir()


# Reading


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "last.safetensors"
    save_checkpoint(path, nn.Linear(3, 2), {"/optimizer/0/step": torch.tensor(3.0)}, {"classes": ["a", "b"]})
    return path


def test_what_is_written_is_read(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    model.append(nn.Conv2d(4, 4, 1))
    model.append(model[2])  # tied
    extra = {"/a": torch.arange(3), "/b": torch.tensor(0.5, dtype=torch.float64)}
    save_checkpoint(tmp_path / "x", model, extra, {"text": "ü", "numbers": [1, 0.1, None]})
    weights, others, about = load_checkpoint(tmp_path / "x")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert {name: tensor.dtype for name, tensor in others.items()} == {"/a": torch.int64, "/b": torch.float64}
    assert about == {"version": VERSION, "text": "ü", "numbers": [1, 0.1, None]}


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(np.random.default_rng(0).bytes(2000)),
        lambda path: path.write_bytes(b"\xff" * 100),
        lambda path: path.write_bytes(pickle.dumps({"weight": [1.0]})),
        lambda path: torch.save({"weight": torch.zeros(3)}, path),
        lambda path: path.write_bytes((8).to_bytes(8, "little") + b"[1, 2, 3"),
        lambda path: save_file({"weight": torch.zeros(3)}, path, {FORMAT: "{not JSON"}),
    ],
    ids="empty random ones pickle torch header json".split(),
)
def test_damaged_and_other_files_are_refused_by_name(checkpoint, write):
    write(checkpoint)
    with pytest.raises(CheckpointError, match=f"'{checkpoint}' cannot be read: .* It is damaged, or another kind of file"):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize("header", [None, "null", "[]", '"text"', "{}", json.dumps({"version": VERSION + 1})])
def test_foreign_weights_and_other_versions_are_refused_by_name(checkpoint, header):
    save_file({"weight": torch.zeros(3)}, checkpoint, {} if header is None else {FORMAT: header})
    with pytest.raises(CheckpointError, match=f"'{checkpoint}' is no checkpoint of this version of gradfilter"):
        load_checkpoint(checkpoint)


def test_no_checkpoint(tmp_path):
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(CheckpointError, match=f"there is no checkpoint '{path}'"):
            load_checkpoint(path)


def test_a_checkpoint_cut_off_anywhere_is_refused(checkpoint):
    whole = checkpoint.read_bytes()
    for length in range(len(whole)):
        checkpoint.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"last\.safetensors"):
            load_checkpoint(checkpoint)


def test_a_pickle_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "run",)

    (tmp_path / "x").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "x")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["cut", "pickle", "version"])
def test_a_damaged_run_is_left_as_it_is(photos, tmp_path, damage):
    out = tmp_path / "out"
    train(make_settings(photos, out, epochs=1))
    last = out / "last.safetensors"
    contents = {"cut": last.read_bytes()[:-1], "pickle": pickle.dumps([1]), "version": b""}
    last.write_bytes(contents[damage])
    if damage == "version":
        save_file({}, last, {FORMAT: '{"version": 99}'})
    before = read_files(out)
    with pytest.raises(CheckpointError, match=str(last)):
        train(make_settings(photos, out, epochs=1, resume=True), NoSteps())
    assert read_files(out) == before


# The optimizer's state


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.1),
    ],
    ids="sgd momentum adam adamw".split(),
)
def test_an_optimizer_goes_on_with_its_state(tmp_path, make):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, 5, 5, generator=generator)
    model, twin = (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))  # pyright: ignore[reportCallIssue]
    optimizer, other = make(model.parameters()), make(twin.parameters())
    for step in range(4):
        if step == 2:
            save_checkpoint(tmp_path / "x", model, pack_optimizer(optimizer), {})
            weights, extra, _ = load_checkpoint(tmp_path / "x")
            twin.load_state_dict(weights)
            unpack_optimizer_(other, extra)
        for net, its in ((model, optimizer), (twin, other))[: 1 + (step >= 2)]:
            net(x).square().mean().backward()
            its.step()
            its.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    ours, theirs = pack_optimizer(optimizer), pack_optimizer(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# The best weights, elsewhere

PLAIN = """
import json, runpy, sys
sys.modules["gradfilter"] = None  # as if it were not installed
runpy.run_path(sys.argv[2])["declare_torchvision_ops"]()  # torchvision may be built without its own
import timm, torch, torchvision
from safetensors import safe_open

for folder, make in (
    ("resnet18", lambda n: torchvision.models.resnet18(num_classes=n)),
    ("efficientnet", lambda n: timm.create_model("tf_efficientnet_lite0", num_classes=n)),
):
    seen = torch.load(f"{sys.argv[1]}/{folder}.pt", weights_only=True)
    with safe_open(f"{sys.argv[1]}/{folder}/best.safetensors", "pt") as file:
        about = json.loads(file.metadata()["gradfilter"])
        weights = {name: file.get_tensor(name) for name in file.keys()}
    model = make(len(about["classes"]))
    model.load_state_dict(weights)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(seen["images"]).softmax(1), seen["probabilities"], rtol=1e-4, atol=1e-5)
    try:
        import gradfilter
    except ImportError:
        continue
    raise AssertionError("gradfilter was there")
"""


def test_the_best_weights_load_into_plain_models_without_gradfilter(photos, tmp_path, monkeypatch):
    for model, folder in (("resnet18", "resnet18"), ("efficientnet-lite0", "efficientnet")):

        def keep(feed, probabilities, folder=folder):
            images = feed.make_input(len(feed.images)).contiguous()
            torch.save({"images": images, "probabilities": probabilities}, tmp_path / f"{folder}.pt")
            return ()

        monkeypatch.setattr("gradfilter.train.run.find_samples", keep)
        train(make_settings(photos, tmp_path / folder, model=model, resolution=32, plan="last1", epochs=1))
    command = [sys.executable, "-c", PLAIN, str(tmp_path), torchvision_ops.__file__]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_header_tells_how_to_use_the_weights(photos, tmp_path):
    results = train(make_settings(photos, tmp_path / "out", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)))
    with safe_open(tmp_path / "out" / "best.safetensors", "pt") as file:
        about = json.loads(file.metadata()[FORMAT])
        names = set(file.keys())
    held_out = about.pop("held_out")
    assert len(held_out) == 64
    assert int(held_out, 16)
    assert about == {
        "version": VERSION,
        "task": "classify",
        "model": "train_nets:small",
        "classes": list(CLASSES),
        "resolution": 12,
        "mean": [0.1, 0.2, 0.3],
        "std": [0.4, 0.5, 0.6],
        "epoch": results.best_epoch,
        "val_accuracy": results.best.val_accuracy,
    }
    assert not any(name.startswith("/") for name in names)


def test_best_is_the_first_of_the_best_epochs(photos, tmp_path, monkeypatch):
    scores, seen = iter([0.5, 0.75, 0.25, 0.75]), []

    def invent(model, *others):
        seen.append(model[0].weight.detach().clone())
        return dataclasses.replace(judge(model, *others), accuracy=next(scores))

    monkeypatch.setattr("gradfilter.train.run.judge", invent)
    results = train(make_settings(photos, tmp_path / "out", epochs=4))
    weights, _, about = load_checkpoint(tmp_path / "out" / "best.safetensors")
    assert (results.best_epoch, about["epoch"], about["val_accuracy"]) == (2, 2, 0.75)
    assert [torch.equal(weights["0.weight"], weight) for weight in seen] == [False, True, False, False]
