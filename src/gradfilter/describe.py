"""Tell what a plan does to a model: layers, regions, exits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Sized

from torch import nn

from gradfilter.hooks import Applied, find_applied
from gradfilter.keep import FULL
from gradfilter.plan import Backward
from gradfilter.regions import Log


def describe(model: nn.Module) -> str:
    """Return the plan in force as a table: layer, backward, patch, keep, trained parameters; then each region and its exits.

    There is no column of keeps where all inputs are held as they are. Patch sizes, regions and exits are those of the latest
    forward pass with gradients. After `freeze_` there are none: then the table is of the trained parameters.
    """
    applied = find_applied(model)
    if applied is None:
        return f"{type(model).__name__}: no plan applied."
    rest = f"rest {applied.plan.rest}, batch norm {applied.plan.batch_norm}"
    rest += f", trunk {applied.plan.trunk}" if applied.plan.trunk != "float32" and not applied.is_exact else ""
    trained = find_trained(model, applied)
    if applied.is_exact:
        title = f"{type(model).__name__}: {count(trained, 'layer')} trained exactly, {rest}"
        return "\n".join([title, *make_lines([("layer", "trained"), *trained.items()])])
    layers = applied.resolved.layers
    # A Linear layer behind the last region, the classifier say, is trained exactly.
    planned = [name for name in layers if name in applied.resolved.convs or name in applied.patches]
    coarse = [name for name in planned if name in applied.patches or not applied.patches]
    rows = [("layer", "backward", "patch", "keep", "trained")]
    for name in planned:
        shown, backward = name or "(model)", layers[name]
        size = str(dataclasses.replace(backward, keep=FULL))
        rows.append((shown, size, describe_patch(backward, name, applied), str(backward.keep), trained.pop(shown, "-")))
    rows += [(name, "-", "-", "-", names) for name, names in trained.items()]
    if all(layers[name].keep == FULL for name in planned):
        rows = [(*row[:3], row[4]) for row in rows]
    compiled = ", compiled" if applied.compiled else ""
    title = f"{type(model).__name__}: {count(coarse, 'layer')} at patch resolution, {rest}{compiled}"
    return "\n".join([title, *make_lines(rows), *describe_regions(applied.log)])


def program(model: nn.Module) -> str:
    """Return what `torch.compile(model, backend="gradfilter")` runs, operator by operator, after the first compiled call.

    For each program, forward and backward: layer, what is computed in one pass, shape and bytes of the result; the tasks of the
    C library and the calls of torch between them; the memory that it takes, and what is held from forward to backward.
    """
    applied = find_applied(model)
    programs = [found for program in applied.programs if (found := program()) is not None] if applied else []
    if applied is None or not programs:
        why = "no plan applied" if applied is None else "nothing is compiled yet; call the model after torch.compile"
        return f"{type(model).__name__}: {why}."
    names = {id(x): name or "(model)" for name, m in model.named_modules() for x in m.parameters(recurse=False)}
    return "\n".join([line for compiled in programs for line in compiled.describe(names)])


def find_trained(model: nn.Module, applied: Applied) -> dict[str, str]:
    """Return the names of each module's own trained parameters, where it has any."""
    found = {}
    for name, module in model.named_modules():
        trained = " ".join(key for key, p in module.named_parameters(recurse=False) if p.requires_grad)
        if trained and name in applied.resolved.trained:
            found[name or "(model)"] = trained
    return found


def make_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table, the first row its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def count(items: Sized, noun: str) -> str:
    """Return how many there are, in words that fit."""
    return f"{len(items)} {noun}{'s' * (len(items) != 1)}"


def describe_regions(log: Log) -> list[str]:
    """Return a line for each region, and one for each function at which it ends: where, and why."""
    if not log.regions:
        return ["regions: none seen yet; run a forward pass"]
    lines = []
    for region, layers in log.regions.items():
        *_, last = layers
        lines.append(f"region: {region or '(model)'}" + (f" to {last} ({count(layers, 'layer')})" if len(layers) > 1 else ""))
        ends: dict[tuple[str, str], list[str]] = {}
        for (layer, function), reason in log.exits.items():
            if layer in layers:
                ends.setdefault((function, reason), []).append(layer or "(model)")
        for (function, reason), places in ends.items():
            shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
            lines.append(f"  exit at {function} behind {shown}: {reason}")
    return lines


def describe_patch(backward: Backward, name: str, applied: Applied) -> str:
    """Return a layer's patch for the table; say so where its gradient is exact."""
    patch = applied.patches.get(name)
    if patch is None:
        return f"exact: {applied.exact[name]}" if name in applied.exact else "?"
    text = str(patch[0]) if patch[0] == patch[1] else f"{patch[0]}x{patch[1]}"
    if not backward.grid or patch != (1, 1):
        return text
    return f"{text} ({'exact: ' if backward.keep == FULL else ''}the map is no larger than the grid)"
