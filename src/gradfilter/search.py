"""The best plans at every cost, by dynamic programming over the layers of a survey, and how much better any could be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from gradfilter.survey import Array, Costs, Survey

Choices = NDArray[np.int64]
PRICES = np.concatenate([np.zeros(1), np.logspace(-4, 4, 257)])
"""What the whole of a resource costs, in units of the whole gradient's energy: the prices of the bound."""
SHARES = 5
"""With several budgets, plans are sought for costs that are shared out among them in so many steps."""
BUCKETS = 1024
"""Of partial plans whose costs fall into one of so many steps of a logarithmic scale, the one that finds most is followed."""
DECADES = 6.0
"""Length of that scale."""


@dataclass(frozen=True)
class Front:
    """The plans that none is better than at less cost, as far as they were followed.

    Attributes:
        choices: An option for each layer, −1 for not trained [plans, layers].
        cosines: The cosine to the whole gradient that the survey lets expect [plans].
        gains: The share of the gradient's energy that each finds, see `Survey.gains` [plans].
        costs: By resource [plans].
        prices: By resource, every price of the bound [prices].
        duals: For each price, the most that gain less price can be over all plans [prices].
    """

    choices: Choices
    cosines: Array
    gains: Array
    costs: dict[str, Array]
    prices: dict[str, Array]
    duals: Array

    def find_feasible(self, budgets: Mapping[str, float]) -> Choices:
        """Return the places of the plans that no budget forbids, the best first."""
        feasible = np.ones(len(self.cosines), dtype=bool)
        for resource, budget in budgets.items():
            feasible &= self.costs[resource] <= budget
        places = np.flatnonzero(feasible & (self.cosines > 0))
        return places[np.argsort(-self.cosines[places], kind="stable")]

    def find_least(self, resource: str) -> float:
        """Return the least that a plan which is of any use costs."""
        return float(self.costs[resource][self.cosines > 0].min())

    def find_bound(self, budgets: Mapping[str, float]) -> float:
        """Return a gain that no plan within the budgets can exceed: the least Lagrangian dual of all prices.

        No plan gains more than 1 whatever its budget, see `Survey.gains`.
        """
        allowed = sum(self.prices[resource] * budget for resource, budget in budgets.items())
        return min(1.0, float(np.min(self.duals + allowed)))


def search(survey: Survey, resources: tuple[str, ...]) -> Front:
    """Find the plans that are best at some cost.

    The plans do not depend on budgets, so a larger budget never gives a plan that is expected to be worse. With several
    resources, plans are sought for several weighted sums of their costs.
    """
    found = {plan.tobytes(): plan for plan in make_simple_plans(*survey.found.shape)}
    prices: dict[str, list[Array]] = {resource: [] for resource in resources}
    duals: list[Array] = []
    gains = survey.gains / survey.total
    for shares in share_out(len(resources)):
        weights = {r: share / whole(survey.costs[r]) for r, share in zip(resources, shares, strict=True)}
        costs = add_up([(weight, survey.costs[resource]) for resource, weight in weights.items()])
        found.update({plan.tobytes(): plan for plan in find_plans(gains, costs, survey.families)})
        dual = find_duals(gains, costs, survey.families)
        duals.append(dual - sum(PRICES * w * survey.costs[r].base for r, w in weights.items()))
        for resource, weight in weights.items():
            prices[resource].append(weight * PRICES)
    choices = np.stack(list(found.values()))
    choices = choices[np.isfinite(pick(survey.costs[resources[0]].trained, choices)).all(1)]
    return Front(
        choices,
        survey.cosine(choices),
        pick(gains, choices).sum(-1),
        {r: count(survey.costs[r], choices) for r in resources},
        {r: np.concatenate(prices[r]) for r in resources},
        np.concatenate(duals),
    )


def make_simple_plans(layers: int, options: int) -> Choices:
    """Return the plans that train one layer, and those that train it and all that run after it, in one option each.

    The cheapest plan of all is among the former; the latter are what a user would try by hand.
    """
    alone = np.full((layers, options, layers), -1)
    alone[np.arange(layers), :, np.arange(layers)] = np.arange(options)
    after = np.where(np.arange(layers) >= np.arange(layers)[:, None, None], np.arange(options)[:, None], -1)
    return np.concatenate([alone, after]).reshape(-1, layers)


def share_out(resources: int) -> Iterator[tuple[float, ...]]:
    """Yield how costs can be shared out among resources."""
    for parts in product(range(SHARES), repeat=resources):
        if sum(parts) == SHARES - 1:
            yield tuple(part / (SHARES - 1) for part in parts)


def whole(costs: Costs) -> float:
    """Return what the dearest plan costs."""
    return float(np.maximum(costs.passed, np.where(np.isfinite(costs.trained), costs.trained, 0)).max(1).sum()) or 1.0


def add_up(parts: Sequence[tuple[float, Costs]]) -> Costs:
    """Return the weighted sum of costs; what a layer cannot do stays infinite, whatever the weight."""
    possible = np.isfinite(parts[0][1].trained)
    trained = sum(weight * np.where(possible, costs.trained, 0) for weight, costs in parts)
    passed = sum((weight * costs.passed for weight, costs in parts), np.zeros_like(parts[0][1].passed))
    return Costs(np.where(possible, trained, np.inf), passed)


