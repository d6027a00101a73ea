"""Random networks of everything that has a rule: exact at patch 1, right bytes and a sound training step at any patch."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st
from torch import nn

import gradfilter as gf
from cases import draw
from gradfilter.cost import measure_saved_bytes, predict_saved_bytes
from gradfilter.errors import ExitWarning
from gradfilter.hooks import CHANGED, find_applied
from random_networks import (
    EVERY,
    HEADS,
    Activation,
    Checkpoint,
    Conv,
    Drawn,
    Dropout,
    Gate,
    LastBlock,
    Norm,
    Recall,
    Split,
    networks,
    sizes,
    spec,
)

run = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
batches = st.integers(1, 3)
batch_norms = st.sampled_from(["train", "eval"])
backwards = st.one_of(
    st.builds(gf.Backward, patch=st.integers(1, 9)),
    st.builds(gf.Backward, patch=st.tuples(st.integers(1, 9), st.integers(1, 9))),
    st.builds(gf.Backward, grid=st.integers(1, 6)),
    st.builds(gf.Backward, patch=st.integers(1, 5), kernel=st.just("lumped")),
)


@st.composite
def plans(draw):
    """Draw a plan for any network: one for all layers, another for the stem or the classifier, or the last layers alone."""
    backward, options = draw(backwards), {"batch_norm": draw(batch_norms), "rest": draw(st.sampled_from(["frozen", "exact"]))}
    kind = draw(st.sampled_from(["all", "stem", "last"]))
    if kind == "last":
        return gf.Plan.last(1, backward, **options)
    other = {"features.0": draw(backwards)} if kind == "stem" else {}
    return gf.Plan({**other, "*": backward}, **options)


def make_twins(drawn, plan):
    """Return a network with a plan and one without, in which batch norms have the mode that the plan gives them."""
    model = drawn.make()
    exact = copy.deepcopy(model)
    gf.apply_(model, plan)
    applied = find_applied(model)
    assert applied is not None
    for name in applied.resolved.frozen_norms:
        exact.get_submodule(name).eval()
    for module in exact.modules():
        if isinstance(module, Norm):
            module.is_oracle = True
        if isinstance(module, Checkpoint) and any(isinstance(m, Checkpoint) for m in module.modules() if m is not module):
            reject()  # a checkpoint within a checkpoint is not supported: torch raises an error when it runs it again
    for name, p in model.named_parameters():
        exact.get_parameter(name).requires_grad_(p.requires_grad)
    return model, exact


def step(model, x):
    """Return the loss of a forward pass, and the gradients of the input and of all trained parameters after a backward."""
    x = x.clone().requires_grad_()
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ExitWarning)  # find_unexpected tells
        torch.manual_seed(3)
        y = model(x)
        loss = F.cross_entropy(y, torch.arange(len(x)) % 3)
        model.zero_grad()
        loss.backward()
    return y.detach(), {"input": x.grad, **{n: p.grad for n, p in model.named_parameters() if p.requires_grad}}


def step_or_reject(model, x):
    """Run torch's own step; a network that torch refuses (views of one tensor changed in place) is none."""
    try:
        return step(model, x)
    except RuntimeError:
        reject()


def find_unexpected(model):
    """List the exits that nobody expected."""
    applied = find_applied(model)
    assert applied is not None
    # One half of a split map changed in place ends the region for the other half, whose storage it is, too.
    found = {function for (_, function), reason in applied.log.find_unexpected().items() if reason != CHANGED}
    # Where a part is frozen, a plain tensor may be changed in place by a PatchTensor: it cannot turn into one.
    is_whole = "*" in applied.plan.layers
    return found if is_whole else found - {"torch.Tensor.add_", "torch.Tensor.mul_"}


def assert_close(got, want):
    """Compare gradients; some are zero but for rounding, and held against the largest."""
    assert got.keys() == want.keys()
    scale = max(float(g.norm()) for g in want.values() if g is not None)
    for key, g in want.items():
        if g is None or got[key] is None:
            assert g is got[key], key
        else:
            assert float((got[key] - g).norm()) <= 1e-9 * float(g.norm()) + 1e-12 * scale, key


