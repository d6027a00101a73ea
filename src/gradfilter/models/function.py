"""Build a model with a function of the user's own, named "module:function"."""

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from torch import nn

from gradfilter.errors import GradFilterError, ModelNameError
from gradfilter.models.registry import IMAGENET_MEAN, IMAGENET_STD, Entry, ModelInfo, pair_plainly


def make_function_entry(name: str) -> Entry:
    """Describe a model that a user's function returns. What it expects is not known: the habits of ImageNet are assumed."""

    def build(classes: int | None) -> nn.Module:
        model = call_function(name)
        return model if classes is None else replace_last_linear_(model, classes, name)

    info = ModelInfo(name, 224, IMAGENET_MEAN, IMAGENET_STD, None, "none")
    return Entry(info, build, pair_plainly, on_meta=False)


def replace_last_linear_(model: nn.Module, classes: int, name: str) -> nn.Module:
    """Replace the last Linear layer of a model by one with random weights, where its number of outputs is another.

    A model without such layers labels pixels; it has to have that many outputs by itself.
    """
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    linears = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linears and convs and convs[-1].out_channels == classes:
        return model
    if not linears or not linears[-1][0]:
        raise GradFilterError(
            f"classes={classes} was given, but {name!r} returned a {type(model).__name__} without a Linear layer to replace. "
            "Let the function return a model with that many outputs, and leave classes out."
        )
    path, old = linears[-1]
    if old.out_features != classes:
        model.set_submodule(path, nn.Linear(old.in_features, classes, bias=old.bias is not None, dtype=old.weight.dtype))
    return model


def call_function(name: str, **options: Any) -> nn.Module:
    """Build a model with a function of the user's own, named "module:function"."""
    path, _, attribute = name.partition(":")
    target: Any = import_user_module(path, name)
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = [key for key in vars(target) if not key.startswith("_") and callable(getattr(target, key))]
            raise ModelNameError(
                f"{name!r}: module {path!r} has no {attribute!r}. It has {', '.join(public[:8]) or 'no functions'}."
            )
        target = getattr(target, part)
    if not callable(target):
        raise ModelNameError(
            f"{name!r} is a {type(target).__name__}, not a function. Give a function without arguments that returns a model."
        )
    try:
        model = target(**options)
    except GradFilterError:
        raise
    except Exception as error:
        raise GradFilterError(
            f"{name!r} failed with {type(error).__name__}: {error}. It is called without arguments and has to return a model."
        ) from error
    if not isinstance(model, nn.Module):
        raise GradFilterError(f"{name!r} returned a {type(model).__name__}. Let it return the model, a torch.nn.Module.")
    return model


def import_user_module(path: str, name: str) -> ModuleType:
    """Import a user's module, from the current directory too."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path == error.name or path.startswith(error.name + ".")):
            raise ModelNameError(
                f"{name!r}: there is no module {error.name!r}, neither installed nor in {here!r}. Give the module as in an "
                "import statement, e.g. 'package.nets:make_net' for package/nets.py, from the folder that holds it."
            ) from error
        raise GradFilterError(f"{name!r}: importing {path!r} failed: {error}. Install what it needs.") from error
    except Exception as error:
        raise GradFilterError(
            f"{name!r}: importing {path!r} failed with {type(error).__name__}: {error}. Mend the module first; "
            f"'python -c \"import {path}\"' shows where."
        ) from error
