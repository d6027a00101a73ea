"""`make fuzz` finds what new examples break, and says how to repeat it."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import fuzz

HERE = Path(__file__).parent
PLANTED = """
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

quick = settings(max_examples=200)


@pytest.mark.parametrize("name", ["a b", "c"])
@quick
@given(st.integers(0, 10**6))
def test_planted(name, number):
    assert name == "c" or number % 20 != 3, f"number is {number}"


@given(st.booleans())
def test_sound(flag):
    assert flag in (False, True)


def test_of_no_interest():
    raise AssertionError
"""


def make_checkout(folder):
    """Write a small project whose tests are set up as ours are."""
    (folder / "tests").mkdir(parents=True)
    for path in (HERE / "conftest.py", HERE / "fuzz.py", HERE / "skips.py"):
        shutil.copy(path, folder / "tests")
    shutil.copy(HERE.parent / "pyproject.toml", folder)
    (folder / "tests" / "test_planted.py").write_text(PLANTED, encoding="utf-8")
    return folder


def test_a_failure_is_found_and_its_command_repeats_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "ROOT", make_checkout(tmp_path / "here"))
    assert fuzz.main(["--rounds", "1", "--minutes", "60"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^fuzz: .* minutes, 1 rounds, 3 tests run, \d{3} examples, 1 tests failed$", printed, re.M)
    assert "number is " in printed
    (line,) = {line.strip() for line in printed.splitlines() if "-m pytest" in line}
    command = line.replace(".venv/bin/python", shlex.quote(sys.executable))  # as a user's shell reads it, settings in front
    there = make_checkout(tmp_path / "there")
    again = subprocess.run(command, shell=True, cwd=there, capture_output=True, text=True, timeout=300)
    assert again.returncode == 1
    assert "1 failed" in again.stdout
    (found,) = {line for line in printed.splitlines() if line.startswith("E       AssertionError: number is ")}
    assert found in again.stdout.splitlines()


def test_tests_that_cannot_run_are_no_success(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "ROOT", make_checkout(tmp_path))
    (tmp_path / "tests" / "conftest.py").unlink()  # it registers the profile
    assert fuzz.main(["--rounds", "1", "--minutes", "60"]) == 2
    assert "'fuzz' is not registered" in capsys.readouterr().out
