"""Make torchvision importable next to a torch without CUDA.

The torchvision wheel of the package index is built for CUDA. Next to a CPU build of torch its native library does not
load, and `import torchvision` fails on operators that nobody has declared; timm, lightning and torchmetrics then fail
with it. Declaring them is enough for models, transforms and datasets; `torchvision.ops` and `torchvision.io` stay out.
"""

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, FileFinder
from importlib.util import find_spec

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

# Operators live only as long as the Library object that declared them.
_libraries: list[torch.library.Library] = []


def declare_torchvision_ops() -> bool:
    """Declare the operators that `import torchvision` looks for, where its own library cannot; True if that was done.

    Call it before the first import of torchvision, or of a package that imports it. Builds that match are left alone.
    """
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or torch.backends.cuda.is_built() or _has_ops():
        return False
    # A matching library declares the operators itself, and would fail to load if they were there already.
    _load_native_ops(os.path.dirname(spec.origin))
    if _has_ops():
        return False
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(name + _SCHEMA)
    _libraries.append(library)
    return True


def _has_ops() -> bool:
    return hasattr(torch.ops.torchvision, "nms")


def _load_native_ops(folder: str) -> None:
    """Load torchvision's native library as its own import would; leave it where that fails."""
    spec = FileFinder(folder, (ExtensionFileLoader, EXTENSION_SUFFIXES)).find_spec("_C")
    if spec is None or spec.origin is None:
        return
    if sys.platform == "win32":
        os.add_dll_directory(folder)
    try:
        torch.ops.load_library(spec.origin)
    except OSError:
        return
