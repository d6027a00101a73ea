"""The training loop: against one written by hand, and what else a run promises."""

import csv
import dataclasses
import io
import json
import math
import multiprocessing
import random
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradfilter.apply import apply_, freeze_
from gradfilter.cli import main
from gradfilter.cli.screen import Bar, Lines, format_time, make_screen
from gradfilter.cost import measure_saved_bytes
from gradfilter.data import load_data, make_transforms
from gradfilter.errors import DataError, SettingsError
from gradfilter.loss import StepLoss
from gradfilter.models import find_info, make_model
from gradfilter.report import Epoch, Results
from gradfilter.train import Settings, train
from gradfilter.train.batches import STEP, VIEW, Rows, load, mix, shuffle
from gradfilter.train.checkpoint import load_checkpoint
from gradfilter.train.feed import Feed
from gradfilter.train.job import WEIGHTS, draw_evenly
from gradfilter.train.run import DivergedError, find_rate
from gradfilter.train.watch import Step, Watch, Work
from train_runs import CLASSES, assert_same_run, find_history, make_settings

# The loop


def make_start(settings: Settings) -> nn.Module:
    """Return the model that a run begins with."""
    generator = torch.Generator().manual_seed(mix(settings.seed, WEIGHTS))
    return make_model(settings.model, classes=len(CLASSES), generator=generator).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def make_images(settings: Settings, view: int, index: int) -> torch.Tensor:
    """Return one view of a training image, drawn as its numbers say."""
    info, images = find_info(settings.model), load_data(settings.data, seed=settings.seed).train
    transform, _ = make_transforms(settings.resolution or 0, info.mean, info.std, settings.augment, flips=images.flips)
    with torch.random.fork_rng():
        torch.manual_seed(mix(settings.seed, VIEW, view, index))
        return transform(images.read(index))


def train_by_hand(settings: Settings) -> tuple[nn.Module, list[float]]:
    """Train with plain torch on the same batches; return the model and the loss of each epoch."""
    model = make_start(settings).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    labels = torch.tensor(load_data(settings.data, seed=settings.seed).train.labels)
    optimizer = make_optimizer(settings, model)
    losses, steps = [], -(-len(labels) // settings.batch)
    for epoch in range(settings.epochs):
        order, total = shuffle(len(labels), settings.seed, epoch), 0.0
        for number, batch in enumerate(order.split(settings.batch)):
            step = epoch * steps + number
            images = torch.stack([make_images(settings, epoch, int(i)) for i in batch])
            for group in optimizer.param_groups:
                group["lr"] = find_rate(settings, step, steps)
            with torch.random.fork_rng():
                torch.manual_seed(mix(settings.seed, STEP, step))
                output = model(images.contiguous(memory_format=torch.channels_last))
            loss = F.cross_entropy(output, labels[batch], label_smoothing=settings.label_smoothing)
            optimizer.zero_grad()
            loss.backward()
            if settings.clip:
                nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            total += loss.item() * len(batch)
        losses.append(total / len(labels))
    return model, losses


def make_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    if settings.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), 1.0, momentum=settings.momentum, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(model.parameters(), 1.0, weight_decay=settings.weight_decay)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"label_smoothing": 0.2, "clip": 0.05, "momentum": 0.5, "seed": 1},
        {"clip": 0.0, "schedule": "constant", "warmup": 1.5, "batch": 7, "augment": "none"},
        {"optimizer": "adamw", "weight_decay": 0.1, "lr": 0.01},
    ],
)
def test_exact_training_is_torchs_own_bit_for_bit(photos, tmp_path, quick, choices):
    settings = make_settings(photos, tmp_path / "out", exact=True, epochs=2, **choices)
    results = train(settings)
    model, losses = train_by_hand(settings)
    weights, _, _ = load_checkpoint(tmp_path / "out" / "last.safetensors")
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []
    assert [epoch.train_loss for epoch in results.history] == losses


