"""The structs that Python packs for the C library: both describe them, and a library that does so differently is not used."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import gradfilter
from gradfilter.geometry.convolution import TILE
from gradfilter.ops import native
from gradfilter.ops.native import conv, library, pooling, task
from gradfilter.ops.native.task import DOUBLE, FLOAT, INT32, INT64, POINTER, Record, Task

NATIVE = Path(gradfilter.__file__).parent / "ops" / "native"
RECORDS, TASKS = dict(task._records), dict(task._tasks)
C_TYPES = {
    INT32: ctypes.c_int32,
    INT64: ctypes.c_int64,
    FLOAT: ctypes.c_float,
    DOUBLE: ctypes.c_double,
    POINTER: ctypes.c_void_p,
}
REFUSED = -2

native_only = pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler on this machine")


def make_structure(record: Record) -> type[ctypes.Structure]:
    """Return a struct as ctypes lays it out."""
    fields = []
    for name, kind in record.fields.items():
        if isinstance(kind, Record):
            made = make_structure(kind)
        else:
            base, *shape = re.findall(r"\w+", kind)
            made = C_TYPES[base]
            for n in reversed(shape):
                made = made * int(n)
        fields.append((name, made))
    return type(record.name, (ctypes.Structure,), {"_fields_": fields})


def count_values(record: Record) -> int:
    return len(record.unpack(bytes(record.size)))


@pytest.fixture
def empty_registry(monkeypatch):
    """Let a test describe structs of its own, which no library has."""
    monkeypatch.setattr(task, "_records", {})
    monkeypatch.setattr(task, "_tasks", {})


# What Python describes.


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_fields_are_where_a_compiler_puts_them(record):
    made = make_structure(record)
    assert record.size == ctypes.sizeof(made)
    for field, _, offset, size in record._place_fields():
        assert (offset, size) == (getattr(made, field).offset, getattr(made, field).size)


@pytest.mark.usefixtures("empty_registry")
def test_gaps_are_where_a_compiler_leaves_them():
    inner = Record("inner", (INT64, "long"), (INT32, "short"))
    outer = Record(
        "outer", (INT32, "first"), (inner, "inner"), (INT32, "last more"), (f"{FLOAT}[3]", "three"), (DOUBLE, "real")
    )
    made = make_structure(outer)
    assert [offset for _, _, offset, _ in outer._place_fields()] == [getattr(made, field).offset for field in outer.fields]
    packed = made.from_buffer_copy(outer.pack(1, 2, 3, 4, 5, 0.5, 1.5, 2.5, 6))
    assert (packed.first, packed.inner.long, packed.inner.short, packed.last, packed.more) == (1, 2, 3, 4, 5)
    assert ([*packed.three], packed.real) == ([0.5, 1.5, 2.5], 6)
    with pytest.raises(ValueError, match="outer cannot be packed in parts"):
        outer.split("more")


@pytest.mark.parametrize(("record", "starts"), [(conv.DEPTHWISE, ("after.x", "h")), (conv.DENSE, ("after.x", "inputs"))])
def test_parts_are_the_whole(record, starts):
    values, packed = list(range(1, count_values(record) + 1)), b""
    for part in record.split(*starts):
        count = len(part.unpack(bytes(part.size)))
        packed += part.pack(*values[:count])
        values = values[count:]
    assert packed == record.pack(*range(1, count_values(record) + 1))


def test_a_table_of_tiles_is_an_array_of_the_structs():
    made = make_structure(RECORDS["axis_tile"])
    tiles = np.arange(made.mix.offset // 4 * 3, dtype=np.int32)
    table = np.zeros(2, TILE)
    table[1] = (*tiles[:6], np.eye(4))
    second = (made * 2).from_buffer_copy(table.tobytes())[1]
    assert (second.out, second.outs, second.seen, second.plain) == (0, 1, 3, 5)
    assert [list(row) for row in second.mix] == np.eye(4).tolist()


def test_every_task_is_described():
    assert sorted(TASKS) == sorted(task.TASKS)


@pytest.mark.usefixtures("empty_registry")
def test_a_name_is_given_once():
    record = Record("unpool", (INT64, "n"))
    Task(record)
    with pytest.raises(ValueError, match="a struct 'unpool' already"):
        Record("unpool", (INT64, "n"))
    with pytest.raises(ValueError, match="'unpool' is there already"):
        Task(record)
    with pytest.raises(ValueError, match="'sum' is not listed in TASKS"):
        Task(record, "sum")


# What the library tells.


def read_description() -> str:
    found = native.load()
    assert found is not None
    return library._read_description(found)


@native_only
@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_the_library_has_the_same_structs(record):
    assert [line for line in read_description().splitlines() if re.match(rf"{record.name}[.:]", line)] == [
        ": ".join(line) for line in record.describe()
    ]


@native_only
def test_the_library_has_the_same_tasks_and_constants_and_no_more():
    said = read_description()
    assert task.find_mismatch(said, library.CONSTANTS) is None
    assert dict(line.split(": ") for line in said.splitlines()) == task.describe(library.CONSTANTS)


SAID = "".join(f"{name}: {value}\n" for name, value in task.describe(library.CONSTANTS).items())
CELLS, Y = "unpool.cells: pointer at byte 56, 8 bytes\n", "unpool.y: pointer at byte 64, 8 bytes\n"
DIFFERENT = {
    "another size": (
        {CELLS: "unpool.cells: int32 at byte 56, 4 bytes\n"},
        "unpool.cells: expected pointer at byte 56, 8 bytes, found int32 at byte 56, 4 bytes",
    ),
    "another order": (
        {CELLS: "unpool.y: pointer at byte 56, 8 bytes\n", Y: "unpool.cells: pointer at byte 64, 8 bytes\n"},
        "unpool.cells: expected pointer at byte 56, 8 bytes, found pointer at byte 64, 8 bytes",
    ),
    "a field less": (
        {CELLS: "", Y: "unpool.y: pointer at byte 56, 8 bytes\n", "unpool: 72": "unpool: 64"},
        "unpool.cells: expected pointer at byte 56, 8 bytes, found nothing",
    ),
    "a field more": (
        {Y: Y + "unpool.z: int64 at byte 72, 8 bytes\n", "unpool: 72": "unpool: 80"},
        "unpool.z: expected nothing, found int64 at byte 72, 8 bytes",
    ),
    "a field of a struct in others": (
        {"map.dtype: int32 at byte 52, 4": "map.dtype: int64 at byte 56, 8", "map: 56": "map: 64", "unpool: 72": "unpool: 80"},
        "map.dtype: expected int32 at byte 52, 4 bytes, found int64 at byte 56, 8 bytes",
    ),
    "another whole": ({"unpool: 72": "unpool: 80"}, "unpool: expected 72 bytes, found 80 bytes"),
    "another number": (
        {"task unpool: number 1,": "task unpool: number 2,"},
        "task unpool: expected number 1, a unpool, found number 2",
    ),
    "a task less": ({"task single: number 14, a single\n": ""}, "task single: expected number 14, a single, found nothing"),
    "a task more": (
        {"task unpool": "task sum: number 15, a unpool\ntask unpool"},
        "task sum: expected nothing, found number 15, a unpool",
    ),
    "another constant": ({"GF_CHANNELS: 16": "GF_CHANNELS: 32"}, "GF_CHANNELS: expected 16, found 32"),
    "no text": ({SAID: ""}, "header.task: expected int32 at byte 0, 4 bytes, found nothing"),
    "something else": ({SAID: "a poem\n"}, "header.task: expected int32 at byte 0, 4 bytes, found nothing"),
}
FUNCTIONS = "gf_run_tasks gf_make_tensor gf_block_bytes gf_trim gf_set_level gf_best_level gf_set_team".split()
STUB = """
#include <stdint.h>
#include <string.h>
static const char said[] = %s;
int64_t gf_describe(char *to, int64_t room) {
    if (to) strncpy(to, said, (size_t)room);
    return sizeof said - 1;
}
%s
"""


def compile_library(path: Path, *arguments: str | Path) -> Path:
    subprocess.run(["cc", "-shared", "-fPIC", "-O0", *arguments, "-o", path], check=True, timeout=300)
    return path


def make_library(folder: Path, said: str, functions: Sequence[str]) -> Path:
    """Return a library that tells some text, and whose functions end the process."""
    quoted = "\n".join('"' + line + '\\n"' for line in said.splitlines()) or '""'
    source = folder / "stub.c"
    source.write_text(STUB % (quoted, "\n".join(f"void {name}(void) {{ __builtin_trap(); }}" for name in functions)))
    return compile_library(folder / "libgradfilter.so", source)


def refuse(path: Path, monkeypatch, caplog) -> str:
    """Load a library that does not fit; return the one warning."""
    monkeypatch.setenv("GRADFILTER_NATIVE", "1")
    monkeypatch.setenv("GRADFILTER_NATIVE_LIBRARY", str(path))
    assert native.load.__wrapped__() is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    said = record.getMessage()
    assert str(path) in said
    assert "everything runs in torch. Install gradfilter again." in said
    return said


@needs_compiler
@pytest.mark.parametrize(("changes", "expected"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_library_that_differs_is_refused(changes, expected, tmp_path, monkeypatch, caplog):
    said = SAID
    for old, new in changes.items():
        assert said.count(old) == 1
        said = said.replace(old, new, 1)
    assert f"of another version ({expected}" in refuse(make_library(tmp_path, said, FUNCTIONS), monkeypatch, caplog)


@needs_compiler
@pytest.mark.parametrize("missing", FUNCTIONS)
def test_a_library_without_a_function_is_refused(missing, tmp_path, monkeypatch, caplog):
    path = make_library(tmp_path, SAID, [name for name in FUNCTIONS if name != missing])
    assert missing in refuse(path, monkeypatch, caplog)


@needs_compiler
def test_an_older_library_is_refused(tmp_path, monkeypatch, caplog):
    source = tmp_path / "old.c"
    source.write_text("int gf_abi(void) { return 10; }\n")
    assert "gf_describe" in refuse(compile_library(tmp_path / "libgradfilter.so", source), monkeypatch, caplog)


@needs_compiler
def test_the_library_tells_what_it_was_compiled_with(tmp_path, monkeypatch, caplog):
    """Its text follows its structs: with a field of another type, it is refused without a further change."""
    copied = tmp_path / "native"
    shutil.copytree(NATIVE, copied, ignore=shutil.ignore_patterns("*.py", "*.so", "__pycache__"))
    header = copied / "maxpool.h"
    changed = header.read_text().replace("F(int64_t, n) F(int64_t, c)", "F(int32_t, n) F(int32_t, c)")
    assert changed != header.read_text()
    header.write_text(changed)
    flags = ["-std=gnu11", "-DGF_SUFFIX=base", "-Wno-psabi", f"-I{copied}"]
    path = compile_library(tmp_path / "libgradfilter.so", *flags, *copied.glob("*.c"), "-lpthread", "-lm")
    said = refuse(path, monkeypatch, caplog)
    assert "max_route.n: expected int64 at byte 0, 8 bytes, found int32 at byte 0, 4 bytes" in said


RUN = """
import logging
import torch
from gradfilter import ops
from gradfilter.ops import native
logging.basicConfig()
x = torch.ones(2, 16, 8, 8).contiguous(memory_format=torch.channels_last)
fused = ops.norm_act(x, None, None, ops.RELU, (4, 4))
assert native.load() is None and not native.is_on()
assert torch.equal(fused.mean, torch.ones(2, 16, 2, 2)) and torch.equal(ops.unpool(fused.mean, (4, 4), (8, 8)), x)
"""


@needs_compiler
def test_the_package_runs_in_torch_then(tmp_path):
    path = make_library(tmp_path, SAID.replace(CELLS, ""), FUNCTIONS)
    environment = os.environ | {"GRADFILTER_NATIVE": "1", "GRADFILTER_NATIVE_LIBRARY": str(path)}
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNING") == done.stderr.count("unpool.cells") == 1


# What it runs.


def pack_unpool(cells: torch.Tensor, y: torch.Tensor) -> bytes:
    return pooling._TASK.pack(1, 1, 2, 2, 2, 2, 0, 0, cells.data_ptr(), y.data_ptr())


def run_tasks(packed: bytes) -> int:
    found = native.load()
    assert found is not None
    return found.gf_run_tasks(packed, len(packed), 1)


@native_only
@pytest.mark.parametrize("size", [0, 71, 73, 144])
def test_a_task_of_another_size_is_refused(size):
    cells, y = torch.full((1, 1, 1, 1), 3.0), torch.zeros(1, 1, 2, 2)
    packed = (pack_unpool(cells, y) * 2)[:size]
    with pytest.raises(RuntimeError, match=f"refuses a task 'unpool' of {size} bytes, for it takes 72"):
        library.call(pooling._TASK, packed, cells, y)
    assert not y.any()


@native_only
@pytest.mark.parametrize(
    "header",
    [b"", b"\0\0\0", task.HEADER.pack(-1, 72), task.HEADER.pack(99, 72), task.HEADER.pack(1, 64), task.HEADER.pack(0, 72)],
)
def test_what_is_no_task_is_refused_and_all_before_it(header):
    cells, y = torch.full((1, 1, 1, 1), 3.0), torch.zeros(1, 1, 2, 2)
    good = pooling._TASK.header + pack_unpool(cells, y)
    assert run_tasks(good + header + pack_unpool(cells, y)) == REFUSED
    assert not y.any()


@native_only
def test_tasks_that_follow_each_other_run_in_order():
    first, cells, y = torch.full((1, 1, 1, 1), 3.0), torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 2, 2)
    unpool = pooling._TASK
    copies = unpool.pack(1, 1, 1, 1, 1, 1, 0, 0, first.data_ptr(), cells.data_ptr())
    assert run_tasks(unpool.header + copies + unpool.header + pack_unpool(cells, y)) == 0
    assert torch.equal(y, torch.full((1, 1, 2, 2), 3.0))


@native_only
def test_they_end_at_the_first_that_has_something_to_say():
    zero, one, out, y = torch.zeros(1), torch.ones(1), torch.zeros(4), torch.zeros(1, 1, 2, 2)
    at = [v.data_ptr() for v in (one, zero, one, out[0], out[1], out[2])]  # a factor is 0
    norm, unpool = TASKS["norm_back"], pooling._TASK
    assert run_tasks(norm.header + norm.pack(1, 1, 0, 0.0, *at, 0, 0) + unpool.header + pack_unpool(one, y)) == 1
    assert not y.any()
