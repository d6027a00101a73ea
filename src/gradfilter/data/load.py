"""From what the user says the data is to the images."""

from pathlib import Path

from gradfilter.data.decode import require_pillow
from gradfilter.data.folder import load_folder
from gradfilter.data.images import Data
from gradfilter.data.split import check_val_share
from gradfilter.errors import DataError


def load_data(
    data: str,
    *,
    root: str | None = None,
    val_share: float = 0.2,
    seed: int = 0,
    strict: bool = False,
    download: bool = False,
) -> Data:
    """Load labelled images.

    Args:
        data: A folder: `<class>/*`, or `train/<class>/*` beside `val/` (`valid/`, `validation/`) and/or `test/`.
        root: Where named sets are kept.
        val_share: Share of the images of each class to hold out where the data has no such part.
        seed: Chooses which images are held out.
        strict: Whether a file that cannot be read is an error; otherwise it is skipped and listed.
        download: Whether a named set may be fetched.
    """
    require_pillow()
    check_val_share(val_share)
    folder = Path(data).expanduser()
    if not folder.exists():
        raise DataError(f"data {data!r} does not exist. Give a folder with one folder of images per class.")
    return load_folder(folder, val_share=val_share, seed=seed, strict=strict)
