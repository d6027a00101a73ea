"""Cost, fidelity and planner where every pixel has a label: what the loss holds counts, to the byte."""

import copy
import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import gradfilter as gf
from cases import seeded
from gradfilter.apply import apply_, freeze_
from gradfilter.cli import main
from gradfilter.cost import SIDES, Trial, make_sgd, measure_saved_by_layer, measure_saved_bytes, predict_saved_bytes
from gradfilter.data import IGNORE, load_masks
from gradfilter.fidelity import compare, find_gradients
from gradfilter.loss import StepLoss
from gradfilter.measure import measure_peak
from gradfilter.meter import LOSS, predict_step
from gradfilter.models.torchvision_ops import declare_torchvision_ops
from gradfilter.ops import native
from gradfilter.plan import Plan
from gradfilter.planner import choose_plan
from gradfilter.survey import FLOPS, MEMORY
from gradfilter.train import Settings, train
from gradfilter.train.job import choose_images, fill_in, make_feeds, make_loss, make_new_model
from gradfilter.train.task import TASKS
from gradfilter.train.watch import Watch
from segment_nets import CLASSES, DECODERS, make_segmenter, segment_loss
from segment_runs import SMALL, classifier, make_scenes, make_settings, small

PLANS = {"patch 4": gf.Plan.all(gf.Backward(patch=4)), "last 2, grid 3": gf.Plan.last(2, gf.Backward(grid=3))}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return make_scenes(tmp_path_factory.mktemp("data") / "scenes", train=6, val=3)


def make_batch(count: int, side: int, classes: int = CLASSES) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(classes, (count, side, side), generator=seeded(3))
    labels[:, :3] = IGNORE
    return torch.randn(count, 3, side, side, generator=seeded(4)), labels


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("name", DECODERS)
def test_predicted_bytes_of_layers_and_loss_are_those_measured(name, plan):
    model = apply_(make_segmenter(name, torch.float32).train(), plan)
    images, labels = make_batch(2, 32)
    bound = StepLoss(segment_loss, labels)
    for run in SIDES.values():
        predicted = run(model, lambda: predict_step(model, (images,), bound)).saved_bytes
        assert predicted == run(model, lambda: measure_saved_by_layer(model, images, loss=bound))
        assert predicted[LOSS]
        assert sum(predicted.values()) == run(model, lambda: predict_saved_bytes(model, images, loss=bound))


def test_the_loss_holds_a_number_per_pixel_exactly_and_per_cell_under_a_plan():
    n, side, classes = 2, 24, 3
    found = gf.cost(apply_(small().train(), gf.Plan.all(gf.Backward(patch=4))), make_batch(n, side, classes)[0])
    divisor = 4  # what the mean divides by
    cells = (side // 2 // 4) ** 2  # in front of the enlargement
    for side_cost, held in ((found.plan, cells * classes * 4), (found.exact, side * side * (classes * 4 + 8))):
        assert side_cost.layers[LOSS].saved_bytes == side_cost.layers[LOSS].measured_saved_bytes == n * held + divisor
    (row,) = [row for row in found.to_table().to_dict()["rows"] if row["layer"] == LOSS]
    assert row["saved bytes"] == found.plan.layers[LOSS].saved_bytes
    assert found.exact.total.saved_bytes == sum(layer.saved_bytes for layer in found.exact.layers.values())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("task", "weights"), [("classify", "none"), ("segment", "none"), ("segment", "balanced")])
def test_losses_of_training_runs_run_on_shapes_alone(scenes, task, weights, smoothing):
    settings = Settings(task=task, class_weights=weights, label_smoothing=smoothing)
    loss = TASKS[task].make_loss(settings, load_masks(str(scenes)).train)
    images, labels = make_batch(2, 16, 3)
    model = apply_((small if task == "segment" else classifier)().train(), gf.Plan.all(gf.Backward(patch=2)))
    found = gf.cost(model, (images, labels if task == "segment" else labels[:, -1, -1]), loss=loss)
    for side in (found.plan, found.exact):
        assert 0 < side.layers[LOSS].saved_bytes == side.layers[LOSS].measured_saved_bytes
        assert side.total.saved_bytes == side.total.measured_saved_bytes


