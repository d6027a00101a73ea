"""What docs/train.md says."""

import re
from dataclasses import fields
from pathlib import Path

from gradfilter.cli.train import parse
from gradfilter.train import Settings

TEXT = (Path(__file__).parents[1] / "docs" / "train.md").read_text(encoding="utf-8")


def test_the_table_names_every_setting_and_no_other():
    table = TEXT.partition("| group | settings |")[2].partition("\n\n")[0]
    words = {word for code in re.findall(r"`([^`]+)`", table) for word in code.split()}
    assert words == {field.name for field in fields(Settings)} - {"preset"}


def test_the_commands_parse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("data: photos/\nplan: last4\n")
    commands = [line.partition("#")[0].split() for line in TEXT.splitlines() if line.startswith("gradfilter train ")]
    settings = [parse(words[2:]) for words in commands if "--print_config" not in words]
    assert len(settings) == 7
    assert (settings[0].plan, settings[0].patch, settings[1].grid) == ("last4", 2, 4)
    assert settings[2].resume
    assert (settings[3].lr, settings[3].plan) == (0.005, "last4")
    assert settings[4].epochs == settings[5].epochs == 50
    assert (settings[5].patch, settings[5].keep) == (1, "hosvd:0.8")
    assert (settings[6].task, settings[6].encoder, settings[6].grid) == ("segment", "efficientnet-lite0", 16)


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(block, {})
    assert re.match(r"0\.\d+ Cost\(batch=32, ", capsys.readouterr().out)
    named = set(re.findall(r"`(\w+\.\w+)`", TEXT.partition("## What a run leaves")[2].partition("```")[0]))
    assert named <= {path.name for path in (tmp_path / "runs" / "try").iterdir()}
