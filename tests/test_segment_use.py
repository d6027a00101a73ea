"""`gradfilter eval` and `predict` of runs that label pixels."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from gradfilter.cli import main
from gradfilter.data.masks import read_values
from gradfilter.report.colours import find_colours
from gradfilter.train import train
from segment_runs import make_scenes, make_settings

VALUES = (7, 11, 200)
"""What stands for the three classes in the files."""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Make scenes whose masks have values of their own."""
    folder = make_scenes(tmp_path_factory.mktemp("data") / "scenes", train=14, val=4, test=3)
    recode(folder)
    return folder


def recode(folder):
    table = np.zeros(256, np.uint8)
    table[:3] = VALUES
    table[255] = 3
    for path in folder.rglob("masks/*.png"):
        Image.fromarray(table[np.asarray(Image.open(path))]).save(path)
    (folder / "classes.txt").write_text("7 sand\n11 sea\n200 sky\n3 void\n")


@pytest.fixture(scope="module")
def run(scenes, tmp_path_factory):
    """Train on them."""
    out = tmp_path_factory.mktemp("runs") / "scenes"
    results = train(make_settings(scenes, out, epochs=20, augment="flip", resolution=20))
    assert results.best.val_accuracy > 0.6
    return out


def evaluate(capsys, *arguments):
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_eval_judges_the_held_out_images_as_the_run_did(run, capsys):
    results = json.loads((run / "results.json").read_text())
    judged = evaluate(capsys, run)
    assert judged["confusion"] == results["confusion"]
    assert judged["mIoU"] == results["history"][results["best_epoch"] - 1]["val_accuracy"]
    assert judged["mIoU"] == pytest.approx(np.mean(judged["IoU"]))
    assert judged["mAcc"] == pytest.approx(np.mean(judged["right"]))
    table = np.array(judged["confusion"])
    assert judged["pixel accuracy"] == pytest.approx(np.trace(table) / table.sum())
    assert (judged["images"], judged["classes"], table.sum()) == (4, ["sand", "sea", "sky"], 4 * 13 * 20)


def test_eval_prints_a_table_of_the_classes(run, capsys):
    assert main(["eval", str(run / "best.safetensors"), "--part", "test", "--batch", "2"]) == 0
    text = capsys.readouterr().out
    assert all(f"| {word}" in text for word in ("class", "pixels", "IoU", "right", "sand", "sea", "sky"))
    assert "mIoU " in text
    assert "pixel accuracy " in text
    assert "3 images of scenes/test" in text


def test_eval_through_windows_is_another_number_of_the_same_pixels(run, capsys):
    whole, window = evaluate(capsys, run), evaluate(capsys, run, "--evaluate", "window")
    assert np.sum(whole["confusion"]) == np.sum(window["confusion"])
    assert window["mIoU"] > 0.5


def test_a_run_judged_through_windows_is_used_so(scenes, tmp_path, capsys):
    results = train(make_settings(scenes, tmp_path / "run", epochs=1, resolution=10, evaluate="window"))
    judged = evaluate(capsys, tmp_path / "run")
    assert judged["mIoU"] == results.best.val_accuracy
    assert judged["loss"] != pytest.approx(evaluate(capsys, tmp_path / "run", "--evaluate", "whole")["loss"])


def test_eval_takes_all_images_of_another_folder_without_a_split(run, tmp_path, capsys):
    recode(make_scenes(tmp_path / "made", new=5))
    other = shutil.move(tmp_path / "made" / "new", tmp_path / "other")
    shutil.copy(tmp_path / "made" / "classes.txt", other)
    judged = evaluate(capsys, run, "--data", other)
    assert (judged["images"], judged["data"]) == (5, "other")
    assert judged["mIoU"] > 0.4


def test_eval_refuses_other_classes(run, tmp_path, capsys):
    other = make_scenes(tmp_path / "other", train=2, val=1)
    assert main(["eval", str(run), "--data", str(other)]) == 2
    text = capsys.readouterr().err
    assert "only in other/val: class 0, class 1, class 2" in text
    assert "only in the model: sand, sea, sky" in text
    assert "a file classes.txt that names the same classes" in text


