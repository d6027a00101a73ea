"""`python -m gradfilter.bench before`: an older copy in the same process, and what a row says. No times are checked."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

import gradfilter
from gradfilter.bench import before, older
from gradfilter.bench.__main__ import main
from gradfilter.cost_table import Seconds
from gradfilter.errors import GradFilterError, SettingsError

PACKAGE = Path(gradfilter.__file__).parent
TINY = ["--model", "cifar-resnet20", "--batch", "2", "--threads", "1", "--pixels", "16", "--rounds", "2"]
needs_library = pytest.mark.skipif(older.find_library(PACKAGE) is None, reason="the C library is not built")


@pytest.fixture(autouse=True)
def no_library_named(monkeypatch):
    """Each version has its own."""
    monkeypatch.delenv("GRADFILTER_NATIVE_LIBRARY", raising=False)


@pytest.fixture
def installed(tmp_path):
    """This version in a folder, as pip would have put it there."""
    skip = shutil.ignore_patterns("__pycache__", "*.c", "*.h")
    shutil.copytree(PACKAGE, tmp_path / "old" / "gradfilter", ignore=skip)
    return tmp_path / "old"


@needs_library
def test_this_version_equals_itself(installed, tmp_path, capsys):
    (installed / older.COMMIT).write_text("0123abc\n")
    plans = ["all:grid4", "last2:patch1"]
    assert main(["--save", str(tmp_path), "before", "--package", str(installed), "--plan", *plans, *TINY]) == 0
    table = json.loads((tmp_path / "before-0123abc.json").read_text())
    assert [row["plan"] for row in table["rows"]] == plans
    for row in table["rows"]:
        assert 0 < row["quartiles"][0] <= row["now / before"] <= row["quartiles"][1]
        assert min(row["ms"]) > 0
        assert len({*row["saved bytes"], *row["predicted bytes"]}) == 1
        assert row["gradients"] == {"bit-equal": True, "difference": 0}
        assert 0 < max(row["error at patch 1"]) < 1e-10
    assert "commit 0123abc" in table["title"]
    assert "--commit 0123abc --model cifar-resnet20 --plan all:grid4 last2:patch1 --batch 2 --threads 1" in table["command"]
    assert "| bit-equal |" in capsys.readouterr().out


@needs_library
def test_a_version_that_computes_otherwise_is_seen(installed):
    """Its gradients are half of what they should be."""
    file = installed / "gradfilter" / "apply.py"
    changed = "\n\ndef _halve(g):\n    return g / 2\n\n\n_apply = apply_\n\n\ndef apply_(model, plan):\n"
    changed += "    for p in model.parameters():\n        p.register_hook(_halve)\n    return _apply(model, plan)\n"
    file.write_text(file.read_text() + changed)
    choices = before.make_choices(
        models=["cifar-resnet20"], plans=["all:patch2"], batches=[1], threads=[1], pixels=16, rounds=2
    )
    report = before.measure(installed, "halved", choices)
    (row,) = report.to_table().to_dict()["rows"]
    assert row["gradients"]["bit-equal"] is False
    assert row["gradients"]["difference"] == pytest.approx(1, rel=0.01)  # of halves
    assert row["error at patch 1"][0] == pytest.approx(0.5, rel=0.01)
    assert row["error at patch 1"][1] < 1e-10


@needs_library
def test_the_copy_imports_nothing_of_this_version(installed):
    with older.renamed(installed) as place:
        assert (place / older.ALIAS / "__init__.py").is_file()
        for file in place.rglob("*.py"):
            assert not re.search(r"\bgradfilter\b", file.read_text(encoding="utf-8")), file
        libraries = [older.find_library(folder) for folder in (place / older.ALIAS, PACKAGE)]
        assert None not in libraries
        assert len(set(libraries)) == 2
    assert not place.exists()


def test_a_folder_without_the_package_is_an_error_of_one_line(tmp_path, capsys):
    assert main(["before", "--package", str(tmp_path), "--commit", "0123abc", *TINY]) == 2
    assert f"error: '{tmp_path}' holds no package gradfilter. Make one with: pip install" in capsys.readouterr().err


def test_a_copy_without_its_library_is_refused(installed, monkeypatch):
    for library in installed.rglob(older.LIBRARY):
        library.unlink()
    monkeypatch.delenv("GRADFILTER_NATIVE", raising=False)
    with pytest.raises(SettingsError, match=r"has no libgradfilter\.so, so it would run in torch alone\. Make one with"):
        before.measure(installed, "0123abc")
    monkeypatch.setenv("GRADFILTER_NATIVE", "0")
    with older.renamed(installed) as place:
        assert place.exists()
    monkeypatch.setenv("GRADFILTER_NATIVE_LIBRARY", "x.so")
    with pytest.raises(SettingsError, match="names one library for both versions"):
        before.measure(installed, "0123abc")


def test_the_commit_of_the_copy_must_be_known(installed):
    with pytest.raises(SettingsError, match="nothing says of which commit"):
        before.measure(installed)


def test_a_version_that_cannot_be_imported_says_so(tmp_path, monkeypatch):
    (tmp_path / older.ALIAS).mkdir()
    (tmp_path / older.ALIAS / "__init__.py").write_text("import nothing_of_this_name\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(
        GradFilterError, match=r"the older package cannot be imported .* No module named 'nothing_of_this_name'"
    ):
        older.import_older(tmp_path)


@pytest.mark.parametrize("given", [{"plans": ["all"]}, {"plans": ["all:patch0"]}, {"batches": [0]}, {"rounds": 1}])
def test_choices_are_checked(given):
    with pytest.raises(SettingsError, match=r"--plan is|at least"):
        before.make_choices(**given)


def test_quick_is_for_what_is_not_given():
    quick = before.make_choices(quick=True, batches=[4], models=None)
    assert (quick.models, quick.batches, quick.threads) == (("mobilenet_v2",), [4], (1,))
    assert before.make_choices() == before.Choices()


def test_versions_are_first_in_turns(monkeypatch):
    monkeypatch.setattr(before, "SHORT", 0)
    order = []
    runs = {name: lambda name=name: order.append(name) or Seconds(len(order), 0, 0) for name in "ab"}
    turns = before.alternate(runs, 3)
    assert "".join(order) == "baabbaab"
    assert {name: [step.forward for step in turn] for name, turn in turns.items()} == {"a": [3, 6, 7], "b": [4, 5, 8]}
