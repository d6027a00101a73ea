"""Tests of `gradfilter.plan`: choices, globs, counting from the end, YAML."""

import importlib
import os
from collections import OrderedDict
from dataclasses import FrozenInstanceError
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradfilter import Backward, Plan
from gradfilter.errors import GradFilterError, PlanError
from gradfilter.keep import HOSVD
from gradfilter.models.torchvision_ops import declare_torchvision_ops
from gradfilter.plan import Resolved, find_last, find_norms, resolve

BAD_SIZES = [0, -1, 2.0, 1.5, "2", True, False, (2, 0), (2, True), (2, 2.0), (1, 2, 3), (), [], {}, (2, (3, 4))]


class Classifier(nn.Module):
    """Five stages of a convolution and its norm, one of them with a shortcut, and two Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.features = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(12))
        self.features[11].add_module("downsample", nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
        self.hidden = nn.Linear(4, 4)
        self.fc = nn.Linear(4, 2)


def convs_of(resolved: Resolved) -> set[str]:
    return set(resolved.convs)


# Backward


@pytest.mark.parametrize("name", ["patch", "grid"])
@pytest.mark.parametrize("value", BAD_SIZES, ids=repr)
def test_backward_refuses_sizes_that_are_no_whole_numbers_from_one(name, value):
    with pytest.raises(PlanError, match=rf"{name}=.*at least 1") as caught:
        Backward(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", ["patch", "grid"])
@pytest.mark.parametrize(
    ("given_size", "kept"),
    [(1, 1), (7, 7), ((2, 3), (2, 3)), ([2, 3], (2, 3)), ((4, 4), 4), ((5,), 5), ([1, 1], 1)],
)
def test_backward_takes_a_side_or_a_pair(name, given_size, kept):
    assert getattr(Backward(**{name: given_size}), name) == kept


def test_backward_refuses_patch_and_grid_together():
    with pytest.raises(PlanError, match=r"patch=2 and grid=4.*give one"):
        Backward(patch=2, grid=4)


@pytest.mark.parametrize("kernel", ["Lift", "", None, 3, ["lift"]])
def test_backward_refuses_an_unknown_kernel(kernel):
    with pytest.raises(PlanError, match="'lift' and 'lumped'"):
        Backward(patch=2, kernel=kernel)


def test_backward_defaults_to_grid_4():
    assert Backward() == Backward(grid=4)
    assert Backward().patch is None
    assert Backward(kernel="lumped").grid == 4
    assert Backward(patch=3).grid is None


def test_choices_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Backward().patch = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        Plan().rest = "exact"  # type: ignore[misc]


def test_plan_errors_are_value_errors_of_this_package():
    assert issubclass(PlanError, ValueError)
    assert issubclass(PlanError, GradFilterError)


# Plan


@pytest.mark.parametrize(
    "layers", [None, "fc", [("fc", Backward())], {"fc": 2}, {"fc": None}, {"fc": {"patch": 2}}, {1: Backward()}], ids=repr
)
def test_plan_refuses_layers_that_are_no_mapping_to_backward(layers):
    with pytest.raises(PlanError, match="mapping from layer patterns to Backward"):
        Plan(layers)


@pytest.mark.parametrize("option", ["rest", "batch_norm", "trunk"])
@pytest.mark.parametrize("value", ["", "none", None, True, 1, ["eval"]])
def test_plan_refuses_unknown_options_and_lists_the_choices(option, value):
    with pytest.raises(PlanError, match=rf"{option}=.*'(frozen|bfloat16)'"):
        Plan({"*": Backward()}, **{option: value})


def test_plan_does_not_follow_later_changes_of_the_mapping_it_was_given():
    layers = {"fc": Backward()}
    plan = Plan(layers)
    layers["stem"] = Backward(patch=2)
    assert list(plan.layers) == ["fc"]


@pytest.mark.parametrize("n", [-1, 1.0, "2", True, None])
def test_last_refuses_what_is_no_count(n):
    with pytest.raises(PlanError, match="whole number of at least 0"):
        Plan.last(n)


def test_shorthands_pass_their_options_on():
    assert Plan.last(2, Backward(patch=2), rest="exact", batch_norm="train") == Plan(
        {"last 2": Backward(patch=2)}, rest="exact", batch_norm="train"
    )
    assert Plan.all(batch_norm="frozen") == Plan({"*": Backward(grid=4)}, batch_norm="frozen")


# YAML

sizes = st.integers(1, 64) | st.tuples(st.integers(1, 64), st.integers(1, 64))
kernels = st.sampled_from(["lift", "lumped"])
backwards = st.one_of(
    st.builds(Backward, patch=sizes, kernel=kernels), st.builds(Backward, grid=sizes, kernel=kernels), st.just(Backward())
)
patterns = st.sampled_from(
    ["*", "last 4", "features.1[5-8]", "layer?.*.conv1", "1", "1.0", "yes", "null", "~", "a: b"]
) | st.text(max_size=20)
plans = st.builds(
    Plan,
    st.dictionaries(patterns, backwards, max_size=6),
    rest=st.sampled_from(["frozen", "exact"]),
    batch_norm=st.sampled_from(["eval", "train", "frozen"]),
    trunk=st.sampled_from(["float32", "bfloat16"]),
)


@given(plan=plans)
def test_yaml_gives_the_same_plan_back_in_the_same_order(plan):
    again = Plan.from_yaml(plan.to_yaml())
    assert again == plan
    assert list(again.layers) == list(plan.layers)


@given(plan=plans)
def test_yaml_is_plain_data(plan):
    data = yaml.safe_load(plan.to_yaml())
    assert set(data) == {"layers", "rest", "batch_norm"} | ({"trunk"} if plan.trunk == "bfloat16" else set())
    assert list(data["layers"]) == list(plan.layers)


def test_yaml_written_by_hand():
    plan = Plan.from_yaml("layers:\n  layer4: {patch: [2, 3], kernel: lumped}\n  3: {patch: 2}\n  fc:\n")
    assert plan == Plan({"layer4": Backward(patch=(2, 3), kernel="lumped"), "3": Backward(patch=2), "fc": Backward()})
    assert Plan.from_yaml("rest: exact") == Plan(rest="exact")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layers: {fc: {patch: 2}}\nlayer: {}", "batch_norm, layers, rest, trunk"),
        ("layers: {fc: {radius: 2}}", "'fc'.*grid, keep, kernel, patch"),
        ("layers: {fc: 2}", "'fc'.*mapping"),
        ("layers: {fc: [2]}", "'fc'.*mapping"),
        ("layers: {fc: {patch: 0}}", "patch=0"),
        ("layers: {fc: {patch: true}}", "patch=True"),
        ("layers: {fc: {patch: 2, grid: 2}}", "give one"),
        ("layers: {fc: {kernel: lifted}}", "'lift' and 'lumped'"),
        ("layers: [fc]", "batch_norm, layers, rest, trunk"),
        ("layers:", "batch_norm, layers, rest, trunk"),
        ("rest: thawed", "rest='thawed'"),
        ("batch_norm: [eval]", "batch_norm="),
        ("", "batch_norm, layers, rest, trunk"),
        ("just words", "batch_norm, layers, rest, trunk"),
        ("- a\n- b", "batch_norm, layers, rest, trunk"),
        ("layers: {fc: {patch: 2}", "not YAML"),
        ("layers: !!python/object/apply:os.getcwd []", "not YAML"),
        ("a: \x00", "not YAML"),
        ("rest: 2001-99-99", "not YAML"),
    ],
)
def test_yaml_that_is_no_plan_is_refused_with_the_reason(text, says):
    with pytest.raises(PlanError, match=says):
        Plan.from_yaml(text)


def test_save_and_load(tmp_path):
    plan = Plan({"features.1[5-8]": Backward(patch=(2, 3)), "über": Backward(kernel="lumped")}, batch_norm="train")
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan
    assert Plan.load(os.fspath(tmp_path / "plan.yaml")) == plan
    assert (tmp_path / "plan.yaml").read_text(encoding="utf-8") == plan.to_yaml()


def test_save_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    Plan.last(2).save(tmp_path / "plan.yaml")
    Plan.last(4).save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == Plan.last(4)
    assert os.listdir(tmp_path) == ["plan.yaml"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, step):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    Plan.last(2).save(tmp_path / "plan.yaml")
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(PlanError, match="No space left"):
        Plan.last(4).save(tmp_path / "plan.yaml")
    monkeypatch.undo()
    assert Plan.load(tmp_path / "plan.yaml") == Plan.last(2)
    assert os.listdir(tmp_path) == ["plan.yaml"]


def test_load_says_which_file_is_missing(tmp_path):
    with pytest.raises(PlanError, match=r"nowhere\.yaml.*No such file"):
        Plan.load(tmp_path / "nowhere.yaml")


def test_load_refuses_a_folder(tmp_path):
    with pytest.raises(PlanError, match="cannot read the plan file"):
        Plan.load(tmp_path)


def test_load_refuses_a_file_that_is_no_text(tmp_path):
    (tmp_path / "plan.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(PlanError, match=r"plan\.yaml|not YAML"):
        Plan.load(tmp_path / "plan.yaml")


# Globs


@pytest.mark.parametrize(
    ("pattern", "convs"),
    [
        ("stem", {"stem.0"}),
        ("stem.0", {"stem.0"}),
        ("s*m", {"stem.0"}),
        ("features.[3-5]", {"features.3.0", "features.4.0", "features.5.0"}),
        ("features.1[0-8]", {"features.10.0", "features.11.0", "features.11.downsample.0"}),
        ("features.1", {"features.1.0"}),
        ("features.?.0", {f"features.{i}.0" for i in range(10)}),
        ("*.downsample", {"features.11.downsample.0"}),
        ("features.[!0-9]*", None),
        ("hidden", set()),
        ("*", {"stem.0", "features.11.downsample.0", *(f"features.{i}.0" for i in range(12))}),
    ],
)
def test_globs(pattern, convs):
    plan = Plan({pattern: Backward(patch=2)})
    if convs is None:
        with pytest.raises(PlanError, match="matches no"):
            resolve(plan, Classifier())
    else:
        assert convs_of(resolve(plan, Classifier())) == convs


def test_a_container_covers_everything_below_it():
    resolved = resolve(Plan({"features": Backward(patch=2)}), Classifier())
    below = {
        name
        for name, m in Classifier().named_modules()
        if name.startswith("features.") and next(m.parameters(False), None) is not None
    }
    assert below <= resolved.trained
    assert not {name for name in resolved.trained if name.startswith(("stem", "fc", "hidden"))}


@pytest.mark.parametrize("reverse", [False, True])
def test_the_first_match_wins(reverse):
    rows = [("features.3", Backward(patch=3)), ("features.[3-4]", Backward(patch=5)), ("*", Backward(grid=2))]
    resolved = resolve(Plan(dict(rows[::-1] if reverse else rows)), Classifier())
    found = {name: resolved.convs[name] for name in ("features.3.0", "features.4.0", "stem.0")}
    expected = [Backward(grid=2)] * 3 if reverse else [Backward(patch=3), Backward(patch=5), Backward(grid=2)]
    assert list(found.values()) == expected


def test_rest_exact_trains_all_other_layers_at_patch_1():
    resolved = resolve(Plan({"features.3": Backward(patch=3)}, rest="exact"), Classifier())
    assert resolved.convs.pop("features.3.0") == Backward(patch=3)
    assert set(resolved.convs.values()) == {Backward(patch=1)}
    assert {"stem.0", "stem.1", "hidden", "fc"} <= resolved.trained


@pytest.mark.parametrize("mode", ["eval", "train", "frozen"])
def test_norms_follow_the_convolution_before_them(mode):
    resolved = resolve(Plan({"features.3.0": Backward(patch=3)}, batch_norm=mode), Classifier())
    norms = {name for name, m in Classifier().named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert ("features.3.1" in resolved.trained) == (mode != "frozen")
    assert resolved.trained - {"features.3.1"} == {"features.3.0"}
    assert set(resolved.frozen_norms) == (norms - {"features.3.1"} if mode == "train" else norms)


def test_norms_are_paired_by_parent_order_and_width():
    block = nn.Module()
    for name, child in [
        ("conv1", nn.Conv2d(2, 3, 1)), ("conv2", nn.Conv2d(3, 5, 1)), ("bn2", nn.BatchNorm2d(5)), ("gn1", nn.GroupNorm(1, 3)),
        ("alone", nn.BatchNorm2d(5)),
    ]:  # fmt: skip
        block.add_module(name, child)
    model = nn.Sequential(block, nn.BatchNorm2d(5))
    assert find_norms(model) == {"0.bn2": "0.conv2", "0.gn1": "0.conv1"}


@pytest.mark.parametrize("pattern", ["layer5.*", "Stem", "features.3.0.weight", "features.*.2", "features.3.", "", "stem 0"])
def test_a_pattern_that_matches_nothing_is_named_with_the_number_of_layers(pattern):
    with pytest.raises(PlanError, match="matches no Conv2d, Linear") as caught:
        resolve(Plan({"fc": Backward(), pattern: Backward()}), Classifier())
    assert f"plan pattern {pattern!r}" in str(caught.value)
    assert "16 Conv2d and Linear layers" in str(caught.value)


def test_a_pattern_that_matches_nothing_is_answered_with_near_names():
    with pytest.raises(PlanError, match=r"'features\.11\.downsample'"):
        resolve(Plan({"features.11.shortcut_downsample": Backward()}), Classifier())


def test_a_model_that_is_one_convolution():
    resolved = resolve(Plan.all(Backward(patch=2)), nn.Conv2d(3, 5, 3))
    assert resolved.convs == {"": Backward(patch=2)}
    assert resolved.trained == {""}


@pytest.mark.parametrize("plan", [Plan.all(), Plan.last(0), Plan({"0": Backward()})])
def test_a_model_without_convolution_is_refused(plan):
    with pytest.raises(PlanError, match="Sequential has no Conv2d"):
        resolve(plan, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))


# Counting from the end


@cache
def torchvision_model(name: str) -> nn.Module:
    pytest.importorskip("torchvision", exc_type=ImportError) if not declare_torchvision_ops() else None
    return getattr(importlib.import_module("torchvision.models"), name)(weights=None)


def test_last_counts_as_the_papers_do_on_resnet18():
    model = torchvision_model("resnet18")
    resolved = resolve(Plan.last(4, Backward(patch=2)), model)
    convs = ["layer4.0.conv1", "layer4.0.conv2", "layer4.1.conv1", "layer4.1.conv2"]
    assert resolved.convs == dict.fromkeys(convs, Backward(patch=2))
    norms = {"layer4.0.bn1", "layer4.0.bn2", "layer4.1.bn1", "layer4.1.bn2"}
    assert resolved.trained == {*convs, *norms, "fc"}


def test_last_counts_as_the_papers_do_on_mobilenet_v2():
    model = torchvision_model("mobilenet_v2")
    resolved = resolve(Plan.last(2), model)
    assert convs_of(resolved) == {"features.18.0", "features.17.conv.2"}
    assert resolved.trained == {"features.18.0", "features.18.1", "features.17.conv.2", "features.17.conv.3", "classifier.1"}


@pytest.mark.parametrize(("name", "count"), [("resnet18", 17), ("mobilenet_v2", 52)])
def test_last_can_take_all_counted_convolutions_but_no_more(name, count):
    model = torchvision_model(name)
    assert len(find_last(model, count)) == count + 1
    with pytest.raises(PlanError, match=rf"last {count + 1} convolutions; the model has {count}\..*Plan\.all"):
        resolve(Plan.last(count + 1), model)


def test_last_0_trains_the_classifier_alone():
    resolved = resolve(Plan.last(0), Classifier())
    assert resolved.trained == {"fc"}
    assert not resolved.convs


def test_last_without_a_classifier_takes_convolutions_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    assert resolve(Plan.last(1), model).trained == {"2"}


def test_last_trains_the_parameters_behind_a_parametrised_weight():
    model = Classifier()
    nn.utils.parametrizations.weight_norm(model.get_submodule("features.10.0"))
    assert "features.10.0.parametrizations.weight" in resolve(Plan.last(2), model).trained


def test_a_plan_made_for_another_model_is_refused():
    plan = Plan({"layer4.1.conv2": Backward(patch=2), "fc": Backward()})
    assert convs_of(resolve(plan, torchvision_model("resnet18"))) == {"layer4.1.conv2"}
    with pytest.raises(PlanError, match=r"'(layer4\.1\.conv2|fc)' matches no.*53 Conv2d and Linear layers"):
        resolve(plan, torchvision_model("mobilenet_v2"))


def test_plan_file_is_found_relative_to_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Plan.last(3).save("plan.yaml")
    assert Plan.load(Path("plan.yaml")) == Plan.last(3)


@pytest.mark.parametrize(
    ("text", "plan"),
    [("all", Plan.all()), ("head", Plan.last(0)), ("last4", Plan.last(4)), ("last 12", Plan.last(12))],
)
def test_words_for_plans(text, plan):
    assert Plan.parse(text) == plan


def test_files_and_other_words(tmp_path):
    plan = Plan({"3": Backward(patch=3)}, rest="exact")
    plan.save(tmp_path / "mine.YML")
    assert Plan.parse(str(tmp_path / "mine.YML")) == plan
    assert Plan.parse("{layers: {'3': {patch: 3}}, rest: exact}") == plan
    with pytest.raises(PlanError, match=r"'lats4' is no plan\. Give 'all', 'head', 'last4' .* or a file that ends in \.yaml"):
        Plan.parse("lats4")


def test_overrides_hold_for_all_layers():
    plan = Plan({"a": Backward(patch=2, tokens=7), "b": Backward(kernel="lumped")}, batch_norm="train")
    assert plan.override(patch=None, grid=None, kernel=None) == plan
    changed = Plan({"a": Backward(grid=3, tokens=7), "b": Backward(grid=3, kernel="lumped")}, batch_norm="train")
    assert plan.override(grid=3) == changed
    layers = {"a": Backward(patch=2, tokens=7, keep=HOSVD(0.8)), "b": Backward(kernel="lumped", keep=HOSVD(0.8))}
    kept = Plan(layers, batch_norm="train")
    assert plan.override(keep="hosvd:0.8") == plan.override(keep=HOSVD(0.8)) == kept
    assert kept.override(keep="full") == plan
    with pytest.raises(PlanError, match="'int4' is no keep"):
        plan.override(keep="int4")
    with pytest.raises(PlanError, match="give one"):
        plan.override(grid=3, patch=2)


def test_a_module_may_be_named_like_the_last_layers():
    model = nn.Sequential(OrderedDict(first=nn.Conv2d(3, 4, 1), last2=nn.Conv2d(4, 4, 1), third=nn.Conv2d(4, 4, 1)))
    assert list(resolve(Plan({"last2": Backward()}), model).convs) == ["last2"]
    assert list(resolve(Plan({"last 2": Backward()}), model).convs) == ["last2", "third"]
    assert list(resolve(Plan({"last1": Backward()}), model).convs) == ["third"]
