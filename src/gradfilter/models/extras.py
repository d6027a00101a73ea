"""Import optional packages, with an error that says what to install."""

import importlib
from types import ModuleType

from gradfilter.errors import MissingExtraError
from gradfilter.models.torchvision_ops import declare_torchvision_ops


def import_extra(package: str, needed_for: str) -> ModuleType:
    """Import an optional package.

    Args:
        package: Name to import, which is also the name to install.
        needed_for: What the user asked for, to begin the error with.
    """
    declare_torchvision_ops()
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{needed_for} needs the package {error.name!r}, which is not installed. Install it with: pip install {package}"
        ) from error
