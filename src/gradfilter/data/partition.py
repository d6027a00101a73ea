"""Cut a set into parts, alike or each with classes of its own, to train on one and fine-tune on another.

The protocol of gradient filtering (Yang, Li, Marculescu, CVPR 2023). Parts that are alike are random and of equal size. For the
others the images are sorted by label and cut into shards, and each part draws some. KL divergence tells how far each is from
the whole.
"""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from gradfilter.data.images import ImageSet
from gradfilter.errors import DataError, SettingsError
from gradfilter.files import replace_file

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Partition:
    """Parts of a set, every image in exactly one.

    Attributes:
        parts: The indices of the images of each part, in rising order.
        kind: "iid" if the parts are alike, "non-iid" if they were drawn as shards of labels.
        shards: How many each part drew; None if the parts are alike.
        seed: What they were drawn with.
        counts: Images of each class, per part.
        fingerprint: Of the set, without its contents: of classes, labels and names.
    """

    parts: tuple[tuple[int, ...], ...]
    kind: Literal["iid", "non-iid"]
    shards: int | None
    seed: int
    counts: tuple[Counts, ...]
    fingerprint: str

    def kl_divergence(self) -> tuple[float, ...]:
        """Measure how far the classes of each part are from those of the whole.

        Equation: Σ p ln(p / q), p the shares of the classes in the part and q in the whole: 0 if they are the same.
        """
        whole = tuple(sum(column) for column in zip(*self.counts, strict=True))
        return tuple(_divergence(part, whole) for part in self.counts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the partition to a JSON file: whole, or not at all."""
        try:
            replace_file(path, json.dumps({**dataclasses.asdict(self), "kl_divergence": self.kl_divergence()}))
        except OSError as error:
            raise DataError(
                f"cannot write the partition file {os.fspath(path)!r}: {error.strerror or error}. "
                "Give a place that can be written."
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str], images: ImageSet) -> Self:
        """Read a partition from a JSON file, and make sure that it is one of these images."""
        name = f"the partition file {os.fspath(path)!r}"
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"cannot read {name}: {error.strerror}. Give a file that a partition was saved to.") from error
        except ValueError as error:
            raise DataError(f"{name} is not JSON: {error}. Make the partition anew.") from error
        return cls(**_check(name, data, images))


def make_partition(images: ImageSet, parts: int, *, shards: int | None = None, seed: int) -> Partition:
    """Cut a set into parts.

    Args:
        images: The set.
        parts: How many parts to make; their sizes differ by one image at most, or by one per shard.
        shards: None for parts that are alike. Else the images are sorted by label and cut into `parts * shards` shards, and
            each part draws this many: the fewer, the fewer classes a part has.
        seed: Of all that is drawn.
    """
    pieces = parts * (1 if shards is None else shards)
    if parts < 1 or pieces < 1:
        raise SettingsError(f"{parts} parts of {shards} shards each were asked for. Give 1 or more of both.")
    if pieces > len(images):
        what = f"{parts} parts" if shards is None else f"{parts} parts of {shards} shards each"
        raise SettingsError(f"{what} are more than the {len(images)} images of {images.name}. Give fewer.")
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(images))
    if shards is not None:
        order = order[np.argsort(np.asarray(images.labels)[order], kind="stable")]
    cut = np.array_split(order, pieces)
    drawn = generator.permutation(pieces).reshape(parts, -1)
    chosen = tuple(tuple(np.sort(np.concatenate([cut[piece] for piece in row])).tolist()) for row in drawn)
    kind = "iid" if shards is None else "non-iid"
    return Partition(chosen, kind, shards, seed, _count(images, chosen), images.fingerprint(contents=False))


def _count(images: ImageSet, parts: Sequence[Sequence[int]]) -> tuple[Counts, ...]:
    return tuple(images.select(part).counts() for part in parts)


def _divergence(counts: Counts, whole: Counts) -> float:
    total, whole_total = sum(counts), sum(whole)
    pairs = [(mine / total, count / whole_total) for mine, count in zip(counts, whole, strict=True) if mine]
    terms = [p * math.log(p / q) for p, q in pairs]
    return max(0.0, math.fsum(terms))  # rounding can leave a hair below


def _check(name: str, data: Any, images: ImageSet) -> dict[str, Any]:
    """Make sure that a file's data is a partition of these images, and give its fields."""
    fields = {field.name for field in dataclasses.fields(Partition)}
    if not isinstance(data, dict) or not fields <= data.keys() or not _is_nested(data["parts"]):
        raise DataError(f"{name} holds no partition: it needs {', '.join(sorted(fields))}. Make the partition anew.")
    parts = tuple(tuple(part) for part in data["parts"])
    total = sum(len(part) for part in parts)
    if total != len(images):
        raise DataError(f"{name} is for {total} images, but {images.name} has {len(images)}. Make the partition anew.")
    if sorted(index for part in parts for index in part) != list(range(total)):
        raise DataError(f"{name} does not have every image in exactly one part. Make the partition anew.")
    if data["fingerprint"] != images.fingerprint(contents=False):
        raise DataError(
            f"{name} was made for other images than {images.name} has now: their names, labels or classes differ. "
            "Give the data it was made for, or make the partition anew."
        )
    return {**{key: data[key] for key in fields}, "parts": parts, "counts": _count(images, parts)}


def _is_nested(parts: Any) -> bool:
    """Whether these are lists of whole numbers, none empty."""
    return isinstance(parts, list) and all(
        isinstance(part, list) and part and all(type(index) is int for index in part) for part in parts
    )
