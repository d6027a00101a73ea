"""report.png: the whole report in one picture, for a message or a README."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradfilter.report import figures
from gradfilter.report.headline import make_headline
from gradfilter.report.results import MaskSample, Results, Sample
from gradfilter.report.style import LIGHT, drawing, make_figure
from gradfilter.report.subject import find_subject
from gradfilter.report.text import shorten

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

_DPI = 130


def make_picture(results: Results, samples: Sequence[Sample] | Sequence[MaskSample]) -> bytes:
    """Return the report as one PNG picture."""
    with drawing():
        heights = [0.95, 3.6, 2.6, *([1.75] if samples else [])]
        figure = make_figure(12, sum(heights))
        parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
        _draw_headline(parts[0], results)
        _draw_learning(parts[1], results)
        _draw_cost(parts[2], results)
        if samples:
            find_subject(results).draw_samples(parts[3], results, samples)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=_DPI, facecolor="#ffffff", metadata={"Software": None})
    return file.getvalue()


def _draw_headline(part: "SubFigure", results: Results) -> None:
    part.text(0.012, 0.8, f"{shorten(results.model, 50)} on {shorten(results.data, 60)}", fontsize=11, color=LIGHT["muted"])
    headline = make_headline(results)
    for index, fact in enumerate(headline):
        x = 0.012 + index / len(headline)
        part.text(x, 0.34, fact.value, fontsize=21, fontweight="bold")
        part.text(x, 0.08, f"{fact.name} · {fact.remark}" if fact.remark else fact.name, fontsize=8, color=LIGHT["muted"])


def _draw_learning(part: "SubFigure", results: Results) -> None:
    parts: Any = part.subfigures(1, 2, width_ratios=[2, 1])
    loss, accuracy = parts[0].subplots(1, 2)
    confusion = parts[1].subplots()
    figures.draw_loss(loss, results)
    figures.draw_accuracy(accuracy, results)
    figures.draw_confusion(confusion, results, 2.2)
    confusion.set_title("Confusion matrix")


def _draw_cost(part: "SubFigure", results: Results) -> None:
    if results.cost is None:
        figures.draw_layers(part.subplots(), results.layers)
        return
    halves: Any = part.subfigures(1, 2, width_ratios=[2, 1])
    left, right = halves
    figures.draw_layers(left.subplots(), results.layers)
    saved, time = right.subplots(2, 1, height_ratios=[2, 3])
    figures.draw_saved_bytes(saved, results.cost)
    figures.draw_step_time(time, results.cost)
