"""Tables of results, with the machine, the versions and the commit they were measured on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradfilter.environment import find_environment
from gradfilter.table import Table, align


@dataclass
class Report:
    """One benchmark's result: a title, the command that repeats it, a table, remarks, a PNG picture where there is one.

    Columns are names, of cells of text; or, as in `Table`, from names to functions that turn the cells' values into text.
    """

    name: str
    title: str
    command: str
    columns: Sequence[str] | Mapping[str, Callable[[Any], str]]
    rows: list[Sequence[Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    picture: bytes | None = None

    def to_table(self) -> Table:
        """Return the table alone."""
        columns = self.columns if isinstance(self.columns, Mapping) else dict.fromkeys(self.columns, str)
        return Table(self.title, columns, self.rows, self.remarks)

    def to_markdown(self) -> str:
        """Return the report as Markdown."""
        lines = [f"# {self.title}", "", f"`{self.command}`", "", *align(list(self.columns), self.to_table().to_cells()), ""]
        lines += [f"{remark}\n" for remark in self.remarks]
        return "\n".join([*lines, ", ".join(f"{key} {value}" for key, value in find_environment().items()), ""])

    def save(self, folder: Path) -> None:
        """Write the report as Markdown and as JSON, and its picture."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.md").write_text(self.to_markdown(), encoding="utf-8")
        data = {"command": self.command, "environment": find_environment(), **self.to_table().to_dict()}
        (folder / f"{self.name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        if self.picture is not None:
            (folder / f"{self.name}.png").write_bytes(self.picture)
