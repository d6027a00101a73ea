"""Tables: the same rows as Markdown for people, and as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradfilter.files import replace_file

NOTHING = "–"
"""What a cell without a value shows."""


@dataclass
class Table:
    """Rows of plain values, and how each column shows them.

    Attributes:
        title: One line.
        columns: From a column's name to the function that turns its values into text.
        rows: The values, as many in each row as there are columns; `None` and NaN where there is none. A value may be a
            mapping of such values.
        remarks: Sentences below the table.
    """

    title: str
    columns: Mapping[str, Callable[[Any], str]]
    rows: list[Sequence[Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def to_markdown(self) -> str:
        """Return the table as Markdown that reads well as plain text."""
        lines = [f"# {self.title}", "", *align(list(self.columns), self.to_cells())]
        return "\n".join([*lines, *(f"\n{remark}" for remark in self.remarks), ""])

    def to_cells(self) -> list[list[str]]:
        """Return the rows as text."""
        return [
            [NOTHING if is_nothing(value) else show(value) for show, value in zip(self.columns.values(), row, strict=True)]
            for row in self.rows
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data, one mapping per row."""
        rows = [{name: to_plain(value) for name, value in zip(self.columns, row, strict=True)} for row in self.rows]
        return {"title": self.title, "rows": rows, "remarks": self.remarks}

    def save(self, stem: Path) -> None:
        """Write the table to `stem`.md and `stem`.json, each whole or not at all."""
        replace_file(stem.with_name(f"{stem.name}.md"), self.to_markdown())
        replace_file(stem.with_name(f"{stem.name}.json"), json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")


def is_nothing(value: Any) -> bool:
    """Tell whether there is no value to show."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def to_plain(value: Any) -> Any:
    """Return a value as JSON can have it: null for NaN, and for what is infinite the text that `float` reads."""
    if isinstance(value, Mapping):
        return {key: to_plain(part) for key, part in value.items()}
    if is_nothing(value):
        return None
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def align(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return a Markdown table, aligned for reading as text."""
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines
