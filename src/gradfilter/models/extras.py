"""Import optional packages, with an error that says what to install."""

import importlib
from types import ModuleType

from gradfilter.errors import MissingExtraError
from gradfilter.models.torchvision_ops import declare_torchvision_ops

INSTALL = {"sklearn": "scikit-learn", "PIL": "pillow", "segmentation_models_pytorch": "segmentation-models-pytorch"}
"""Packages that are installed under another name than they are imported by."""


def import_extra(package: str, needed_for: str) -> ModuleType:
    """Import an optional package.

    Args:
        package: Name to import, of a package or a module in one.
        needed_for: What the user asked for, to begin the error with.
    """
    declare_torchvision_ops()
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        top = package.partition(".")[0]
        name = INSTALL.get(top, top)
        raise MissingExtraError(
            f"{needed_for} needs the package {error.name!r}, which is not installed. Install it with: pip install {name}"
        ) from error
