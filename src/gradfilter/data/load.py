"""From what the user says the data is to the images."""

import difflib
import logging
from pathlib import Path

from gradfilter.data.decode import require_pillow
from gradfilter.data.folder import load_folder
from gradfilter.data.images import Data
from gradfilter.data.sets import Request, find_root, find_sets, load_set
from gradfilter.data.split import check_val_share
from gradfilter.errors import DataError

_log = logging.getLogger(__name__)


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
        data: The name of a known set, or a folder: `<class>/*`, or `train/<class>/*` beside `val/` (`valid/`,
            `validation/`) and/or `test/`. Where only `test/` is given it becomes `val`, the one part that is held out.
        root: Where named sets are kept; by default $GRADFILTER_DATA, or a folder in the user's cache.
        val_share: Share of the images of each class to hold out where the data has no such part.
        seed: Chooses which images are held out.
        strict: Whether a file that cannot be read is an error; otherwise it is skipped and listed.
        download: Whether a named set may be fetched.
    """
    require_pillow()
    check_val_share(val_share)
    folder = Path(data).expanduser()
    if data in find_sets():
        if folder.is_dir():
            _log.warning("data %r is taken as the known set, not as the folder of that name; for that, say './%s'", data, data)
        return load_set(data, Request(find_root(root), val_share, seed, strict, download))
    if not data or not folder.exists():
        near = difflib.get_close_matches(data, find_sets(), n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise DataError(
            f"data {data!r} is neither a folder nor a known set. {hint}Give a folder with one folder of images per class, "
            f"or one of: {', '.join(find_sets())}."
        )
    return load_folder(folder, val_share=val_share, seed=seed, strict=strict)