def check_exact(drawn, size, n, batch_norm):
    """Hold a network at patch 1 against torch."""
    model, exact = make_twins(drawn, gf.Plan.all(gf.Backward(patch=1), batch_norm=batch_norm))
    x = draw(n, 4, *size)
    want_y, want = step_or_reject(exact, x)
    y, got = step(model, x)
    torch.testing.assert_close(y, want_y, rtol=1e-12, atol=1e-12)
    assert_close(got, want)
    assert not find_unexpected(model)
    for key, buffer in exact.named_buffers():
        torch.testing.assert_close(model.get_buffer(key), buffer, rtol=1e-12, atol=1e-12)


@run
@given(drawn=networks, size=sizes, n=batches, batch_norm=batch_norms)
@example(
    drawn=Drawn(spec(Conv), [spec(Conv), spec(Gate, kind="spatial")]), size=(5, 5), n=1, batch_norm="eval"
)  # two maps of one pixel
@example(
    drawn=Drawn(spec(Conv), [spec(Conv), spec(LastBlock, kind="reshape")]), size=(5, 5), n=1, batch_norm="eval"
)  # one token
@example(
    drawn=Drawn(
        spec(Conv),
        [spec(Recall, how="interleave"), spec(Split, kind="tensor_split", how="add", first=[spec(Activation, inplace=True)])],
    ),
    size=(5, 5),
    n=1,
    batch_norm="train",
)  # half of a map changed in place
@example(
    drawn=Drawn(
        spec(Conv), [spec(Recall, how="interleave"), spec(Split, kind="chunk", how="add", first=[spec(Dropout, inplace=True)])]
    ),
    size=(5, 5),
    n=1,
    batch_norm="train",
)  # a dropout of nothing, which torch allows on a part that must not be changed in place
@example(
    drawn=Drawn(spec(Conv), [spec(Checkpoint, steps=[spec(Conv, norm="instance running")])]),
    size=(5, 5),
    n=1,
    batch_norm="train",
)  # running statistics of what runs twice
def test_patch_one_is_exact(drawn, size, n, batch_norm):
    check_exact(drawn, size, n, batch_norm)


@pytest.mark.parametrize("head", HEADS)
def test_every_head_is_exact(head):
    check_exact(Drawn(spec(Conv), [spec(Activation)], head), (9, 12), 2, "train")


@pytest.mark.parametrize("part", EVERY, ids=repr)
def test_every_part_is_exact(part):
    check_exact(Drawn(spec(Conv, norm="eval"), [part, spec(Conv)]), (9, 12), 2, "train")


@pytest.mark.filterwarnings("ignore::gradfilter.errors.ExitWarning")
@run
@given(drawn=networks, size=sizes, n=batches, plan=plans())
def test_predicted_saved_bytes_are_the_measured_ones(drawn, size, n, plan):
    model, exact = make_twins(drawn, plan)
    x = draw(n, 4, *size)
    step_or_reject(exact, x)
    assert predict_saved_bytes(model, x) == measure_saved_bytes(model, x)


@pytest.mark.filterwarnings("ignore::gradfilter.errors.ExitWarning")
@run
@given(drawn=networks, size=sizes, other=sizes, n=batches, m=batches, plan=plans())
def test_training_steps_are_sound_at_any_patch(drawn, size, other, n, m, plan):
    """The loss is torch's own, gradients are finite and as many, and the next batch may have another size."""
    model, exact = make_twins(drawn, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in (draw(n, 4, *size), draw(m, 4, *other, seed=1)):
        exact.load_state_dict(model.state_dict())
        want_y, want = step_or_reject(exact, x)
        y, got = step(model, x)
        torch.testing.assert_close(y, want_y, rtol=1e-12, atol=1e-12)
        assert {k for k, g in got.items() if g is not None} == {k for k, g in want.items() if g is not None}
        assert all(g.isfinite().all() for g in got.values() if g is not None)
        assert not find_unexpected(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert math.isfinite(float(y.sum()))
