"""The benchmarks and the example run, and what they print hangs together. No times are checked."""

import json
import os
import re
import runpy
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data_folders import make_classes, make_files, write_image
from gradfilter.bench import accuracy, approximation, keeps
from gradfilter.bench.__main__ import main
from gradfilter.bench.fidelity import measure
from gradfilter.bench.report import Report
from gradfilter.cost import measure_saved_bytes
from gradfilter.errors import GradFilterError
from gradfilter.keep import parse_keep
from gradfilter.models.torchvision_ops import declare_torchvision_ops
from segment_runs import make_scenes

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("GRADFILTER_SHARED", ROOT.parent / "shared" / "data"))
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def noise(tmp_path):
    """A folder with noise of two classes."""
    generator = np.random.default_rng(0)
    for number in range(6):
        write_image(tmp_path / f"noise/{'ab'[number % 2]}/{number}.png", generator.integers(0, 256, (9, 9, 3), np.uint8))
    return tmp_path / "noise"


def test_keeps_benchmark(noise, tmp_path):
    args = ["--save", str(tmp_path / "out"), "keeps", "--data", str(noise), "--label", "noise", "--weights", "random"]
    assert main([*args, "--batch", "5", "--pixels", "64", "--rounds", "1"]) == 0
    steps, overhead = (json.loads((tmp_path / "out" / f"keeps{n}-mcunet-in3.json").read_text()) for n in ("", "-overhead"))
    assert "random weights, noise, batch 5, 64 px" in steps["title"]
    assert [(row["trained"], row["method"]) for row in steps["rows"]] == [
        (f"last {depth}", method) for depth in (2, 4) for method in keeps.METHODS
    ]
    for depth in (2, 4):
        rows = {row["method"]: row for row in steps["rows"] if row["trained"] == f"last {depth}"}
        assert {rows["exact"][f"{part} / exact"] for part in ("step", "forward", "backward")} == {"1.00"}
        fewer = {method: float(row["times fewer"]) for method, row in rows.items()}
        assert fewer["exact"] == 1 < fewer["patch 1"] < min(fewer["HOSVD 0.8"], fewer["SVD 0.8"], fewer["Int8"])
        assert fewer["lift, patch 2"] < min(fewer["lift, patch 2 × Int8"], fewer["lift, patch 2 × HOSVD 0.8"])
    *layers, total = overhead["rows"]
    assert [row["layer"] for row in layers] == ["blocks.16.project.conv", *(f"blocks.17.{name}.conv" for name in PARTS)]
    assert layers[-1]["input"] == "5×480×2×2"
    for name in (keeps.FULL_SVDS, *keeps.COMPRESSED):  # one round: the median of sums is the sum of medians
        assert float(total[f"{name}, ms"]) == pytest.approx(sum(float(row[f"{name}, ms"]) for row in layers), abs=0.03)


PARTS = ("expand", "depthwise", "project")


def test_subspace_is_compared_at_the_bytes_of_hosvd(noise):
    images, labels, classes = keeps.load_batch(noise, "mcunet-in3", 6, 64)
    network = keeps.make_network("mcunet-in3", "random", classes)
    inputs = keeps.find_inputs(network, 4, images)
    assert classes == 2
    assert sorted(labels.tolist()) == [0, 0, 0, 1, 1, 1]
    for layer, x in inputs.items():
        shapes = [
            [tensor.shape for tensor in keeps.COMPRESSED[name].compress(x, keeps.State(layer)).tensors]
            for name in ("HOSVD 0.8", "Subspace 0.8")
        ]
        assert len(shapes[0]) > 1, layer
        assert shapes[0] == shapes[1], layer
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    trial = keeps.make_trial(network, 2, keeps.METHODS["Subspace 0.8"], images, labels)
    trial.step()
    for state in (network.state_dict(), trial.model.state_dict()):  # neither what is measured nor its copies move
        assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())


def test_a_model_has_its_usual_size_of_batch(noise, monkeypatch):
    sizes = []
    monkeypatch.setattr(keeps, "measure_steps", lambda report, network, images, *_: sizes.append(images.shape) or report)
    monkeypatch.setattr(keeps, "measure_overhead", lambda report, *_: report)
    (noise / "b" / "5.png").unlink()
    for model in ("mcunet-in3", "resnet18"):
        reports = keeps.measure(noise, "noise", model, "random", None, None, 1, 1)
        assert [report.name for report in reports] == [f"keeps-{model}", f"keeps-overhead-{model}"]
    assert [tuple(size) for size in sizes] == [(5, 3, 176, 176), (5, 3, 224, 224)]  # there are but five images
    assert "--batch 32 --pixels 224" in reports[0].command


