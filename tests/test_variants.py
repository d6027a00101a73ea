"""What `--try` says: which settings a variant changes, and what is refused."""

import dataclasses
import shlex
from typing import Any

import pytest

from gradfilter.errors import SettingsError
from gradfilter.plan import Backward, Plan
from gradfilter.train.compare import compare
from gradfilter.train.variants import USUAL, find_usual, make_variants
from train_runs import make_settings

BASE: dict[str, Any] = {"plan": "last4", "patch": 2, "kernel": "lumped"}


@pytest.mark.parametrize(
    ("text", "changes", "name", "folder"),
    [
        ("exact", {"exact": True, "patch": None}, "exact", "exact"),
        ("patch=7", {"patch": 7}, "patch 7", "patch7"),
        ("grid=4", {"grid": 4, "patch": None}, "grid 4", "grid4"),
        ("kernel=lift  patch=2", {"kernel": "lift"}, "patch 2, lift", "patch2-lift"),
        ("kernel=lift", {"kernel": "lift"}, "lift", "lift"),
        ("plan=head", {"plan": "head"}, "head", "head"),
        ("plan='last 2' exact=true", {"plan": "last 2", "exact": True, "patch": None}, "last 2, exact", "last2-exact"),
        ("patch=1 keep=hosvd:0.8", {"patch": 1, "keep": "hosvd:0.8"}, "patch 1, hosvd:0.8", "patch1-hosvd0.8"),
        ("keep=int8 kernel=lift", {"kernel": "lift", "keep": "int8"}, "lift, int8", "lift-int8"),
        ("keep=subspace:64KB,cold", {"keep": "subspace:64KB,cold"}, "subspace:64KB,cold", "subspace64kb-cold"),
        ("batch_norm=train", {"batch_norm": "train"}, "batch norm train", "batchnormtrain"),
        ("trunk=bfloat16", {"trunk": "bfloat16"}, "trunk bfloat16", "trunkbfloat16"),
    ],
)
def test_a_variant_changes_what_it_says(tmp_path, text, changes, name, folder):
    base = make_settings(tmp_path, tmp_path, **BASE)
    variant = make_variants(base, [text, "grid=9"])[0]
    assert variant.settings == dataclasses.replace(base, **changes)
    assert (variant.name, variant.folder) == (name, folder)


def test_a_plan_file_brings_its_own_sizes(tmp_path):
    file = tmp_path / "my plan.yaml"
    Plan({"*": Backward(patch=3)}).save(file)
    base = make_settings(tmp_path, tmp_path, **BASE, batch_norm="train")
    ours, told, _ = make_variants(base, [shlex.quote(str(file)), f"plan='{file}' grid=3", "patch=3"])
    assert (ours.name, ours.folder, told.name) == ("my plan", "myplan", "my plan, grid 3")
    assert ours.settings.make_plan() == Plan({"*": Backward(patch=3)}, batch_norm="train")
    assert told.settings.make_plan() == Plan({"*": Backward(grid=3)}, batch_norm="train")


def test_exact_settings_give_way_to_a_variant_that_filters(tmp_path):
    base = make_settings(tmp_path, tmp_path, exact=True, patch=None)
    variants = make_variants(base, ["patch=2", "kernel=lumped", "exact=false", "plan=head", "batch_norm=train"])
    assert [variant.settings.exact for variant in variants] == [False, False, False, True, True]
    assert not make_variants(base, ["keep=int8", "plan=head"])[0].settings.exact


def test_a_keep_of_all_gives_way_to_what_has_none(tmp_path):
    """To exact backprop and to a plan file, not to another size of patches: patch and keep are two choices."""
    file = tmp_path / "mine.yaml"
    Plan({"*": Backward(patch=3)}).save(file)
    base = make_settings(tmp_path, tmp_path, keep="int8")
    variants = make_variants(base, ["exact", str(file), "grid=3", "plan=head", "keep=full"])
    assert [variant.settings.keep for variant in variants] == [None, None, "int8", "int8", "full"]
    assert variants[1].settings.make_plan() == Plan({"*": Backward(patch=3)})
    assert variants[4].settings.make_plan() == Plan({"*": Backward(patch=2)})


