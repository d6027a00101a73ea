"""Runs that are killed or interrupted, and go on: they end as if nothing had happened, bit for bit."""

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gradfilter.cli import main
from gradfilter.errors import CheckpointError, SettingsError
from gradfilter.train import InterruptedRunError, Settings, train
from gradfilter.train.checkpoint import FORMAT, load_checkpoint
from gradfilter.train.watch import Step, Watch
from train_runs import (
    Process,
    assert_same_run,
    find_weights,
    make_command,
    make_environment,
    make_settings,
    read_files,
)

pytestmark = pytest.mark.usefixtures("quick")


def test_killed_at_random_moments_a_run_ends_as_if_nobody_had(tmp_path):
    script = Path(__file__).with_name("killed_runs.py")
    command = [sys.executable, "-W", "error", str(script), str(tmp_path)]
    done = subprocess.run(command, env=make_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["kills"] >= 25
    assert counts["last"] >= 10  # or all were killed before there was anything to lose


class Stop(Watch):
    """Sends this process a signal after so many steps, or in the epoch's end."""

    def __init__(self, steps: int, number: signal.Signals = signal.SIGINT) -> None:
        self.steps, self.number = steps, number

    def step(self, step: Step) -> None:
        self.steps -= 1
        if self.steps == 0:
            os.kill(os.getpid(), self.number)


KEEPS = {"int8": 4, "subspace:0.9": 3, "subspace:6": 7, "subspace:4KB,cold": 9, "fixed:0.9": 3, "fixed:5,4": 7, "hosvd:0.8": 4}
"""Keeps, and steps after which a run is stopped: some while they calibrate, some later."""


@pytest.mark.parametrize(
    ("steps", "choices"),
    [
        (3, {"optimizer": "adam", "lr": 0.01}),
        (10, {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "batch_norm": "train"}),  # after an epoch's last batch
        (6, {"momentum": 0.0, "clip": 0.0, "schedule": "constant", "augment": "none"}),
        (8, {"exact": True, "label_smoothing": 0.1, "warmup": 1.5, "val_every": 2}),
        (15, {"views": 2, "cache": "memory", "plan": "last1"}),  # after the very last batch
        *((steps, {"keep": keep, "patch": 1}) for keep, steps in KEEPS.items()),
        (7, {"keep": "subspace:6", "batch_norm": "train", "optimizer": "adamw", "lr": 0.01}),
        (7, {"keep": "int8", "views": 2, "cache": "memory", "plan": "last1"}),
    ],
)
def test_interrupted_runs_go_on(photos, tmp_path, choices, steps):
    expected, out = tmp_path / "expected", tmp_path / "out"
    train(make_settings(photos, expected, **choices))
    with pytest.raises(InterruptedRunError, match=r"stopped in epoch \d after \d of 5 batches"):
        train(make_settings(photos, out, **choices), Stop(steps))
    train(make_settings(photos, out, resume=True, **choices))
    assert_same_run(out, expected)


def test_signals_are_given_back(photos, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(InterruptedRunError):
        train(make_settings(photos, tmp_path / "out"), Stop(1, signal.SIGTERM))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_while_the_last_epoch_is_judged_is_heard(photos, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("gradfilter.train.run.write_csv", lambda *arguments: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(InterruptedRunError, match="stopped after epoch 1 of 1"):
            train(make_settings(photos, out, epochs=1))
    results = train(make_settings(photos, out, epochs=1, resume=True))
    assert [epoch.epoch for epoch in results.history] == [1]
    assert (out / "results.json").exists()


def test_a_run_that_is_done_can_be_resumed_for_its_report(photos, tmp_path):
    first = train(make_settings(photos, tmp_path / "out"))
    before = find_weights(tmp_path / "out")
    again = train(make_settings(photos, tmp_path / "out", resume=True))
    assert (again.history, again.confusion, again.best_epoch) == (first.history, first.confusion, first.best_epoch)
    after = find_weights(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_settings_that_change_nothing_may_change(photos, tmp_path):
    expected, out = tmp_path / "expected", tmp_path / "out"
    train(make_settings(photos, expected))
    with pytest.raises(InterruptedRunError):
        train(make_settings(photos, out), Stop(7))
    train(make_settings(photos, out, resume=True, save_every=3, strict=True, threads=1, workers=1))
    assert_same_run(out, expected)


@pytest.fixture
def stopped(photos, tmp_path):
    """A run that was stopped in its second epoch."""
    with pytest.raises(InterruptedRunError):
        train(make_settings(photos, tmp_path / "out"), Stop(7))
    return make_settings(photos, tmp_path / "out", resume=True)


def change_settings(photos: Path, changes: dict[str, Any]) -> dict[str, Any]:
    return changes


def change_photo(photos: Path, changes: dict[str, Any]) -> dict[str, Any]:
    for path in photos.rglob("*.png"):
        path.write_bytes(path.read_bytes() + b" ")
    return changes


def rename_class(photos: Path, changes: dict[str, Any]) -> dict[str, Any]:
    (photos / "plum").rename(photos / "prune")
    return changes


@pytest.mark.parametrize(
    ("change", "changes", "named"),
    [
        (change_settings, {"lr": 0.1, "batch": 5}, ["--batch was 4, now 5; --lr was 0.05, now 0.1."]),
        (change_settings, {"patch": None, "grid": 2}, ["--patch was 2, now None", "--grid was None, now 2"]),
        (change_settings, {"epochs": 4, "seed": 1}, ["--epochs was 3, now 4", "--seed was 0, now 1"]),
        (change_settings, {"mean": (0.5, 0.5, 0.5)}, ["--mean was [0.485, 0.456, 0.406], now [0.5, 0.5, 0.5]"]),
        (change_photo, {}, ["the training images changed; the held-out images changed."]),
        (rename_class, {}, ["the classes changed; the training images changed; the held-out images changed."]),
    ],
)
def test_another_run_is_not_gone_on_with(stopped, photos, change, changes, named):
    changes = change(photos, changes)
    before = read_files(stopped.folder)
    with pytest.raises(SettingsError, match="cannot be resumed: ") as caught:
        train(dataclasses.replace(stopped, **changes))
    assert all(text in str(caught.value) for text in [*named, str(stopped.folder / "config.yaml")])
    assert read_files(stopped.folder) == before


def test_another_plan_in_the_same_file_is_not_gone_on_with(photos, tmp_path):
    plan = tmp_path / "mine.yaml"
    plan.write_text("layers: {'*': {patch: 2}}")
    settings = make_settings(photos, tmp_path / "out", plan=str(plan), patch=None)
    with pytest.raises(InterruptedRunError):
        train(settings, Stop(2))
    plan.write_text("layers: {'*': {patch: 4}}")
    before = read_files(tmp_path / "out")
    with pytest.raises(SettingsError, match="cannot be resumed: the plan changed"):
        train(dataclasses.replace(settings, resume=True))
    assert read_files(tmp_path / "out") == before


def test_other_weights_to_start_from_do_not_reach_a_resumed_run(photos, tmp_path):
    """The cache is filled with what the checkpoint's frozen layers make, not with what the weight file holds by now."""
    file = tmp_path / "weights.pth"
    choices = {"weights": str(file), "plan": "last1", "cache": "memory", "augment": "none"}
    save_random_weights(file, seed=0)
    train(make_settings(photos, tmp_path / "expected", **choices))
    with pytest.raises(InterruptedRunError):
        train(make_settings(photos, tmp_path / "out", **choices), Stop(4))
    save_random_weights(file, seed=1)
    train(make_settings(photos, tmp_path / "out", resume=True, **choices))
    assert_same_run(tmp_path / "out", tmp_path / "expected")


def save_random_weights(file: Path, seed: int) -> None:
    from gradfilter.models import make_model

    model = make_model("train_nets:small", classes=5, generator=torch.Generator().manual_seed(seed))
    torch.save(model.state_dict(), file)


def test_from_another_current_directory(photos, tmp_path, monkeypatch, capsys):
    """All paths of config.yaml are absolute; what is no path stays a word."""
    save_random_weights(tmp_path / "weights.pth", seed=0)
    (tmp_path / "plan.yaml").write_text("layers: {'*': {patch: 2}}")
    (tmp_path / "elsewhere").mkdir()
    train(make_settings(photos, tmp_path / "beside", epochs=1))
    choices: dict[str, Any] = {"weights": "weights.pth", "plan": "./plan.yaml", "patch": None, "parts": 2, "root": "sets"}
    choices |= {"partition": "parts.json", "cache_folder": "kept", "beside": "elsewhere/../beside"}
    paths = {"data": "photos", "weights": "weights.pth", "plan": "plan.yaml", "root": "sets", "partition": "parts.json"}
    paths |= {"cache_folder": "kept", "beside": "beside", "out": "out"}
    monkeypatch.chdir(tmp_path)
    train(make_settings(Path("photos"), Path("expected"), **choices))
    with pytest.raises(InterruptedRunError):
        train(make_settings(Path("photos"), Path("out"), **choices), Stop(4))
    stored = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert {name: stored[name] for name in paths} == {name: str(tmp_path / path) for name, path in paths.items()}
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["train", "--config", "../out/config.yaml", "--resume"]) == 0, capsys.readouterr()
    assert_same_run(tmp_path / "out", tmp_path / "expected")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_words_are_no_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "pretrained", "last4", "all"):
        (tmp_path / name).mkdir()
    for plan in ("last4", "all"):
        absolute = Settings(data="digits", plan=plan).make_absolute()
        assert absolute == Settings(data="digits", plan=plan, out=str(tmp_path / "runs" / f"digits-efficientnet-lite0-{plan}"))
    (tmp_path / "photos").mkdir()
    settings = Settings(data="photos")
    assert settings.find_changes({**settings.to_dict(), "data": str(tmp_path / "photos")}) == []
    assert settings.make_absolute().find_changes(settings.to_dict()) == []
    for data in ("", "phtos"):  # for the error to name
        assert Settings(data=data, weights="absent.pth").make_absolute().data == data


def test_resume_without_a_run(photos, tmp_path):
    with pytest.raises(SettingsError, match=r"the folder '.*out' holds no run to go on with\. Check --out"):
        train(make_settings(photos, tmp_path / "out", resume=True))
    assert not (tmp_path / "out").exists()


def test_a_run_is_not_written_over_unasked(stopped):
    before = read_files(stopped.folder)
    with pytest.raises(SettingsError, match=r"holds a run already\. Go on with it \(--resume\), replace it \(--overwrite\)"):
        train(dataclasses.replace(stopped, resume=False))
    assert read_files(stopped.folder) == before


def test_overwrite_replaces_a_run(photos, stopped, tmp_path):
    (stopped.folder / "report.html").write_text("of the other run")
    train(make_settings(photos, tmp_path / "expected", seed=3))
    train(dataclasses.replace(stopped, resume=False, overwrite=True, seed=3))
    assert_same_run(stopped.folder, tmp_path / "expected")
    assert not (stopped.folder / "report.html").exists()


@pytest.mark.parametrize("own", [[], ["notes.txt", "tensorboard/notes.txt", "tensorboard/mine/notes.txt"]])
def test_overwrite_leaves_nothing_of_a_run_and_all_that_is_not_ours(photos, tmp_path, own):
    old, new = ({"measure": True, "tensorboard": True, "cache": "disk", "plan": "last1", "augment": "none"}, {"epochs": 1})
    folder, other = tmp_path / "out", tmp_path / "other"
    train(make_settings(photos, folder, **old))
    cache = {name for name in read_files(folder) if name.startswith("cache/")}
    for name in own:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    train(make_settings(photos, other, **new))
    train(make_settings(photos, folder, overwrite=True, **new))
    assert len(cache) == 4
    assert read_files(folder).keys() == {*read_files(other), *own, *cache}
    assert (folder / "tensorboard").exists() == bool(own)


def test_a_run_that_cannot_start_replaces_none(stopped, monkeypatch):
    def refuse(*arguments: Any) -> None:
        raise SettingsError("no room for the cache")

    before = read_files(stopped.folder)
    monkeypatch.setattr("gradfilter.train.feed.Feed.keep", refuse)
    with pytest.raises(SettingsError, match="no room"):
        train(dataclasses.replace(stopped, resume=False, overwrite=True, cache="memory", views=1))
    assert read_files(stopped.folder) == before


def test_drafts_of_killed_processes_go_and_other_files_stay(stopped):
    (stopped.folder / "cache").mkdir()
    drafts = [stopped.folder / ".last.safetensors.123.tmp", stopped.folder / "cache" / ".0a.0.bin.99.tmp"]
    others = [stopped.folder / "notes.tmp", stopped.folder / ".mine.tmp"]
    for path in (*drafts, *others):
        path.write_text("x")
    train(stopped)
    assert [path.exists() for path in (*drafts, *others)] == [False, False, True, True]


def test_best_weights_in_place_of_the_checkpoint(stopped):
    (stopped.folder / "last.safetensors").write_bytes((stopped.folder / "best.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"last\.safetensors' holds weights, but no run to go on with"):
        train(stopped)


def test_a_model_that_changed(stopped, monkeypatch):
    import train_nets

    monkeypatch.setattr(train_nets, "small", train_nets.pixels)
    with pytest.raises(CheckpointError, match=r"last\.safetensors' does not fit the model 'train_nets:small' any more"):
        train(stopped)


def change_checkpoint(path: Path, forget: str = "", drop: str = "") -> dict[str, Any]:
    """Make a checkpoint one of an older version: without a setting, and without tensors of a kind; return its settings."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()[FORMAT])
    about["settings"].pop(forget, None)
    tensors = {name: tensor for name, tensor in load_file(path).items() if not drop or not name.startswith(drop)}
    save_file(tensors, path, {FORMAT: json.dumps(about)})
    return about["settings"]


def test_a_run_of_an_older_version_goes_on(photos, stopped, tmp_path):
    """A setting that did not exist was as its default is; there was nothing for keeps to remember."""
    train(make_settings(photos, tmp_path / "expected"))
    last, config = stopped.folder / "last.safetensors", stopped.folder / "config.yaml"
    settings = change_checkpoint(last, forget="keep", drop="/keep/")
    assert "keep" not in settings
    config.write_text(yaml.safe_dump(settings))
    train(stopped)
    assert_same_run(stopped.folder, tmp_path / "expected")


def test_what_an_older_version_did_not_know_is_not_what_it_did(stopped):
    change_checkpoint(stopped.folder / "last.safetensors", forget="keep")
    with pytest.raises(SettingsError, match="cannot be resumed: --keep was None, now int8"):
        train(dataclasses.replace(stopped, keep="int8"))
    change_checkpoint(stopped.folder / "last.safetensors", forget="lr")
    with pytest.raises(SettingsError, match=r"--lr was 0\.01, now 0\.05"):
        train(stopped)


def test_best_weights_have_nothing_of_keeps(photos, tmp_path):
    train(make_settings(photos, tmp_path / "out", keep="fixed:0.9", epochs=1))
    _, extra, _ = load_checkpoint(tmp_path / "out" / "last.safetensors")
    assert any(name.startswith("/keep/") for name in extra)
    _, extra, _ = load_checkpoint(tmp_path / "out" / "best.safetensors")
    assert extra == {}
    assert main(["eval", str(tmp_path / "out")]) == 0
    assert main(["predict", str(tmp_path / "out"), str(next(photos.rglob("*.png")))]) == 0


# The command line, in processes of its own


def find_command(errors: str) -> list[str]:
    """Return the command that a run was told to go on with."""
    line = next(line for line in errors.splitlines() if line.startswith("    gradfilter train"))
    return make_command(*shlex.split(line)[1:])


def test_interrupts_and_kills_of_the_command_line(photos, tmp_path):
    expected, out = tmp_path / "expected", tmp_path / "a run"
    settings = make_settings(photos, expected, model="train_nets:gated", save_every=2)
    train(settings)
    flags = {**settings.to_dict(), "out": str(out), "workers": 2}
    config = tmp_path / "run.json"
    config.write_text(json.dumps(flags))

    run = Process(tmp_path, make_command("train", "--config", str(config)), inputs=4)
    run.signal(signal.SIGINT)
    code, errors = run.finish()
    assert code == 130, errors
    assert "stopped in epoch 1 after 4 of 5 batches. All is saved. Go on with:" in errors
    assert "Traceback" not in errors
    state = load_checkpoint(out / "last.safetensors")[2]["state"]
    assert (state["epoch"], state["batch"]) == (0, 4)

    run = Process(tmp_path, find_command(errors), inputs=6)
    run.signal(signal.SIGTERM)
    code, errors = run.finish()
    assert code == 130, errors
    assert "stopped in epoch 2 after 3 of 5 batches" in errors

    command = find_command(errors)
    run = Process(tmp_path, command, inputs=4)
    run.signal(signal.SIGKILL)
    code, _ = run.finish()
    assert code == -signal.SIGKILL

    done = subprocess.run(command, env=make_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"weights: {out / 'best.safetensors'}" in done.stdout
    assert (out / "report.html").exists()
    assert_same_run(out, expected)


def test_a_second_interrupt_ends_at_once(photos, tmp_path):
    out = tmp_path / "out"
    config = tmp_path / "run.json"
    config.write_text(json.dumps(make_settings(photos, out, model="train_nets:gated", save_every=1).to_dict()))
    run = Process(tmp_path, make_command("train", "--config", str(config)), inputs=4)
    before = read_files(out)
    run.signal(signal.SIGINT)
    run.wait_for("asked")
    run.signal(signal.SIGINT)
    run.process.wait()  # the gate is still closed
    code, errors = run.finish()
    assert code == 130
    assert "stopped at once. Go on with:" in errors
    assert "Traceback" not in errors
    assert read_files(out) == before