def test_patches_of_one_pixel_train_as_exact_backprop(photos, tmp_path, quick):
    settings = make_settings(photos, tmp_path / "out", patch=1, epochs=2)
    train(settings)
    weights, _, _ = load_checkpoint(tmp_path / "out" / "last.safetensors")
    model, _ = train_by_hand(settings)
    torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-3, atol=1e-5)
    train(make_settings(photos, tmp_path / "coarse", patch=4, epochs=2))
    coarse, _, _ = load_checkpoint(tmp_path / "coarse" / "last.safetensors")
    assert (coarse["0.weight"] - weights["0.weight"]).abs().max() > 1e-3  # so that the comparison above says something


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 1.5])
def test_learning_rates(schedule, warmup):
    batches, epochs, top = 4, 3, 0.5
    settings = Settings(schedule=schedule, warmup=warmup, epochs=epochs, lr=top)
    rates = [find_rate(settings, step, batches) for step in range(batches * epochs)]
    warm = int(warmup * batches)
    assert rates[:warm] == pytest.approx([top * (step + 1) / warm for step in range(warm)])
    rest = batches * epochs - warm
    fall = [0.5 + 0.5 * math.cos(math.pi * step / rest) if schedule == "cosine" else 1.0 for step in range(rest)]
    assert rates[warm:] == pytest.approx([top * share for share in fall])
    assert max(rates) == top


def test_clipping_limits_the_whole_gradient(photos, tmp_path, quick):
    choices: dict[str, Any] = {"epochs": 1, "batch": 18, "schedule": "constant", "lr": 1.0, "momentum": 0, "weight_decay": 0}
    norms = {}
    for clip in (0.01, 0.0):
        settings = make_settings(photos, tmp_path / str(clip), clip=clip, **choices)
        start = make_start(settings).state_dict()
        train(settings)
        weights, _, _ = load_checkpoint(settings.folder / "last.safetensors")
        norms[clip] = math.sqrt(sum(float((weights[name] - start[name]).double().square().sum()) for name in start))
    assert norms[0.01] == pytest.approx(0.01, rel=1e-3)
    assert norms[0.0] > 0.1


# Order, views, workers, random numbers


def test_the_order_is_a_function_of_seed_and_epoch():
    orders = {(seed, epoch): shuffle(50, seed, epoch).tolist() for seed in range(3) for epoch in range(3)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == len(orders)
    torch.manual_seed(5)
    assert shuffle(50, 1, 2).tolist() == orders[1, 2]


def make_rows(photos: Path, seed: int = 0) -> Rows:
    images = load_data(str(photos)).train
    transform, _ = make_transforms(12, (0.5,) * 3, (0.5,) * 3, "standard", flips=True)
    return Rows(images, transform, seed)


def test_views_are_a_function_of_seed_view_and_image(photos):
    rows = make_rows(photos)
    first, again = rows[3][1], [rows[7][1], rows[3][1]][1]
    assert torch.equal(first, again)
    others = [rows[3 + view * len(rows)][1] for view in range(1, 6)]
    assert not all(torch.equal(first, other) for other in others)
    seeds = [make_rows(photos, seed)[3][1] for seed in range(1, 6)]
    assert not all(torch.equal(first, other) for other in seeds)


def test_views_come_in_turn_and_from_any_batch(photos):
    rows = make_rows(photos)
    for views, same in ((2, {(0, 2), (1, 3)}), (None, set())):
        feed = Feed(
            rows.images, rows.transform, nn.Flatten(), torch.device("cpu"), 5, views=views, seed=0, workers=0, training=True
        )
        order = shuffle(18, 0, 0)
        epochs = [[(labels, forward()) for labels, forward in feed.run(order, epoch)] for epoch in range(4)]
        seen = [torch.cat([output for _, output in epoch]) for epoch in epochs]
        assert {(i, j) for i in range(4) for j in range(i) if torch.equal(seen[i], seen[j])} == {(j, i) for i, j in same}
        assert torch.equal(torch.cat([labels for labels, _ in epochs[0]]), torch.tensor(rows.images.labels)[order])
        rest = [forward() for _, forward in feed.run(order, 3, start=2)]
        assert all(torch.equal(x, y) for x, (_, y) in zip(rest, epochs[3][2:], strict=True))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")  # on a machine with one core
@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_is_damaged_meanwhile_is_one_line_of_error(photos, tmp_path, workers):
    settings = make_settings(photos, tmp_path / "out", workers=workers)

    class Damage(Watch):
        def tell(self, text: str) -> None:
            for path in photos.rglob("*.png") if "parameters trained" in text else ():  # just before the first step
                path.write_bytes(b"no image")

    with pytest.raises(DataError) as caught:
        train(settings, Damage())
    assert re.fullmatch(r"/\S+\.png: not an image, or damaged .*\. Put the file right, or remove it, .*", str(caught.value))


def test_a_worker_that_dies_is_one_line_of_error(photos, tmp_path):
    class Kill(Watch):
        def step(self, step: Step) -> None:
            for child in multiprocessing.active_children():
                child.kill()
                child.join()

    with pytest.raises(DataError, match=r"^a process that loads images has died \(.*\)\. .* fewer --workers, .*\.$"):
        train(make_settings(photos, tmp_path / "out", workers=1, batch=1), Kill())


def test_workers_change_nothing(photos):
    batches = shuffle(18, 0, 0).split(5)
    alone, helped = (list(load(make_rows(photos), batches, workers)) for workers in (0, 2))
    assert len(alone) == len(helped) == 4
    for (rows, images), (other_rows, other_images) in zip(alone, helped, strict=True):
        assert torch.equal(rows, other_rows)
        assert torch.equal(images, other_images)
        assert images.is_contiguous(memory_format=torch.channels_last)


def get_random_states() -> list[Any]:
    state = np.random.get_state()  # noqa: NPY002
    return [torch.get_rng_state().tolist(), random.getstate(), [np.asarray(part).tolist() for part in state]]


@pytest.mark.parametrize("choices", [{"measure": True}, {"plan": "last1", "cache": "memory", "views": 2, "workers": 1}])
def test_the_global_random_state_is_neither_changed_nor_used(photos, tmp_path, quick, choices):
    for name, seed in (("a", 1), ("b", 2)):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        before = get_random_states()
        train(make_settings(photos, tmp_path / name, epochs=1, **choices))
        assert get_random_states() == before
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_seeds_differ(photos, tmp_path, quick):
    for seed in (0, 1):
        train(make_settings(photos, tmp_path / str(seed), epochs=1, seed=seed))
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "0", tmp_path / "1")


