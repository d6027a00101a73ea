"""Find any model by name: one of ours, torchvision's or timm's, or what a user's own function returns."""

import difflib
import inspect
import warnings
from importlib.util import find_spec
from typing import Any, cast

from torch import nn

from gradfilter.errors import MissingExtraError, ModelNameError
from gradfilter.models.extras import import_extra
from gradfilter.models.function import call_function, make_function_entry
from gradfilter.models.registry import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Entry,
    ModelInfo,
    Triple,
    find_models,
    find_registered,
    pair_plainly,
)
from gradfilter.models.segmenters import SEGMENTERS, find_decoder, make_segmenter_entry, split_name

PACKAGES = ("torchvision", "timm")
"""Where a bare name is looked up after ours, in this order: a name that both have is torchvision's."""
TORCHVISION_OPTIONS = {
    # As torchvision itself builds them with published weights: one output, and images normalised as for its other models.
    "googlenet": {"aux_logits": False, "transform_input": True, "init_weights": True},
    "inception_v3": {"aux_logits": False, "transform_input": True, "init_weights": True},
}


def find_entry(name: str) -> Entry:
    """Find how a model is built, from its name as `make_model` takes it."""
    if ":" in name:
        return make_function_entry(name)
    registered = find_registered(name)
    if registered is not None:
        return registered
    decoder, encoder, auxiliary = split_name(name)
    if kind := find_decoder(decoder):
        return make_segmenter_entry(name, kind, encoder, find_classifier(encoder), auxiliary)
    package, bare = find_package(name)
    return make_timm_entry(name, bare) if package == "timm" else make_torchvision_entry(name, bare)


def find_classifier(encoder: str) -> Entry | None:
    """Find the classifier that an encoder is the trunk of; None where no such name is known."""
    try:
        return find_entry(encoder.removeprefix("tu-").removeprefix("timm-"))
    except (ModelNameError, MissingExtraError):
        return None


def make_listed(name: str, **options: Any) -> nn.Module:
    """Build a network of torchvision's or timm's, or with a user's function, under whatever random state and device there is.

    Args:
        name: A name of theirs, bare or behind "torchvision/" or "timm/", or "module:function".
        options: Arguments for whatever builds the network, e.g. `num_classes=10`.
    """
    if ":" in name:
        return call_function(name, **options)
    package, bare = find_package(name)
    return make_timm(bare, **options) if package == "timm" else make_torchvision(bare, **options)


def find_package(name: str) -> tuple[str, str]:
    """Return which package has a model, and its name there."""
    prefix, _, bare = name.rpartition("/")
    for package in PACKAGES:
        if prefix == package or (not prefix and find_spec(package)):
            import_extra(package, f"Model {name!r}")
            if is_listed(bare, package):
                return package, find_present_name(bare) if package == "timm" else bare
    if not prefix and not any(find_spec(package) for package in PACKAGES):
        import_extra(PACKAGES[0], f"Model {name!r}, which is none of ours ({', '.join(find_models())}),")
    raise ModelNameError(explain_unknown(name))


def is_listed(bare: str, package: str) -> bool:
    """Tell whether torchvision or timm has a model; timm's may carry the tag of their weights, as in "resnet18.a1_in1k"."""
    if package == "timm":
        timm = import_extra(package, f"Model {bare!r}")
        return timm.is_model_pretrained(bare) if "." in bare else timm.is_model(bare)
    return bare in list_names(package)


def find_present_name(bare: str) -> str:
    """Return what timm calls a model by now: it takes old names too, such as "xception", but describes the new ones alone."""
    old = getattr(import_extra("timm.models._registry", f"Model {bare!r}"), "_deprecated_models", {})
    return old.get(bare) or bare


def list_names(package: str) -> list[str]:
    """List the networks that torchvision or timm can build."""
    module = import_extra(package, f"The list of {package}'s models")
    return module.list_models() if package == "timm" else module.models.list_models()


