"""Contract several tensors into one, two at a time, in the order that takes the fewest products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Tree = int | tuple[Any, Any]
"""An order of contraction: the place of an operand, or a pair of trees to be contracted with each other."""


@lru_cache(maxsize=4096)
def find_order(terms: tuple[str, ...], result: str, sizes: tuple[tuple[str, int], ...]) -> tuple[int, Tree]:
    """Return the products that the best order takes, and that order.

    Exactly, by dynamic programming over sets of operands: of the ways to split a set in two, the cheapest.

    Args:
        terms: The labels of each operand's axes.
        result: The labels of the result's.
        sizes: The size of each label.
    """
    size, count = dict(sizes), len(terms)
    labels = [find_labels(terms, result, members) for members in range(1 << count)]
    best: dict[int, tuple[int, Tree]] = {1 << i: (0, i) for i in range(count)}
    for members in range(1, 1 << count):
        if members in best:
            continue
        part = (members - 1) & members
        while part:  # every non-empty part, and what is left of the set
            rest = members ^ part
            if part < rest:
                products = math.prod(size[label] for label in labels[part] | labels[rest])
                cost = best[part][0] + best[rest][0] + products
                if members not in best or cost < best[members][0]:
                    best[members] = cost, (best[part][1], best[rest][1])
            part = (part - 1) & members
    return best[(1 << count) - 1]


def find_labels(terms: Sequence[str], result: str, members: int) -> set[str]:
    """Return the labels that a set of operands, contracted, still has: those that the others or the result need."""
    inside = {label for i, term in enumerate(terms) if members >> i & 1 for label in term}
    outside = {label for i, term in enumerate(terms) if not members >> i & 1 for label in term}
    return inside & (outside | set(result))


def find_sizes(terms: Sequence[str], tensors: Sequence[Tensor]) -> tuple[tuple[str, int], ...]:
    """Return the size of each label."""
    sizes = {label: n for term, x in zip(terms, tensors, strict=True) for label, n in zip(term, x.shape, strict=True)}
    return tuple(sorted(sizes.items()))


def contract(terms: Sequence[str], tensors: Sequence[Tensor], result: str) -> Tensor:
    """Return Σ over all labels that are not in the result, as `torch.einsum(",".join(terms) + "->" + result, *tensors)`."""
    terms = tuple(terms)
    if len(terms) == 1:
        return torch.einsum(f"{terms[0]}->{result}", tensors[0])
    _, tree = find_order(terms, result, find_sizes(terms, tensors))

    def run(tree: Tree, wanted: str) -> tuple[str, Tensor, int]:
        if isinstance(tree, int):
            return terms[tree], tensors[tree], 1 << tree
        (a, x, first), (b, y, second) = run(tree[0], ""), run(tree[1], "")
        members = first | second
        out = wanted or "".join(sorted(find_labels(terms, result, members)))
        return out, torch.einsum(f"{a},{b}->{out}", x, y), members

    return run(tree, result)[1]
