"""The C library on ARM, where most small machines are: built and run for aarch64, it gives the numbers that it gives here."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import gradfilter

NATIVE = Path(gradfilter.__file__).parent / "ops" / "native"
FLAGS = "-std=gnu11 -O3 -ffp-contract=fast -Wno-psabi -Wall -Wextra -Werror -DGF_SUFFIX=base".split()
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"

TOOLS = ("cc", CROSS, EMULATOR)
needs_tools = pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}")


def run(folder: Path, compiler: list[str], emulator: list[str]) -> np.ndarray:
    """Return what the library computes, built by a compiler."""
    driver = folder / f"driver-{compiler[0]}"
    sources = [Path(__file__).with_name("native_driver.c"), *sorted(NATIVE.glob("*.c"))]
    subprocess.run([*compiler, *FLAGS, f"-I{NATIVE}", *sources, "-o", driver, "-lpthread", "-lm"], check=True, timeout=300)
    done = subprocess.run([*emulator, driver], check=True, capture_output=True, timeout=300)
    return np.frombuffer(done.stdout, dtype=np.float32)


@needs_tools
def test_it_gives_the_same_numbers_on_arm(tmp_path):
    here, there = run(tmp_path, ["cc"], []), run(tmp_path, [CROSS, "-static"], [EMULATOR])
    assert here.size == there.size > 1_400_000
    np.testing.assert_allclose(there, here, rtol=1e-5, atol=1e-4)  # sums are added in another order, of numbers up to 100
