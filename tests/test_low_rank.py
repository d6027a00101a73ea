"""Decompositions: ranks against brute force, contractions against einsum, and what iteration and calibration converge to."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import gradfilter as gf
from cases import draw
from gradfilter.errors import InputError
from gradfilter.keep import State, Tucker, parse_keep
from gradfilter.keep.contract import contract, find_labels, find_order, find_sizes
from gradfilter.keep.tucker import LEAST_RANDOM, choose_ranks, count_numbers, find_factor, project, times, unfold
from keep_cases import make_factor, open_kept, restore

quick = settings(deadline=None, max_examples=100)


def make_falling(*shape, power=1.0, seed=0):
    """Return a tensor whose modes have spectra that fall."""
    x = draw(*shape, seed=seed)
    for mode, n in enumerate(shape):
        mix = make_factor(n, n, 50 + mode)
        assert mix is not None
        x = times(times(x, torch.diag(torch.arange(1.0, n + 1, dtype=x.dtype) ** -power), mode), mix, mode)
    return x


def energies_of(x, mode):
    """Return the energies of a mode, the largest first, by the full SVD."""
    return torch.linalg.svdvals(unfold(x, mode)).square()


# Ranks


@st.composite
def spectra(draw):
    """Draw the energies of a few modes; a mode may have to stay whole."""
    energy = st.floats(0, 1e3)
    found = []
    for n in draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)):
        values = np.sort(draw(arrays.arrays(np.float64, n, elements=energy)))[::-1]
        found.append(np.append(np.zeros(n - 1), np.inf) if draw(st.booleans()) and n > 1 and not found else values)
    return found


@quick
@given(energies=spectra(), numbers=st.integers(0, 400))
def test_chosen_ranks_lose_least_of_all_that_fit(energies, numbers):
    shape = [len(values) for values in energies]

    def lost(ranks):
        return sum(float(values[r:].sum()) for values, r in zip(energies, ranks, strict=True))

    every = itertools.product(*(range(1, n + 1) for n in shape))
    fitting = [lost(ranks) for ranks in every if count_numbers(shape, ranks) <= numbers and math.isfinite(lost(ranks))]
    chosen = choose_ranks(energies, numbers)
    if chosen is None:
        assert not fitting
    else:
        assert count_numbers(shape, chosen) <= numbers
        assert lost(chosen) <= min(fitting) * (1 + 1e-12) + 1e-9


@quick
@given(shape=st.lists(st.integers(1, 9), min_size=2, max_size=4), seed=st.integers(0, 20), energy=st.floats(0.3, 0.999))
def test_each_mode_keeps_its_share_of_the_energy_in_the_smallest_rank(shape, seed, energy):
    x = make_falling(*shape, seed=seed)
    total = float(x.square().sum())
    for mode, n in enumerate(shape):
        factor, energies = find_factor(x, mode, energy), energies_of(x, mode)
        energies = torch.cat([energies, energies.new_zeros(n - len(energies))])
        rank = n if factor is None else factor.shape[1]
        found = total if factor is None else float(times(x, factor, mode).square().sum())
        assert found >= energy * total * (1 - 1e-9)
        assert rank == 1 or float(energies[: rank - 1].sum()) < energy * total * (1 + 1e-9)
        if factor is not None:
            torch.testing.assert_close(factor.t() @ factor, torch.eye(rank, dtype=x.dtype), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [0.0, 0.5, 2.0])
def test_a_long_mode_keeps_its_share_of_the_energy_too(dtype, power):
    """Random directions are tried there; where they do not do, the whole mode is decomposed."""
    x = make_falling(6, LEAST_RANDOM + 8, 5, 4, power=power).to(dtype)
    for energy in (0.5, 0.9):
        factor = find_factor(x, 1, energy)
        assert factor is not None
        found = times(x, factor, 1).double().square().sum() / x.double().square().sum()
        assert found >= energy * (1 - 1e-4)
        smallest = int((energies_of(x.double(), 1).cumsum(0) < energy * x.double().square().sum()).sum()) + 1
        assert factor.shape[1] <= max(1.5 * smallest, smallest + 2)


@pytest.mark.parametrize("keep", [gf.HOSVD(0.9), gf.SVD(0.9), gf.Subspace(rank=3), gf.Fixed(rank=3)], ids=str)
def test_a_compressed_form_is_orthonormal_and_smaller(keep):
    x = make_falling(8, 9, 7, 6)
    kept = keep.compress(x, State("layer"))
    tucker = kept.open(kept.tensors)
    assert isinstance(tucker, Tucker)
    assert sum(tensor.numel() for tensor in kept.tensors) < x.numel()
    assert all(tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept.tensors)
    for factor in tucker.factors:
        if factor is not None:
            torch.testing.assert_close(factor.t() @ factor, torch.eye(factor.shape[1], dtype=x.dtype), rtol=0, atol=1e-9)
    # The core is the projection: what is lost is orthogonal to what is kept.
    held = tucker.expand().core
    torch.testing.assert_close((held * (x - held)).sum(), x.new_zeros(()), rtol=0, atol=1e-9)
    torch.testing.assert_close(tucker.core.square().sum(), held.square().sum(), rtol=1e-9, atol=0)


# Contractions


@st.composite
def contractions(draw):
    """Draw labels of a few operands, their sizes and a result; every label is in two operands, or in the result."""
    letters = "abcdefg"[: draw(st.integers(2, 7))]
    terms = draw(st.lists(st.lists(st.sampled_from(letters), min_size=1, max_size=4, unique=True), min_size=1, max_size=5))
    count = {label: sum(label in term for term in terms) for label in letters}
    used = [label for label in letters if count[label]]
    result = [label for label in used if count[label] == 1 or draw(st.booleans())]
    sizes = {label: draw(st.integers(1, 4)) for label in used}
    return tuple("".join(term) for term in terms), "".join(draw(st.permutations(result))), sizes


def brute_cost(terms, result, sizes):
    """Return the fewest products of any order, by trying them all, two operands at a time."""
    whole = (1 << len(terms)) - 1

    def best(sets):
        if len(sets) == 1:
            return 0
        costs = []
        for a, b in itertools.combinations(sets, 2):
            labels = find_labels(terms, result, a) | find_labels(terms, result, b)
            rest = [members for members in sets if members not in (a, b)]
            costs.append(math.prod(sizes[label] for label in labels) + best([*rest, a | b]))
        return min(costs)

    assert find_labels(terms, result, whole) == set(result)
    return best([1 << i for i in range(len(terms))])


@quick
@given(case=contractions())
def test_a_contraction_is_einsum_at_the_least_cost(case):
    terms, result, sizes = case
    tensors = [draw(*(sizes[label] for label in term), seed=i) for i, term in enumerate(terms)]
    want = torch.einsum(",".join(terms) + "->" + result, *tensors)
    torch.testing.assert_close(contract(terms, tensors, result), want, rtol=1e-9, atol=1e-9)
    if len(terms) > 1:
        assert find_order(terms, result, find_sizes(terms, tensors))[0] == brute_cost(terms, result, sizes)


@quick
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    ranks=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    chosen=st.sets(st.integers(0, 3)),
)
def test_expanding_modes_one_by_one_or_at_once_is_the_same(shape, ranks, chosen):
    x = draw(*shape)
    factors = [make_factor(n, r, mode) for mode, (n, r) in enumerate(zip(shape, ranks, strict=False))]
    tucker = project(x, factors)
    want = x
    for mode, factor in enumerate(factors):
        want = want if factor is None else times(want, factor @ factor.t(), mode)
    torch.testing.assert_close(tucker.expand().core, want, rtol=1e-9, atol=1e-9)
    some = tucker.expand([mode for mode in chosen if mode < len(shape)])
    torch.testing.assert_close(some.expand().core, want, rtol=1e-9, atol=1e-9)
    terms, tensors = tucker.spell("abcd"[: len(shape)])
    torch.testing.assert_close(contract(terms, tensors, "abcd"[: len(shape)]), want, rtol=1e-9, atol=1e-9)


# Subspace iteration


def test_the_error_of_a_subspace_is_what_its_modes_lose_one_after_the_other():
    x = make_falling(8, 9, 7, 6)
    kept = gf.Subspace(rank=3).compress(x, State("layer"))
    tucker = kept.open(kept.tensors)
    left, lost = x, 0.0
    for mode in sorted(range(4), key=lambda mode: 3 / x.shape[mode]):
        before = left.square().sum()
        left = times(left, tucker.factors[mode], mode)
        lost += float(before - left.square().sum())
    assert float((open_kept(kept) - x).square().sum()) == pytest.approx(lost, rel=1e-9)
    torch.testing.assert_close(left, tucker.core, rtol=1e-9, atol=1e-9)


def test_a_subspace_converges_to_the_leading_directions():
    x, state = make_falling(8, 9, 7, 6), State("layer")
    keep = gf.Subspace(rank=(3, 3, 3, 3))
    errors = [float((restore(keep, x, state) - x).square().sum()) for _ in range(60)]
    best = project(x, [torch.linalg.svd(unfold(x, mode)).U[:, :3] for mode in range(4)])
    hosvd = float((best.expand().core - x).square().sum())
    bound = sum(float(energies_of(x, mode)[3:].sum()) for mode in range(4))
    assert errors[-1] <= min(hosvd * 1.01, bound)
    assert errors[-1] <= errors[0]
    assert errors[5] <= 1.05 * errors[-1]


def test_a_warm_start_follows_slowly_changing_inputs_better_than_a_cold_one():
    x, drift = make_falling(8, 30, 7, 6, power=0.5), make_falling(8, 30, 7, 6, power=0.5, seed=1)
    totals = []
    for warm in (True, False):
        keep, state = gf.Subspace(rank=4, warm_start=warm), State("layer")
        steps = [x + 0.02 * step * drift for step in range(12)]
        totals.append(sum(float((restore(keep, now, state) - now).square().sum()) for now in steps))
        assert bool(state.tensors) == warm
    assert totals[0] < totals[1]


FEW = [gf.Subspace(rank=2), gf.Subspace(rank=2, warm_start=False), gf.HOSVD(0.999), gf.Fixed(rank=2)]


@pytest.mark.parametrize("keep", FEW, ids=str)
def test_what_has_few_directions_is_exact(keep):
    x = project(draw(8, 9, 7, 6), [make_factor(n, 2, n) for n in (8, 9, 7, 6)]).expand().core
    if keep == gf.HOSVD(0.999):
        assert (restore(keep, x) - x).norm() <= 0.07 * x.norm()
    else:
        torch.testing.assert_close(restore(keep, x), x, rtol=1e-9, atol=1e-9)


def test_a_budget_takes_the_ranks_that_lose_least():
    x = make_falling(8, 9, 7, 6)
    for memory in (800, 2000, 6000, 10**6):
        kept = gf.Subspace(memory=memory).compress(x, State("layer"))
        assert sum(tensor.nbytes for tensor in kept.tensors) <= memory
        ranks = choose_ranks([energies_of(x, mode).numpy() for mode in range(4)], memory // 8)
        assert ranks is not None
        assert kept.tensors[0].shape == ranks
    assert torch.equal(restore(gf.Subspace(memory=10**6), x), x)


@pytest.mark.parametrize("kind", [gf.Subspace, gf.Fixed])
def test_a_budget_for_nothing_says_so(kind):
    with pytest.raises(InputError, match=r"layer 'conv' cannot keep .*\[8, 9, 7, 6\] in 99 B.* takes \d+ B\. Give more"):
        kind(memory=99).compress(draw(8, 9, 7, 6), State("conv"))


# Fixed factors


def test_fixed_factors_hold_the_calibration_batches_within_their_bound():
    batches = [make_falling(4, 9, 7, 6, seed=seed) for seed in range(3)]
    keep, state = gf.Fixed(energy=0.9, batches=3), State("layer")
    for x in batches:
        keep.compress(x, state)
    assert int(state.tensors["seen"]) == 3
    frozen = dict(state.tensors)
    lost = sum(float((restore(keep, x, state) - x).square().sum()) for x in batches)
    assert lost <= 3 * 0.1 * sum(float(x.square().sum()) for x in batches)
    restore(keep, draw(4, 9, 7, 6), state)
    assert state.tensors.keys() == frozen.keys()
    assert all(state.tensors[name] is tensor for name, tensor in frozen.items())
    assert not any(name.startswith("gram") for name in frozen)


def test_fixed_factors_are_those_of_all_calibration_batches_together():
    batches = [make_falling(4, 9, 7, 6, seed=seed) for seed in range(3)]
    state = State("layer")
    for x in batches:
        gf.Fixed(rank=3, batches=3).compress(x, state)
    for mode in (1, 2, 3):
        want = torch.linalg.svd(torch.cat([unfold(x, mode) for x in batches], 1)).U[:, :3]
        got = state.tensors[f"factor{mode}"]
        torch.testing.assert_close(got @ got.t(), want @ want.t(), rtol=0, atol=1e-8)


@quick
@given(shape=st.lists(st.integers(1, 7), min_size=2, max_size=4), memory=st.integers(100, 3000), seed=st.integers(0, 9))
def test_no_budget_is_exceeded(shape, memory, seed):
    for keep in (gf.Subspace(memory=memory), gf.Fixed(memory=memory)):
        state = State("layer")
        for n in (shape[0], shape[0] + 2, 1):
            x = draw(n, *shape[1:], seed=seed)
            try:
                kept = keep.compress(x, state)
            except InputError:
                assume(False)
            else:
                assert sum(tensor.nbytes for tensor in kept.tensors) <= memory
                assert (open_kept(kept) - x).norm() <= x.norm() * (1 + 1e-9)


@pytest.mark.parametrize("keep", ["hosvd:0.8", "svd:0.8", "subspace:0.8", "subspace:1", "fixed:0.8", "fixed:1"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_nothing_is_held_besides_what_is_kept(keep, memory_format):
    """A slice of a larger matrix would hold all of it: one direction of 48 is the worst case."""
    state = State("layer")
    x = (torch.ones(48, 24, 4, 4) + 1e-3 * draw(48, 24, 4, 4)).contiguous(memory_format=memory_format)
    for _ in range(2):
        kept = parse_keep(keep).compress(x, state)
        for tensor in (*kept.tensors, *state.tensors.values()):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("keep", [gf.Subspace(memory=2500), gf.Subspace(memory=8000), gf.Fixed(memory=8000)], ids=str)
def test_a_memory_is_predicted_as_the_most_that_can_be_held_before_the_first_batch(keep):
    x, state = draw(4, 16, 8, 8).float(), State("layer")
    most = sum(t.nbytes for t in keep.compress(x.to("meta"), state).tensors)
    assert sum(t.nbytes for t in keep.compress(x, state).tensors) <= most <= keep.memory
    assert most > 0.95 * keep.memory
