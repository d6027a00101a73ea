"""Labels of pixels in the trunk cache, in comparisons, under a budget, and in the benchmark of accuracy."""

import dataclasses
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gradfilter.bench import accuracy
from gradfilter.bench.__main__ import main as bench
from gradfilter.data import load_masks
from gradfilter.errors import PlanError, SettingsError
from gradfilter.models.torchvision_ops import declare_torchvision_ops
from gradfilter.plan import Backward, Plan
from gradfilter.report.outcomes import find_outcomes, make_table
from gradfilter.report.pareto import make_paired_pareto, make_pareto
from gradfilter.scores import find_mean_accuracy
from gradfilter.train import Settings, train
from gradfilter.train.compare import compare
from gradfilter.train.variants import find_usual, make_variants
from gradfilter.train.watch import Watch
from segment_runs import make_scenes, make_settings
from train_runs import find_weights

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return make_scenes(tmp_path_factory.mktemp("data") / "scenes", train=14, val=6)


@pytest.fixture(autouse=True)
def _quick_report(monkeypatch):
    """Let runs end without drawing their report."""

    def write(folder: Path, *rest: object) -> None:
        for name in ("report.html", "report.png"):
            (folder / name).write_text("drawn")

    monkeypatch.setattr("gradfilter.train.run.write_report", write)


class Told(Watch):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.text = ""

    def tell(self, text: str) -> None:
        self.text += f"{text}\n"


# Trunk cache


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("choices", [{"augment": "none"}, {"augment": "standard", "views": 2}], ids=["plain", "two views"])
def test_a_run_from_the_cache_is_the_same(scenes, tmp_path, place, choices):
    folders = {"off": tmp_path / "off", place: tmp_path / "cached"}
    runs = [train(make_settings(scenes, out, plan="decoder", cache=cache, **choices)) for cache, out in folders.items()]
    plain, cached = (find_weights(out) for out in folders.values())
    for name, expected in plain.items():
        torch.testing.assert_close(cached[name], expected, rtol=1e-4, atol=1e-5)
    assert runs[1].best.val_loss == pytest.approx(runs[0].best.val_loss, rel=1e-3)


def test_labels_are_bytes_in_the_cache(scenes, tmp_path):
    told = Told()
    train(make_settings(scenes, tmp_path / "out", plan="decoder", cache="disk", augment="none", epochs=1), told)
    sizes = sorted(path.stat().st_size for path in (tmp_path / "out" / "cache").glob("*.bin"))
    assert sizes == [6 * 16 * 16, 14 * 16 * 16, 6 * 8 * 8 * 8 * 4, 14 * 8 * 8 * 8 * 4]
    assert "14 rows of 2.3 kB" in told.text


def test_other_masks_are_another_cache(tmp_path):
    scenes = make_scenes(tmp_path / "scenes", train=6, val=4)
    settings = make_settings(scenes, tmp_path / "out", plan="decoder", cache="disk", augment="none", epochs=1, overwrite=True)
    train(settings)
    again, changed = Told(), Told()
    train(settings, again)
    assert again.text.count("found on disk") == 2
    mask = scenes / "train" / "masks" / "05.png"
    Image.fromarray(np.flip(np.asarray(Image.open(mask)), 1)).save(mask)
    train(settings, changed)
    assert changed.text.count("found on disk") == 1


def test_the_cache_takes_no_new_view_each_epoch(scenes, tmp_path):
    with pytest.raises(SettingsError, match="--augment standard makes a new one each epoch: give --views 4"):
        make_settings(scenes, tmp_path, cache="memory")


# Batch norms


def test_norms_of_a_fresh_decoder_move(scenes, tmp_path):
    def find(**changes):
        return make_settings(scenes, tmp_path, **changes).make_plan().batch_norm

    assert [find(), find(plan="decoder"), find(batch_norm="eval"), find(batch_norm="frozen")] == [
        *("train", "train", "eval", "frozen"),
    ]
    assert Settings(plan="last4").make_plan().batch_norm == "eval"
    Plan({"decoder": Backward()}).save(tmp_path / "mine.yaml")  # says eval
    mine = str(tmp_path / "mine.yaml")
    assert [find(plan=mine, patch=None), find(plan=mine, batch_norm="train")] == ["eval", "train"]


# Comparisons


def test_a_comparison_tells_miou_and_macc(scenes, tmp_path):
    out = tmp_path / "out"
    settings = make_settings(scenes, out, plan="decoder", measure=True, epochs=2, cache="memory", augment="none")
    compared = compare(settings, ["plan=head", "exact", "patch=2"], seeds=2)
    data, text = json.loads((out / "compare.json").read_text()), (out / "compare.md").read_text()
    head, exact, patch = data["rows"]
    assert list(exact) == [
        *("method", "mIoU, %", "mAcc, %", "less exact, paired", "± s.e.", "MB held", "times fewer", "step / exact"),
    ]
    assert patch["less exact, paired"] == pytest.approx(patch["mIoU, %"] - exact["mIoU, %"])
    assert head["MB held"] < patch["MB held"] < exact["MB held"]
    assert [row["mIoU, %"] for row in data["runs"] if row["method"] == "exact"] == pytest.approx(
        [100 * run.history[-1].val_accuracy for run in compared.runs["exact"] if run]
    )
    assert "14 training images" in text
    assert "of all pixels of 6 held-out images together" in text
    assert "Wilson" not in text
    assert (out / "compare.png").read_bytes().startswith(PNG)


