"""Sample predictions: which to show, and their thumbnails."""

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradfilter.report.results import Sample

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

_SIDE = 160
SMALL_SIDE = 64
"""Thumbnails smaller than this are kept without loss, and drawn with their pixels visible."""


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


def to_data_uri(image: "PILImage") -> str:
    """Return a thumbnail as a data URI."""
    file = io.BytesIO()
    if max(image.size) <= SMALL_SIDE:
        image.save(file, "PNG", optimize=True)
        kind = "png"
    else:
        image.save(file, "JPEG", quality=85, optimize=True)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