# Batch norms


@pytest.mark.parametrize(
    ("mode", "moved"), [("eval", {"weight", "bias"}), ("train", {"weight", "bias", "mean"}), ("frozen", set())]
)
def test_batch_norms(photos, tmp_path, quick, mode, moved):
    settings = make_settings(photos, tmp_path / "out", batch_norm=mode, epochs=1)
    start = make_start(settings).state_dict()
    train(settings)
    weights, _, _ = load_checkpoint(tmp_path / "out" / "last.safetensors")
    names = {"weight": "1.weight", "bias": "1.bias", "mean": "1.running_mean"}
    assert {what for what, name in names.items() if not torch.equal(weights[name], start[name])} == moved
    assert not torch.equal(weights["0.weight"], start["0.weight"])
    assert int(weights["1.num_batches_tracked"]) == (5 if mode == "train" else 0)


@pytest.mark.parametrize("batch", [17, 1])
def test_a_batch_of_one_image_that_has_no_statistics_is_found_before_training(photos, tmp_path, batch):
    settings = make_settings(photos, tmp_path / "out", model="train_nets:pixels", batch=batch, batch_norm="train")
    with pytest.raises(SettingsError, match=f"18 images in batches of {batch} end with a single one. Give another --batch"):
        train(settings)
    assert not list((tmp_path / "out").iterdir())


def test_a_batch_of_one_image_that_has_statistics_is_fine(photos, tmp_path, quick):
    assert train(make_settings(photos, tmp_path / "out", batch=17, batch_norm="train", epochs=1)).history


# What goes wrong


