"""`gradfilter train --task segment`: the same run, with a label for each pixel."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

import segment_runs
from gradfilter.cli import main
from gradfilter.data import IGNORE, load_masks, make_mask_transforms
from gradfilter.errors import DataError, SettingsError
from gradfilter.hooks import find_applied
from gradfilter.models.extras import import_extra
from gradfilter.models.torchvision_ops import declare_torchvision_ops
from gradfilter.report import Results
from gradfilter.scores import find_ious, find_mean_accuracy, find_mean_iou
from gradfilter.train import Settings, train
from gradfilter.train.batches import MaskRows, load
from gradfilter.train.job import fill_in, prepare
from gradfilter.train.run import find_rate
from gradfilter.train.task import SEGMENT, TASKS, count_pixels, find_class_weights
from gradfilter.train.watch import Watch
from segment_runs import make_scenes, make_settings
from train_runs import assert_same_run


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return make_scenes(tmp_path_factory.mktemp("data") / "scenes", train=14, val=6)


def make_scores(seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (3, 9, 7), generator=generator)
    scores = torch.randn(3, 4, 9, 7, generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORE
    return scores, labels


def test_scores_are_those_of_torchmetrics():
    scores, labels = make_scores()
    table = count_pixels(scores, labels)
    metrics = import_extra("torchmetrics", "a test").classification
    options = {"num_classes": 4, "ignore_index": IGNORE}
    assert table.tolist() == metrics.MulticlassConfusionMatrix(**options)(scores, labels).tolist()
    each = metrics.MulticlassJaccardIndex(average="none", **options)(scores, labels)
    assert find_ious(table).tolist() == pytest.approx(each.tolist())
    assert find_mean_iou(table) == pytest.approx(float(each.mean()))
    assert find_mean_accuracy(table) == pytest.approx(float(metrics.MulticlassAccuracy(**options)(scores, labels)))


def test_scores_leave_out_classes_that_are_not_there():
    table = [[6, 2, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert find_ious(table)[:2].tolist() == pytest.approx([6 / 8, 2 / 4])
    assert np.isnan(find_ious(table)[2:]).all()
    assert find_mean_iou(table) == pytest.approx(0.625)
    assert find_mean_accuracy(table) == pytest.approx(0.875)
    assert math.isnan(find_mean_iou(np.zeros((2, 2))))


def test_rare_classes_weigh_more(scenes):
    images = load_masks(str(scenes)).train
    areas = np.array([[30, 10, 0], [50, 0, 0]])  # shares: 80 of 90, 10 of 40, never
    weights = find_class_weights(dataclasses.replace(images.select([0, 1]), areas=areas))
    median = (80 / 90 + 10 / 40) / 2
    assert weights.tolist() == pytest.approx([median / (80 / 90), median / (10 / 40), 1])


@pytest.mark.parametrize("class_weights", ["none", "balanced"])
def test_the_loss_is_cross_entropy_without_what_is_ignored(scenes, class_weights):
    images = load_masks(str(scenes)).train
    loss = SEGMENT.make_loss(Settings(**{**segment_runs.SMALL, "class_weights": class_weights}), images)
    labels = torch.tensor([[[0, 1], [2, IGNORE]]])
    scores = torch.randn(1, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    each = -scores.log_softmax(1)[0, [0, 1, 2], [0, 0, 1], [0, 1, 0]]
    weights = find_class_weights(images).float() if class_weights == "balanced" else torch.ones(3)
    assert float(loss(scores, labels)) == pytest.approx(float((each * weights).sum() / weights.sum()))


def test_a_batch_in_which_nothing_counts_teaches_nothing(scenes):
    loss = SEGMENT.make_loss(Settings(**segment_runs.SMALL), load_masks(str(scenes)).train)
    scores = torch.ones(1, 3, 2, 2, requires_grad=True)
    labels = torch.full((1, 2, 2), IGNORE)
    value = loss(scores, labels)
    value.backward()
    assert float(value.detach()) == 0
    assert scores.grad is not None
    assert not scores.grad.any()
    assert SEGMENT.count_right(scores.detach(), labels) == 0


def test_views_are_a_function_of_seed_view_and_image(scenes):
    images = load_masks(str(scenes)).train
    transform, _ = make_mask_transforms(16, (0.5,) * 3, (0.5,) * 3, "standard", flips=True)
    rows = MaskRows(images, transform, 0)
    before = torch.get_rng_state()
    first = [rows[row] for row in (3, 3 + len(images), 3)]
    assert all(torch.equal(a, b) for a, b in zip(first[0][1:], first[2][1:], strict=True))
    assert not torch.equal(first[0][1], first[1][1])
    assert not torch.equal(first[0][1], MaskRows(images, transform, 1)[3][1])
    assert torch.equal(torch.get_rng_state(), before)
    (numbers, pixels, labels), *_ = load(rows, [torch.tensor([3, 5])], 0)
    assert (numbers.tolist(), pixels.shape, labels.shape) == ([3, 5], (2, 3, 16, 16), (2, 16, 16))
    assert torch.equal(labels[0], first[0][2])


def test_a_run_learns_and_leaves_what_a_run_leaves(scenes, tmp_path):
    settings = make_settings(scenes, tmp_path / "out", epochs=25, augment="flip", measure=True, resolution=20)
    results = train(settings)
    assert results.best.val_accuracy > 0.7
    assert results.best.val_accuracy == pytest.approx(find_mean_iou(results.confusion))
    counted = 6 * 13 * 20  # the first row of each mask is ignored
    assert sum(map(sum, results.confusion)) == counted
    assert (results.metric, results.val_images, results.train_counts) == ("mIoU", 6, (14, 13, 14))
    assert results.cost is not None
    assert results.cost.saved_bytes < results.cost.exact_saved_bytes
    stored = Results.from_dict(json.loads((tmp_path / "out" / "results.json").read_text()))
    assert stored.val_images == 6
    report = (tmp_path / "out" / "report.html").read_text()
    assert "mIoU" in report
    assert "mAcc" in report
    assert report.count("<figcaption>predicted</figcaption>") == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_ends_with_the_same_bits(scenes, tmp_path, workers, monkeypatch):
    train(make_settings(scenes, tmp_path / "whole"))
    settings = make_settings(scenes, tmp_path / "cut", workers=workers)
    finish = segment_runs.Small.forward
    left = [6]  # four batches an epoch: in the second

    def fail(self, x):
        left[0] -= self.training
        if left[0] < 0:
            raise KeyboardInterrupt
        return finish(self, x)

    with monkeypatch.context() as patch:
        patch.setattr(segment_runs.Small, "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            train(settings)
    train(dataclasses.replace(settings, resume=True))
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_the_region_reaches_the_loss_and_the_decoder_alone_is_trained(scenes, tmp_path):
    job = prepare(fill_in(make_settings(scenes, tmp_path / "out", plan="decoder", grid=4, patch=None)), Watch())
    applied = find_applied(job.model)
    assert applied is not None
    assert set(applied.resolved.convs) == {"decoder.0", "segmentation_head.0"}
    labels, forward = next(job.train.run(torch.arange(4), 0))
    job.loss(forward(), labels).backward()
    moved = {name for name, p in job.model.named_parameters() if p.grad is not None}
    assert {name.partition(".")[0] for name in moved} == {"decoder", "segmentation_head"}


def test_the_head_of_a_network_without_linear_is_its_last_convolution(scenes, tmp_path):
    job = prepare(fill_in(make_settings(scenes, tmp_path / "out", plan="head")), Watch())
    assert {name for name, p in job.model.named_parameters() if p.requires_grad} == {
        "segmentation_head.0.weight",
        "segmentation_head.0.bias",
    }


def test_the_command_line(scenes, tmp_path, capsys):
    flags = {**segment_runs.SMALL, "data": scenes, "out": tmp_path / "out", "epochs": 1, "limit": 8, "schedule": "poly"}
    flags |= {"class_weights": "balanced", "augment": "standard"}
    assert main(["train", *(f"--{name}={value}" for name, value in flags.items())]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("mIoU ")
    assert "on 6 held-out images" in captured.out
    assert "mIoU" in captured.err
    assert "8 images to train on, 3 classes" in captured.err


def test_folders_of_runs_name_the_encoder():
    settings = Settings(task="segment", data="camvid/", model="deeplabv3", encoder="resnet18", plan="decoder", grid=16)
    assert settings.folder.name == "camvid-deeplabv3-resnet18-decoder-grid16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": 2}, "--parts is for --task classify"),
        ({"partition": "parts.json"}, "--partition is for --task classify"),
        ({"evaluate": "halves"}, "--evaluate is 'halves', but must be one of whole, window"),
        ({"task": "classify", "evaluate": "window"}, "--evaluate window is for --task segment"),
        ({"task": "sort"}, "--task is 'sort', but must be one of classify, segment"),
        ({"task": "classify", "class_weights": "balanced"}, "--class_weights balanced is for --task segment"),
    ],
)
def test_settings_of_the_other_task(scenes, tmp_path, changes, message):
    with pytest.raises(SettingsError, match=message):
        make_settings(scenes, tmp_path, **changes)


def test_a_model_of_the_other_task(scenes, tmp_path):
    with pytest.raises(SettingsError, match=r"one score per pixel and class, \[4, 3, 16, 16\]: take another model"):
        train(make_settings(scenes, tmp_path / "out", model="segment_runs:classifier"))
    assert not (tmp_path / "out" / "config.yaml").exists()


def test_data_of_the_other_task(tmp_path):
    with pytest.raises(DataError, match="is for --task classify"):
        train(Settings(**{**segment_runs.SMALL, "data": "digits", "out": str(tmp_path / "out")}))


def test_poly_falls_to_nothing():
    settings = Settings(schedule="poly", lr=1.0, epochs=2)
    assert [find_rate(settings, step, 2) for step in range(4)] == pytest.approx([(1 - step / 4) ** 0.9 for step in range(4)])


def test_tasks_have_the_names_of_the_flag():
    assert list(TASKS) == ["classify", "segment"]


def test_fidelity_is_measured(scenes, tmp_path, capsys):
    flags = {"task": "segment", "data": scenes, "model": "segment_runs:small", "weights": "random", "resolution": 16}
    flags |= {"patch": 1, "batch": 4, "device": "cpu", "batches": 1}
    assert main(["fidelity", *(f"--{name}={value}" for name, value in flags.items())]) == 0
    assert "1.0000" in capsys.readouterr().out


def test_a_run_is_shown_beside_another(scenes, tmp_path):
    first = train(make_settings(scenes, tmp_path / "exact", exact=True, patch=None, epochs=1))
    second = train(make_settings(scenes, tmp_path / "out", epochs=1, beside=str(tmp_path / "exact")))
    assert second.beside is not None
    assert (second.beside.name, second.beside.accuracy) == ("exact", first.best.val_accuracy)
    assert "exact " in (tmp_path / "out" / "report.html").read_text()


def test_a_network_of_the_registry(scenes, tmp_path):
    declare_torchvision_ops()
    pytest.importorskip("segmentation_models_pytorch")
    settings = make_settings(scenes, tmp_path / "out", model="fpn", encoder="resnet18", resolution=32, plan="decoder")
    job = prepare(fill_in(settings), Watch())
    assert job.describe_model()["model"] == "fpn/resnet18"
    labels, forward = next(job.train.run(torch.arange(2), 0))
    job.loss(forward(), labels).backward()  # an exit would warn, and warnings are errors here
    assert {name.partition(".")[0] for name, p in job.model.named_parameters() if p.grad is not None} == {
        "decoder",
        "segmentation_head",
    }
