"""Fine-tune a classifier on one's own images: settings in, weights and a report out."""

from gradfilter.train.run import InterruptedRunError, train
from gradfilter.train.settings import Settings

__all__ = ["InterruptedRunError", "Settings", "train"]