def test_weights_that_diverge_are_not_saved(photos, tmp_path, quick, monkeypatch):
    """One step that ruins the weights; its own loss, from before it, is fine."""
    train(make_settings(photos, tmp_path / "expected", save_every=1))
    settings = make_settings(photos, tmp_path / "out", save_every=1)
    with monkeypatch.context() as patch:
        patch.setattr(
            "gradfilter.train.run.find_rate", lambda s, step, batches: math.inf if step == 6 else find_rate(s, step, batches)
        )
        with pytest.raises(
            DivergedError, match=r"in epoch 2, batch 2\. The checkpoint before it is in '.*out'\. Start again with"
        ):
            train(settings)
    weights, _, about = load_checkpoint(tmp_path / "out" / "last.safetensors")
    assert (about["state"]["epoch"], about["state"]["batch"]) == (1, 1)
    assert all(tensor.isfinite().all() for tensor in weights.values())
    train(dataclasses.replace(settings, resume=True))
    assert_same_run(tmp_path / "out", tmp_path / "expected")


@pytest.mark.parametrize("val_every", [1, 5])
def test_weights_that_diverge_with_the_last_step_end_no_run(photos, tmp_path, quick, monkeypatch, val_every):
    monkeypatch.setattr("gradfilter.train.run.find_rate", lambda settings, step, batches: math.inf if step == 4 else 0.01)
    with pytest.raises(DivergedError, match=r"no finite numbers any more, in epoch 1, batch 5\. Start again"):
        train(make_settings(photos, tmp_path / "out", epochs=2, val_every=val_every))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.yaml", "plan.yaml"}


def test_a_learning_rate_that_is_too_high(photos, tmp_path, capsys):
    config = tmp_path / "run.json"
    settings = make_settings(photos, tmp_path / "out", lr=1e30, clip=0, schedule="constant")
    config.write_text(json.dumps(settings.to_dict()))
    assert main(["train", "--config", str(config)]) == 2
    err = capsys.readouterr().err
    assert "error: loss or weights are no finite numbers any more, in epoch 1" in err
    assert "lower --lr (now 1e+30), a --warmup, or a smaller --clip (now 0.0)." in err
    assert "Traceback" not in err


# What a run leaves and tells


