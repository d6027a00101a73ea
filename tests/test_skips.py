"""The end of a run says what was skipped."""

import os
import subprocess
import sys
from pathlib import Path

from skips import describe_skips


def test_skips_are_counted_by_what_is_missing():
    reasons = ["chromium is not installed", "needs cc, aarch64-linux-gnu-gcc, qemu-aarch64-static", "a bad number"]
    reasons += ["the shared data is absent", "shared data is absent: /here (set GRADFILTER_SHARED)", "timm is not installed"]
    reasons += ["could not import 'onnxruntime': No module named 'onnxruntime'"]
    lines = describe_skips(reasons)
    assert lines[0].startswith("    2 for want of real images and weights: put pets.tar.gz")
    assert "    1 for want of Chromium: apt-get install chromium" in lines
    assert "    1 for want of ONNX Runtime: pip install --constraint constraints.txt --editable '.[bench]'" in lines
    assert "    1 for want of a Python package: make setup (-rs says which one)" in lines
    assert "    1 for other reasons: -rs lists them" in lines
    assert len(lines) == 6


def test_the_end_of_a_run_says_it():
    tests = [
        "tests/test_switch.py::test_it_nests_and_comes_back_after_errors",
        "tests/test_frozen.py",
        "-p",
        "no:cacheprovider",
    ]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env={**os.environ, "GRADFILTER_NATIVE": "0"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "= tests skipped =" in run.stdout
    end = run.stdout.partition("tests skipped")[2]
    assert "for want of the C library: leave GRADFILTER_NATIVE unset" in end
    assert "for other reasons" not in end
    assert "2 passed" in end
