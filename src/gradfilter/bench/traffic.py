"""Bytes that operators read and write, counted from what torch's observer writes down of one run."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ExecutionTraceObserver, ProfilerActivity
from torch.profiler import profile as profiler

from gradfilter.measure import silent

OVERWRITES = {"aten::copy_", "aten::fill_", "aten::zero_"}
"""Operators that do not read what they change."""
ALLOCATES = re.compile(r"aten::(new_)?empty(_|$)")
"""Operators that touch no numbers, though their result is a tensor of its own."""
ASKS = {"aten::_local_scalar_dense", "aten::equal"}
"""Operators that return no tensor, and read numbers for what they do return."""
LIKE = re.compile(r"aten::(new_\w+|\w+_like)$")
"""Operators that take a tensor's shape and dtype alone."""


Tensors = dict[int, tuple[int, int]]
"""From a tensor's number to its storage's number and the bytes that it holds."""


class Traffic(NamedTuple):
    """What one operator reads and what it writes."""

    reads: Tensors
    writes: Tensors


def count_bytes(run: Callable[[], Any]) -> dict[str, int]:
    """Return the bytes that each operator of a run reads and writes, all its calls together.

    An operator reads each tensor that it is given once, and writes each that it changes or returns once; a tensor counts
    what it holds, numbers that it repeats once. Views, allocations and questions about shapes count nothing, nor does an
    operator all of whose tensors are read and written by operators inside it. The library's calls tell what they move.

    Args:
        run: What to run, once.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with silent():
            observer = ExecutionTraceObserver().register_callback(str(path))
            with profiler(activities=[ProfilerActivity.CPU], execution_trace_observer=observer):
                run()
            observer.unregister_callback()
        return add_up(json.loads(path.read_text(encoding="utf-8"))["nodes"])


def add_up(nodes: list[dict[str, Any]]) -> dict[str, int]:
    """Return the bytes per operator of a trace, in which an operator comes after those inside it."""
    moved: Counter[str] = Counter()
    inside: dict[int, tuple[set[int], set[int]]] = {}
    for node in nodes:
        name, (read, written) = node["name"], inside.pop(node["id"], (set(), set()))
        if name.startswith("gradfilter::"):
            moved[name] += int(node["inputs"]["values"][0])
        elif name.startswith("aten::"):
            reads, writes = find_traffic(node)
            sources, targets = find_storages(reads), find_storages(writes)
            if not (sources <= read and targets <= written):
                moved[name] += sum(held for side in (reads, writes) for _, held in side.values())
                read |= sources
                written |= targets
        around = inside.setdefault(node["ctrl_deps"], (set(), set()))
        around[0].update(read)
        around[1].update(written)
    return dict(moved)


def find_traffic(node: dict[str, Any]) -> Traffic:
    """Return what an operator of a trace reads and writes itself, or hands on to others."""
    name = node["name"]
    schema = next(field["value"] for field in node["attrs"] if field["name"] == "op_schema")
    changed, given, moves = find_roles(schema)
    if ALLOCATES.match(name) or not moves:
        return Traffic({}, {})
    given = set() if LIKE.match(name) else given - {0} if name in OVERWRITES else given
    arguments, results = dict(find_tensors(node["inputs"])), dict(find_tensors(node["outputs"]))
    reads, writes = join(arguments, given), join(results, results) | join(arguments, changed)
    is_view = not changed and find_storages(writes) <= find_storages(join(arguments, arguments))
    # What returns no tensor is such a view of nothing: it asks about a shape or a type.
    return Traffic({}, {}) if is_view and name not in ASKS else Traffic(reads, writes)


def join(tensors: Mapping[int, Tensors], places: Iterable[int]) -> Tensors:
    """Return the tensors in these places together."""
    return {number: tensor for at in places for number, tensor in tensors.get(at, {}).items()}


def find_storages(tensors: Tensors) -> set[int]:
    """Return the numbers of the storages of tensors."""
    return {storage for storage, _ in tensors.values()}


@lru_cache(maxsize=4096)
def find_roles(schema: str) -> tuple[frozenset[int], frozenset[int], bool]:
    """Return which arguments of an operator it changes and which it reads, and whether it is about numbers at all.

    Args:
        schema: The operator as torch declares it, such as `aten::neg.out(Tensor self, *, Tensor(a!) out) -> Tensor(a!)`.
    """
    parsed = torch._C.parse_schema(schema)
    arguments = list(enumerate(parsed.arguments))
    changed = frozenset(at for at, one in arguments if one.alias_info is not None and one.alias_info.is_write)
    given = frozenset(at for at, one in arguments if not (at in changed and one.kwarg_only))
    packet = getattr(torch.ops.aten, parsed.name.removeprefix("aten::"))
    operator = getattr(packet, parsed.overload_name or "default")
    return changed, given, torch.Tag.inplace_view not in operator.tags


def find_tensors(side: dict[str, Any]) -> Iterator[tuple[int, Tensors]]:
    """Yield the place of each argument or result that has tensors, and these."""
    for at, (values, shapes, strides, kind) in enumerate(
        zip(side["values"], side["shapes"], side["strides"], side["types"], strict=True)
    ):
        if "Tensor(" not in kind:
            continue
        single = kind.startswith("Tensor(")
        found: Tensors = {}
        for value, shape, steps in zip(*([part] if single else part for part in (values, shapes, strides)), strict=True):
            if isinstance(value, list) and len(value) == 6:  # and no `None` among others
                number, storage, _, _, size, _ = value
                held = size * math.prod(n for n, step in zip(shape, steps, strict=True) if step or not n)
                if held:
                    found[number] = storage, held
        if found:
            yield at, found