def test_labels_that_are_part_of_a_larger_tensor_count_as_far_as_they_show():
    model, (images, labels) = small().train(), make_batch(4, 16, 3)
    bound, own = StepLoss(cross_entropy, labels[:2]), StepLoss(cross_entropy, labels[:2].clone())
    held = measure_saved_bytes(model, images[:2], loss=bound)
    assert held == measure_saved_bytes(model, images[:2], loss=own) == predict_saved_bytes(model, images[:2], loss=bound)


def cross_entropy(outputs, labels):
    return F.cross_entropy(outputs, labels, ignore_index=IGNORE)


def test_the_peak_is_with_the_loss():
    images, labels = make_batch(4, 128)
    model = apply_(make_segmenter("pyramid", torch.float32).train(), gf.Plan.all(gf.Backward(patch=4)))
    bound = StepLoss(segment_loss, labels)
    trial = Trial(model, images, bound, make_sgd(list(model.parameters())))
    trial.step()
    for run in SIDES.values():
        predicted = run(model, lambda: predict_step(model, (images,), bound, make_sgd)).peak_bytes
        assert (
            predicted > run(model, lambda: predict_step(model, (images,), lambda out: out["out"].mean(), make_sgd)).peak_bytes
        )
        with native.off():
            assert predicted == pytest.approx(run(model, partial(measure_peak, trial.step, images.device)), rel=0.1)


def test_a_run_records_what_the_loss_holds(scenes, tmp_path):
    settings = make_settings(scenes, tmp_path / "out", epochs=1, measure=True)
    cost = train(settings).cost
    assert cost is not None
    filled = fill_in(settings)
    data = choose_images(filled, Watch(), None)
    model, plan = make_new_model(filled, data.train), settings.make_plan()
    feed, _ = make_feeds(filled, data, model, torch.device("cpu"))
    images, labels = feed.make_batch(4)
    bound = StepLoss(make_loss(filled, data.train), labels)
    assert cost.saved_bytes == measure_saved_bytes(apply_(copy.deepcopy(model), plan), images, loss=bound)
    exact = freeze_(model, plan)
    assert cost.exact_saved_bytes == measure_saved_bytes(exact, images, loss=bound)
    assert cost.exact_saved_bytes - measure_saved_bytes(exact, images) >= 4 * 16 * 16 * (3 * 4 + 8)


def run(*args):
    return main([str(arg) for arg in args])


def test_cost_on_the_command_line(tmp_path, capsys):
    args = ["cost", "segment_runs:small", "--patch", 4, "--batch", 2, "--resolution", 16, "--out", tmp_path]
    assert run(*args) == 0
    first = json.loads((tmp_path / "cost.json").read_text())
    assert run(*args, "--task", "segment", "--no-measure") == 0
    second = json.loads((tmp_path / "cost.json").read_text())
    for data in (first, second):
        (row,) = [row for row in data["rows"] if row["layer"] == LOSS]
        assert row["saved bytes"] == 2 * 4 * 3 * 4 + 4  # cells, images, classes; and a divisor
        assert row["exact saved bytes"] == 2 * 16 * 16 * (3 * 4 + 8) + 3 * 4 + 2 * 4  # and weights
    assert "(loss)" in capsys.readouterr().out


def test_cost_of_a_network_of_the_registry(tmp_path, capsys):
    declare_torchvision_ops()
    pytest.importorskip("segmentation_models_pytorch")
    args = ["--task", "segment", "--plan", "decoder", "--grid", 4, "--classes", 12, "--batch", 2, "--resolution", 64]
    assert run("cost", "deeplabv3", "--encoder", "resnet18", *args, "--no-measure", "--out", tmp_path) == 0
    assert "deeplabv3/resnet18, plan decoder, grid 4" in capsys.readouterr().out
    (row,) = [row for row in json.loads((tmp_path / "cost.json").read_text())["rows"] if row["layer"] == LOSS]
    assert row["exact saved bytes"] == 2 * 64 * 64 * (12 * 4 + 8) + 12 * 4 + 2 * 4
    assert row["saved bytes"] == 2 * 4 * 4 * 12 * 4 + 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["segment_runs:classifier", "--task", "segment"], "--task segment asks for one score per pixel and class"),
        (["segment_runs:small", "--task", "classify"], "--task classify asks for one score per image and class"),
        (["segment_runs:small", "--classes", 1], "--classes 1 leaves nothing to tell apart"),
        (["segment_runs:small", "--encoder", "resnet18"], "which has none of its own"),
    ],
)
def test_cost_says_what_is_wrong(args, message, capsys):
    assert run("cost", *args, "--resolution", 16, "--batch", 2) == 2
    assert message in capsys.readouterr().err