def make_timm_entry(name: str, bare: str) -> Entry:
    """Describe one of timm's models."""
    config = import_extra("timm", f"Model {name!r}").get_pretrained_cfg(bare)
    published = config.has_weights
    where = f"timm's hub ({config.hf_hub_id or config.url})" if published else "none"
    info = ModelInfo(name, max(config.input_size[1:]), config.mean, config.std, config.num_classes or None, where)
    return Entry(
        info,
        lambda classes: make_timm(bare, **({} if classes is None else {"num_classes": classes})),
        pair_plainly,
        download=(lambda: make_timm(bare, pretrained=True)) if published else None,
    )


def make_timm(bare: str, **options: Any) -> nn.Module:
    """Build one of timm's models."""
    return import_extra("timm", f"Model {bare!r}").create_model(bare, **options)


def make_torchvision_entry(name: str, bare: str) -> Entry:
    """Describe one of torchvision's models."""
    weights = find_torchvision_weights(bare)
    preset = weights.transforms() if weights else None
    info = ModelInfo(
        name,
        resolution=getattr(preset, "crop_size", [224])[0],
        mean=cast(Triple, tuple(getattr(preset, "mean", IMAGENET_MEAN))),
        std=cast(Triple, tuple(getattr(preset, "std", IMAGENET_STD))),
        classes=len(weights.meta.get("categories") or range(1000)) if weights else 1000,
        weights_from=f"torchvision's hub ({weights.url})" if weights else "none",
    )
    options = TORCHVISION_OPTIONS.get(bare, {})
    return Entry(
        info,
        lambda classes: make_torchvision(bare, **options, **({} if classes is None else {"num_classes": classes})),
        pair_plainly,
        download=(lambda: make_torchvision(bare, weights=weights)) if weights else None,
    )


def find_torchvision_weights(bare: str) -> Any:
    """Return what torchvision knows of the weights that it would take by default, or None where it has none."""
    models = import_extra("torchvision", f"Model {bare!r}").models
    return models.get_model_weights(bare).__members__.get("DEFAULT")


def make_torchvision(bare: str, *, weights: Any = None, **options: Any) -> nn.Module:
    """Build one of torchvision's models; nothing is downloaded unless weights are given."""
    builder = import_extra("torchvision", f"Model {bare!r}").models.get_model_builder(bare)
    if "weights_backbone" in inspect.signature(builder).parameters:
        options = {"weights_backbone": None, **options}  # the default would be downloaded
    if weights is not None:
        options = {"progress": False, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The default weight initialization", FutureWarning)
        return builder(weights=weights, **options)


def explain_unknown(name: str) -> str:
    """Return the error text for a name that nobody knows, with near ones from every source that is installed."""
    installed = [package for package in PACKAGES if find_spec(package)]
    known = [*find_models(), *(f"{package}/{listed}" for package in installed for listed in list_names(package))]
    bare = name.rpartition("/")[2]
    near = difflib.get_close_matches(bare, [full.rpartition("/")[2] for full in known], n=4, cutoff=0.6)
    full = [full for wanted in dict.fromkeys(near) for full in known if full.rpartition("/")[2] == wanted]
    hint = f"Did you mean {', '.join(map(repr, full[:-1]))}{' or ' * (len(full) > 1)}{full[-1]!r}? " if full else ""
    near = difflib.get_close_matches(name.partition("/")[0].lower(), SEGMENTERS, n=2, cutoff=0.7)
    if near:
        hint = f"Did you mean {' or '.join(map(repr, near))}, which label pixels? "
    missing = "".join(f" (not installed here: {package})" for package in PACKAGES if package not in installed)
    return (
        f"No model is named {name!r}. {hint}Ours are {', '.join(find_models())}; those that label pixels, with any encoder, "
        f"{', '.join(SEGMENTERS)}; the others are those of torchvision and of timm{missing}. For a model of your own, give "
        "'module:function'."
    )
