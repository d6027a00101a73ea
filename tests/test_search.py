"""The best plans at every cost, against all plans there are."""

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradfilter.plan import Backward
from gradfilter.search import count, find_states, make_simple_plans, search
from gradfilter.survey import FLOPS, MEMORY, Costs, Survey


def draw_survey(seed, layers=4, families=3, resources=(MEMORY,), keeps=1):
    """Return an invented survey: finer families find more and cost more, as in life; some layers lack some keeps.

    As in life, too, no option gains more than the layer's energy: |ĝ|² is at least ⟨ĝ, g⟩² / |g|².
    """
    generator = np.random.default_rng(seed)
    options = families * keeps
    energies = generator.lognormal(0, 1.5, layers)
    shares = np.sort(generator.uniform(0, 1, (layers, options)), 1)
    shares[:, -1] = 1
    found = energies[:, None] * shares
    squares = found * generator.uniform(np.maximum(shares, 0.8), 1.2)
    squares[:, -1] = found[:, -1]
    lacking = (generator.uniform(size=(layers, options)) < 0.2) & (np.arange(options) % keeps < keeps - 1)
    costs = {}
    for resource in resources:
        passed = np.sort(generator.integers(0, 40, (layers, options)), 1).astype(float)
        passed[:, ::keeps] = passed[:, keeps > 1 :: keeps]  # the first two keeps treat what is around them alike
        extra = np.sort(generator.integers(1, 100, (layers, options)), 1).astype(float)
        costs[resource] = Costs(np.where(lacking, np.inf, passed + extra), passed, 7.0)
    names = tuple(f"layer{i}" for i in range(layers))
    choices = [Backward(grid=2 ** (i // keeps)) for i in range(options)]
    own = tuple(tuple(None if lack else c for c, lack in zip(choices, row, strict=True)) for row in lacking)
    levels = tuple(i // keeps for i in range(options))
    return Survey(names, own, levels, found, squares, energies, energies.sum() * 1.1, costs)


def cost_slowly(costs, plan):
    """Return what a plan costs, written as a loop."""
    total, latest = costs.base, None
    for layer, choice in enumerate(plan):
        latest = choice if choice >= 0 else latest
        if choice >= 0:
            total += costs.trained[layer, choice]
        elif latest is not None:
            total += costs.passed[layer, latest]
    return total


def list_all(survey):
    """Return every plan in which the gradient gets no coarser towards the loss."""
    layers, options = survey.found.shape
    plans = [p for p in product(range(-1, options), repeat=layers) if is_allowed(survey, p)]
    return np.array(plans)


def is_allowed(survey, plan):
    families = [survey.families[choice] for choice in plan if choice >= 0]
    has = all(choice < 0 or survey.options[layer][choice] for layer, choice in enumerate(plan))
    return bool(families) and has and families == sorted(families)


@given(st.integers(0, 10**6))
def test_invented_surveys_gain_no_more_than_a_layers_energy(seed):
    survey = draw_survey(seed, keeps=4)
    assert (survey.gains <= survey.energies[:, None] * (1 + 1e-12)).all()
    assert survey.energies.sum() <= survey.total


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(4, 3, 1), (3, 2, 3), (2, 3, 4)]))
@example(61, (2, 3, 4))  # once drawn with gains above a layer's energy: a plan then exceeded the bound
def test_plans_are_the_best_of_all_at_every_budget(seed, sizes):
    layers, families, keeps = sizes
    survey = draw_survey(seed, layers, families, keeps=keeps)
    front, plans = search(survey, (MEMORY,)), list_all(survey)
    gains = np.where(plans >= 0, survey.gains[np.arange(layers), plans], 0).sum(1) / survey.total
    costs = np.array([cost_slowly(survey.costs[MEMORY], plan) for plan in plans])
    for budget in np.unique(costs):
        best = gains[costs <= budget].max()
        places = front.find_feasible({MEMORY: budget})
        assert front.gains[places].max() == pytest.approx(best, rel=1e-9)
        assert front.find_bound({MEMORY: budget}) >= best - 1e-9
        # The plan that is taken is the one with the best cosine: of all plans none has a better one by more than the gap.
        gap = front.find_bound({MEMORY: budget}) - front.gains[places[0]]
        assert survey.cosine(plans[costs <= budget]).max() ** 2 <= front.gains[places[0]] + gap + 1e-9


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_several_budgets_are_kept_and_the_bound_holds(seed):
    survey = draw_survey(seed, 3, 2, (MEMORY, FLOPS), keeps=3)
    front, plans = search(survey, (MEMORY, FLOPS)), list_all(survey)
    gains = np.where(plans >= 0, survey.gains[np.arange(3), plans], 0).sum(1) / survey.total
    costs = {r: np.array([cost_slowly(survey.costs[r], plan) for plan in plans]) for r in (MEMORY, FLOPS)}
    for share in (0.3, 0.6, 1.0):
        budgets = {MEMORY: share * costs[MEMORY].max(), FLOPS: 0.8 * share * costs[FLOPS].max()}
        places = front.find_feasible(budgets)
        inside = (costs[MEMORY] <= budgets[MEMORY]) & (costs[FLOPS] <= budgets[FLOPS])
        assert len(places)
        for place in places:
            assert all(cost_slowly(survey.costs[r], front.choices[place]) <= budgets[r] for r in budgets)
        assert gains[inside].max() - 1e-9 <= front.find_bound(budgets)
        assert front.gains[places].max() >= 0.9 * gains[inside].max()


def test_more_budget_is_never_expected_to_be_worse():
    survey = draw_survey(3, layers=40, families=4, keeps=3)
    front = search(survey, (MEMORY,))
    whole = front.costs[MEMORY].max()
    cosines = [front.cosines[front.find_feasible({MEMORY: share * whole})[0]] for share in np.linspace(0.02, 1, 200)]
    assert cosines == sorted(cosines)


def test_long_networks_are_thinned_and_still_near_the_bound():
    survey = draw_survey(5, layers=60, families=9, keeps=4)
    front = search(survey, (MEMORY,))
    whole = front.costs[MEMORY].max()
    assert len(front.choices) < 1024 + 2 * 60 * 36
    for share in (0.05, 0.1, 0.3, 0.7):
        place = front.find_feasible({MEMORY: share * whole})
        assert front.find_bound({MEMORY: share * whole}) - front.gains[place].max() < 0.02


def test_costs_are_counted_as_written():
    survey = draw_survey(7, layers=6, families=2, keeps=2)
    plans = np.random.default_rng(0).integers(-1, 4, (50, 6))
    expected = [cost_slowly(survey.costs[MEMORY], plan) for plan in plans]
    np.testing.assert_allclose(count(survey.costs[MEMORY], plans), expected)


def test_options_that_leave_later_layers_the_same_share_a_state():
    survey = draw_survey(2, layers=5, families=2, keeps=3)
    assert find_states(survey.costs[MEMORY], survey.families) == [0, 0, 2, 3, 3, 5]


def test_simple_plans():
    plans = make_simple_plans(2, 2).tolist()
    assert plans == [[0, -1], [1, -1], [-1, 0], [-1, 1], [0, 0], [1, 1], [-1, 0], [-1, 1]]


def test_nothing_is_found_where_every_gradient_points_away():
    survey = draw_survey(1)
    survey.found[:] = -1
    assert not len(search(survey, (MEMORY,)).find_feasible({MEMORY: 1e9}))
