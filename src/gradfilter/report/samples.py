"""Sample predictions: which to show, as cards of the page and as a row of the picture."""

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradfilter.report import markup
from gradfilter.report.results import Results, Sample
from gradfilter.report.style import LIGHT
from gradfilter.report.text import percent, shorten

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure
    from PIL.Image import Image as PILImage

_SIDE = 160
_SHOWN = 24  # of each kind, on the page
_DRAWN = 10  # in the picture
SMALL_SIDE = 64
"""Thumbnails smaller than this are kept without loss, and drawn with their pixels visible."""


def show_samples(results: Results, samples: Sequence[Sample]) -> str:
    """Show held-out images with what the model said, wrong and right."""
    if not samples:
        return ""
    right, wrong = choose_samples(samples, _SHOWN)
    none_wrong = "<p class='muted'>None of the samples was classified wrongly.</p>"
    none_right = "<p class='muted'>None of the samples was classified rightly.</p>"
    return markup.make_section(
        "samples",
        "Sample predictions",
        "<h3>Wrong, surest first</h3>",
        _cards(results, wrong) if wrong else none_wrong,
        "<h3>Right</h3>",
        _cards(results, right) if right else none_right,
    )


def draw_samples(part: "SubFigure", results: Results, samples: Sequence[Sample]) -> None:
    """Draw a row of images, wrong ones first."""
    right, wrong = choose_samples(samples, _DRAWN // 2)
    cells: Any = part.subplots(2, _DRAWN, height_ratios=[4, 1])
    for cell in cells.flat:
        cell.set_axis_off()
    for picture, caption, sample in zip(*cells, [*wrong, *right], strict=False):
        is_right = sample.label == sample.predicted
        answer = f"{'right' if is_right else 'wrong'}, {percent(sample.confidence, 0)}"
        truth, said = (shorten(results.classes[index], 15) for index in (sample.label, sample.predicted))
        picture.imshow(to_thumbnail(sample.image), interpolation="nearest")
        picture.set_title(answer, fontsize=8.5, color=LIGHT["blue" if is_right else "orange"], loc="center")
        words = caption.text(0.5, 1, said if is_right else f"{said}\nis {truth}", ha="center", va="top", fontsize=7.5)
        words.set_in_layout(False)  # a long name must not make the pictures smaller


def choose_samples(samples: Sequence[Sample], number: int) -> tuple[list[Sample], list[Sample]]:
    """Return up to `number` right and wrong samples: the right ones as given, the wrong ones surest first."""
    right = [sample for sample in samples if sample.label == sample.predicted]
    wrong = [sample for sample in samples if sample.label != sample.predicted]
    return right[:number], sorted(wrong, key=lambda sample: -sample.confidence)[:number]


def to_thumbnail(image: "PILImage") -> "PILImage":
    """Return an RGB copy of an image that fits a card; transparent parts become white."""
    from PIL import Image  # who has an image has Pillow

    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA"):
        layer = image.convert("RGBA")
        image = Image.new("RGBA", layer.size, "white")
        image.alpha_composite(layer)
    small = image.convert("RGB")
    small.thumbnail((_SIDE, _SIDE))
    return small


def to_data_uri(image: "PILImage", lossless: bool = False) -> str:
    """Return a thumbnail as a data URI."""
    file = io.BytesIO()
    if lossless or max(image.size) <= SMALL_SIDE:
        image.save(file, "PNG", optimize=True)
        kind = "png"
    else:
        image.save(file, "JPEG", quality=85, optimize=True)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def make_image(image: "PILImage", label: str, lossless: bool = False) -> str:
    """Return a thumbnail as an element of the page; its label is HTML already."""
    pixels = ' class="small"' if max(image.size) <= SMALL_SIDE else ""
    width, height = image.size
    return f'<img{pixels} src="{to_data_uri(image, lossless)}" width="{width}" height="{height}" alt="{label}">'


def _cards(results: Results, samples: Sequence[Sample]) -> str:
    return '<ul class="cards">\n' + "\n".join(_card(results, sample) for sample in samples) + "\n</ul>"


def _card(results: Results, sample: Sample) -> str:
    truth, said = (markup.escape(results.classes[index]) for index in (sample.label, sample.predicted))
    right = sample.label == sample.predicted
    kind, mark, correction = ("right", "✓", "") if right else ("wrong", "✗", f"<br>is <b>{truth}</b>")
    return (
        f'<li class="{kind}">{make_image(to_thumbnail(sample.image), truth)}'
        f"<div>{mark} <b>{said}</b> {percent(sample.confidence, 0)}{correction}<br>"
        f'<span class="name" title="{markup.escape(sample.name)}">{markup.escape(shorten(sample.name, 36))}</span></div></li>'
    )
