"""Settings: what they refuse, and how flags, YAML files and presets come together."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradfilter.cli import main
from gradfilter.cli.train import parse
from gradfilter.errors import PlanError, SettingsError
from gradfilter.keep import HOSVD, Subspace
from gradfilter.plan import Backward, Plan
from gradfilter.train.presets import get_preset
from gradfilter.train.settings import MAY_CHANGE, Settings
from train_runs import assert_same_run, make_settings

NAMES = {field.name for field in dataclasses.fields(Settings)}
PRESET = "cifar10-mcunet-last4-patch2"

WRONG: list[tuple[dict[str, Any], str]] = [
    *[
        ({name: 0}, f"--{name} is 0, but must be at least 1")
        for name in "epochs batch parts shards views save_every val_every threads resolution patch grid".split()
    ],
    *[
        ({name: -1}, f"--{name} is -1, but must be at least 0")
        for name in "part workers seed lr momentum weight_decay warmup clip label_smoothing".split()
    ],
    *[
        ({name: math.nan}, f"--{name} is nan, but must be at least 0")
        for name in "lr momentum weight_decay warmup clip label_smoothing".split()
    ],
    *[
        ({name: math.inf}, f"--{name} is inf, which is no finite number")
        for name in "lr momentum weight_decay warmup clip label_smoothing".split()
    ],
    ({"limit": 1}, "--limit is 1, but must be at least 2"),
    *[({"val_share": value}, f"--val_share is {value}, but must be between 0 and 1") for value in (0, 1, -0.5, math.nan)],
    ({"label_smoothing": 1}, "--label_smoothing is 1, but must be below 1"),
    ({"warmup": 11}, "--warmup is 11 epochs, but there are --epochs 10"),
    ({"mean": (0, math.nan, 0)}, "--mean is (0, nan, 0), but three finite numbers"),
    ({"std": (1, 0, 1)}, "--std is (1, 0, 1), but three finite numbers above 0"),
    ({"std": (1, math.inf, 1)}, "--std is (1, inf, 1), but three finite numbers above 0"),
    ({"augment": "flips"}, "--augment is 'flips', but must be one of none, flip, standard"),
    ({"optimizer": "SGD"}, "--optimizer is 'SGD', but must be one of sgd, adam, adamw"),
    ({"schedule": "step"}, "--schedule is 'step', but must be one of cosine, poly, constant"),
    ({"cache": "ram"}, "--cache is 'ram', but must be one of off, memory, disk"),
    ({"precision": "16"}, "--precision is '16', but must be one of 32-true, bf16-mixed"),
    ({"kernel": "sum"}, "--kernel is 'sum', but must be one of lift, lumped"),
    ({"batch_norm": "off"}, "--batch_norm is 'off', but must be one of eval, train, frozen"),
    ({"patch": 2, "grid": 4}, "--patch 2 and --grid 4 both set the resolution of the gradient: give one"),
    ({"keep": "int4"}, "--keep: 'int4' is no keep. The keeps are full, bfloat16, int8, "),
    ({"keep": "hosvd:2"}, "--keep: HOSVD got energy=2.0. Give the share of the energy to keep, above 0 and up to 1"),
    ({"keep": "subspace:64XB"}, "--keep: Subspace: memory is '64XB'"),
    (
        {"keep": "int8", "exact": True},
        "--keep int8 says how inputs are held, but --exact leaves that to torch",
    ),
    ({"keep": "int8", "memory": "1MB"}, "--memory 1MB chooses layers, patches and keeps itself: drop --keep"),
    ({"part": 2, "parts": 2}, "--part 2 is none of the 2 parts, which count from 0"),
    ({"shards": 2}, "--shards cuts parts out of shards, but --parts is 1: say how many parts"),
    ({"resume": True, "overwrite": True}, "--resume goes on with the run that --overwrite replaces: give one"),
    ({"cache": "disk"}, "--cache disk keeps what frozen layers make of an image, but --augment standard makes a new one"),
]


@pytest.mark.parametrize(("given", "text"), WRONG, ids=[" ".join(f"{k}={v}" for k, v in given.items()) for given, _ in WRONG])
def test_what_cannot_be_is_refused(given, text):
    with pytest.raises(SettingsError) as caught:
        Settings(**given)
    assert text in str(caught.value)
    assert str(caught.value).endswith(".")


def test_all_that_is_wrong_is_named_at_once():
    given: dict[str, Any] = {"epochs": 0, "lr": -1, "val_share": 2, "optimizer": "x", "kernel": "y", "patch": 1, "grid": 1}
    given |= {"keep": "z"}
    with pytest.raises(SettingsError) as caught:
        Settings(**given, resume=True, overwrite=True)
    assert all(re.search(rf"--{name}\b", str(caught.value)) for name in (*given, "resume", "overwrite"))
    assert str(caught.value).count(";") == 7


@pytest.mark.parametrize(
    "given",
    [
        {"lr": 0, "momentum": 0, "weight_decay": 0, "warmup": 0, "clip": 0, "label_smoothing": 0},
        {"limit": 2, "batch": 1, "epochs": 1, "val_every": 9, "save_every": 1, "threads": 1, "workers": 0, "patch": 1},
        {"part": 5, "partition": "made.json"},  # how many parts there are is in the file
        {"warmup": 10, "epochs": 10},
        {"cache": "memory", "augment": "none"},
        {"cache": "disk", "views": 1},
        {"mean": (0, 0, 0), "std": (1, 1, 1)},
    ],
)
def test_what_is_just_possible(given):
    assert dataclasses.replace(Settings(**given)) == Settings(**given)


def test_plain_data_and_back():
    settings = Settings(mean=(0.1, 0.2, 0.3), lr=0.1 + 0.2, limit=7)
    data = yaml.safe_load(yaml.safe_dump(settings.to_dict()))
    assert data["mean"] == [0.1, 0.2, 0.3]
    assert Settings.from_dict(data) == settings
    with pytest.raises(SettingsError, match=r"there is no setting 'colour', 'size'\. 'gradfilter train --help' lists them"):
        Settings.from_dict({"size": 1, "colour": 2, "lr": 0.1})


def test_changes_that_matter_are_found():
    before = Settings(lr=0.1).to_dict()
    assert Settings(lr=0.1).find_changes(before) == []
    for name in MAY_CHANGE:
        assert Settings(lr=0.1).find_changes({**before, name: "other"}) == []
    for name in NAMES - MAY_CHANGE:
        assert Settings(lr=0.1).find_changes({**before, name: "/other"}) == [f"--{name} was /other, now {before[name]}"]
    assert MAY_CHANGE < NAMES


def test_a_setting_that_did_not_exist_was_as_its_default_is():
    before = {name: value for name, value in Settings(lr=0.1).to_dict().items() if name != "keep"}
    assert Settings(lr=0.1).find_changes(before) == []
    assert Settings(lr=0.1, keep="int8").find_changes(before) == ["--keep was None, now int8"]
    del before["lr"]
    assert Settings(lr=0.1).find_changes(before) == ["--lr was 0.01, now 0.1"]


# Plans


@pytest.mark.parametrize(
    ("given", "plan"),
    [
        ({}, Plan.all()),
        ({"plan": "head"}, Plan.last(0)),
        ({"plan": "last4"}, Plan.last(4)),
        ({"keep": "hosvd:0.8"}, Plan.all(Backward(grid=4, keep=HOSVD(0.8)))),
        ({"keep": "subspace:64KB", "patch": 1}, Plan.all(Backward(patch=1, keep=Subspace(memory="64KB")))),
        ({"plan": "last 12", "batch_norm": "train"}, dataclasses.replace(Plan.last(12), batch_norm="train")),
    ],
)
def test_named_plans(given, plan):
    assert Settings(**given).make_plan() == plan


@pytest.mark.parametrize(
    ("given", "backward"),
    [
        ({}, Backward(patch=4, kernel="lumped")),
        ({"patch": 2}, Backward(patch=2, kernel="lumped")),
        ({"grid": 7}, Backward(grid=7, kernel="lumped")),
        ({"kernel": "lift"}, Backward(patch=4, kernel="lift")),
        ({"keep": "hosvd:0.8"}, Backward(patch=4, kernel="lumped", keep=HOSVD(0.8))),
    ],
)
def test_overrides_of_a_plan_in_a_file(tmp_path, given, backward):
    file = tmp_path / "mine.yaml"
    file.write_text("layers: {'a*': {patch: 4, kernel: lumped}}\nbatch_norm: frozen")
    plan = Settings(plan=str(file), **given).make_plan()
    assert plan == Plan({"a*": backward}, batch_norm="frozen")


def test_no_plan(tmp_path):
    with pytest.raises(PlanError, match=r"'lats4' is no plan\. Give 'all', 'head', 'last4'"):
        Settings(plan="lats4").make_plan()
    with pytest.raises(PlanError, match=r"none\.yaml"):
        Settings(plan=str(tmp_path / "none.yaml")).make_plan()


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ({}, "runs/digits-efficientnet-lite0-all"),
        ({"data": "photos/", "plan": "last4", "patch": 2}, "runs/photos-efficientnet-lite0-last4-patch2"),
        ({"data": "/a/b", "model": "timm/x", "plan": "c/d.yaml", "grid": 4, "kernel": "lumped"}, "runs/b-timm-x-d-grid4lumped"),
        ({"data": ".", "model": "nets:net", "exact": True, "patch": 2}, "runs/data-nets-net-all-exact"),
        ({"grid": 4, "keep": "hosvd:0.8"}, "runs/digits-efficientnet-lite0-all-grid4-hosvd0.8"),
        ({"patch": 2, "kernel": "lumped", "keep": "int8:64"}, "runs/digits-efficientnet-lite0-all-patch2lumped-int8-64"),
        ({"keep": "fixed:0.9,4"}, "runs/digits-efficientnet-lite0-all-fixed0.9-4"),
        ({"out": "here"}, "here"),
    ],
)
def test_where_a_run_goes(given, folder):
    assert Settings(**given).folder == Path(folder)


# The command line


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["train", *arguments])
    return code, *capsys.readouterr()


def print_config(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["train", *arguments, "--print_config"])
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--lerning_rate", "1"], "there is no setting 'lerning_rate'. 'gradfilter train --help' lists them all."),
        (["--epoch", "1"], "there is no setting 'epoch'. Did you mean --epochs?"),
        (["--weight-deca=1"], "there is no setting 'weight_deca'. Did you mean --weight_decay?"),
        (["photos"], "there is no setting 'photos'."),
        (["--lr", "much"], "--lr: Expected a float. Got value: much."),
        (["--epochs", "1.5"], "--epochs: Expected a int. Got value: 1.5."),
        (["--optimizer", "sdg"], "--optimizer: Expected one of 'sgd', 'adam', 'adamw'. Got value: sdg."),
        (["--kernel", "sum"], "--kernel: Expected one of 'lift', 'lumped'. Got value: sum."),
        (["--mean", "[1, 2]"], "--mean: Expected a tuple with 3 elements. Got value: [1, 2]."),
        (["--lr"], "--lr: expected one argument"),
        (["--lr", "-1", "--epochs", "0"], "--epochs is 0, but must be at least 1; --lr is -1.0, but must be at least 0."),
        (["--config", "/none.yaml"], "--config: File does not exist: '/none.yaml'"),
        (["--preset", "cifar10-mcunet-last4-patch3"], "Did you mean 'cifar10-mcunet-last4-patch"),
        (["--plan", "lats4"], "'lats4' is no plan. Give 'all'"),
        (["--model", "resnt18"], "resnt18"),
        (["--data", "/none"], "/none"),
        (["--resume", "--out", "/none"], "the folder '/none' holds no run to go on with"),
        (["--beside", "/none"], "--beside /none names no run that was finished"),
    ],
)
def test_bad_arguments_are_one_line_of_error(capsys, tmp_path, monkeypatch, arguments, text):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert text in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("lrr: 1", "there is no setting 'lrr'. Did you mean --lr?"),
        ("lr: much", "--lr: Expected a float. Got value: much."),
        ("lr: [1", "Problems parsing config"),
        ("words", "Unexpected config: words"),
        ("lr: -1", "--lr is -1.0, but must be at least 0."),
    ],
)
def test_bad_yaml_files(capsys, tmp_path, content, text):
    file = tmp_path / "run.yaml"
    file.write_text(content)
    code, _, err = run(capsys, "--config", str(file))
    assert code == 2
    assert err.startswith("error: ")
    assert text in err


def test_help_tells_of_every_setting(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert [name for name in sorted(NAMES) if f"--{name} " not in out] == []
    assert "Share of the target spread over all classes" in out


def test_flags_with_dashes_and_switches():
    assert parse(["--val-share", "0.3", "--weight_decay=0.5"]) == Settings(val_share=0.3, weight_decay=0.5)
    assert parse(["--exact", "--strict", "--lr", "1"]) == Settings(exact=True, strict=True, lr=1)
    assert parse(["--lr", "1", "--measure", "false", "--exact=true"]) == Settings(lr=1, measure=False, exact=True)
    assert parse(["--measure=False", "--tensorboard", "True"]) == Settings(measure=False, tensorboard=True)
    assert parse(["--data", "my-photos", "--plan=last-4.yaml"]) == Settings(data="my-photos", plan="last-4.yaml")
    assert parse(["--mean", "[0.1, 0.2, 0.3]", "--limit", "null"]) == Settings(mean=(0.1, 0.2, 0.3))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--lr", "0.30000000000000004", "--mean", "[0.1, 0.2, 0.3]", "--exact", "--data", "a b"],
        ["--preset", PRESET],
        ["--preset", PRESET, "--lr", "1", "--grid", "3"],
        ["--preset", "cifar10-mcunet-hosvd0.8", "--keep", "subspace:8x32x3x3,cold"],
    ],
)
def test_a_printed_config_is_read_as_the_same_settings(capsys, tmp_path, arguments):
    file = tmp_path / "printed.yaml"
    file.write_text(print_config(capsys, *arguments))
    assert parse(["--config", str(file)]) == parse(arguments)


def test_flags_come_before_the_file_and_the_file_before_the_preset(tmp_path):
    preset = Settings(**get_preset(PRESET), preset=PRESET)
    file = tmp_path / "run.yaml"
    file.write_text("{lr: 0.5, epochs: 7, batch: 3}")
    assert parse(["--preset", PRESET]) == preset
    for arguments in (["--lr", "1", "--config", str(file)], [f"--config={file}", "--lr", "1"]):
        assert parse(arguments) == Settings(lr=1, epochs=7, batch=3)
        assert parse([*arguments, "--preset", PRESET]) == dataclasses.replace(preset, lr=1, epochs=7, batch=3)
    file.write_text(f"{{preset: {PRESET}, lr: 0.5}}")
    assert parse(["--config", str(file), "--batch", "9"]) == dataclasses.replace(preset, lr=0.5, batch=9)


def test_a_size_of_patches_takes_the_place_of_another(tmp_path):
    preset = Settings(**get_preset(PRESET), preset=PRESET)
    assert parse(["--preset", PRESET, "--grid", "3"]) == dataclasses.replace(preset, patch=None, grid=3)
    assert parse(["--preset", PRESET, "--patch", "3"]) == dataclasses.replace(preset, patch=3)
    exact = PRESET.replace("patch2", "exact")
    assert not parse(["--preset", exact, "--patch", "3"]).exact
    assert parse(["--preset", exact]).exact
    file = tmp_path / "run.yaml"
    file.write_text("grid: 4")
    assert parse(["--config", str(file), "--patch", "2"]) == Settings(patch=2)
    assert parse(["--config", str(file), "--exact"]) == Settings(grid=4, exact=True)
    with pytest.raises(SettingsError, match="--patch 2 and --grid 3 both"):
        parse(["--patch", "2", "--grid", "3"])


def test_a_keep_takes_the_place_of_another_and_of_exact_backprop(tmp_path):
    name = "cifar10-mcunet-hosvd0.8"
    preset = Settings(**get_preset(name), preset=name)
    assert parse(["--preset", name]) == preset
    assert parse(["--preset", name, "--keep", "int8"]) == dataclasses.replace(preset, keep="int8")
    assert parse(["--preset", name, "--grid", "4"]) == dataclasses.replace(preset, patch=None, grid=4)
    for exact in ("--exact", "--exact=True"):
        assert parse(["--preset", name, exact]) == dataclasses.replace(preset, keep=None, exact=True)
    assert parse(["--preset", name, "--exact=false"]) == preset
    kept = parse(["--preset", PRESET.replace("patch2", "exact"), "--keep", "int8"])
    assert (kept.exact, kept.keep) == (False, "int8")
    file = tmp_path / "run.yaml"
    file.write_text("keep: int8")
    assert parse(["--config", str(file), "--exact"]) == Settings(exact=True)
    with pytest.raises(SettingsError, match="--keep int8 says how inputs are held, but --exact leaves that"):
        parse(["--keep", "int8", "--exact"])


def test_what_fits_only_with_the_preset_is_not_refused_without():
    preset = "imagenet-resnet18-last4-exact"
    assert get_preset(preset)["parts"] == 2
    assert parse(["--preset", preset, "--part", "0"]).part == 0


def test_resume_takes_the_settings_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored = Settings(data="photos", lr=0.7, parts=3, part=2, out="mine")
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text(yaml.safe_dump(stored.to_dict()))
    assert parse(["--out", "mine", "--resume"]) == dataclasses.replace(stored, resume=True)
    assert parse(["--out", "mine", "--resume", "--part", "1"]) == dataclasses.replace(stored, resume=True, part=1)
    preset = parse(["--preset", PRESET, "--lr", "0.7"])
    preset.folder.mkdir(parents=True)
    (preset.folder / "config.yaml").write_text(yaml.safe_dump(preset.to_dict()))
    assert parse(["--preset", PRESET, "--resume"]) == dataclasses.replace(preset, resume=True)


def test_a_run_is_repeated_from_its_config_alone(photos, tmp_path, capsys, quick):
    first, second = tmp_path / "first", tmp_path / "second"
    settings = make_settings(photos, first, epochs=2, lr=0.1 + 0.2)
    flags = [f"--{name}={value}" for name, value in settings.to_dict().items() if value != getattr(Settings(), name)]
    code, out, _ = run(capsys, *flags)
    assert code == 0
    assert f"weights: {first / 'best.safetensors'}" in out
    stored = yaml.safe_load((first / "config.yaml").read_text())
    assert stored.keys() == NAMES
    assert (stored["resolution"], stored["mean"], stored["lr"]) == (12, [0.485, 0.456, 0.406], 0.30000000000000004)
    assert Plan.load(first / "plan.yaml") == settings.make_plan()
    code, _, err = run(capsys, "--config", str(first / "config.yaml"))
    assert code == 2
    assert "holds a run already" in err
    assert run(capsys, "--config", str(first / "config.yaml"), "--out", str(second))[0] == 0
    assert_same_run(second, first)
    other = yaml.safe_load((second / "config.yaml").read_text())
    assert {name for name in NAMES if other[name] != stored[name]} == {"out"}
