"""An older version of this package, in one process with the one that runs: a copy of it under another name."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gradfilter
from gradfilter.errors import GradFilterError, SettingsError

NAME, ALIAS = "gradfilter", "gradfilter_before"
WORD = re.compile(rf"\b{NAME}\b")
LIBRARY = "libgradfilter.so"
COMMIT = "COMMIT"
"""A file beside the older package that says of which commit it is."""
MAPS = Path("/proc/self/maps")
ADVICE = "Make one with: pip install --no-deps --target FOLDER SOURCES, where SOURCES is a checkout of the older commit"


@dataclass(frozen=True)
class Version:
    """A version of the package: what `import gradfilter` gives, and its module `cost`.

    Nothing but public names is asked of either: what is behind them differs between versions.
    """

    package: Any
    cost: Any

    def make_plan(self, layers: str, choice: str, size: int) -> Any:
        """Return a plan of this version.

        Args:
            layers: "all", or "last4" and the like.
            choice: "patch" or "grid".
            size: Of the patch or the grid.
        """
        backward = self.package.Backward(**{choice: size})
        if layers == "all":
            return self.package.Plan.all(backward)
        return self.package.Plan.last(int(layers.removeprefix("last")), backward)


def find_commit_of(folder: Path, given: str | None) -> str:
    """Return the commit of an older package: the one that was given, or the one that its folder names."""
    if given is not None:
        return given
    try:
        return (folder / COMMIT).read_text(encoding="utf-8").split()[0]
    except (OSError, IndexError):
        raise SettingsError(
            f"nothing says of which commit the package in '{folder}' is. Give --commit, or write it to '{folder / COMMIT}'."
        ) from None


@contextmanager
def renamed(folder: Path) -> Iterator[Path]:
    """Copy the package of a folder, named `gradfilter_before`, into a temporary folder, which is gone afterwards.

    Two packages of one process need two names, and modules import each other by the package's name, some of them late, inside
    functions. So the word is replaced in all Python files. Operators, loggers and registries that are named after the
    package are named apart by this, too; the C library keeps its name, and is another one by its path.
    """
    source = folder / NAME
    if not (source / "__init__.py").is_file():
        raise SettingsError(f"'{folder}' holds no package {NAME}. {ADVICE}.")
    check_libraries(source)
    with TemporaryDirectory(prefix=f"{ALIAS}-") as place:
        copy = Path(place).resolve() / ALIAS
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for file in copy.rglob("*.py"):
            file.write_text(WORD.sub(ALIAS, file.read_text(encoding="utf-8")), encoding="utf-8")
        yield copy.parent


def check_libraries(older: Path) -> None:
    """Refuse to measure where one side would run without its C library, or with the other's."""
    if "GRADFILTER_NATIVE_LIBRARY" in os.environ:
        raise SettingsError(
            "GRADFILTER_NATIVE_LIBRARY names one library for both versions, and each needs the one that it was built with. "
            "Unset it."
        )
    if is_native():
        for source, remedy in ((older, ADVICE), (Path(gradfilter.__file__).parent, "Install gradfilter again")):
            if find_library(source) is None:
                raise SettingsError(
                    f"the package in '{source.parent}' has no {LIBRARY}, so it would run in torch alone. {remedy}, with a C "
                    "compiler; or set GRADFILTER_NATIVE=0 to compare both versions without their libraries."
                )


def is_native() -> bool:
    """Tell whether the versions are to run with their C libraries."""
    return os.environ.get("GRADFILTER_NATIVE", "1") != "0"


def find_library(package: Path) -> Path | None:
    """Return the C library of a package, wherever in it this version has its place."""
    return next(package.rglob(LIBRARY), None)


def import_older(folder: Path) -> Version:
    """Return the older version from the folder that `renamed` gave."""
    sys.path.insert(0, str(folder))
    try:
        return Version(importlib.import_module(ALIAS), importlib.import_module(f"{ALIAS}.cost"))
    except Exception as error:  # it may be of another time, for another torch
        raise GradFilterError(
            f"the older package cannot be imported by this Python and with this torch. It says {type(error).__name__}: {error}"
        ) from error


def import_current() -> Version:
    """Return the version that runs."""
    return Version(gradfilter, importlib.import_module(f"{NAME}.cost"))


def check_loaded(*versions: Version) -> None:
    """Refuse to go on where a version has not loaded its own C library, once steps of all of them have run.

    What the process has mapped is the truth: it does not depend on where a version keeps its handle.
    """
    if not is_native() or not MAPS.exists():
        return
    mapped = {line.split(maxsplit=5)[5] for line in MAPS.read_text(encoding="utf-8").splitlines() if line.endswith(LIBRARY)}
    for version in versions:
        library = find_library(Path(version.package.__file__).resolve().parent)
        if str(library) not in mapped:
            raise GradFilterError(
                f"{version.package.__name__} runs without its own {LIBRARY}: this process has loaded "
                f"{' and '.join(sorted(mapped)) or 'none'}."
            )