@pytest.mark.shared
def test_hosvd_holds_a_fiftieth_of_exact(tmp_path):
    """MCUNet, last four, batch 128: all that autograd holds, on CIFAR-10, or else on pets as small as its images."""
    weights, images, pets = (SHARED / name for name in ("weights/mcunet-in3.pth", "cifar10/test", "pets.tar.gz"))
    if not weights.exists() or not (images.exists() or pets.exists()):
        pytest.skip(f"shared data is absent: {weights}, {images} or {pets} (set GRADFILTER_SHARED)")
    if not images.exists():
        images = tmp_path / "images"
        images.mkdir()
        with tarfile.open(pets) as tar:
            tar.extractall(tmp_path, [m for m in tar.getmembers() if m.name.endswith(".jpg")][::40], filter="data")
        for file in tmp_path.rglob("*.jpg"):
            Image.open(file).resize((32, 32)).save(images / f"{file.stem}.png")
    batch, labels, classes = keeps.load_batch(images, "mcunet-in3", 128, 176)
    assert len(batch) == 128
    network = keeps.make_network("mcunet-in3", str(weights), classes)
    trials = {name: keeps.make_trial(network, 4, keeps.METHODS[name], batch, labels) for name in ("exact", "HOSVD 0.8")}
    held = {name: measure_saved_bytes(trial.model, batch) for name, trial in trials.items()}
    assert 0 < 50 * held["HOSVD 0.8"] <= held["exact"]


def test_an_empty_folder_is_an_error_of_one_line(tmp_path, capsys):
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
    methods = ["patch 2 lumped", "patch 2", *(f"grid {n}" for n in (14, 7, 4, 2))]
    report = measure(tmp_path, "pets", batch=32, batches=1, blocks=9, pixels=224, methods=methods)
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
    assert (tmp_path / "accuracy-colours-cifar-resnet20-last2.png").read_bytes().startswith(PNG)


def test_runs_of_the_accuracy_benchmark_have_folders_of_their_own(tmp_path):
    """Those of earlier benchmarks are found again; every method is a plan that can be read."""
    depth = accuracy.Depth("last4", 100, 1, 0.1, 8, "off", 0.1)
    settings = {
        method: accuracy.make_settings(tmp_path, "mcunet-in3", "random", depth, 1, tmp_path, method, choices)
        for method, choices in accuracy.choose_methods(["*"], depth).items()
    }
    folders = [one.folder.name for one in settings.values()]
    assert folders[:4] == [f"last4-{name}-seed1" for name in ("headonly", "exact", "lift-patch2", "lift-patch4")]
    assert {"last4-lift-patch2-Int8-seed1", "last4-lift-patch2-HOSVD0.8-seed1"} <= set(folders)
    assert len(set(folders)) == len(folders) == len(accuracy.METHODS) + 1
    assert all(name.isascii() for name in folders)
    plans = {method: one.make_plan().layers["last 4"] for method, one in settings.items() if method != accuracy.HEAD}
    assert plans["Subspace 0.8"].keep == parse_keep("subspace:0.8")
    assert (plans["HOSVD 0.9"].patch, str(plans["HOSVD 0.9"].keep)) == (1, "hosvd:0.9")
    assert (plans["lift, patch 2 × Int8"].patch, str(plans["lift, patch 2 × Int8"].keep)) == (2, "int8")


def test_a_part_of_the_methods_can_be_chosen():
    depth = accuracy.Depth("last4", None, 1, 0.1, 8, "off", 0.1)
    assert list(accuracy.choose_methods(["hosvd*", "*patch 7"], depth)) == [
        *("exact", "lift, patch 7", "lumped, patch 7", "HOSVD 0.8", "HOSVD 0.9"),
    ]
    calibrated = accuracy.Depth("last4", None, 1, 0.1, 8, "off", 0.1, calibrate=True)
    assert list(accuracy.choose_methods(["Int8"], calibrated)) == ["head only", "exact", "Int8"]
    assert "--methods 'hosvd*' Int8" in accuracy.make_command("x", "net", depth, 3, ["hosvd*", "Int8"])
    assert "--methods" not in accuracy.make_command("x", "net", depth, 3, ["*"])
    with pytest.raises(GradFilterError, match=r"--methods 'hovsd\*' is none of the methods, which are: head only; exact; lift"):
        accuracy.choose_methods(["hovsd*"], depth)


def test_a_report_without_a_picture_writes_none(tmp_path):
    Report("name", "title", "command", ("a",), [("1",)]).save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["name.json", "name.md"]


def test_segmentation_networks_have_a_row_for_each_depth(tmp_path, capsys):
    declare_torchvision_ops()
    pytest.importorskip("segmentation_models_pytorch")
    make_scenes(tmp_path / "scenes", train=4, val=2)
    sizes = ["--batch", "2", "--batches", "1", "--pixels", "32", "--steps", "1", "--only", "DeepLabV3-MBV2"]
    assert main(["--save", str(tmp_path), "segment", "--data", str(tmp_path / "scenes"), "--label", "scenes", *sizes]) == 0
    rows = json.loads((tmp_path / "segment-scenes.json").read_text())["rows"]
    assert [row["layers"] for row in rows] == [5, 10]
    for row in rows:
        assert float(row["cosine lift"]) > 0.5
        assert float(row["MB lift"]) < float(row["MB exact"])
        assert "decoder.branches.3 9" in row["patch sizes"]
    assert "DeepLabV3-MBV2" in capsys.readouterr().out