def test_eval_refuses_the_data_of_the_other_task(run, capsys):
    assert main(["eval", str(run), "--data", "digits"]) == 2
    assert "is for --task classify" in capsys.readouterr().err


def test_predict_writes_masks_as_the_data_has_them(run, scenes, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["predict", str(run), str(scenes / "val" / "images"), "--out", str(out), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 4
    right = []
    for row in rows:
        name = row["file"].rpartition("/")[2]
        assert row["mask"] == str(out / "masks" / name)
        values, truth = read_values(row["mask"]), read_values(scenes / "val" / "masks" / name)
        assert set(np.unique(values)) <= set(VALUES)
        right.append((values == truth)[1:].mean())
        names = dict(zip(VALUES, ("sand", "sea", "sky"), strict=True))
        shares = {
            names[value]: count / values.size for value, count in zip(*np.unique(values, return_counts=True), strict=True)
        }
        assert {one["class"]: one["share"] for one in row["classes"]} == pytest.approx(shares)
        with Image.open(row["mask"]) as mask:
            assert mask.mode == "P"
            assert np.array_equal(np.asarray(mask.convert("RGB")), paint(values))
        with Image.open(row["overlay"]) as overlay:
            assert (overlay.mode, overlay.size) == ("RGB", (20, 14))
    assert np.mean(right) > 0.7


def paint(values):
    colours = np.zeros((256, 3), np.uint8)
    colours[list(VALUES)] = find_colours(3)
    return colours[values]


def test_predict_says_what_eval_counts(run, scenes, tmp_path, capsys):
    """Both see images through the same windows: the masks that one writes have the confusion that the other counts."""
    table = np.zeros((3, 3), int)
    images, flag = scenes / "test" / "images", ("--evaluate", "window")
    assert main(["predict", str(run), str(images), "--out", str(tmp_path), *flag]) == 0
    capsys.readouterr()
    labels = {value: label for label, value in enumerate(VALUES)}
    for path in sorted((tmp_path / "masks").iterdir()):
        pairs = zip(read_values(scenes / "test" / "masks" / path.name).flat, read_values(path).flat, strict=True)
        for truth, said in pairs:
            if truth in labels:
                table[labels[truth], labels[said]] += 1
    assert table.tolist() == evaluate(capsys, run, "--part", "test", *flag)["confusion"]


def test_predict_never_writes_over_a_file_unasked(run, scenes, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image = scenes / "val" / "images" / "00.png"
    assert main(["predict", str(run), str(image)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{image}: ")
    assert "%" in text
    mask, overlay = (tmp_path / "predictions" / kind / "00.png" for kind in ("masks", "overlays"))
    assert overlay.exists()
    mask.write_bytes(b"mine")
    assert main(["predict", str(run), str(image)]) == 2
    assert f"{mask.relative_to(tmp_path)}" in (text := capsys.readouterr().err)
    assert "--overwrite" in text
    assert mask.read_bytes() == b"mine"
    assert main(["predict", str(run), str(image), "--overwrite", "--top", "1", "--format", "csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert read_values(mask).shape == (14, 20)


def test_masks_are_named_as_images_are(run, scenes, tmp_path, capsys):
    images = tmp_path / "images"
    for name in ("a/1.png", "b/1.png", "2.png"):
        (images / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(scenes / "val" / "images" / "00.png", images / name)
    assert main(["predict", str(run), str(images), "--out", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    written = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.png")}
    assert written == {f"{kind}/{name}" for kind in ("masks", "overlays") for name in ("a/1.png", "b/1.png", "2.png")}
    Image.open(images / "2.png").save(images / "2.jpg")
    assert main(["predict", str(run), str(images), "--out", str(tmp_path / "new")]) == 2
    assert "would both have the mask '2.png'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_to(run, scenes, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    image = str(scenes / "val" / "images" / "00.png")
    assert main(["predict", str(run), image, "--out", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err
