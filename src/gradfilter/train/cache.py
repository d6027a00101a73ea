"""The trunk cache: what frozen layers make of each image is computed once and kept, in memory or in a memory-mapped file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from gradfilter.apply import keep_state, load_keep_state_
from gradfilter.environment import find_free_memory
from gradfilter.errors import GradFilterError, SettingsError
from gradfilter.files import replace_file, sync_folder
from gradfilter.ops import native
from gradfilter.train.batches import seeded
from gradfilter.train.record import Record, Spec, TrunkError, find_tensors
from gradfilter.train.trunk import Trunk

Place = Literal["off", "memory", "disk"]
TOLERANCE = 1e-4
"""How far, relatively, results may be from each other that should be the same: another size of batch sums in another order."""


class CacheError(GradFilterError, RuntimeError):
    """Report a trunk cache that cannot be written."""


@dataclass(frozen=True)
class Cache:
    """The cut of every image of a set, and labels where pixels have some: tensors with a row per image and view."""

    columns: tuple[Tensor, ...]
    specs: tuple[Spec, ...]

    def read(self, rows: Tensor) -> list[Tensor]:
        """Return the cut for a batch, as the trunk would have made it, layout in memory included; then labels, if any."""
        return [from_row(column[rows], spec) for column, spec in zip(self.columns, self.specs, strict=True)]


def find_row_order(spec: Spec) -> tuple[int, ...]:
    """Return the axes of a tensor of the cut in the order of memory, but for the batch, which comes first."""
    return (0, *(axis for axis in spec.order if axis))


def to_row(x: Tensor, spec: Spec) -> Tensor:
    """Return a tensor of the cut with its axes in the order of memory, so that a row is one stretch of it."""
    return x.permute(find_row_order(spec)).contiguous()


def from_row(x: Tensor, spec: Spec) -> Tensor:
    """Return a tensor of the cut with its own order of axes, and its layout in memory."""
    order = find_row_order(spec)
    x = x.permute(tuple(order.index(axis) for axis in range(len(order))))
    return x if spec.order == order else torch.empty_permuted(x.shape, spec.order, dtype=x.dtype, device=x.device).copy_(x)


def count_bytes(specs: Sequence[Spec], rows: int) -> int:
    """Return how large a cache of so many images and views is."""
    return rows * sum(spec.bytes for spec in specs)


def make_key(trunk: Trunk, record: Record, *parts: str) -> str:
    """Return what names a cache: the trunk's calls and weights, and what the caller says of data and transforms."""
    return hashlib.sha256("\n".join([trunk.fingerprint(record), *parts]).encode()).hexdigest()[:24]


def build_cache(
    trunk: Trunk,
    batches: Iterable[tuple[Tensor, ...]],
    first: tuple[Tensor, ...],
    rows: int,
    *,
    last: int,
    place: Place,
    folder: Path,
    key: str,
    tell: Callable[[str], None],
    shared: dict[str, Cache] | None = None,
) -> Cache:
    """Compute the cut of every image, or take it from the file that has it.

    Args:
        trunk: The trunk.
        batches: Gives rows, images and, where pixels have labels, these, until every row was given once. Not looked at where
            the file exists.
        first: The first images, a whole batch, to check the trunk with, and their labels where pixels have some.
        last: How many images the last batch of an epoch has.
        rows: How many rows there are: images times views.
        place: "memory" or "disk".
        folder: Where the files of a cache on disk are kept.
        key: Names the cache, see `make_key`.
        tell: Is told what will be written, before it is.
        shared: Caches in memory of earlier runs of this process, by key; this one joins them.
    """
    shared = {} if shared is None else shared
    images, *labels = first
    specs = [*trunk.find_record(images).cut, *map(Spec.of, labels)]
    size = count_bytes(specs, rows)
    header = {"key": key, "rows": rows, "bytes": size, "cut": [repr(spec) for spec in specs]}
    files = [folder / f"{key}.{i}.bin" for i in range(len(specs))]
    where = f"on disk, in {folder}" if place == "disk" else "in memory"
    check_trunk(trunk, images, last)
    if place == "memory" and key in shared and holds(shared[key], [*trunk.compute(images), *labels]):
        tell(f"trunk cache: {rows} rows, {size / 1e6:.1f} MB, found {where}")
        return shared[key]
    if place == "disk" and is_written(folder / f"{key}.json", header, files):
        cache = open_cache(specs, rows, files, write=False)
        if holds(cache, [*trunk.compute(images), *labels]):
            tell(f"trunk cache: {rows} rows, {size / 1e6:.1f} MB, found {where}")
            return cache
        tell(f"trunk cache: what was found in {folder} is not what the model makes of these images; it is written anew")
    tell(f"trunk cache: {rows} rows of {size / rows / 1e3:.1f} kB, {size / 1e6:.1f} MB {where}")
    if place == "memory":
        if size > find_free_memory():
            shared.clear()  # what may be of use later makes room for what is needed now
        check_space(size, find_free_memory(), "of memory free", "disk")
        shared[key] = fill(open_cache(specs, rows, None, write=True), trunk, batches)
        return shared[key]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_space(size, shutil.disk_usage(folder).free, f"free on the disk of '{folder}'", "memory")
        write_files(specs, rows, files, lambda cache: fill(cache, trunk, batches))
        replace_file(folder / f"{key}.json", json.dumps(header))
    except OSError as error:
        raise CacheError(
            f"the trunk cache cannot be written to '{folder}': {error.strerror or error}. Free some space, give another folder "
            "with --cache_folder, or use --cache memory or --cache off."
        ) from error
    return open_cache(specs, rows, files, write=False)


