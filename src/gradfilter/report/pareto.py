"""compare.png: accuracy against what it costs, in bytes held and in time, with the methods that no other beats in both."""

import dataclasses
import io
import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gradfilter.report.outcomes import ACCURACY, KINDS, Outcome, find_front
from gradfilter.report.style import LIGHT, MARKS, Mark, drawing, make_figure
from gradfilter.report.text import byte_size, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

OF_KIND: dict[str, Mark] = dict(zip(KINDS, MARKS, strict=True))
Price = Callable[[Outcome], float]
"""What a method is charged for in one panel."""

_DPI = 130
_LONGEST = 28  # characters of a label
_BAR: dict[str, Any] = {"linewidth": 2.4, "alpha": 0.4}
_FAR = 20  # points: a label further from its point than this has a line to it
# Where a label may stand, in points from its point, nearest first.
_PLACES = [
    (distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle)))
    for distance in (9, 16, 26, 38, 52, 68)
    for angle in (0, 180, 30, 150, -30, -150, 60, 120, -60, -120, 90, -90)
]


def make_pareto(title: str, outcomes: Sequence[Outcome]) -> bytes | None:
    """Return the comparison as one PNG picture; None where no method has both an accuracy and a cost."""
    return draw_picture(
        title, outcomes, [(_scale_bytes, _find_bytes), (_scale_time, _find_time)], f"{_name(outcomes)} (%)", "95 % interval"
    )


def make_paired_pareto(title: str, outcomes: Sequence[Outcome], reference: str) -> bytes | None:
    """Return accuracies less the reference's, paired by seed, by bytes held, as one PNG picture; None as in `make_pareto`."""
    height = f"{_name(outcomes)} less that of {reference} (percentage points)"
    paired = [pair(outcome, reference) for outcome in outcomes]
    return draw_picture(title, paired, [(_scale_bytes, _find_bytes)], height, "± standard error, paired by seed")


def pair(outcome: Outcome, reference: str) -> Outcome:
    """Return an outcome whose accuracy is the difference to the reference, and whose interval is its standard error."""
    difference = 0.0 if outcome.method == reference else outcome.difference
    error = outcome.error if math.isfinite(outcome.error) else 0.0
    return dataclasses.replace(outcome, accuracy=difference, interval=(difference - error, difference + error))


def draw_picture(
    title: str, outcomes: Sequence[Outcome], panels: Sequence[tuple[Callable[[Any], None], Price]], height: str, interval: str
) -> bytes | None:
    """Return a picture with a panel for each price; None where no method has both an accuracy and a cost.

    Args:
        title: One line.
        outcomes: The methods.
        panels: For each panel, what labels its axis, and what is drawn along it.
        height: What the other axis shows.
        interval: What the vertical lines show.
    """
    panels = [(scale, price) for scale, price in panels if find_front(outcomes, price)]
    if not panels:
        return None
    with drawing():
        figure = make_figure(12, 4.9 if len(panels) > 1 else 6.2)
        figure.set_dpi(_DPI)  # before labels are measured
        figure.suptitle(shorten(title, 120), x=0.012, ha="left", fontsize=11, color=LIGHT["muted"])
        axes: Any = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for part, (scale, price) in zip(axes, panels, strict=True):
            draw_outcomes(part, outcomes, price)
            scale(part)
            part.set_title(f"{height} by {part.get_title(loc='left')}")
        draw_legend(figure, outcomes, interval)
        figure.draw_without_rendering()  # labels are placed where the layout has put the points; it must not move them again
        figure.set_layout_engine("none")
        for part, (_, price) in zip(axes, panels, strict=True):
            draw_front(part, outcomes, price)
            place_labels(part, outcomes, price)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=_DPI, facecolor="#ffffff", metadata={"Software": None})
    return file.getvalue()


