"""What a report shows otherwise where whole images have labels, and where pixels have."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradfilter.report.colours import find_colours
from gradfilter.report.results import Results
from gradfilter.report.samples import draw_samples, show_samples
from gradfilter.report.scenes import draw_scenes, make_swatch, show_scenes
from gradfilter.report.text import half_interval, percent
from gradfilter.scores import find_recalls

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure


@dataclass(frozen=True)
class Subject:
    """What is particular to the reports of a task.

    Attributes:
        show_samples: From results and samples to a section of the page.
        draw_samples: Draws them into a part of the picture.
        remark: From results to what stands beside the score, or "".
        score: What the score of a class is called, by which classes are ranked.
        columns: More columns of the table of classes, by head: from results and index of the class to text.
        make_mark: From results and index of a class to what stands before its name, as HTML.
        write_cell: From a number of the confusion matrix, and its share of its row, to text.
        cells: What these texts are, as a sentence.
        counts: From training or held-out images by class to a few words on them.
    """

    show_samples: Callable[[Results, Any], str]
    draw_samples: "Callable[[SubFigure, Results, Any], None]"
    remark: Callable[[Results], str]
    score: str
    columns: Mapping[str, Callable[[Results, int], str]]
    make_mark: Callable[[Results, int], str]
    write_cell: Callable[[int, float], str]
    cells: str
    counts: Callable[[Sequence[int]], str]


def find_subject(results: Results) -> Subject:
    """Return what is particular to a report."""
    return SUBJECTS[results.task]


def _describe_interval(results: Results) -> str:
    half = half_interval(results.best.val_accuracy, sum(map(sum, results.confusion)))
    return f"± {100 * half:.1f} " if math.isfinite(half) else ""


def _describe_second(results: Results) -> str:
    """Name the second score; an interval would take the pixels of an image for independent."""
    _, (name, rate), *_ = results.scores.overall.items()
    return f"{name} {percent(rate(results.confusion))} "


def _count_right(results: Results, index: int) -> str:
    row = results.confusion[index]
    return f"{row[index]:,} of {sum(row):,}"


def _share_right(results: Results, index: int) -> str:
    return percent(float(find_recalls(results.confusion)[index]))


def _share_of_all(results: Results, index: int) -> str:
    return percent(sum(results.confusion[index]) / max(1, sum(map(sum, results.confusion))))


def _spread(counts: Sequence[int]) -> str:
    fewest, most = min(counts), max(counts)
    return f"{fewest:,} to {most:,}" if fewest < most else f"{most:,}"


SUBJECTS = {
    "classify": Subject(
        show_samples=show_samples,
        draw_samples=draw_samples,
        remark=_describe_interval,
        score="accuracy",
        columns={"right": _count_right},
        make_mark=lambda results, index: "",
        write_cell=lambda count, share: str(count),
        cells="numbers count held-out images",
        counts=lambda counts: f"{_spread(counts)} ({sum(counts):,} in all)",
    ),
    "segment": Subject(
        show_samples=show_scenes,
        draw_samples=draw_scenes,
        remark=_describe_second,
        score="IoU",
        columns={"accuracy": _share_right, "of the pixels": _share_of_all},
        make_mark=lambda results, index: make_swatch(find_colours(len(results.classes))[index]),
        write_cell=lambda count, share: f"{100 * share:.0f}" if share >= 0.005 else "",
        cells="numbers are percent of the true class's pixels",
        counts=_spread,
    ),
}
"""By name of the task."""