def test_every_keep_has_a_folder_of_its_own(tmp_path):
    keeps = "full bfloat16 int8 int8:64 int8:64,nearest int8:nearest svd:0.8 hosvd:0.8 hosvd:0.85 subspace:0.8 subspace:8 "
    keeps += "subspace:8x32x3x3 subspace:64KB subspace:8,cold fixed:0.9 fixed:0.9,4 fixed:0.94 fixed:9 fixed:64KB"
    variants = make_variants(make_settings(tmp_path, tmp_path), [f"keep={keep}" for keep in keeps.split()])
    folders = [variant.folder for variant in variants]
    assert len(set(folders)) == len(folders)
    assert all(set(folder) <= {*"abcdefghijklmnopqrstuvwxyz0123456789.-"} and folder[-1] != "." for folder in folders)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["exact"], "a comparison takes two variants or more, not 1. Give --try again, or not at all."),
        (
            ["exact", "lr=1"],
            "--try lr=1: 'lr' does not choose a plan; plan, patch, grid, kernel, keep, exact, batch_norm, trunk do.",
        ),
        (["exact", "lr=1"], "All variants have the same lr: give --lr."),
        (
            ["exact", "pach=2"],
            "'pach' does not choose a plan; plan, patch, grid, kernel, keep, exact, batch_norm, trunk do. Did you mean patch?",
        ),
        (["exact", "patch=two"], "--try patch=two: patch is 'two', but must be a whole number."),
        (["exact", "patch=2.0"], "patch is '2.0', but must be a whole number."),
        (["exact", "grid="], "grid is '', but must be a whole number."),
        (["exact", "patch=0"], "--try patch=0: --patch is 0, but must be at least 1."),
        (["exact", "kernel=sum"], "kernel is 'sum', but must be one of lift, lumped."),
        (["exact", "batch_norm=off"], "batch_norm is 'off', but must be one of eval, train, frozen."),
        (["exact", "exact=yes"], "exact is 'yes', but must be one of true, false."),
        (["exact", "plan=most"], "--try plan=most: 'most' is no plan."),
        (["exact", "absent.yaml"], "--try absent.yaml: cannot read the plan file 'absent.yaml'"),
        (["exact", "head"], "'head' is neither 'exact', nor a plan file that ends in .yaml, nor key=value, as in 'plan=head'."),
        (["exact", "lift"], "'lift' is neither 'exact', nor a plan file that ends in .yaml, nor key=value, as in 'patch=2'."),
        (["exact", ""], "--try '': it changes nothing. Give one or more of plan=…, patch=…"),
        (["exact", "plan='a"], "a quotation mark is left open"),
        (["exact", "patch=2 patch=3"], "--try 'patch=2 patch=3': patch is said twice. Give one."),
        (["exact", "patch=2 grid=3"], "--patch 2 and --grid 3 both set the resolution of the gradient: give one."),
        (["grid=2", "exact patch=2 kernel=lift"], "exact backprop has no patch and no kernel. Give one or the other."),
        (["patch=2 kernel=lumped", "kernel=lumped patch=2"], "it is the same as --try 'patch=2 kernel=lumped'. Leave one out."),
        (["plan=last2", "plan='last 2'"], "its folder 'last2' is that of --try plan=last2. Give the plan file another name."),
        (["keep=int8 exact", "grid=2"], "--try 'keep=int8 exact': exact backprop has no keep. Give one or the other."),
        (["keep=hosvd", "grid=2"], "--try keep=hosvd: --keep: keep 'hosvd' got ''. Give the share of the energy to keep"),
        (
            ["keep=hosvd:0.8", "keep=hosvd:0.80"],
            "keep=hosvd:0.80: it is the same as --try keep=hosvd:0.8. Leave one out.",
        ),
        (["patch=x", "grid=y"], "--try patch=x: patch is 'x', but must be a whole number. --try grid=y: grid is 'y', but"),
    ],
)
def test_variants_that_cannot_be(tmp_path, monkeypatch, texts, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as caught:
        compare(make_settings(tmp_path / "photos", tmp_path / "out"), texts)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_file_may_not_be_called_as_the_cache(tmp_path):
    Plan.all().save(tmp_path / "Cache.yaml")
    with pytest.raises(SettingsError, match="the folder 'cache' is that of the trunk cache"):
        make_variants(make_settings(tmp_path, tmp_path), ["exact", str(tmp_path / "Cache.yaml")])


def test_the_usual_variants_and_what_the_settings_choose(tmp_path):
    assert find_usual(make_settings(tmp_path, tmp_path, patch=2)) == USUAL
    assert find_usual(make_settings(tmp_path, tmp_path, patch=3)) == (*USUAL, "patch=3")
    assert find_usual(make_settings(tmp_path, tmp_path, patch=None, plan="mine.yaml")) == (*USUAL, "mine.yaml")
    assert len(make_variants(make_settings(tmp_path, tmp_path), USUAL)) == 5
