"""Python code that loads the weights of a run without gradfilter."""

import re
from importlib.util import find_spec

from gradfilter.models.network import PACKAGES, TORCHVISION_OPTIONS, is_listed
from gradfilter.models.registry import find_registered
from gradfilter.models.segmenters import find_plain
from gradfilter.report.results import Results

_ELSEWHERE = {"efficientnet-lite0": "timm/tf_efficientnet_lite0"}  # where others have one of our models under another name


def make_loading_code(results: Results) -> str:
    """Return the code that fits a run's model."""
    imports, build = _find_builder(results.model, len(results.classes))
    lines = (
        *imports,
        "from safetensors.torch import load_file",
        "",
        build,
        f"model.load_state_dict(load_file({results.weights_file!r}))",
        "model.eval()",
        *_describe_input(results),
    )
    return "\n".join(lines)


def _find_builder(model: str, classes: int) -> tuple[tuple[str, ...], str]:
    """Return the imports and the line that builds a model without weights."""
    package, bare = _find_package(model)
    if package == "timm":
        return ("import timm",), f"model = timm.create_model({bare!r}, num_classes={classes})"
    if package == "torchvision":
        options = "".join(f", {name}={value!r}" for name, value in TORCHVISION_OPTIONS.get(bare, {}).items())
        return (
            "from torchvision.models import get_model",
        ), f"model = get_model({bare!r}, weights=None, num_classes={classes}{options})"
    network = find_plain(model)
    if network:
        decoder, encoder = network
        return (
            "import segmentation_models_pytorch as smp",
        ), f"model = smp.{decoder}({encoder!r}, encoder_weights=None, classes={classes})"
    own = re.fullmatch(r"([\w.]+):(\w+)", model)
    if own:
        return (f"from {own[1]} import {own[2]}",), f"model = {own[2]}()  # with a classifier of {classes} outputs"
    return (), f"model = ...  # {' '.join(model.split())} with {classes} outputs: any module with these names in its state_dict"


def _find_package(model: str) -> tuple[str, str]:
    """Return which package has a model and its name there; ("", "") for a model that no package has."""
    registered = find_registered(model)
    name = registered.info.name if registered else model
    prefix, _, bare = _ELSEWHERE.get(name, name).rpartition("/")
    for package in PACKAGES:
        if ":" not in model and prefix in ("", package) and find_spec(package) and is_listed(bare, package):
            return package, bare
    return "", ""


def _describe_input(results: Results) -> tuple[str, ...]:
    """Return what the model expects of its images, as a comment, where the settings tell."""
    settings = results.settings
    if not all(settings.get(name) for name in ("resolution", "mean", "std")):
        return ()
    mean, std = (", ".join(f"{value:.4g}" for value in settings[name]) for name in ("mean", "std"))
    side = settings["resolution"]
    numbers = f"scaled to [0, 1], minus ({mean}), divided by ({std})."
    if settings.get("task") != "segment":
        return ("", f"# Images: RGB, {side} x {side} pixels, {numbers}")
    seen = f"windows of {side} x {side} pixels" if settings.get("evaluate") == "window" else f"their long side {side} pixels"
    return ("", f"# Images: RGB, {seen}, {numbers}", f"# What is missing to {side} x {side} below and on the right is 0.")
