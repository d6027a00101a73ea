"""The picture of a model's fidelity: layer by layer, from the loss to the input."""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradfilter.fidelity import Fidelity, Spread
from gradfilter.report.style import LIGHT, MARKS, Mark, drawing, make_figure
from gradfilter.report.text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 130
_MOST_NAMES = 60
"""So many layers are named below the picture; more are numbered."""


def make_fidelity_picture(fidelity: Fidelity, title: str = "") -> bytes:
    """Return a PNG picture: above, what patches keep of the exact gradient gy; below, the cosine of each layer's gradient.

    Layers stand from the loss to the input, so that what happens to the gradient on its way reads from left to right.
    """
    # Those whose gradient is no map, such as the classifier, are nearest to the loss.
    names = [*(name for name in reversed(list(fidelity.layers)) if name not in fidelity.depth), *fidelity.depth]
    layers = [fidelity.layers[name] for name in names]
    with drawing():
        figure = make_figure(max(6.5, min(14, 2 + 0.2 * len(names))), 6.2)
        above, below = figure.subplots(2, 1, sharex=True)
        figure.suptitle(title, x=0.012, ha="left", fontsize=10, color=LIGHT["muted"])
        _draw(above, [layer.gy_snr_db for layer in layers], MARKS[0])
        share = fidelity.rising_share
        rises = "" if math.isnan(share) else f": does not fall in {share:.0%} of the steps"
        above.set_title(f"SNR of the exact gradient gy on the patches (dB){rises}")
        _draw(below, [layer.cosine for layer in layers], MARKS[1])
        below.axhline(1, color=LIGHT["muted"], linewidth=0.8)
        below.set_title("Cosine of the layer's filtered gradient to the exact one")
        _name_layers(below, names)
        bars = f"; bars: smallest to largest of {fidelity.batches} batches" if fidelity.batches > 1 else ""
        below.set_xlabel(f"layer, from the loss to the input{bars}")
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=_DPI, facecolor="#ffffff", metadata={"Software": None})
    return file.getvalue()


def _draw(axes: "Axes", spreads: Sequence[Spread | None], mark: Mark) -> None:
    """Draw the means as a curve, and from smallest to largest as a bar behind it; a gap where there is nothing to show."""
    known: Any = [(i, s) for i, s in enumerate(spreads) if s is not None and math.isfinite(s.mean)]
    means = [s.mean if s is not None and math.isfinite(s.mean) else math.nan for s in spreads]
    axes.plot(range(len(spreads)), means, **mark.curve())
    axes.vlines(
        [i for i, _ in known],
        [s.smallest for _, s in known],
        [s.largest for _, s in known],
        color=LIGHT[mark.colour],
        linewidth=5,
        alpha=0.3,
    )
    if not known:
        axes.text(0.5, 0.5, "no layer of this plan is filtered", transform=axes.transAxes, ha="center", color=LIGHT["muted"])


def _name_layers(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_xlim(-0.6, len(names) - 0.4)
    if len(names) <= _MOST_NAMES:
        axes.set_xticks(range(len(names)), [shorten(name or "(model)", 28) for name in names], rotation=90, fontsize=7)
    else:
        axes.set_xticks(range(0, len(names), 10))
