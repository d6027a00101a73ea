"""The trunk cache: what frozen layers make of each image is computed once and kept, in memory or in a memory-mapped file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import torch
from torch import Tensor

from gradfilter.errors import GradFilterError, SettingsError
from gradfilter.files import replace_file, sync_folder
from gradfilter.train.batches import seeded
from gradfilter.train.trunk import Record, Spec, Trunk, TrunkError, find_tensors

Place = Literal["off", "memory", "disk"]
TOLERANCE = 1e-4
"""How far, relatively, results may be from each other that should be the same: another size of batch sums in another order."""


class CacheError(GradFilterError, RuntimeError):
    """Report a trunk cache that cannot be written."""


@dataclass(frozen=True)
class Cache:
    """The cut of every image of a set: one tensor for each of the cut's, with a row per image and view."""

    columns: tuple[Tensor, ...]
    specs: tuple[Spec, ...]

    def read(self, rows: Tensor) -> list[Tensor]:
        """Return the cut for a batch, as the trunk would have made it, layout in memory included."""
        return [from_row(column[rows], spec) for column, spec in zip(self.columns, self.specs, strict=True)]


def to_row(x: Tensor, spec: Spec) -> Tensor:
    """Return a tensor of the cut with its axes in the order of memory, so that a row is one stretch of it."""
    return x.permute(spec.order).contiguous()


def from_row(x: Tensor, spec: Spec) -> Tensor:
    """Return a tensor of the cut with its own order of axes."""
    return x.permute(tuple(spec.order.index(axis) for axis in range(len(spec.order))))


def count_bytes(record: Record, rows: int) -> int:
    """Return how large a cache of so many images and views is."""
    return rows * sum(spec.bytes for spec in record.cut)


def make_key(trunk: Trunk, record: Record, *parts: str) -> str:
    """Return what names a cache: the trunk's calls and weights, and what the caller says of data and transforms."""
    return hashlib.sha256("\n".join([trunk.fingerprint(record), *parts]).encode()).hexdigest()[:24]


def build_cache(
    trunk: Trunk,
    batches: Iterable[tuple[Tensor, Tensor]],
    first: Tensor,
    rows: int,
    *,
    place: Place,
    folder: Path,
    key: str,
    tell: Callable[[str], None],
) -> Cache:
    """Compute the cut of every image, or take it from the file that has it.

    Args:
        trunk: The trunk.
        batches: Gives pairs of rows and images, until every row was given once. Not looked at where the file exists.
        first: A batch of images, to record and check the trunk with.
        rows: How many rows there are: images times views.
        place: "memory" or "disk".
        folder: Where the files of a cache on disk are kept.
        key: Names the cache, see `make_key`.
        tell: Is told what will be written, before it is.
    """
    record = trunk.find_record(first)
    size = count_bytes(record, rows)
    header = folder / f"{key}.json"
    files = [folder / f"{key}.{i}.bin" for i in range(len(record.cut))]
    where = f"on disk, in {folder}" if place == "disk" else "in memory"
    if place == "disk" and header.exists() and all(file.exists() for file in files):
        tell(f"trunk cache: {rows} rows, {size / 1e6:.1f} MB, found {where}")
        return open_cache(record, rows, files, write=False)
    tell(f"trunk cache: {rows} rows of {size / rows / 1e3:.1f} kB, {size / 1e6:.1f} MB {where}")
    check_space(size, place, folder)
    check_trunk(trunk, first)
    drafts = [file.with_name(f".{file.name}.{os.getpid()}.tmp") for file in files]
    try:
        cache = open_cache(record, rows, drafts if place == "disk" else None, write=True)
        for chosen, images in batches:
            for column, spec, x in zip(cache.columns, cache.specs, trunk.compute(images), strict=True):
                column[chosen] = to_row(x, spec)
        if place == "disk":
            for column, draft, file in zip(cache.columns, drafts, files, strict=True):
                del column
                flush(draft)
                os.replace(draft, file)
            sync_folder(folder)
            replace_file(header, json.dumps({"rows": rows, "bytes": size, "key": key}))
    except OSError as error:
        raise CacheError(
            f"the trunk cache cannot be written to '{folder}': {error.strerror or error}. Free some space, give another --out, "
            "or use --cache memory or --cache off."
        ) from error
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
    return cache


def open_cache(record: Record, rows: int, files: list[Path] | None, write: bool) -> Cache:
    """Return a cache over files, mapped into memory, or without files in memory itself."""
    columns: list[Tensor] = []
    for i, spec in enumerate(record.cut):
        shape = (rows, *(spec.shape[axis] for axis in spec.order[1:]))
        count = torch.Size(shape).numel()
        if files is None:
            columns.append(torch.empty(shape, dtype=spec.dtype))
            continue
        if write:
            with files[i].open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, count * spec.dtype.itemsize))  # a full disk shows here
        columns.append(torch.from_file(str(files[i]), shared=write, size=count, dtype=spec.dtype).view(shape))
    return Cache(tuple(columns), tuple(record.cut))


def flush(path: Path) -> None:
    """Flush a file to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_space(size: int, place: Place, folder: Path) -> None:
    """Refuse a cache that does not fit, before anything is computed."""
    if place == "disk":
        folder.mkdir(parents=True, exist_ok=True)
        free, what, other = shutil.disk_usage(folder).free, f"free on the disk of '{folder}'", "memory"
    else:
        free, what, other = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "of memory free", "disk"
    if size > free:
        raise SettingsError(
            f"the trunk cache would take {size / 1e6:.0f} MB, and there are {free / 1e6:.0f} MB {what}. Use fewer --views, "
            f"--cache {other}, or --cache off."
        )


def check_trunk(trunk: Trunk, images: Tensor) -> None:
    """Refuse a trunk whose cut is not a function of each image alone, or from which the model does not give its own output."""
    try:
        cut, again = trunk.compute(images), trunk.compute(images)
        part = trunk.compute(images[: max(1, len(images) // 2)])
        with torch.no_grad(), seeded(0):
            output = trunk.run(trunk.find_record(images), cut)
        with torch.no_grad(), seeded(0):
            expected = trunk.model(images)
    except TrunkError as error:
        refuse_trunk(str(error))
    for x, twin, fewer in zip(cut, again, part, strict=True):
        if not is_close(x, twin):
            refuse_trunk("they give other results for the same images")
        if not is_close(x[: len(fewer)], fewer):
            refuse_trunk("they mix the images of a batch")
    if not all(is_close(x, y) for x, y in zip(find_tensors(output), find_tensors(expected), strict=True)):
        refuse_trunk("they compute something by other means than torch functions")


def is_close(x: Tensor, y: Tensor) -> bool:
    """Tell whether two results are the same but for rounding."""
    return torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE * float(y.abs().max()))


def refuse_trunk(reason: str) -> NoReturn:
    """Raise the error for a model whose trunk cannot be cached."""
    raise SettingsError(f"the frozen layers of this model cannot be cached: {reason}. Use --cache off.")
