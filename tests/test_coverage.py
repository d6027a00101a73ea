"""The coverage table, and a sample of it: gradients right to 1e-8, and no exit where none is expected."""

import json
from importlib.util import find_spec

import pytest

from gradfilter.bench import coverage
from gradfilter.bench.__main__ import main
from gradfilter.bench.coverage import UNET, Candidate, CannotRunError, measure_candidate

pytestmark = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")

PIXELS = 64
SAMPLE = [
    "timm/test_resnet",
    "timm/test_byobnet",
    "timm/test_convnext",
    "timm/test_efficientnet",
    "timm/resnetv2_18",
    "timm/regnety_002",
    "timm/mobilenetv1_100",
    "timm/mobilenetv3_small_050",
    "timm/mobilenetv4_conv_small_050",
    "timm/ghostnet_050",
    "timm/cs3darknet_focus_s",
    "timm/dla46x_c",
    "timm/repvgg_a0",
    "torchvision/shufflenet_v2_x0_5",
    "torchvision/densenet121",
    "torchvision/lraspp_mobilenet_v3_large",
    UNET,
]
"""Small members of the families in which no unexpected exit may be."""


@pytest.mark.parametrize("name", SAMPLE)
def test_gradients_are_right_and_no_exit_is_unexpected(name):
    row = measure_candidate(Candidate("sample", [name]), PIXELS)
    assert row.failure == ""
    assert row.error <= 1e-8
    assert row.unexpected == {}
    assert row.exact > 4 * row.filtered


def test_the_command_writes_the_table(tmp_path, capsys):
    assert main(["--save", str(tmp_path), "coverage", "--only", "U-*", "--sample", "1", "--pixels", "32"]) == 0
    assert "U-Net" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "coverage.json").read_text())["rows"]
    assert row["network"].endswith("UNet")
    assert float(row["patch-1 error"]) <= 1e-8


def test_a_network_that_fails_is_a_row(monkeypatch):
    def fail(*_):
        raise RuntimeError("no | luck\nat all")

    monkeypatch.setattr(coverage, "measure_error", fail)
    report = coverage.measure("U-Net", pixels=32)
    assert "RuntimeError: no / luck" in report.rows[0]
    assert "all of which failed" in report.remarks[0]


def test_what_cannot_run_is_left_out():
    with pytest.raises(CannotRunError, match="two convolutions"):
        measure_candidate(Candidate("a transformer", ["timm/test_vit"]), 32)
    with pytest.raises(CannotRunError, match="at 2 px"):
        measure_candidate(Candidate("a U-Net", [UNET]), 2)
