"""Decode every image file once, before any work is built on it."""

import logging
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gradfilter.data.decode import find_extensions, read_rgb
from gradfilter.errors import DataError

_log = logging.getLogger(__name__)

_CHUNK = 256  # files per task of the thread pool
_SMALL_FILE = 8192  # bytes
_LISTED = 20  # files named in an error


@dataclass(frozen=True)
class Checked:
    """What became of some files, by path: the stamps of the good ones, and why the others cannot be used."""

    stamps: dict[str, str]
    reasons: dict[str, str]

    @property
    def skipped(self) -> tuple[str, ...]:
        """The others, each as "path: reason"."""
        return tuple(f"{path}: {reason}" for path, reason in self.reasons.items())


def check_files(paths: Sequence[str]) -> Checked:
    """Decode every file once."""
    chunks = [paths[start : start + _CHUNK] for start in range(0, len(paths), _CHUNK)]
    checked = Checked({}, {})
    # Filters of warnings belong to the process: set here, they hold in the threads. What is wrong is raised, not warned of.
    with warnings.catch_warnings(), ThreadPoolExecutor(count_threads(paths)) as pool:
        warnings.simplefilter("ignore")
        for done, part in enumerate(pool.map(_check_chunk, chunks), start=1):
            checked.stamps.update(part.stamps)
            checked.reasons.update(part.reasons)
            if done % 40 == 0:
                _log.info("checked %d of %d images", done * _CHUNK, len(paths))
    return checked


def make_stamp(path: str) -> str:
    """Tell the contents of a file from others, and from its own before a change, by its size and time of change."""
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns}"


def refuse_skipped(what: str, skipped: Sequence[str]) -> None:
    """Raise, for a strict user, if any file was skipped."""
    if skipped:
        files = "1 file" if len(skipped) == 1 else f"{len(skipped)} files"
        raise DataError(
            f"{what}: {files} cannot be used: {listed(skipped)}. Mend or remove them, or do without strict to skip them."
        )


def listed(lines: Sequence[str]) -> str:
    """Join some lines for an error, which is kept short."""
    more = len(lines) - _LISTED
    return "; ".join(lines[:_LISTED]) + (f"; and {more} more" if more > 0 else "")


def count_threads(paths: Sequence[str]) -> int:
    """Choose how many threads decode: small files take little but Python's own time, in which threads hinder each other."""
    sample = paths[:_CHUNK]
    size = sum(os.path.getsize(path) for path in sample if os.path.isfile(path))
    return 1 if size < _SMALL_FILE * len(sample) else min(8, os.cpu_count() or 1)


def _check_chunk(paths: Sequence[str]) -> Checked:
    checked = Checked({}, {})
    for path in paths:
        try:
            checked.stamps[path] = check_file(path)[0]
        except DataError as error:
            checked.reasons[path] = str(error)
    return checked


def check_file(path: str) -> tuple[str, tuple[int, int]]:
    """Decode one file; give its stamp, and its size (w, h)."""
    extension = os.path.splitext(path)[1].lower()
    if extension not in find_extensions():
        raise DataError(f"not an image file (extension {extension!r})" if extension else "not an image file (no extension)")
    try:
        stamp = make_stamp(path)
    except OSError as error:
        raise DataError(str(error.strerror)) from error
    if not os.path.isfile(path):  # to open a pipe would wait for ever
        raise DataError("not a regular file")
    return stamp, read_rgb(path).size
