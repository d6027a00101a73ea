"""Split labelled images into a part to train on and one to hold out."""

from collections.abc import Sequence

import numpy as np

from gradfilter.data.images import ImageSet
from gradfilter.errors import DataError, SettingsError


def check_val_share(val_share: float) -> None:
    """Raise unless the share lies between 0 and 1, both excluded."""
    if not 0 < val_share < 1:
        raise SettingsError(
            f"val_share is {val_share}, but it is a share of the images. Give a number between 0 and 1, e.g. 0.2."
        )


def split_images(images: ImageSet, val_share: float, seed: int) -> tuple[ImageSet, ImageSet]:
    """Split a set into (train, val), class by class; a class of two images or more has at least one in each."""
    train, val = split_labels(images.labels, val_share, seed)
    if not val:
        raise DataError(
            f"{images.name}: no class has two images, so none can be held out. Add images, or give folders train/ and val/."
        )
    return images.select(train), images.select(val)


def split_labels(labels: Sequence[int], val_share: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Choose the indices of (train, val), each in rising order."""
    check_val_share(val_share)
    array = np.asarray(labels, dtype=np.int64)
    held_out = np.zeros(len(array), dtype=bool)
    for label in np.unique(array):
        # One generator per class: adding images to one class leaves the split of the others as it was.
        order = np.random.default_rng([seed, int(label)]).permutation(np.flatnonzero(array == label))
        if len(order) > 1:
            held_out[order[: min(max(round(len(order) * val_share), 1), len(order) - 1)]] = True
    return tuple(np.flatnonzero(~held_out).tolist()), tuple(np.flatnonzero(held_out).tolist())