def draw_outcomes(axes: "Axes", outcomes: Sequence[Outcome], price: Price) -> None:
    """Draw each method with its interval: filled where it is on the front, hollow where another is better and cheaper."""
    front = find_front(outcomes, price)
    for outcome in find_known(outcomes, price):
        mark = OF_KIND[outcome.kind]
        low, high = (100 * share for share in outcome.interval)
        axes.vlines(price(outcome), low, high, color=LIGHT[mark.colour], **_BAR, zorder=1)
        face = LIGHT[mark.colour] if outcome in front else "#ffffff"
        axes.plot(price(outcome), 100 * outcome.accuracy, **make_point(mark), markerfacecolor=face, zorder=3)
    places = [price(outcome) for outcome in find_known(outcomes, price)]
    if min(places) == max(places):
        axes.set_xlim(places[0] / 2, places[0] * 2)
    axes.margins(x=0.16, y=0.12)


def make_point(mark: Mark) -> dict[str, Any]:
    """Return how a method is drawn, all but its face."""
    return {
        "marker": mark.marker,
        "markersize": 8,
        "markeredgecolor": LIGHT[mark.colour],
        "markeredgewidth": 1.6,
        "linestyle": "none",
    }


def draw_legend(figure: "Figure", outcomes: Sequence[Outcome], interval: str) -> None:
    """Say below the panels what marks and lines are."""
    from matplotlib.lines import Line2D

    shown = {outcome.kind for outcome in outcomes}
    handles = {
        kind: Line2D([], [], **make_point(mark), markerfacecolor=LIGHT[mark.colour])
        for kind, mark in OF_KIND.items()
        if kind in shown
    }
    handles["hollow: another is better and cheaper"] = Line2D(
        [], [], **{**make_point(MARKS[0]), "markeredgecolor": LIGHT["muted"]}, markerfacecolor="#ffffff"
    )
    handles["front: what can be had at each price"] = Line2D([], [], color=LIGHT["muted"], linewidth=1.2)
    if any(low < high for low, high in (outcome.interval for outcome in outcomes)):
        handles[interval] = Line2D([], [], color=LIGHT["muted"], **_BAR)
    figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=4, handlelength=1.8)


def draw_front(axes: "Axes", outcomes: Sequence[Outcome], price: Price) -> None:
    """Draw the front as stairs: the accuracy that can be had at each price."""
    axes.plot(
        *find_corners(axes, outcomes, price),
        drawstyle="steps-post",
        color=LIGHT["muted"],
        linewidth=1.2,
        zorder=2,
        scalex=False,
        scaley=False,
    )


def find_corners(axes: "Axes", outcomes: Sequence[Outcome], price: Price) -> tuple[list[float], list[float]]:
    """Return the stairs of the front: where each begins, how high it is; the last one goes on to the edge."""
    front = find_front(outcomes, price)
    return [*map(price, front), axes.get_xlim()[1]], [100 * outcome.accuracy for outcome in (*front, front[-1])]


def find_stairs(axes: "Axes", outcomes: Sequence[Outcome], price: Price, unit: float) -> list["Bbox"]:
    """Return the boxes that the stairs of the front take, so that no label is written across them."""
    corners = [axes.transData.transform(corner) for corner in zip(*find_corners(axes, outcomes, price), strict=True)]
    steps = pairwise(corners)
    lines = [line for (x, y), (to_x, to_y) in steps for line in ((x, y, to_x, y), (to_x, y, to_x, to_y))]
    return [_box(x - unit, y - unit, to_x + unit, to_y + unit) for x, y, to_x, to_y in lines]