def test_fidelity_is_that_of_the_loss_of_training(scenes, tmp_path):
    flags = {"task": "segment", "data": scenes, "model": "segment_runs:small", "weights": "random", "resolution": 16}
    flags |= {"patch": 2, "batch": 4, "batches": 1, "class_weights": "balanced", "augment": "none", "out": tmp_path / "found"}
    assert run("fidelity", *(f"--{name}={value}" for name, value in flags.items())) == 0
    rows = {row["layer"]: row for row in json.loads((tmp_path / "found" / "fidelity.json").read_text())["rows"]}
    given = {name: flags[name] for name in ("patch", "resolution", "class_weights", "augment")}
    settings = fill_in(make_settings(scenes, tmp_path / "out", **given))
    data = choose_images(settings, Watch(), None)
    model = make_new_model(settings, data.train)
    feed, _ = make_feeds(settings, data, model, torch.device("cpu"))
    (batch,) = feed.first(1)
    assert bool((batch[1] == IGNORE).any())
    loss = make_loss(settings, data.train)
    exact = find_gradients(freeze_(copy.deepcopy(model), settings.make_plan()), batch, loss)
    found = find_gradients(apply_(model, settings.make_plan()), batch, loss)
    assert rows["all"]["cosine"]["mean"] == pytest.approx(compare(found, exact).cosine)
    plain = find_gradients(model, (batch[0], batch[1].where(batch[1] != IGNORE, 0)))
    assert abs(compare(plain, exact).cosine - rows["all"]["cosine"]["mean"]) > 1e-3  # ignored pixels and weights do matter


def test_a_plan_is_chosen_and_trained_within_its_budget(scenes, tmp_path, capsys):
    common = {name: SMALL[name] for name in ("task", "model", "weights", "resolution", "batch", "device")}
    flags = [f"--{name}={value}" for name, value in {**common, "data": scenes}.items()]
    assert run("plan", "--memory", "6kB", "--out", tmp_path / "plan", *flags) == 0
    assert "What the loss holds counts with the last layer." in capsys.readouterr().out
    plan = Plan.load(tmp_path / "plan" / "plan.yaml")
    results = train(make_settings(scenes, tmp_path / "out", patch=None, memory="6kB", measure=True, epochs=1))
    assert Plan.load(tmp_path / "out" / "plan.yaml") == plan
    assert results.cost is not None
    assert 0 < results.cost.saved_bytes <= 6000


OPTIONS = [{}, {"keep": "full", "batch": 5}, {"keep": "full", "flops": "1G"}]


@pytest.mark.parametrize("options", OPTIONS, ids=["keeps", "batch", "flops"])
def test_a_budget_has_room_for_the_loss_of_every_pixel(options):
    model, sample = small(), make_batch(3, 16, 3)
    images, labels = make_batch(options.get("batch", 3), 16, 3)
    for budget in (5_000, 10**9):
        limits = {MEMORY: budget, **{kind: options[kind] for kind in (FLOPS,) if kind in options}}
        chosen = choose_plan(model, sample, cross_entropy, limits, options.get("batch"), options.get("keep"))
        twin = apply_(copy.deepcopy(model).train(), chosen.plan)
        held = measure_saved_bytes(twin, images, loss=StepLoss(cross_entropy, labels))
        assert measure_saved_bytes(twin, images) < held == chosen.costs[MEMORY] <= budget


def test_targets_are_drawn_for_every_pixel():
    model, images = small(), make_batch(2, 16, 3)[0]
    plan = gf.plan_for(model, images, memory="60kB", keep="full")
    found = gf.cost(apply_(model.train(), plan), images)
    assert 0 < found.plan.layers[LOSS].saved_bytes < found.plan.total.saved_bytes <= 60_000
