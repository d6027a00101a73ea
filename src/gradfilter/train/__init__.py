"""Fine-tune a classifier on one's own images: settings in, weights and a report out."""

from gradfilter.train.run import Interrupted, train
from gradfilter.train.settings import Settings

__all__ = ["Interrupted", "Settings", "train"]
