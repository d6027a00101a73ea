"""Pictures of the price of a step: bars by method, and curves of how it grows."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradfilter.report.style import LIGHT, MARKS, drawing, make_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 130
CLEAR = {"facecolor": "#ffffff", "edgecolor": "none", "pad": 0.6}
"""What stands behind a number, so that no line runs through it."""

KINDS = ("gradfilter", "peers")


def make_bars(title: str, rows: Sequence[Mapping[str, Any]], ours: Collection[str]) -> bytes:
    """Return a PNG picture of step / inference: a panel for each batch and number of threads, a bar for each method."""
    cases = list(dict.fromkeys((row["batch"], row["threads"]) for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    with drawing():
        figure = make_figure(2.6 + 3.9 * len(cases), 1.7 + 0.3 * len(methods))
        figure.suptitle(title, x=0.012, ha="left", fontsize=10, color=LIGHT["muted"])
        panels = figure.subplots(1, len(cases), sharey=True, squeeze=False)[0]
        for axes, case in zip(panels, cases, strict=True):
            own = {row["method"]: row["step / inference"] for row in rows if (row["batch"], row["threads"]) == case}
            for place, method in enumerate(methods):
                value, mark = own.get(method), MARKS[0 if method in ours else 1]
                if value is not None:
                    axes.barh(place, value, height=0.66, **mark.bar())
                text = "not available" if value is None else f"{value:.2f}"
                where: Any = {"textcoords": "offset points", "va": "center", "fontsize": 8, "bbox": CLEAR}
                axes.annotate(text, (value or 0, place), (4, 0), **where)
            axes.axvline(1, color=LIGHT["ink"], linewidth=1)
            axes.margins(x=0.16)
            axes.set_title("batch {}, {} {}".format(*case, "thread" if case[1] == 1 else "threads"))
            axes.set_xlabel("step / inference")
            axes.grid(axis="y", visible=False)
        panels[0].set_yticks(range(len(methods)), methods)
        panels[0].invert_yaxis()
        kinds = [panels[0].barh(0, 0, label=label, **mark.bar()) for mark, label in zip(MARKS[:2], KINDS, strict=True)]
        figure.legend(handles=kinds, loc="outside lower right", ncols=2)
        return to_png(figure)


def make_curves(title: str, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a PNG picture: a panel for each thing that varies; above step / inference, below saved bytes."""
    varied = list(dict.fromkeys(row["varied"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in reversed(rows)))  # what the picture is about comes first
    with drawing():
        figure = make_figure(3.2 * len(varied) + 0.6, 5.4)
        figure.suptitle(title, x=0.012, ha="left", fontsize=10, color=LIGHT["muted"])
        panels = figure.subplots(2, len(varied), sharex="col", sharey="row", squeeze=False)
        for column, name in enumerate(varied):
            values = sorted({row["value"] for row in rows if row["varied"] == name})
            above, below = panels[:, column]
            for method, mark in zip(methods, MARKS, strict=False):
                for axes, key, scale in ((above, "step / inference", 1), (below, "saved bytes", 1e6)):
                    own = [r for r in rows if (r["varied"], r["method"]) == (name, method) and r[key] is not None]
                    axes.plot([r["value"] for r in own], [r[key] / scale for r in own], label=method, **mark.curve())
            above.axhline(1, color=LIGHT["ink"], linewidth=1)
            above.set_title(name)
            above.set_ylim(bottom=0)
            below.set_xscale("log")
            below.set_yscale("log")
            below.set_xticks(values, [str(value) for value in values])
            below.minorticks_off()
        panels[0, 0].set_ylabel("step / inference")
        panels[1, 0].set_ylabel("saved MB")
        panels[1, 0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # powers of ten would need mathematics in text
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=len(methods))
        return to_png(figure)


def to_png(figure: Figure) -> bytes:
    """Return a figure as a PNG picture."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, facecolor="#ffffff", metadata={"Software": None})
    return file.getvalue()
