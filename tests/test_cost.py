"""Cost of a step: predictions against what is measured, sums, errors, and no trace. No times are checked."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import fields
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfilter as gf
from cases import MODELS, seeded
from gradfilter.cli import main
from gradfilter.cost import EXACT, PLAN, SIDES, Trial, make_sgd, measure_saved_by_layer
from gradfilter.cost_table import LayerCost
from gradfilter.errors import GradFilterError, InputError
from gradfilter.hooks import exactly, find_applied
from gradfilter.measure import measure_peak, silent
from gradfilter.meter import BACKWARD, FORWARD, UPDATE, predict_step
from gradfilter.ops import native
from gradfilter.outputs import sum_outputs
from test_fidelity import snapshot, with_some_grads
from train_nets import small

PLANS = {
    "all, patch 4": gf.Plan.all(gf.Backward(patch=4)),
    "all, grid 3, statistics move": gf.Plan.all(gf.Backward(grid=3), batch_norm="train"),
    "last 4, lumped": gf.Plan.last(4, gf.Backward(patch=2, kernel="lumped")),
    "head": gf.Plan.last(0),
}


def draw_images(n: int, side: int) -> torch.Tensor:
    return torch.randn(n, 3, side, side, generator=seeded(1))


def make_model(plan: gf.Plan | None = None, n: int = 3) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A small network with dropout under a plan, images and labels."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = gf.apply_(small(), plan or gf.Plan.all(gf.Backward(patch=2)))
    return model, draw_images(n, 14), torch.randint(5, (n,), generator=seeded(2))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_predicted_saved_bytes_are_those_measured_for_every_layer(name, plan):
    model = gf.apply_(MODELS[name]().train(), plan)
    images = draw_images(2, 65)
    for run in SIDES.values():
        predicted = run(model, lambda: predict_step(model, (images,), sum_outputs)).saved_bytes
        assert predicted == run(model, lambda: measure_saved_by_layer(model, images, loss=sum_outputs))


NAMES = ("mobilenet_v2", "resnet18", "mcunet-in3")
PEAKS = [(name, batch, side) for name in NAMES for batch, side in ((1, 224), (8, 128), (32, 96))]


@pytest.mark.parametrize(("name", "batch", "side"), PEAKS)
def test_predicted_peak_is_that_of_the_allocator(name, batch, side):
    images = draw_images(batch, side)
    model = MODELS[name]().train()
    for plan in (PLANS["all, patch 4"], gf.Plan.last(4, gf.Backward(patch=2))):
        gf.apply_(model, plan)
        trial = Trial(model, images, sum_outputs, make_sgd([p for p in model.parameters() if p.requires_grad]))
        trial.step()
        for run in SIDES.values():
            predicted = run(model, lambda: predict_step(model, (images,), sum_outputs, make_sgd)).peak_bytes
            with native.off():
                assert predicted == pytest.approx(run(model, partial(measure_peak, trial.step, images.device)), rel=0.1)
            # The library needs no more: what waits for an activation is never made.
            assert run(model, partial(measure_peak, trial.step, images.device)) <= 1.1 * predicted


@pytest.mark.parametrize("plan", [None, gf.Plan.last(1, gf.Backward(patch=4))], ids=["all", "last1"])
def test_layers_sum_up_to_the_step(plan):
    model, x, y = make_model(plan)
    found = gf.cost(model, (x, y))
    applied = find_applied(model)
    assert applied is not None
    step = predict_step(model, (x,), lambda out: F.cross_entropy(out, y.to("meta")), make_sgd)
    with exactly(applied):
        exact = predict_step(model, (x,), lambda out: F.cross_entropy(out, y.to("meta")), make_sgd)
    for side, expected in ((found.plan, step), (found.exact, exact)):
        assert side.total.forward_flops == expected.count(FORWARD)
        assert side.total.backward_flops == expected.count(BACKWARD)
        assert side.update_flops == expected.count(UPDATE)
        assert side.total.saved_bytes == sum(expected.saved_bytes.values()) == side.total.measured_saved_bytes
        assert side.peak_bytes == expected.peak_bytes
        assert side.total.parameter_bytes == sum(p.nbytes for p in model.parameters())
        assert side.total.gradient_bytes == expected.gradient_bytes
        assert side.total.optimizer_bytes == expected.optimizer_bytes == expected.gradient_bytes
    rows = found.to_table().to_dict()["rows"]
    for column in ("backward flops", "exact backward flops", "saved bytes", "exact saved bytes", "parameter bytes"):
        assert rows[-1][column] == sum(row[column] for row in rows[:-1])


def test_both_sides_are_measured():
    model, x, y = make_model(gf.Plan.last(2, gf.Backward(patch=2)))
    found = gf.cost(model, (x, y))
    for side in (found.plan, found.exact):
        assert side.measured_peak_bytes
        assert min(side.seconds.forward, side.seconds.backward, side.seconds.update) > 0
        assert side.seconds.step == side.seconds.forward + side.seconds.backward + side.seconds.update
        assert side.rss_bytes is None or side.rss_bytes > side.measured_peak_bytes
    assert found.plan.total.saved_bytes < found.exact.total.saved_bytes
    assert found.plan.total.backward_flops < found.exact.total.backward_flops
    assert found.step_ratio > 0
    assert (found.batch, found.resolution, found.patches) == (3, (14, 14), {"3": (2, 2), "7": (2, 2)})
    assert found.notes == ()


def test_predictions_alone_and_images_without_content():
    model, x, _ = make_model()
    model.register_forward_pre_hook(lambda m, args: pytest.fail("the model ran") if not args[0].is_meta else None)
    found = gf.cost(model, x, measure=False)
    assert gf.cost(model, x.to("meta")).plan == found.plan
    assert found.plan.measured_peak_bytes is found.plan.rss_bytes is found.plan.total.measured_saved_bytes is None
    assert math.isnan(found.step_ratio)
    assert math.isnan(found.exact.seconds.step)
    assert "measured" not in str(found)


def test_a_batch_that_fits_nowhere_is_predicted_only(monkeypatch):
    model, x = make_model()[0], draw_images(16, 64)
    predicted = gf.cost(model, x, measure=False)
    free = predicted.plan.peak_bytes + predicted.exact.peak_bytes  # at most half of it is taken
    monkeypatch.setattr(sys.modules["gradfilter.cost"], "find_free_memory", lambda: free)
    found = gf.cost(model, x)
    assert found.plan.measured_peak_bytes
    assert found.exact.measured_peak_bytes is None
    assert found.exact.peak_bytes > found.plan.peak_bytes
    assert math.isnan(found.step_ratio)
    (note,) = found.notes
    assert "Not measured exactly" in note
    assert note in str(found)


def make_adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def test_state_is_that_of_the_optimizer_at_hand():
    model, x, _ = make_model()
    plain = gf.cost(model, x, make_optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), measure=False).plan
    adam = gf.cost(model, x, make_optimizer=make_adam, measure=False).plan
    assert plain.total.optimizer_bytes == 0
    steps = 4 * len(list(model.parameters()))
    assert adam.total.optimizer_bytes == 2 * adam.total.gradient_bytes + steps


def test_a_loss_of_outputs_alone():
    model, x, _ = make_model()
    found = gf.cost(model, x, loss=lambda out: out.abs().exp().sum(), measure=False)
    assert found.plan.layers["(loss)"].forward_flops == 3 * 15


@pytest.mark.parametrize("measure", [True, False])
def test_the_model_comes_out_as_it_was(measure):
    model, x, y = make_model(gf.Plan.all(gf.Backward(patch=2), batch_norm="train"))
    before = snapshot(with_some_grads(model))
    described = gf.describe(model)
    gf.cost(model, (x, y), measure=measure, make_optimizer=make_adam)
    assert snapshot(model) == before
    assert gf.describe(model) == described


def fail(*_):
    raise RuntimeError("no loss today")


WRONG: dict[str, tuple[Any, str]] = {
    "no scalar": (lambda out, y: F.cross_entropy(out, y, reduction="none"), r"a tensor of shape \[3\].*mean"),
    "detached": (lambda out, y: out.detach().sum(), "no gradient"),
    "an error": (fail, "no loss today"),
}


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize(("loss", "message"), WRONG.values(), ids=WRONG)
def test_a_loss_that_has_no_gradient_is_refused(loss, message, measure):
    model, x, y = make_model()
    before = snapshot(with_some_grads(model))
    with pytest.raises(InputError, match=message):
        gf.cost(model, (x, y), loss=loss, measure=measure)
    assert snapshot(model) == before


def test_what_is_no_sample_is_refused():
    model, x, y = make_model()
    with pytest.raises(InputError, match=r"gradfilter\.apply_\(model, plan\)"):
        gf.cost(small(), x)
    with pytest.raises(GradFilterError, match=r"fails on images of shape \[3, 2, 14, 14\]"):
        gf.cost(model, x[:, :2])
    with pytest.raises(InputError, match=r"outputs of shape \[3, 5\] and targets of shape \[2\]"):
        gf.cost(model, (x, y[:2]))
    with pytest.raises(InputError, match="the sample is a dict"):
        gf.cost(model, cast(Any, {"images": x}))


def test_the_profiler_keeps_off_the_screen(capfd):
    peak = measure_peak(lambda: torch.zeros(1000).sum(), torch.device("cpu"))
    assert 4000 <= peak < 8000
    assert capfd.readouterr() == ("", "")
    with silent():
        os.write(2, b"hidden")
    os.write(2, b"shown")
    assert capfd.readouterr().err == "shown"


def run(capsys, *args):
    code = main(["cost", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_command_line(tmp_path, capsys):
    args = ["train_nets:small", "--plan", "last2", "--patch", "2", "--batch", "2", "--resolution", "16"]
    code, out, _ = run(capsys, *args, "--out", str(tmp_path / "new"))
    assert code == 0
    assert out.startswith("# Cost of a training step beside exact backprop, batch 2 at 16×16 px: train_nets:small, plan last2")
    for words in ("| total", "Saved: ", "(measured ", "Step: ", "Peak of a step", "optimizer state"):
        assert words in out
    assert (tmp_path / "new" / "cost.md").read_text() in out
    data = json.loads((tmp_path / "new" / "cost.json").read_text())
    assert data["rows"][-1]["layer"] == "total"
    assert set(data["cost"][PLAN]["layers"]["3"]) == {f.name for f in fields(LayerCost)}
    assert data["cost"][EXACT]["seconds"]["backward"] > 0
    code, out, _ = run(capsys, *args, "--no-measure")
    assert code == 0
    assert "measured" not in out


def test_command_line_as_the_paper_counts(tmp_path, capsys):
    args = ["resnet18", "--plan", "last2", "--patch", "2", "--kernel", "lumped", "--accounting", "paper", "--out"]
    assert run(capsys, *args, str(tmp_path))[0] == 0
    total = json.loads((tmp_path / "cost.json").read_text())["rows"][-1]
    assert total["exact input bytes"] == 196 * 1024
    assert total["input bytes"] == 64 * 1024


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--plan", "most"], "'most' is no plan"),
        (["--batch", "0"], "no batch of images"),
        (["--plan", "last9"], "the last 9 convolutions"),
        (
            ["--no-measure", "--out", "/dev/null/x"],
            "--out /dev/null/x cannot be written: Not a directory. Give another folder.",
        ),
    ],
)
def test_command_line_errors_are_one_line(args, message, capsys):
    code, _, err = run(capsys, "train_nets:small", "--resolution", "16", *args)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
