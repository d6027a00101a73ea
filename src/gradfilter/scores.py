"""Scores of a segmentation, from pixels by true class (row) and predicted class (column)."""

import math

import numpy as np
from numpy.typing import ArrayLike


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
    table = np.asarray(confusion, dtype=np.float64)
    return _mean(_divide(np.diagonal(table), table.sum(1)))


def _divide(share: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(share, whole, out=np.full(len(whole), np.nan), where=whole > 0)


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan
