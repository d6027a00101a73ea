"""Training runs with every keep: they train, also on a smaller last batch, and tell how inputs were held."""

import dataclasses
import json
import math

import pytest
import torch

import gradfilter as gf
from gradfilter.cli import main
from gradfilter.keep import parse_keep
from gradfilter.plan import Backward, Plan
from gradfilter.report import Results
from gradfilter.train import Settings, train
from gradfilter.train.compare import compare, find_results
from gradfilter.train.feed import untouched
from train_nets import small
from train_runs import assert_same_run, make_settings

TEXTS = "bfloat16 int8 int8:16 int8:nearest svd:0.8 hosvd:0.8 subspace:0.8 subspace:3 subspace:3x4x2x2 subspace:4KB "
TEXTS += "subspace:3,cold fixed:0.9 fixed:3 fixed:4KB,2"
KEEPS = tuple(TEXTS.split())


@pytest.mark.parametrize("keep", KEEPS)
def test_every_keep_trains_on_digits_with_a_smaller_last_batch(tmp_path, quick, keep):
    settings = Settings(
        data="digits",
        model="train_nets:small",
        weights="random",
        resolution=16,
        limit=50,
        epochs=2,
        batch=16,  # the last batch has two images
        plan="last3" if "x" in keep else "all",  # ranks of four modes are for maps, not for the classifier's features
        patch=1,
        keep=keep,
        measure=False,
        device="cpu",
        out=str(tmp_path / "out"),
    )
    torch.manual_seed(5)
    before = torch.get_rng_state()
    results = train(settings)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(math.isfinite(epoch.train_loss) for epoch in results.history)
    keeps = [layer.keep for layer in results.layers if layer.patch]
    assert keeps == [str(parse_keep(keep))] * (3 if "x" in keep else 4)


@pytest.mark.parametrize("keep", ["int8", "hosvd:0.8", "subspace:3", "fixed:0.9"])
@pytest.mark.parametrize("choices", [{"batch": 17, "grid": 2, "patch": None}, {"precision": "bf16-mixed"}, {"patch": 3}])
def test_keeps_with_filtered_gradients_single_images_and_half_precision(photos, tmp_path, quick, keep, choices):
    settings = make_settings(photos, tmp_path / "out", **{"epochs": 2, "keep": keep, **choices})
    results = train(settings)
    assert settings.batch != 17 or sum(results.train_counts) % 17 == 1
    assert all(math.isfinite(epoch.train_loss) for epoch in results.history)


@pytest.mark.parametrize("keep", ["int8", "hosvd:0.8", "subspace:3", "fixed:0.9"])
def test_the_trunk_cache_changes_nothing(photos, tmp_path, quick, keep):
    choices = {"keep": keep, "patch": 1, "plan": "last1", "augment": "none"}
    train(make_settings(photos, tmp_path / "off", **choices))
    train(make_settings(photos, tmp_path / "memory", cache="memory", **choices))
    assert_same_run(tmp_path / "memory", tmp_path / "off")


@pytest.mark.parametrize("keep", ["int8", "subspace:3", "fixed:0.9,4"])
def test_what_runs_without_a_trace_teaches_keeps_nothing(keep):
    model = gf.apply_(small(), Plan.all(Backward(patch=1, keep=parse_keep(keep))))
    images = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    with untouched(model):
        model(images)
    assert gf.keep_state(model) == {}
    model(images)
    before = gf.keep_state(model)
    assert before
    with untouched(model):
        model(images + 1)
    after = gf.keep_state(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_measuring_changes_nothing_that_keeps_remember(photos, tmp_path, quick):
    for measure in (False, True):
        train(make_settings(photos, tmp_path / str(measure), keep="subspace:3", epochs=1, measure=measure))
    assert_same_run(tmp_path / "True", tmp_path / "False")


def test_reports_tell_how_inputs_were_held(photos, tmp_path):
    train(make_settings(photos, tmp_path / "out", keep="hosvd:0.8", patch=1, epochs=1))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "patch 1 hosvd:0.8" in page
    assert 'class="tag kept"' in page
    assert "Inputs of layers were held until backward as hosvd:0.8." in page
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert "hosvd:0.8" in stored["plan"]
    for layer in stored["layers"]:
        layer.pop("keep")
    assert {layer.keep for layer in Results.from_dict(stored).layers} == {None}  # as an older version wrote them


def test_runs_made_before_there_were_keeps_are_found_as_done(photos, tmp_path, quick):
    settings = make_settings(photos, tmp_path / "out", epochs=1)
    done = train(settings)
    file = tmp_path / "out" / "results.json"
    stored = json.loads(file.read_text())
    assert stored["settings"].pop("keep", "absent") is None
    file.write_text(json.dumps(stored))
    found = find_results(settings)
    assert found is not None
    assert found.history == done.history
    assert find_results(dataclasses.replace(settings, keep="int8")) is None


def test_keeps_are_compared(photos, tmp_path, quick):
    tries = ["exact", "patch=1 keep=hosvd:0.8", "patch=1 keep=int8"]
    compared = compare(make_settings(photos, tmp_path / "out", epochs=1), tries)
    assert [outcome.method for outcome in compared.outcomes] == ["exact", "patch 1, hosvd:0.8", "patch 1, int8"]
    assert (tmp_path / "out" / "patch1-hosvd0.8" / "best.safetensors").exists()


def test_commands_take_a_keep(capsys, tmp_path):
    arguments = ["train_nets:small", "--patch", "1", "--keep", "hosvd:0.8", "--batch", "4", "--resolution", "12"]
    assert main(["check", *arguments]) == 0
    out = capsys.readouterr().out
    assert "layer  backward  patch  keep       trained" in out
    assert main(["cost", *arguments, "--no-measure"]) == 0
    assert "train_nets:small, plan all, patch 1, keep hosvd:0.8" in capsys.readouterr().out
    assert main(["cost", *arguments, "--accounting", "paper"]) == 2
    assert "--accounting paper counts inputs as they are" in capsys.readouterr().err
    for command in ("check", "cost"):
        assert main([command, "train_nets:small", "--keep", "int4"]) == 2
        assert "'int4' is no keep" in capsys.readouterr().err


def test_fidelity_of_a_keep(photos, tmp_path, capsys):
    settings = make_settings(photos, tmp_path / "run").to_dict()
    (tmp_path / "run.json").write_text(json.dumps(settings))
    arguments = ["fidelity", "--config", str(tmp_path / "run.json"), "--patch", "1", "--batches", "1"]
    assert main([*arguments, "--keep", "int8", "--out", str(tmp_path / "out")]) == 0
    assert "patch 1 int8" in (tmp_path / "out" / "fidelity.md").read_text()
    assert main(["plan", "--memory", "1MB", "--keep", "int8"]) == 2
    assert "a budget chooses layers, patches and keeps itself: drop --keep." in capsys.readouterr().err
