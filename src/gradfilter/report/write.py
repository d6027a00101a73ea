"""Write a report, whole or not at all."""

import os
from collections.abc import Sequence
from pathlib import Path

from gradfilter.errors import GradFilterError
from gradfilter.files import replace_file
from gradfilter.report.page import make_page
from gradfilter.report.picture import make_picture
from gradfilter.report.results import MaskSample, Results, Sample


class ReportError(GradFilterError, OSError):
    """Report a folder that a report cannot be written to."""


def write_report(folder: Path, results: Results, samples: Sequence[Sample] | Sequence[MaskSample]) -> None:
    """Write `report.html` and `report.png`.

    Args:
        folder: An existing folder; former reports in it are replaced.
        results: What the run found out.
        samples: Held-out images with predictions. A choice of them is shown.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ReportError: The folder cannot be written to; former reports are then as they were.
    """
    contents = {"report.html": make_page(results, samples).encode("utf-8"), "report.png": make_picture(results, samples)}
    for name, content in contents.items():
        try:
            replace_file(folder / name, content)
        except OSError as error:
            raise ReportError(
                f"cannot write {name} into the folder {os.fspath(folder)!r}: {error.strerror or error}. "
                "Make the folder, make it writable, or free some space."
            ) from error
