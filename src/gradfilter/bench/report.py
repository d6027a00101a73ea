"""Tables of results, with the machine, the versions and the commit they were measured on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradfilter.environment import find_environment
from gradfilter.table import align


@dataclass
class Report:
    """One benchmark's result: a title, the command that repeats it, a table, remarks, a PNG picture where there is one."""

    name: str
    title: str
    command: str
    columns: Sequence[str]
    rows: list[Sequence[Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    picture: bytes | None = None

    def to_markdown(self) -> str:
        """Return the report as Markdown."""
        lines = [f"# {self.title}", "", f"`{self.command}`", "", *align(self.columns, self.rows), ""]
        lines += [f"{remark}\n" for remark in self.remarks]
        return "\n".join([*lines, ", ".join(f"{key} {value}" for key, value in find_environment().items()), ""])

    def save(self, folder: Path) -> None:
        """Write the report as Markdown and as JSON, and its picture."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.md").write_text(self.to_markdown(), encoding="utf-8")
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        data = {
            "title": self.title,
            "command": self.command,
            "environment": find_environment(),
            "rows": rows,
            "remarks": self.remarks,
        }
        (folder / f"{self.name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        if self.picture is not None:
            (folder / f"{self.name}.png").write_bytes(self.picture)
