"""What the C library takes: structs by the names, types and order of their fields, and the tasks that are run on them.

tasks.h lists the same structs, and the library tells where it has each field. `find_mismatch` compares the two before anything
is run, so a struct is described here and there, and neither has to trust the other.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

INT32, INT64, FLOAT, DOUBLE, POINTER = "int32", "int64", "float", "double", "pointer"
"""Types of fields. "float[4][3]" is an array of one of them."""
TASKS: list[str] = []
TASKS += "norm_act unpool slope norm_back norm_end fold max_pool max_route".split()
TASKS += "depthwise dense winograd expand pairs backward single".split()
"""The tasks that the library runs; a task's number is its place, as in `GF_TASKS` of tasks.h."""

_CODES = {INT32: "i", INT64: "q", FLOAT: "f", DOUBLE: "d", POINTER: "P"}
_NUMPY = {"i4": INT32, "i8": INT64, "f4": FLOAT, "f8": DOUBLE}
_ADDRESS = struct.Struct("@P")
_records: dict[str, Record] = {}
_tasks: dict[str, Task] = {}


class Record:
    """A C struct: its fields in order, by which it is packed and compared with the library's.

    Attributes:
        name: Its name in C, without the `gf_`.
        fields: The type of each field by its name, in order.
        format: Its fields as `struct` has them.
        alignment: The code of the number that it is aligned as.
        size: Its bytes.
        pack: Return its bytes for one value per field, those of a struct or an array one by one.
        unpack: Return the values in its bytes.
    """

    def __init__(self, name: str, *fields: tuple[str | Record, str]) -> None:
        """Describe a struct.

        Args:
            name: Its name in C, without the `gf_`.
            fields: Types, each with the names of the fields that have it: `(INT64, "n c h w"), (MAP, "map")`.
        """
        if name in _records:
            raise ValueError(f"there is a struct {name!r} already; give this one another name")
        self.name = name
        self.fields = {field: kind for kind, names in fields for field in names.split()}
        self._leaves = [leaf for field, kind in self.fields.items() for leaf in _find_leaves(field, kind)]
        self.format = "".join(code for _, code in self._leaves)
        self.alignment = max((_find_alignment(kind) for kind in self.fields.values()), key=_measure_alignment)
        whole = struct.Struct(f"@{self.format}0{self.alignment}")
        self.size, self.pack, self.unpack = whole.size, whole.pack, whole.unpack
        _records[name] = self

    def split(self, *starts: str) -> list[struct.Struct]:
        """Return what packs its parts, which begin at the first field and at each of `starts`, such as "after.x"."""
        names, codes = zip(*self._leaves, strict=True)
        cuts, step = [names.index(start) for start in starts], _measure_alignment(self.alignment)
        if any(struct.calcsize(f"@{''.join(codes[:cut])}0{codes[cut][-1]}") % step for cut in cuts):
            raise ValueError(f"{self.name} cannot be packed in parts from {starts}: not all of these are aligned as it is")
        return [struct.Struct(f"@{''.join(codes[a:b])}0{self.alignment}") for a, b in pairwise([0, *cuts, len(codes)])]

    @classmethod
    def from_dtype(cls, name: str, dtype: np.dtype) -> Record:
        """Return the struct of which an array of this numpy type is one."""
        fields = []
        for field in dtype.names or ():
            base, shape = dtype[field].subdtype or (dtype[field], ())
            fields.append((_NUMPY[base.str[1:]] + "".join(f"[{n}]" for n in shape), field))
        record = cls(name, *fields)
        if record.size != dtype.itemsize:
            raise ValueError(f"an array of {dtype} has other gaps than the struct {name!r}")
        return record

    def describe(self) -> Iterator[tuple[str, str]]:
        """Yield what the library should tell of each field and of the whole, by their names."""
        for field, kind, offset, size in self._place_fields():
            yield f"{self.name}.{field}", f"{kind} at byte {offset}, {size} bytes"
        yield self.name, f"{self.size} bytes"

    @cached_property
    def pointers(self) -> list[int]:
        """Where in the packed struct addresses stand: those bytes of each that are its first."""
        before, found = "@", []
        for _, code in self._leaves:
            if code == _CODES[POINTER]:
                found.append(struct.calcsize(f"{before}0{code}"))
            before += code
        return found

    def find_pointers(self, packed: bytes) -> list[tuple[int, int]]:
        """Return place and value of each address in a packed struct, but for those that are 0."""
        found = [(at, *_ADDRESS.unpack_from(packed, at)) for at in self.pointers]
        return [(at, address) for at, address in found if address]

    def _place_fields(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield the name, the type, the offset and the bytes of each field."""
        before = "@"
        for field, kind in self.fields.items():
            offset = struct.calcsize(f"{before}0{_find_alignment(kind)}")
            before += "".join(code for _, code in _find_leaves(field, kind))
            yield field, kind if isinstance(kind, str) else kind.name, offset, struct.calcsize(before) - offset


class Task:
    """One of the library's functions, and the struct that it is run on.

    Attributes:
        name: Its name, one of `TASKS`.
        record: The struct.
        pack: `record.pack`.
        header: What precedes the packed struct: which task it is, and its bytes.
    """

    def __init__(self, record: Record, name: str | None = None) -> None:
        """Describe a task, by the name of its struct where it has no other."""
        name = name or record.name
        if name not in TASKS or name in _tasks:
            raise ValueError(f"a task {name!r} is {'there already' if name in _tasks else 'not listed in TASKS'}")
        self.name, self.record, self.pack = name, record, record.pack
        self.header = HEADER.pack(TASKS.index(name), record.size)
        _tasks[name] = self


def read_task(given: bytes) -> tuple[Task, bytes]:
    """Return which task is packed behind a header, and its struct's bytes."""
    number, size = HEADER.unpack(given[: HEADER.size])
    return _tasks[TASKS[number]], given[HEADER.size : HEADER.size + size]


def find_mismatch(said: str, constants: Mapping[str, int]) -> str | None:
    """Return where the library differs from this package, or `None`.

    Args:
        said: What the library tells of itself: a line for each field, struct, task and constant.
        constants: The constants that both have.
    """
    found: dict[str, str] = {}
    for line in said.splitlines():
        name, _, value = line.partition(": ")
        found[name] = value
    expected = describe(constants)
    differ = [name for name in (*expected, *found) if expected.get(name) != found.get(name)]
    if not differ:
        return None
    # A field that is not there explains all that follow it, and a struct within another the size of that one.
    alone = [name for name in differ if "." in name and not (name in expected and name in found)]
    name = [*alone, *(name for name in differ if "." in name), *differ][0]
    return f"{name}: expected {expected.get(name, 'nothing')}, found {found.get(name, 'nothing')}"


def describe(constants: Mapping[str, int]) -> dict[str, str]:
    """Return what a library that fits tells of itself, by name."""
    lines = {name: line for record in _records.values() for name, line in record.describe()}
    lines |= {f"task {name}": f"number {TASKS.index(name)}, a {task.record.name}" for name, task in _tasks.items()}
    return lines | {name: str(value) for name, value in constants.items()}


def _parse(kind: str) -> tuple[str, list[int]]:
    """Return the type of the numbers of an array, and its shape."""
    base, *shape = re.findall(r"\w+", kind)
    return base, [int(n) for n in shape]


def _find_leaves(field: str, kind: str | Record) -> list[tuple[str, str]]:
    """Return name and code of the number or array in a field, or of all in a struct, between two marks that align its ends."""
    if isinstance(kind, Record):
        mark = ("", f"0{kind.alignment}")
        return [mark, *((f"{field}.{leaf}" if leaf else "", code) for leaf, code in kind._leaves), mark]
    base, shape = _parse(kind)
    return [(field, f"{math.prod(shape)}{_CODES[base]}" if shape else _CODES[base])]


def _find_alignment(kind: str | Record) -> str:
    """Return the code of the number that a type is aligned as."""
    return kind.alignment if isinstance(kind, Record) else _CODES[_parse(kind)[0]]


@lru_cache
def _measure_alignment(code: str) -> int:
    return struct.calcsize(f"@b0{code}")


HEADER = Record("header", (INT32, "task bytes"))
MAP = Record("map", (INT64, "n c h w ph pw"), (INT32, "channels_last dtype"))
