"""How pictures look: readable in colour, in black and white, by the colour-blind, on light and on dark pages."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradfilter.models.extras import import_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIGHT = {
    "ink": "#1c2128",
    "muted": "#5d6671",
    "line": "#d3d9e0",
    "faint": "#e4e8ed",
    "blue": "#0b62a8",
    "orange": "#bc4c05",
    "green": "#0a7a5a",
    "purple": "#7a4199",
}
"""The colours of pictures, by name. In a page they become CSS variables of the same names."""

DARK = {
    "ink": "#e6edf3",
    "muted": "#9ca6b2",
    "line": "#3d4550",
    "faint": "#2b323c",
    "blue": "#63b0ff",
    "orange": "#f5924a",
    "green": "#3fc79b",
    "purple": "#c79bea",
}
"""The same colours on a dark page."""


@dataclass(frozen=True)
class Mark:
    """Say how one thing is told from the others: by colour, and by line, marker and hatch for those who see no colour."""

    colour: str
    line: str
    marker: str
    hatch: str

    def curve(self) -> dict[str, Any]:
        """Return the arguments of `Axes.plot`."""
        return {"color": LIGHT[self.colour], "linestyle": self.line, "marker": self.marker}

    def bar(self) -> dict[str, Any]:
        """Return the arguments of `Axes.bar`: the first kind is filled, the others are hatched."""
        colour = LIGHT[self.colour]
        return {"facecolor": "none" if self.hatch else colour, "edgecolor": colour, "hatch": self.hatch, "linewidth": 1.0}


MARKS = (
    Mark("blue", "-", "o", ""),
    Mark("orange", "--", "s", "///"),
    Mark("green", ":", "^", "\\\\\\"),
    Mark("purple", "-.", "D", "xx"),
)
"""One for each series of a picture, in this order: what the picture is about comes first."""

_FALLBACK_FONTS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "Noto Sans Arabic", "Noto Sans Devanagari")
_SETTINGS = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": LIGHT["muted"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["faint"],
    "grid.linewidth": 0.8,
    "text.color": LIGHT["ink"],
    "text.parse_math": False,  # a class may be called $x$
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "hatch.linewidth": 1.2,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gradfilter",  # the same picture gives the same file
}


@contextmanager
def drawing() -> Iterator[None]:
    """Give everything drawn and saved inside the style of gradfilter; matplotlib's own settings come back afterwards."""
    matplotlib = import_extra("matplotlib", "The report")
    from matplotlib.font_manager import fontManager

    known = {font.name for font in fontManager.ttflist}
    fonts = ["DejaVu Sans", *(font for font in _FALLBACK_FONTS if font in known)]
    with matplotlib.rc_context({**_SETTINGS, "font.family": fonts}), warnings.catch_warnings():
        # A name in a script that no font here has shows as boxes in the picture; the page has the name itself.
        warnings.filterwarnings("ignore", r"Glyph .* missing from", UserWarning)
        yield


def make_figure(width: float, height: float) -> "Figure":
    """Make an empty figure, in inches, that belongs to no window and no global state."""
    import_extra("matplotlib", "The report")
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