def test_plans_are_tried_on_the_network_with_its_encoder(scenes, tmp_path, monkeypatch):
    declare_torchvision_ops()
    pytest.importorskip("segmentation_models_pytorch")
    tried = []

    def make(settings, *rest):
        tried.append(settings.model)
        raise PlanError("no such layer.")

    monkeypatch.setattr("gradfilter.train.compare.make_trained_model", make)
    settings = make_settings(scenes, tmp_path / "out", model="fpn", encoder="mobilenet_v2", auxiliary=0.4)
    with pytest.raises(SettingsError, match="--try 'exact': no such layer"):
        compare(settings, ["exact", "patch=2"])
    assert tried == ["fpn/mobilenet_v2/auxiliary"]


def test_the_usual_plans_leave_the_gradient_of_the_head_as_it_is(scenes, tmp_path):
    settings = make_settings(scenes, tmp_path, plan="decoder", patch=None)
    head = make_variants(settings, find_usual(settings))[0]
    assert (head.name, head.settings.make_plan().layers) == ("head, patch 1", {"last 0": Backward(patch=1)})


def test_macc_is_that_of_the_last_epoch(scenes, tmp_path):
    runs = [train(make_settings(scenes, tmp_path / str(seed), seed=seed)) for seed in range(2)]
    for run in runs:
        assert run.best.val_mean_accuracy == pytest.approx(find_mean_accuracy(run.confusion))
        assert Settings.from_dict(run.settings).task == "segment"
    (outcome,) = find_outcomes({"patch 2": runs}, "patch 2")
    assert outcome.mean_accuracy == pytest.approx(sum(run.history[-1].val_mean_accuracy for run in runs) / 2)
    assert outcome.metric == "mIoU"
    assert "95 % interval" not in make_table("title", [outcome], "patch 2").columns


def test_pictures_without_intervals(scenes, tmp_path):
    run = train(make_settings(scenes, tmp_path / "out", epochs=1, measure=True))
    (outcome,) = find_outcomes({"patch 2": [run]}, "patch 2")
    outcomes = [outcome, dataclasses.replace(outcome, method="other", accuracy=0.2, saved_bytes=10.0, difference=-0.1)]
    for picture in (make_pareto("title", outcomes), make_paired_pareto("title", outcomes, "patch 2")):
        assert picture
        assert picture.startswith(PNG)


# What else a run of this task takes, or does not


def test_a_plan_for_a_budget(scenes, tmp_path):
    budget = make_settings(scenes, tmp_path / "out", patch=None, memory="12kB", epochs=1, measure=True)
    told = Told()
    results = train(budget, told)
    assert "plan for 12kB: trains" in told.text
    assert results.cost is not None
    assert 0 < results.cost.saved_bytes <= 12_000 < results.cost.exact_saved_bytes
    assert Plan.from_yaml(results.plan).batch_norm == "train"


def test_a_partition_is_of_images_with_one_class(scenes, tmp_path):
    with pytest.raises(SettingsError, match="a partition deals out images by their one class, and masks have many"):
        make_settings(scenes, tmp_path, parts=2)


def test_a_folder_named_like_a_set_is_told(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        load_masks(str(make_scenes(tmp_path / "scenes", train=2, val=2)))
        assert not caplog.text
        data = load_masks(str(make_scenes(tmp_path / "camvid", train=2, val=2)))
    assert "named like the known set 'camvid'" in caplog.text
    assert len(data.train.classes) == 11


def test_the_accuracy_benchmark(scenes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(accuracy, "METHODS", {name: accuracy.METHODS[name] for name in ("exact", "lift, patch 2")})
    arguments = ["--save", str(tmp_path), "accuracy", "--task", "segment", "--data", str(scenes), "--label", "scenes"]
    arguments += ["--model", "segment_runs:small", "--weights", "random", "--plan", "decoder", "--pixels", "16"]
    arguments += ["--start", "no", "--optimizer", "adamw", "--epochs", "2", "--batch", "4", "--seeds", "1"]
    arguments += ["--cache", "disk", "--work", str(tmp_path / "runs")]
    assert bench(arguments) == 0
    text = capsys.readouterr().out
    assert "--task segment --pixels 16 --optimizer adamw --start no --label scenes" in text
    assert "no weights, scenes, the decoder trained, 16 px" in text
    assert "14 training images, 2 epochs, AdamW" in text
    assert "batch norms of trained layers in train mode" in text
    assert "behind a decoder that stays as it is at the start" in text
    (file,) = tmp_path.glob("accuracy-scenes-*-decoder.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["method"] for row in rows] == ["head only", "exact", "lift, patch 2"]
    assert all(0 < float(row["mAcc, %"]) <= 100 for row in rows)
    assert float(rows[2]["times fewer"]) > 1
    (head,) = (tmp_path / "runs").glob("decoder-headonly-seed0")
    assert Plan.load(head / "plan.yaml").layers["last 0"].patch == 1