def is_written(path: Path, header: dict[str, Any], files: list[Path]) -> bool:
    """Tell whether a cache is there as its header, which is written last, says. Its contents are not read: that takes long."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return stored == header and sum(file.stat().st_size for file in files) == header["bytes"]
    except (OSError, ValueError):
        return False


def holds(cache: Cache, first: list[Tensor]) -> bool:
    """Tell whether the first rows of a cache are those that were computed now."""
    stored = cache.read(torch.arange(len(first[0])))
    return all(is_close(x.to(y.device), y) for x, y in zip(stored, first, strict=True))


def write_files(specs: Sequence[Spec], rows: int, files: list[Path], write: Callable[[Cache], object]) -> None:
    """Write the files of a cache beside their places, flush them to disk, and move them there."""
    drafts = [file.with_name(f".{file.name}.{os.getpid()}.tmp") for file in files]
    try:
        write(open_cache(specs, rows, drafts, write=True))
        for draft, file in zip(drafts, files, strict=True):
            flush(draft)
            os.replace(draft, file)
        sync_folder(files[0].parent)
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)


def fill(cache: Cache, trunk: Trunk, batches: Iterable[tuple[Tensor, ...]]) -> Cache:
    """Compute all rows of a cache."""
    try:
        for rows, images, *labels in batches:
            made = [*trunk.compute(images), *labels]
            if [(x.shape[1:], x.dtype) for x in made] != [(spec.shape[1:], spec.dtype) for spec in cache.specs]:
                refuse_trunk(f"they do not give the same number or shape of results for {len(images)} images as for more")
            for column, spec, x in zip(cache.columns, cache.specs, made, strict=True):
                column[rows] = to_row(x, spec).to(column.device)
    except TrunkError as error:
        refuse_trunk(str(error))
    return cache


def open_cache(specs: Sequence[Spec], rows: int, files: list[Path] | None, write: bool) -> Cache:
    """Return a cache over files, mapped into memory, or without files in memory itself."""
    columns: list[Tensor] = []
    for i, spec in enumerate(specs):
        shape = (rows, *(spec.shape[axis] for axis in spec.order[1:]))
        count = torch.Size(shape).numel()
        if files is None:
            columns.append(torch.empty(shape, dtype=spec.dtype))
            continue
        if write:
            with files[i].open("wb") as file:
                allocate(file.fileno(), max(1, count * spec.dtype.itemsize))
        columns.append(torch.from_file(str(files[i]), shared=write, size=count, dtype=spec.dtype).view(shape))
    return Cache(tuple(columns), tuple(specs))


def allocate(handle: int, size: int) -> None:
    """Give an open file its size; a full disk shows here, where the system can tell."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.ftruncate(handle, size)


