"""What docs/data.md says."""

import re
from pathlib import Path

from gradfilter.data import find_sets

TEXT = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")


def test_the_table_lists_the_named_sets():
    rows = []
    for name, info in find_sets(None).items():
        counts = ", ".join(f"{part} {count}" for part, count in info.counts.items())
        layout = f"`{info.layout}` " if info.layout else ""
        rows.append(f"| `{name}` | {info.description} | {info.classes} | {counts} | {layout}|")
    assert re.findall(r"^\| `.*$", TEXT, re.MULTILINE) == rows


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(block, names)
    assert capsys.readouterr().out.startswith("(0.")
    assert names["x"].shape == (3, 176, 176)
    assert (names["pixels"].shape, names["labels"].shape) == ((3, 64, 64), (64, 64))
    assert len(names["part"]) in (718, 719)