def place_labels(axes: "Axes", outcomes: Sequence[Outcome], price: Price) -> None:
    """Name the points, each name where it covers no point, no interval and no other name, as near to its point as can be."""
    known = find_known(outcomes, price)
    points = [(float(x), float(y)) for x, y in axes.transData.transform([(price(one), 100 * one.accuracy) for one in known])]
    unit = axes.figure.dpi / 72  # pyright: ignore[reportAttributeAccessIssue]
    taken = [_box(x - 6 * unit, y - 6 * unit, x + 6 * unit, y + 6 * unit) for x, y in points]
    for outcome, (x, _) in zip(known, points, strict=True):
        if math.isnan(outcome.interval[0]):
            continue
        low, high = (axes.transData.transform((price(outcome), 100 * share))[1] for share in outcome.interval)
        taken.append(_box(x - 2 * unit, low, x + 2 * unit, high))
    taken += find_stairs(axes, outcomes, price, unit)
    for outcome, point in zip(known, points, strict=True):
        taken.append(place_label(axes, shorten(outcome.method, _LONGEST), point, taken, unit))
    rest = [outcome.method for outcome in outcomes if outcome not in known]
    if rest:
        text = shorten(f"not shown: {', '.join(rest)}", 70)
        axes.text(0.99, 0.01, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=8, color=LIGHT["muted"])


def place_label(axes: "Axes", text: str, point: tuple[float, float], taken: Sequence["Bbox"], unit: float) -> "Bbox":
    """Write a label at the first free place, or else at the one that covers least; return the box that it takes."""
    label = axes.annotate(text, point, xycoords="figure pixels", xytext=(0, 0), textcoords="offset points", fontsize=8.5)
    size = label.get_window_extent()
    inside = axes.get_window_extent()
    best: tuple[float, tuple[float, float], Bbox] | None = None
    for dx, dy in _PLACES:
        # The label's near edge is at the place: its left one to the right of the point, its lower one above it.
        left = point[0] + dx * unit - size.width * (0.5 - 0.5 * dx / math.hypot(dx, dy))
        low = point[1] + dy * unit - size.height / 2
        box = _box(left, low, left + size.width, low + size.height)
        covered = sum(_overlap(box, other) for other in taken) + 4 * (size.width * size.height - _overlap(box, inside))
        if best is None or covered < best[0] - 1:
            best = (covered, (dx, dy), box)
    assert best is not None
    _, (dx, dy), box = best
    label.set_position(((box.x0 - point[0]) / unit, (box.y0 - point[1]) / unit))
    label.set_verticalalignment("bottom")
    if math.hypot(dx, dy) > _FAR:
        x = min(max(point[0], box.x0 - 2 * unit), box.x1 + 2 * unit)
        end = (x, (box.y0 if dy > 0 else box.y1) if x == point[0] else (box.y0 + box.y1) / 2)
        axes.annotate(
            "",
            point,
            xycoords="figure pixels",
            xytext=end,
            textcoords="figure pixels",
            arrowprops={"arrowstyle": "-", "color": LIGHT["muted"], "linewidth": 0.8, "shrinkA": 0, "shrinkB": 5},
        )
    return box


def find_known(outcomes: Sequence[Outcome], price: Price) -> list[Outcome]:
    """Return the methods that can be drawn."""
    return [outcome for outcome in outcomes if math.isfinite(outcome.accuracy) and math.isfinite(price(outcome))]


def _name(outcomes: Sequence[Outcome]) -> str:
    """Return what the score is called, as a sentence begins."""
    metric = outcomes[0].metric if outcomes else ACCURACY
    return metric.capitalize() if metric == ACCURACY else metric


def _find_bytes(outcome: Outcome) -> float:
    return max(outcome.saved_bytes, 1.0)  # a log axis has no 0


def _find_time(outcome: Outcome) -> float:
    return outcome.step_ratio


def _scale_bytes(axes: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0) if high < 200 * low else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: re.sub(r"\.0+(?!\d)", "", byte_size(value))))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title("bytes held")
    axes.set_xlabel("held by autograd for a batch")


def _scale_time(axes: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter

    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.yaxis.set_tick_params(labelleft=True)
    axes.set_title("time of a step")
    axes.set_xlabel("time of a training step, exact = 1")


def _box(left: float, low: float, right: float, high: float) -> "Bbox":
    from matplotlib.transforms import Bbox

    return Bbox.from_extents(left, low, right, high)


def _overlap(one: "Bbox", other: "Bbox") -> float:
    """Return the area that two boxes have in common."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return max(width, 0.0) * max(height, 0.0)