def flush(path: Path) -> None:
    """Flush a file to disk."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def check_space(size: int, free: int, what: str, other: Place) -> None:
    """Refuse a cache that does not fit, before anything is computed."""
    if size > free:
        raise SettingsError(
            f"the trunk cache would take {size / 1e6:.0f} MB, and there are {free / 1e6:.0f} MB {what}. Use fewer --views, "
            f"--cache {other}, or --cache off."
        )


def check_trunk(trunk: Trunk, first: Tensor, last: int) -> None:
    """Refuse a trunk whose cut is not a function of each image alone, or from which the model does not give its own output.

    Trained parameters are changed between computing the cut and running from it, so that a cut that depends on them shows; the
    images are not those of the record; gradients are looked at, too. Images are run among others, and in a batch as small
    as the last one of an epoch.
    """
    images, mixed = torch.empty_like(first).copy_(first.flip(-1)), first.clone()
    half = -(-len(first) // 2)
    mixed[:half] = images[:half]
    record = trunk.find_record(images)
    try:
        cut, among_others, among_fewer = (trunk.compute(x) for x in (images, mixed, images[:last]))
        with disturbed(trunk.model), native.off():  # which rounds otherwise in a whole model
            results = run_with_gradients(trunk.model, lambda: trunk.run(record, [x.clone() for x in cut]))
            expected = run_with_gradients(trunk.model, lambda: trunk.model(images.clone()))
            again = trunk.compute(images)
    except TrunkError as error:
        refuse_trunk(str(error))
    except (RuntimeError, TypeError, ValueError, LookupError) as error:  # a call that could not be answered leads anywhere
        refuse_trunk(f"run without them, the model fails ({type(error).__name__}: {error})")
    if not all(is_close(x, y) for x, y in zip(cut, again, strict=True)):
        refuse_trunk("they give other results for the same images, or depend on what is trained")
    if not all(is_close(x[:half], y[:half]) for x, y in zip(cut, among_others, strict=True)):
        refuse_trunk("they mix the images of a batch")
    if not all(is_close(x[:last], y) for x, y in zip(cut, among_fewer, strict=True)):
        refuse_trunk(f"they give other results for the same images in a batch of {last}, the last one of an epoch")
    if len(results) != len(expected) or not all(map(is_close, results, expected)):
        refuse_trunk(
            "run without them, the model gives other results. It may compute by other means than torch functions, or compute "
            "frozen layers again in its backward pass (checkpointing)"
        )


def run_with_gradients(model: nn.Module, forward: Callable[[], Any]) -> list[Tensor]:
    """Return the outputs of a forward and, in training mode, the gradients of a loss for trained parameters.

    What keeps remember is as before then: the next run is to find the same.
    """
    remembered = keep_state(model)
    with seeded(0), torch.set_grad_enabled(model.training):
        outputs = find_tensors(forward())
        losses = [y.float().square().mean() for y in outputs if y.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    load_keep_state_(model, remembered)
    return outputs + gradients


@contextmanager
def disturbed(model: nn.Module) -> Iterator[None]:
    """Give a model other trained parameters, without gradients, for a while."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    kept = [(p.detach().clone(), p.grad) for p in parameters]
    try:
        with torch.no_grad():
            for p in parameters:
                p.grad = None
                p.add_(0.05 * p.abs().mean() + 0.001)
        yield
    finally:
        with torch.no_grad():
            for p, (values, grad) in zip(parameters, kept, strict=True):
                p.copy_(values)
                p.grad = grad


def is_close(x: Tensor, y: Tensor) -> bool:
    """Tell whether two results are the same but for rounding."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if torch.equal(x, y) or not (x.is_floating_point() or x.is_complex()):
        return torch.equal(x, y)
    size = y.detach().abs().nan_to_num(0, 0, 0).max() if y.numel() else 0
    return torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE * float(size), equal_nan=True)


def refuse_trunk(reason: str) -> NoReturn:
    """Raise the error for a model whose trunk cannot be cached."""
    raise SettingsError(f"the frozen layers of this model cannot be cached: {reason}. Use --cache off.")
