"""The picture of a choice: what plans cost, how good their gradients are, and where the chosen one lies."""

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from gradfilter.planner import NAMES, Chosen
from gradfilter.report.style import LIGHT, MARKS, drawing, make_figure
from gradfilter.search import Choices, count, make_simple_plans
from gradfilter.units import show_amount

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 130
_APART = 1.6
"""Points are named where they cost so many times what the point that was named before costs: names must not overlap."""


def make_front_picture(chosen: Chosen, title: str = "") -> bytes:
    """Return a PNG picture: the cosine that is expected of a plan against what it costs, a panel for each budget."""
    with drawing():
        figure = make_figure(7.2, 0.6 + 4.2 * len(chosen.budgets))
        figure.suptitle(title, x=0.012, ha="left", fontsize=10, color=LIGHT["muted"])
        for axes, resource in zip(figure.subplots(len(chosen.budgets), 1, squeeze=False)[:, 0], chosen.budgets, strict=True):
            draw_front(axes, chosen, resource)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=_DPI, facecolor="#ffffff", metadata={"Software": None})
    return file.getvalue()


def draw_front(axes: "Axes", chosen: Chosen, resource: str) -> None:
    """Draw the best plans as a line, plans that treat all layers alike as points on either side of it, and the choice."""
    survey, front = chosen.survey, chosen.front
    costs, cosines = front.costs[resource], front.cosines
    order = np.argsort(costs, kind="stable")
    best = np.maximum.accumulate(cosines[order])
    rises = np.append(True, best[1:] > best[:-1]) & (best > 0)
    axes.plot(costs[order][rises], best[rises], drawstyle="steps-post", color=LIGHT["ink"], linewidth=1.2, label="best plans")
    options = len(survey.families)
    simple = make_simple_plans(len(survey.layers), options).reshape(2, -1, options, len(survey.layers))[1]
    whole = np.append(np.diff(survey.families) > 0, True)  # the last of each family: inputs are held as they are
    simple = simple[:, whole]
    exact, uniform = simple[0, -1:], simple[0, :-1]
    last = [n for n in (2, 4, 8, 16, 32) if n < len(simple)]
    kinds = (
        ("all layers, one grid", uniform, MARKS[1]),
        ("last 2, 4, 8, … layers, exact", simple[[-n - 1 for n in last], -1], MARKS[2]),
        ("all layers, exact", exact, MARKS[3]),
    )
    for label, plans, mark in kinds:
        style: dict[str, Any] = {"color": LIGHT[mark.colour], "marker": mark.marker, "markerfacecolor": "white"}
        axes.plot(*_find_points(chosen, plans, resource), label=label, linestyle="none", **style)
    lowest, before = chosen.cosine, 0.0
    for _, plans, _ in kinds:
        lowest = min(lowest, float(_find_points(chosen, plans, resource)[1].min(initial=1.0)))
    named = [option for option, last in zip(survey.options[0], whole, strict=True) if last]
    for option, x, y in zip(named, *_find_points(chosen, uniform, resource), strict=False):
        if x > _APART * before:
            axes.annotate(str(option), (x, y), (4, -4), textcoords="offset points", fontsize=7, color=LIGHT["muted"], va="top")
            before = x
    axes.axvline(chosen.budgets[resource], color=LIGHT["muted"], linestyle=":", linewidth=1)
    axes.plot(
        [chosen.costs[resource]], [chosen.cosine], marker="*", markersize=14, linestyle="none", color=MARKS[0].curve()["color"],
        label=f"chosen: {show_amount(resource, chosen.costs[resource])}, cosine {chosen.cosine:.3f}",
    )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda amount, _: show_amount(resource, amount))
    axes.set_xlabel(f"{NAMES[resource]} (budget: {show_amount(resource, chosen.budgets[resource])})")
    axes.set_title("Expected cosine to the whole gradient")
    axes.set_ylim(max(0.0, 1 - 1.4 * (1.02 - lowest)), 1.02)  # below it are plans that nobody would try
    axes.legend(loc="lower right", fontsize=8, frameon=False)


def _find_points(chosen: Chosen, plans: Choices, resource: str) -> tuple[np.ndarray, np.ndarray]:
    """Return costs and cosines of plans."""
    return count(chosen.survey.costs[resource], plans), chosen.survey.cosine(plans)
