"""Read image files of any kind as upright 8-bit RGB."""

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gradfilter.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from PIL.Image import Image

_ORIENTATION = 0x0112  # the Exif tag

# Pillow knows these by name, but needs another program or a plug-in for their pixels (for EPS it would start Ghostscript).
_NO_PIXELS = frozenset({"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"})

_COMMON = ("JPEG", "PNG")


def require_pillow() -> None:
    """Raise if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "reading images needs the package 'PIL', which is not installed. Install it with: pip install pillow"
        ) from error


@functools.cache
def find_formats() -> tuple[str, ...]:
    """List the image formats that are read, by Pillow's names for them."""
    from PIL import Image

    Image.init()
    # Pillow tries them in this order.
    return tuple(sorted(set(Image.OPEN) - _NO_PIXELS, key=lambda name: (name not in _COMMON, name)))


@functools.cache
def find_extensions() -> frozenset[str]:
    """List the file extensions of the formats that are read, in lower case and with the dot."""
    from PIL import Image

    formats = find_formats()
    return frozenset(extension for extension, name in Image.registered_extensions().items() if name in formats)


def read_rgb(path: str | Path) -> "Image":
    """Read and fully decode an image file.

    Raises:
        DataError: The file cannot be read, is damaged, or has pixels of unknown range. The text is the reason alone.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with open(path, "rb") as file, Image.open(file, formats=find_formats()) as image:
            if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):
                raise Image.DecompressionBombError
            return make_rgb(image)
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError("not an image, or damaged at its beginning") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"too large to be decoded safely (over {Image.MAX_IMAGE_PIXELS:,} pixels)") from error
    except Exception as error:  # on damaged files the decoders raise whatever it happens to lead to
        reason = error.strerror if isinstance(error, OSError) else None
        raise DataError(reason or str(error) or type(error).__name__) from error


def make_rgb(image: "Image") -> "Image":
    """Decode an image and make it upright 8-bit RGB: transparency becomes white, 16-bit grey keeps its upper half."""
    image.load()
    image = _upright(image)
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = _from_16_bit(image)
    elif image.mode == "F":
        raise DataError("its pixels are floating-point numbers of unknown range; save it with 8 or 16 bits per channel")
    elif image.has_transparency_data:
        image = _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _upright(image: "Image") -> "Image":
    """Turn an image as its Exif orientation says."""
    from PIL import ImageOps

    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # as in `read_rgb`; the pixels are good all the same
        return image
    return ImageOps.exif_transpose(image) if orientation in range(2, 9) else image


def _from_16_bit(image: "Image") -> "Image":
    from PIL import Image

    pixels = np.asarray(image)
    if pixels.min() < 0 or pixels.max() > 0xFFFF:
        raise DataError("its pixels are 32-bit integers of unknown range; save it with 8 or 16 bits per channel")
    return Image.fromarray((pixels >> 8).astype(np.uint8))


def _on_white(image: "Image") -> "Image":
    from PIL import Image

    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image)