class Listen(Watch):
    """Keeps all that it is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.steps: list[Step] = []
        self.works: list[Work] = []
        self.epochs: list[tuple[Epoch, int, bool]] = []

    def tell(self, text: str) -> None:
        self.texts.append(text)

    def step(self, step: Step) -> None:
        self.steps.append(step)

    def work(self, work: Work) -> None:
        self.works.append(work)

    def epoch(self, epoch: Epoch, epochs: int, is_best: bool) -> None:
        self.epochs.append((epoch, epochs, is_best))


def test_a_whole_run(photos, tmp_path):
    settings, listen, out = make_settings(photos, tmp_path / "out", measure=True, tensorboard=True), Listen(), tmp_path / "out"
    results = train(settings, listen)
    names = {"config.yaml", "plan.yaml", "metrics.csv", "results.json", "report.html", "report.png", "tensorboard"}
    assert {path.name for path in out.iterdir()} == {*names, "best.safetensors", "last.safetensors"}
    assert list((out / "tensorboard").glob("events*"))
    assert Results.from_dict(json.loads((out / "results.json").read_text())) == results

    rows = list(csv.DictReader((out / "metrics.csv").read_text().splitlines()))
    history = [{key: repr(value) for key, value in vars(epoch).items()} for epoch in results.history]
    assert [{key: repr(float(value)) if key != "epoch" else value for key, value in row.items()} for row in rows] == history
    assert [epoch for epoch, _, _ in listen.epochs] == list(results.history)
    assert [(step.epoch, step.batch) for step in listen.steps] == [
        (epoch, batch) for epoch in (1, 2, 3) for batch in range(1, 6)
    ]
    assert [(work.what, work.done, work.total) for work in listen.works] == [("judging", done, 6) for done in (4, 6)] * 3
    assert listen.texts[0] == "18 images to train on, 3 classes of 6 each"

    assert (results.classes, results.train_counts, results.val_counts) == (CLASSES, (6, 6, 6), (2, 2, 2))
    assert sum(map(sum, results.confusion)) == 6
    right = sum(results.confusion[i][i] for i in range(3)) / 6
    assert results.best.val_accuracy == right == max(epoch.val_accuracy for epoch in results.history)
    assert results.cost is not None
    assert {step.saved_bytes for step in listen.steps} == {results.cost.saved_bytes}


def test_the_learning_rate_and_time_of_an_epoch(photos, tmp_path, quick):
    results = train(make_settings(photos, tmp_path / "out"))
    assert [epoch.lr for epoch in results.history] == [find_rate(Settings(lr=0.05, epochs=3), 5 * n - 1, 5) for n in (1, 2, 3)]
    assert all(epoch.seconds > 0 for epoch in results.history)


def test_judged_every_so_many_epochs_and_at_the_end(photos, tmp_path, quick):
    results = train(make_settings(photos, tmp_path / "out", epochs=5, val_every=2))
    assert [math.isnan(epoch.val_accuracy) for epoch in results.history] == [True, False, True, False, False]
    assert results.best_epoch in (2, 4, 5)
    train(make_settings(photos, tmp_path / "each", epochs=5))
    judged, each = find_history(tmp_path / "out"), find_history(tmp_path / "each")
    assert [judged[i] for i in (1, 3, 4)] == [each[i] for i in (1, 3, 4)]
    assert [row["train_loss"] for row in judged] == [row["train_loss"] for row in each]


def test_limits_and_parts(photos, tmp_path, quick):
    listen = Listen()
    results = train(make_settings(photos, tmp_path / "out", parts=2, part=1, limit=4, epochs=1), listen)
    assert sum(results.train_counts) == 4
    assert max(results.train_counts) - min(results.train_counts) <= 1
    assert any("part 1 of 2: 9 images, KL divergence" in text and "(trained on)" in text for text in listen.texts)
    images = load_data(str(photos)).train
    assert draw_evenly(images.labels, 7, 0) == sorted(set(draw_evenly(images.labels, 7, 0)))
    assert draw_evenly(images.labels, 7, 0) != draw_evenly(images.labels, 7, 1)
    assert sorted(images.select(draw_evenly(images.labels, 7, 0)).counts()) == [2, 2, 3]


def test_half_precision(photos, tmp_path, quick):
    results = train(make_settings(photos, tmp_path / "out", precision="bf16-mixed", epochs=1))
    assert math.isfinite(results.history[0].train_loss)
    weights, _, _ = load_checkpoint(tmp_path / "out" / "last.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32, torch.int64}


def test_a_device_that_is_not_there(photos, tmp_path):
    with pytest.raises(SettingsError, match=r"--device cuda --precision 32-true cannot be had: "):
        train(make_settings(photos, tmp_path / "out", device="cuda"))


def test_in_a_thread_signals_are_somebody_elses(photos, tmp_path, quick):
    found: list[Results] = []
    thread = threading.Thread(target=lambda: found.append(train(make_settings(photos, tmp_path / "out", epochs=1))))
    thread.start()
    thread.join()
    assert len(found[0].history) == 1


# Cost


def test_costs_are_those_that_are_measured(photos, tmp_path, quick):
    settings = make_settings(photos, tmp_path / "out", measure=True, epochs=1)
    cost = train(settings).cost
    assert cost is not None
    images = torch.zeros(4, 3, 12, 12).contiguous(memory_format=torch.channels_last)
    plan = settings.make_plan()
    loss = StepLoss(None, torch.zeros(4, dtype=torch.long))
    assert cost.saved_bytes == measure_saved_bytes(apply_(make_start(settings).train(), plan), images, loss=loss)
    assert cost.exact_saved_bytes == measure_saved_bytes(freeze_(make_start(settings).train(), plan), images, loss=loss)
    assert cost.saved_bytes < cost.exact_saved_bytes
    assert (cost.batch, cost.resolution) == (4, 12)
    assert cost.step_ratio > 0
    assert min(cost.step_seconds, cost.exact_step_seconds, cost.inference_seconds) > 0


def test_where_memory_is_short_exact_backprop_is_not_tried(photos, tmp_path, capsys, monkeypatch):
    free = "gradfilter.train.measure.find_free_memory"
    settings = make_settings(photos, tmp_path / "out", measure=True, epochs=1)
    config = tmp_path / "run.json"
    config.write_text(json.dumps(settings.to_dict()))
    monkeypatch.setattr(free, lambda: 1000)
    assert main(["train", "--config", str(config)]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert "MB of exact backprop" in line
    assert "a step took" not in line
    results = Results.from_dict(json.loads((tmp_path / "out" / "results.json").read_text()))
    assert results.cost is not None
    assert math.isnan(results.cost.step_ratio)
    assert math.isnan(results.cost.exact_step_seconds)
    assert (tmp_path / "out" / "report.html").exists()
    monkeypatch.undo()
    again = train(dataclasses.replace(settings, resume=True)).cost
    assert again is not None
    assert (again.saved_bytes, again.exact_saved_bytes) == (results.cost.saved_bytes, results.cost.exact_saved_bytes)
    assert again.step_ratio > 0


def test_measuring_changes_nothing(photos, tmp_path, quick):
    for name, measure in (("a", False), ("b", True)):
        train(make_settings(photos, tmp_path / name, epochs=1, batch_norm="train", measure=measure))
    assert_same_run(tmp_path / "a", tmp_path / "b")


# The screen

STEP_SEEN = Step(1, 3, 2, 5, 0.5, 0.25, 123.4, 5_600_000, 75.0)
EPOCH_SEEN = Epoch(1, 0.5, 0.25, 0.4, 0.75, 0.1, 123.4, 9.0)
FIGURES = ("loss 0.500", "accuracy 25.0%", "123 images/s", "5.6 MB held", "1:15 min left")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal():
    stream = Terminal()
    screen = make_screen(stream)
    assert isinstance(screen, Bar)
    screen.step(STEP_SEEN)
    screen.step(dataclasses.replace(STEP_SEEN, batch=5))
    screen.bar.refresh()  # which it does by itself after a while
    screen.epoch(EPOCH_SEEN, 3, True)
    screen.close()
    text = stream.getvalue()
    assert all(figure in text for figure in ("epoch 1/3", *FIGURES))
    assert "epoch 1 of 3: loss 0.500, accuracy 25.0%, held out 75.0% (best), 123 images/s, 9 s\n" in text


def test_plain_lines_elsewhere(monkeypatch):
    stream = io.StringIO()
    screen = make_screen(stream)
    assert type(screen) is Lines
    screen.step(STEP_SEEN)
    assert stream.getvalue() == ""
    monkeypatch.setattr("gradfilter.cli.screen.QUIET", -1.0)  # as if nothing had been said for long
    screen.step(STEP_SEEN)
    assert stream.getvalue() == f"epoch 1 of 3, batch 2 of 5: {', '.join(FIGURES)}\n"
    screen.epoch(dataclasses.replace(EPOCH_SEEN, val_accuracy=math.nan), 3, False)
    assert stream.getvalue().endswith("epoch 1 of 3: loss 0.500, accuracy 25.0%, 123 images/s, 9 s\n")


def test_work_between_steps_has_a_bar_of_its_own():
    stream = Terminal()
    screen = Bar(stream)
    screen.step(STEP_SEEN)
    screen.work(Work("judging", 64, 1000, 75.0))
    assert (screen.bar.n, screen.bar.total) == (64, 1000)
    screen.bar.refresh()
    screen.work(Work("judging", 1000, 1000, 0.0))
    assert not screen.bar
    screen.step(STEP_SEEN)
    assert (screen.bar.n, screen.bar.total) == (2, 5)
    screen.close()
    assert "judging   6%|" in stream.getvalue()
    assert "64/1000, 1:15 min left" in stream.getvalue()


def test_work_between_steps_in_plain_lines(monkeypatch):
    stream = io.StringIO()
    screen = Lines(stream)
    screen.work(Work("trunk cache", 64, 1000, 75.0))
    assert stream.getvalue() == ""
    monkeypatch.setattr("gradfilter.cli.screen.QUIET", -1.0)
    screen.work(Work("trunk cache", 64, 1000, 75.0))
    assert stream.getvalue() == "trunk cache: 64 of 1000, 1:15 min left\n"


def test_times_for_reading():
    assert [format_time(seconds) for seconds in (0.4, 59, 60, 3599, 3661)] == [
        "0 s",
        "59 s",
        "1:00 min",
        "59:59 min",
        "1:01:01 h",
    ]
