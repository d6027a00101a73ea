"""Keeps as text: what is written comes back, and what is wrong is said."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradfilter as gf
from cases import draw
from gradfilter.errors import InputError, PlanError
from gradfilter.keep import KEEPS, State, parse_keep
from gradfilter.plan import resolve
from keep_cases import KEEPS as CASES

energies = st.floats(0, 1, exclude_min=True)
ranks = st.one_of(st.integers(1, 10**6), st.lists(st.integers(1, 512), min_size=1, max_size=5).map(tuple))
memories = st.one_of(st.integers(1, 10**12), st.floats(0.1, 1e9), st.sampled_from(["64KB", "1.5 MiB", "2e3b", "1GB"]))
sizes = st.one_of(
    st.builds(lambda rank: {"rank": rank}, ranks),
    st.builds(lambda energy: {"energy": energy}, energies),
    st.builds(lambda memory: {"memory": memory}, memories),
)
keeps = st.one_of(
    st.just(gf.Full()),
    st.just(gf.BFloat16()),
    st.builds(gf.Int8, group=st.one_of(st.none(), st.integers(2, 10**6)), stochastic=st.booleans()),
    st.builds(gf.SVD, energies),
    st.builds(gf.HOSVD, energies),
    st.builds(lambda size, warm: gf.Subspace(**size, warm_start=warm), sizes, st.booleans()),
    st.builds(lambda size, batches: gf.Fixed(**size, batches=batches), sizes, st.integers(1, 10**4)),
)
backwards = st.builds(gf.Backward, patch=st.integers(1, 8), keep=keeps, kernel=st.sampled_from(["lift", "lumped"]))


@given(keep=keeps)
def test_text_and_back(keep):
    text = str(keep)
    assert parse_keep(text) == keep
    assert parse_keep(f" {text.upper() if ':' not in text else text} ") == keep
    assert parse_keep(keep) is keep
    assert pickle.loads(pickle.dumps(keep)) == keep
    assert hash(parse_keep(text)) == hash(keep)
    assert parse_keep(str(keep.around)) == keep.around


@given(layers=st.dictionaries(st.sampled_from(["*", "last 2", "stem", "layer4.*"]), backwards, min_size=1))
def test_plans_survive_yaml_with_their_keeps(layers):
    plan = gf.Plan(layers)
    assert gf.Plan.from_yaml(plan.to_yaml()) == plan


@pytest.mark.parametrize(
    ("text", "keep"),
    [
        ("full", gf.Full()),
        ("bfloat16", gf.BFloat16()),
        ("int8", gf.Int8()),
        ("INT8", gf.Int8()),
        ("int8:64", gf.Int8(group=64)),
        ("int8:nearest", gf.Int8(stochastic=False)),
        ("int8:64,nearest", gf.Int8(64, False)),
        ("svd:0.8", gf.SVD(0.8)),
        ("hosvd:0.8", gf.HOSVD(0.8)),
        ("hosvd:1", gf.HOSVD(1)),
        ("subspace:8", gf.Subspace(rank=8)),
        ("subspace:8x32x3x3", gf.Subspace(rank=(8, 32, 3, 3))),
        ("subspace:1.0", gf.Subspace(energy=1.0)),
        ("subspace:64KB", gf.Subspace(memory=64_000)),
        ("subspace:64KB,cold", gf.Subspace(memory="64KB", warm_start=False)),
        ("fixed:0.9", gf.Fixed(energy=0.9)),
        ("fixed:0.9,4", gf.Fixed(energy=0.9, batches=4)),
        ("fixed:3x3", gf.Fixed(rank=(3, 3))),
    ],
)
def test_what_a_text_means(text, keep):
    assert parse_keep(text) == keep
    assert gf.Backward(keep=text).keep == keep


@pytest.mark.parametrize("text", ["", "int4", "hosvd0.8", ":0.8", None, 8, ["int8"], "keep:int8"])
def test_what_is_no_keep_is_told_what_the_keeps_are(text):
    with pytest.raises(PlanError, match=r"is no keep\. The keeps are .*int8.*hosvd:0\.8"):
        gf.Backward(keep=text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("full:1", "'full' takes no options.*'1'.*Write 'full'"),
        ("bfloat16:x", "'bfloat16' takes no options.*Write 'bfloat16'"),
        ("int8:x", "'int8' got 'x'.*Write 'int8'"),
        ("int8:4,5", "'int8' got '4,5'.*Write 'int8'"),
        ("int8:1", "group=1.*at least 2"),
        ("int8:-4", "'int8' got '-4'"),
        ("int8:4,", "'int8' got '4,'"),
        ("hosvd", "'hosvd' got ''.*'hosvd:0.8'"),
        ("hosvd:0", "energy=0.0.*above 0 and up to 1"),
        ("hosvd:1.1", "energy=1.1.*above 0 and up to 1"),
        ("hosvd:nan", "energy=nan"),
        ("svd:80%", "'svd' got '80%'.*'svd:0.8'"),
        ("subspace", "'subspace' got ''.*'subspace:8'.*'subspace:64KB'"),
        ("subspace:0", "rank=0.*at least 1"),
        ("subspace:8x0", "rank=.*at least 1"),
        ("subspace:-0.5", "energy=-0.5"),
        ("subspace:64XB", "Subspace: memory is '64XB'.*no unit"),
        ("subspace:0B", "Subspace: memory is '0B'"),
        ("subspace:x", "Subspace: memory is 'x'"),
        ("subspace:" + "9" * 5000, "energy=inf"),
        ("subspace:8,warm", "'subspace' got '8,warm'.*'subspace:8,cold'"),
        ("fixed", "'fixed' got ''.*'fixed:0.9,4'"),
        ("fixed:0.9,0", "batches=0.*at least 1"),
        ("fixed:0.9,x", "'fixed' got '0.9,x'"),
    ],
)
def test_wrong_options_are_named(text, message):
    with pytest.raises(PlanError, match=message):
        parse_keep(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gf.HOSVD("0.8"), "HOSVD got energy='0.8'"),  # type: ignore[arg-type]
        (lambda: gf.SVD(True), "SVD got energy=True"),
        (lambda: gf.Int8(group=2.5), "Int8 got group=2.5"),  # type: ignore[arg-type]
        (lambda: gf.Subspace(), "Subspace got no size. Give one of rank, energy and memory"),
        (lambda: gf.Subspace(8, 0.5), "Subspace got rank and energy. Give one"),
        (lambda: gf.Subspace(rank=()), "Subspace got rank=()"),
        (lambda: gf.Subspace(rank=(2, True)), "Subspace got rank="),
        (lambda: gf.Subspace(rank=2.0), "Subspace got rank=2.0"),  # type: ignore[arg-type]
        (lambda: gf.Subspace(memory=-1), "Subspace: memory is -1"),
        (lambda: gf.Fixed(rank=2, batches=0), "Fixed got batches=0"),
        (lambda: gf.Fixed(rank=2, batches=1.5), "Fixed got batches=1.5"),  # type: ignore[arg-type]
    ],
)
def test_wrong_values_are_named(make, message):
    with pytest.raises(PlanError) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize("keep", [gf.Subspace(rank=(2, 2, 2)), gf.Fixed(rank=(2, 2))], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ranks_for_another_number_of_modes_name_the_layer(keep, device):
    message = rf"layer 'stem' keeps an input of shape \[2, 3, 4, 5\] as '{keep}', which has \d ranks for \d modes. Give a rank"
    with pytest.raises(InputError, match=message):
        keep.compress(draw(2, 3, 4, 5).to(device), State("stem"))


def test_every_keep_says_what_it_does():
    for keep in KEEPS.values():
        assert keep.__doc__ is not None
        assert all(heading in keep.__doc__ for heading in ("Equation:", "Cost:", "Exact when:")), keep.name
    assert len({str(case.keep) for case in CASES}) == len(CASES)


def test_the_classifier_behind_the_last_convolutions_holds_its_input_as_it_is():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    keep = gf.HOSVD(0.8)
    keeps = {name: b.keep for name, b in resolve(gf.Plan.last(1, gf.Backward(patch=1, keep=keep)), net).layers.items()}
    assert keeps == {"2": keep, "5": gf.Full()}
    named = gf.Plan({"5": gf.Backward(patch=1, keep=gf.Int8()), "last 1": gf.Backward(patch=1, keep=keep)})
    assert {name: b.keep for name, b in resolve(named, net).layers.items()} == {"2": keep, "5": gf.Int8()}
    head = resolve(gf.Plan.last(0, gf.Backward(patch=1, keep=keep)), net).layers
    assert {name: b.keep for name, b in head.items()} == {"5": keep}
    every = resolve(gf.Plan.all(gf.Backward(patch=1, keep=keep)), net).layers
    assert {b.keep for b in every.values()} == {keep}


def test_a_second_keep_of_a_name_is_refused():
    with pytest.raises(PlanError, match="there is a keep 'int8' already, Int8"):

        class Again(gf.Int8):
            name = "int8"

    assert KEEPS["int8"] is gf.Int8
