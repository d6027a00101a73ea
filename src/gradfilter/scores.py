"""Scores of a model, from images or pixels by true class (row) and predicted class (column)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Scores:
    """Say how the models of a task are scored.

    Attributes:
        unit: What gets a label and is counted.
        overall: From name to score; by the first one the best epoch is chosen.
        by_class: From name to a score for each class, NaN where there is none; by the first one classes are ranked.
    """

    unit: str
    overall: Mapping[str, Callable[[ArrayLike], float]]
    by_class: Mapping[str, Callable[[ArrayLike], np.ndarray]]

    @property
    def metric(self) -> str:
        """Return the name of the score by which the best epoch is chosen."""
        return next(iter(self.overall))


def find_ious(confusion: ArrayLike) -> np.ndarray:
    """Return, for each class, the pixels that are of it and said to be, by those that are or are said to be; NaN for none."""
    table = np.asarray(confusion, dtype=np.float64)
    right = np.diagonal(table)
    return _divide(right, table.sum(0) + table.sum(1) - right)


def find_mean_iou(confusion: ArrayLike) -> float:
    """Return mIoU: the mean over the classes that are there or are said to be."""
    return _mean(find_ious(confusion))


def find_mean_accuracy(confusion: ArrayLike) -> float:
    """Return mAcc: the share of each class's pixels that are said to be of it, mean over the classes that are there."""
    return _mean(find_recalls(confusion))


def find_recalls(confusion: ArrayLike) -> np.ndarray:
    """Return, for each class, the share of what is of it that is said to be; NaN for none."""
    table = np.asarray(confusion, dtype=np.float64)
    return _divide(np.diagonal(table), table.sum(1))


def find_share_right(confusion: ArrayLike) -> float:
    """Return the share of all that is said to be what it is."""
    table = np.asarray(confusion, dtype=np.float64)
    return float(np.diagonal(table).sum() / table.sum()) if table.any() else math.nan


def _divide(share: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(share, whole, out=np.full(len(whole), np.nan), where=whole > 0)


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


SCORES = {
    "classify": Scores("image", {"accuracy": find_share_right}, {"right": find_recalls}),
    "segment": Scores(
        "pixel",
        {"mIoU": find_mean_iou, "mAcc": find_mean_accuracy, "pixel accuracy": find_share_right},
        {"IoU": find_ious, "right": find_recalls},
    ),
}
"""By name of the task."""
