"""Figures as SVG that stands inside a page: its colours follow the page, its ids are unique, it needs nothing else."""

import io
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from gradfilter.report.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_VARIABLES = {colour: f"var(--{name})" for name, colour in LIGHT.items()}
_DROPPED = ("metadata", "style")
_MAGNIFICATION = 1.25  # at most: letters have one size in all pictures of a page
_NOTHING = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def to_svg(figure: "Figure", name: str, label: str) -> str:
    """Return a figure as an `<svg>` element for a page.

    Args:
        figure: The figure; its colours of `style.LIGHT` become CSS variables.
        name: Unique within the page; all ids begin with it.
        label: What the picture shows, for those who do not see it.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=_NOTHING)
    root = ElementTree.fromstring(file.getvalue())
    _strip(root)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(key): _embed(_local(key), value, name) for key, value in element.attrib.items()}
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    width = _MAGNIFICATION * 72 * figure.get_figwidth()
    root.attrib.update({"role": "img", "aria-label": label, "style": f"max-width: {width:.0f}px"})
    return ElementTree.tostring(root, encoding="unicode")


def _strip(element: ElementTree.Element) -> None:
    """Remove what is meant for SVG files: licence metadata, and style sheets, which would hold for the whole page."""
    for child in list(element):
        if _local(child.tag) in _DROPPED:
            element.remove(child)
        else:
            _strip(child)


def _local(name: str) -> str:
    """Return a name without its namespace: HTML knows that of `<svg>` by itself."""
    return name.rpartition("}")[2]


def _embed(key: str, value: str, name: str) -> str:
    """Return an attribute with ids made unique and colours left to the page."""
    if key == "id":
        return f"{name}-{value}"
    if key == "href" and value.startswith("#"):
        return f"#{name}-{value[1:]}"
    value = re.sub(r"url\(#", f"url(#{name}-", value)
    if key in ("style", "fill", "stroke"):
        return re.sub("#[0-9a-f]{6}", lambda match: _VARIABLES.get(match[0], match[0]), value)
    return value