@dataclass(frozen=True)
class Partial:
    """Partial plans: what becomes of some layer and of all that run after it.

    Attributes:
        costs: What each costs [plans].
        gains: What each finds [plans].
        choices: An option for each layer, −1 for not trained, and for those before [plans, layers].
    """

    costs: Array
    gains: Array
    choices: Choices

    def train(self, layer: int, option: int, cost: float, gain: float) -> Partial:
        """Return the plans with a layer in front that is trained."""
        choices = self.choices.copy()
        choices[:, layer] = option
        return Partial(self.costs + cost, self.gains + gain, choices)

    def skip(self, cost: float) -> Partial:
        """Return the plans with a layer in front that passes the gradient on."""
        return Partial(self.costs + cost, self.gains, self.choices)

    def join(self, other: Partial) -> Partial:
        """Return the plans of both that none is better than at less cost, thinned to one per bucket of costs."""
        costs, gains = np.concatenate([self.costs, other.costs]), np.concatenate([self.gains, other.gains])
        order = np.lexsort((-gains, costs))  # by cost; at the same cost the largest gain first
        best = np.maximum.accumulate(gains[order])
        order = order[np.append(True, best[1:] > best[:-1])]
        if len(order) > BUCKETS:
            buckets = np.floor(np.log10(np.maximum(costs[order], 10**-DECADES)) * BUCKETS / DECADES)
            order = order[np.append(buckets[1:] != buckets[:-1], True)]
        return Partial(costs[order], gains[order], np.concatenate([self.choices, other.choices])[order])


def find_plans(gains: Array, costs: Costs, families: Sequence[int]) -> Choices:
    """Return the plans that are best at some cost [plans, layers].

    By dynamic programming from the last layer to the first. With P(l, o) the partial plans of layers l, l+1, … when the
    latest trained layer before them has option o, a family t and a keep,
        P(l, o) = P(l+1, o) with l passing the gradient on  ∪  for all o' with t' ≥ t: P(l+1, o') with l trained in o'.
    The first trained layer may be any: what runs before it costs nothing. The gradient gets no coarser towards the loss
    (t' ≥ t), so what a layer receives is at least as good as in the family that it was measured in. A keep may follow any
    other: what a layer passes on does not depend on it.
    """
    options, layers = len(families), len(gains)
    nothing = Partial(np.zeros(1), np.zeros(1), np.full((1, layers), -1))
    states, plans = find_states(costs, families), nothing
    after = dict.fromkeys(states, nothing)
    for layer in reversed(range(layers)):
        best, here = Partial(np.zeros(0), np.zeros(0), np.zeros((0, layers), dtype=np.int64)), {}
        for option in reversed(range(options)):  # the finest family first, and in it what is held whole
            if np.isfinite(costs.trained[layer, option]):
                trained = after[states[option]].train(layer, option, costs.trained[layer, option], gains[layer, option])
                best = best.join(trained)
            if option == 0 or families[option - 1] != families[option]:
                for state in {s for s in states if families[s] == families[option]}:
                    here[state] = after[state].skip(costs.passed[layer, state]).join(best)
        after, plans = here, plans.join(best)
    return plans.choices[(plans.choices >= 0).any(1)]


def find_states(costs: Costs, families: Sequence[int]) -> list[int]:
    """Return for each option the first that leaves layers after it the same: of its family, and at the same costs for them."""
    first: dict[tuple[int, bytes], int] = {}
    return [first.setdefault((t, costs.passed[:, option].tobytes()), option) for option, t in enumerate(families)]


def find_duals(gains: Array, costs: Costs, families: Sequence[int]) -> Array:
    """Return, for each of `PRICES`, the most that gain less price times cost can be over all plans, exactly.

    The same recursion as in `find_plans`: at a price, gain less price is one number, and the largest is all that matters.
    """
    first = np.searchsorted(families, families)  # of the options of the same family
    possible = np.isfinite(costs.trained)
    known = np.where(possible, costs.trained, 0.0)
    value = np.zeros((len(PRICES), gains.shape[1]))
    most = np.zeros(len(PRICES))
    for layer in reversed(range(len(gains))):
        train = np.where(possible[layer], gains[layer] - PRICES[:, None] * known[layer] + value, -np.inf)
        best = np.maximum.accumulate(train[:, ::-1], 1)[:, ::-1][:, first]  # over this family and all finer ones
        most = np.maximum(most, best[:, 0])
        value = np.maximum(best, value - PRICES[:, None] * costs.passed[layer])
    return most


def pick(table: Array, choices: Choices) -> Array:
    """Return the entries of a table [layers, options] that plans choose [plans, layers], zero where a layer is not trained."""
    return np.where(choices >= 0, table[np.arange(choices.shape[1]), choices], 0.0)


def count(costs: Costs, choices: Choices) -> Array:
    """Return what plans cost [plans]: trained layers, and those behind the first of them that pass the gradient on."""
    latest = np.full(len(choices), -1)
    total = np.full(len(choices), float(costs.base))
    for layer in range(choices.shape[1]):
        choice = choices[:, layer]
        latest = np.where(choice >= 0, choice, latest)
        price = np.where(choice >= 0, costs.trained[layer, choice], costs.passed[layer, latest])
        total += np.where(latest >= 0, price, 0.0)
    return total
