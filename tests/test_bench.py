"""The benchmarks and the example run, and what they print hangs together. No times are checked."""

import json
import os
import re
import runpy
import tarfile
from pathlib import Path

import pytest
import torch

from data_folders import make_classes, make_files
from gradfilter.bench import accuracy, approximation
from gradfilter.bench.__main__ import main
from gradfilter.bench.fidelity import measure

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("GRADFILTER_SHARED", ROOT.parent / "shared" / "data"))


def read_rows(folder):
    (file,) = folder.glob("*.json")
    return {row["method"]: row for row in json.loads(file.read_text())["rows"]}


def test_memory_benchmark(tmp_path, capsys):
    args = ["--save", str(tmp_path), "memory", "--model", "mcunet-in3", "--batch", "2", "--pixels", "64", "--rounds", "1"]
    assert main(args) == 0
    rows = read_rows(tmp_path)
    assert "| patch 4 " in capsys.readouterr().out
    saved = {method: float(row["saved MB"]) for method, row in rows.items()}
    assert saved["exact"] > saved["patch 1"] > saved["patch 2"] > saved["patch 4"] > 0
    assert all(row["saved MB"] == row["predicted MB"] for row in rows.values())
    assert float(rows["exact"]["peak MB"]) > float(rows["exact"]["above import MB"]) > 0


def test_step_benchmark(tmp_path):
    args = ["--save", str(tmp_path), "step", "--model", "mcunet-in3", "--batch", "1", "--pixels", "48", "--rounds", "1"]
    assert main(args) == 0
    rows = read_rows(tmp_path)
    assert rows["inference"]["step / inference"] == rows["exact"]["step / exact"] == "1.00"


def test_an_unknown_model_or_an_empty_folder_is_an_error_of_one_line(tmp_path, capsys):
    assert main(["memory", "--model", "no-such-net"]) == 2
    assert "no-such-net" in capsys.readouterr().err
    assert main(["fidelity", "--data", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_the_example_learns(capsys):
    runpy.run_path(str(ROOT / "examples" / "own_loop.py"), run_name="__main__")
    *lines, last = capsys.readouterr().out.splitlines()
    losses = [float(line.removeprefix("loss ")) for line in lines]
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0]
    held, exact = (float(number) for number in re.findall(r"([\d.]+) MB", last))
    assert exact > 10 * held


@pytest.mark.shared
def test_lift_is_close_to_exact_on_photographs(tmp_path):
    """EfficientNet-Lite0, last nine blocks, one batch of pets: the lift is close where the lumped kernel is not."""
    archive = SHARED / "pets.tar.gz"
    if not archive.exists():
        pytest.skip(f"shared data is absent: {archive} (set GRADFILTER_SHARED)")
    with tarfile.open(archive) as tar:
        photographs = [m for m in tar.getmembers() if m.name.endswith(".jpg")]
        tar.extractall(tmp_path, photographs[::9], filter="data")  # all breeds
    report = measure(tmp_path, "pets", batch=32, batches=1, blocks=9, pixels=224)
    rows = {row[0]: dict(zip(report.columns, row, strict=True)) for row in report.rows}
    whole = {method: float(row["cosine, all trained"]) for method, row in rows.items()}
    kernels = {method: float(row["cosine, conv weights"]) for method, row in rows.items()}
    assert whole["patch 2"] >= 0.93
    assert whole["grid 4"] >= 0.92
    assert kernels["patch 2"] >= kernels["patch 2 lumped"] + 0.1
    assert kernels["grid 14"] > kernels["grid 7"] > kernels["grid 4"] > kernels["grid 2"]


def test_approximation_is_held_against_the_projected_jacobian():
    x, gy = (torch.randn(2, 5, 6, 6, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    for function in approximation.FUNCTIONS.values():
        assert approximation.compare(function, x, gy, (1, 1)) == pytest.approx((1, 0), abs=1e-5)
        cosine, error = approximation.compare(function, x, gy, (3, 3))
        assert 0.5 < cosine < 0.9999
        assert error > 0.01


def test_accuracy_benchmark_pairs_methods_and_keeps_runs(tmp_path, capsys, monkeypatch):
    data = make_files(tmp_path / "colours", {**make_classes("train/", a=6, b=6), **make_classes("test/", a=4, b=4)})
    monkeypatch.setattr(accuracy, "METHODS", {name: accuracy.METHODS[name] for name in ("exact", "lift, patch 2")})
    arguments = ["--save", str(tmp_path), "accuracy", "--data", str(data), "--label", "colours", "--model", "cifar-resnet20"]
    arguments += [
        "--weights",
        "random",
        "--plan",
        "last2",
        "--epochs",
        "1",
        "--batch",
        "4",
        "--seeds",
        "2",
        "--cache",
        "memory",
    ]
    arguments += ["--calibrate", "--work", str(tmp_path / "runs")]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    rows = json.loads((tmp_path / "accuracy-colours-cifar-resnet20-last2.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["head only", "exact", "lift, patch 2"]
    assert rows[1]["step / exact"] == "1.00"
    assert float(rows[2]["times fewer"]) > 1
    assert "--calibrate" in first
    stored = json.loads((tmp_path / "runs" / "last2-lift-patch2-seed1" / "results.json").read_text())
    assert stored["settings"]["weights"].endswith("last2-headonly-seed1/best.safetensors")
    monkeypatch.setattr(accuracy, "train", lambda *_, **__: pytest.fail("a run that is done was run again"))
    assert main(arguments) == 0
    assert capsys.readouterr().out == first
