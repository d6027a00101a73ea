"""Images to train on: folders, named sets, splits, partitions, and the way from an image to a network's input."""

from gradfilter.data.decode import read_rgb
from gradfilter.data.frames import FRAMES, Evaluate
from gradfilter.data.images import Data, ImageSet
from gradfilter.data.load import load_data, load_masks
from gradfilter.data.mask_transforms import MaskTransform, make_mask_transforms
from gradfilter.data.masks import IGNORE, MaskSet
from gradfilter.data.partition import Partition, make_partition
from gradfilter.data.sets import SetInfo, find_sets
from gradfilter.data.transforms import Transform, make_transforms

__all__ = [
    "FRAMES",
    "IGNORE",
    "Data",
    "Evaluate",
    "ImageSet",
    "MaskSet",
    "MaskTransform",
    "Partition",
    "SetInfo",
    "Transform",
    "find_sets",
    "load_data",
    "load_masks",
    "make_mask_transforms",
    "make_partition",
    "make_transforms",
    "read_rgb",
]
