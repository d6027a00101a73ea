"""Sample predictions where pixels have labels: an image, its labels, the model's, and where they differ."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradfilter.report import markup
from gradfilter.report.colours import IGNORED, WRONG, find_colours, paint, paint_differences, to_hex
from gradfilter.report.results import MaskSample, Results
from gradfilter.report.samples import make_image
from gradfilter.report.text import percent, shorten

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure
    from PIL.Image import Image

_DRAWN = ("worst", "median", "best")  # in the picture
_WORDS = ("image", "truth", "predicted", "wrong")
_IGNORED = 255  # the label of what does not count


def show_scenes(results: Results, samples: Sequence[MaskSample]) -> str:
    """Show held-out images with their labels and the model's, the lowest score first."""
    if not samples:
        return ""
    text = (
        "<p>Held-out images from the lowest mIoU to the highest, each with its own. The last picture shows what was labelled "
        "wrongly.</p>"
    )
    rows = "\n".join(_scene(results, sample) for sample in samples)
    return markup.make_section(
        "samples", "Sample predictions", text, _legend(results, samples), f'<ol class="scenes">\n{rows}\n</ol>'
    )


def draw_scenes(part: "SubFigure", results: Results, samples: Sequence[MaskSample]) -> None:
    """Draw a row of images, each with its labels, the model's, and where they differ beside it."""
    chosen = [sample for sample in samples if sample.rank in _DRAWN]
    cells: Any = part.subplots(1, len(_WORDS) * len(_DRAWN))
    for cell in cells:
        cell.set_axis_off()
    for place, sample in enumerate(chosen):
        titles = (f"{sample.rank}, {percent(sample.score, 0)}", *_WORDS[1:])
        pictures = _paint(results, sample)
        for cell, title, picture in zip(cells[len(_WORDS) * place :], titles, pictures, strict=False):
            cell.imshow(picture, interpolation="nearest")
            cell.set_title(title, fontsize=8, loc="left")


def make_swatch(colour: np.ndarray | tuple[int, int, int]) -> str:
    """Return a patch of colour to stand beside a name."""
    return f'<i class="swatch" style="background: {to_hex(colour)}"></i>'


def _paint(results: Results, sample: MaskSample) -> "tuple[Image, Image, Image, Image]":
    truth, predicted = (np.asarray(labels) for labels in (sample.truth, sample.predicted))
    classes = len(results.classes)
    differences = paint_differences(sample.image, truth, predicted, _IGNORED)
    return sample.image.convert("RGB"), paint(truth, classes), paint(predicted, classes), differences


def _scene(results: Results, sample: MaskSample) -> str:
    name = markup.escape(sample.name)
    pictures = (
        f"<figure>{make_image(picture, f'{word}: {name}', lossless=word in ('truth', 'predicted'))}"
        f"<figcaption>{word}</figcaption></figure>"
        for word, picture in zip(_WORDS, _paint(results, sample), strict=True)
    )
    head = f'<b>{sample.rank}</b> mIoU {percent(sample.score)} <span class="name" title="{name}">'
    return f"<li><p>{head}{markup.escape(shorten(sample.name, 60))}</span></p><div>{''.join(pictures)}</div></li>"


def _legend(results: Results, samples: Sequence[MaskSample]) -> str:
    """Return the colours of what is seen."""
    seen = np.unique(np.concatenate([np.unique(np.asarray(x)) for one in samples for x in (one.truth, one.predicted)]))
    colours = find_colours(len(results.classes))
    rows = [(colours[label], results.classes[label]) for label in seen if label < len(colours)]
    rows += [(np.array(IGNORED), "does not count")] if _IGNORED in seen else []
    rows.append((np.array(WRONG), "labelled wrongly"))
    items = "".join(f"<li>{make_swatch(colour)}{markup.escape(name)}</li>" for colour, name in rows)
    return f'<ul class="legend">{items}</ul>'
