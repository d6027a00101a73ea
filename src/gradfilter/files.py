"""Files that are whole or not there: written beside their place, flushed to disk, and moved there in one step."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

DRAFT = re.compile(r"\..+\.\d+\.tmp")
"""Name of a file that is being written: the file's own, and the number of the process."""


def replace_file(path: str | os.PathLike[str], content: bytes | str | Callable[[BinaryIO], object]) -> None:
    """Write a file, in place of the one that is there: all of it, or, whatever happens, nothing.

    Args:
        path: Where to.
        content: Bytes, text for UTF-8, or a function that writes to the open file.

    Raises:
        OSError: It cannot be written. What was there before is still there.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
        sync_folder(target.parent)
    finally:
        draft.unlink(missing_ok=True)


def remove_drafts(folder: Path) -> None:
    """Remove what processes that were killed have left in a folder, into which nobody else is writing now."""
    for path in folder.glob(".*.tmp"):
        if DRAFT.fullmatch(path.name):
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names, so that a power cut does not undo a rename; where the system can do that."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
