"""The package without its C library: an install with no compiler, and a compiler that fails."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARM = "aarch64-linux-gnu-gcc"
AARCH64 = b"\xb7\x00"  # the machine in the header of an ELF file
pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake on this machine")


def build(folder: Path, *options: str, **environment: str) -> tuple[list[str], str]:
    """Configure and install the project as pip does; return the installed files and what was said."""
    said = ""
    commands = (
        ["cmake", "-S", str(ROOT), "-B", str(folder / "build"), "-DCMAKE_INSTALL_PREFIX=" + str(folder / "out"), *options],
        ["cmake", "--build", str(folder / "build")],
        ["cmake", "--install", str(folder / "build")],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=600)
        said += done.stdout + done.stderr
        assert done.returncode == 0, said
    return [path.name for path in (folder / "out").rglob("*") if path.is_file()], said


def test_no_compiler(tmp_path):
    files, said = build(tmp_path, CC=str(tmp_path / "no-such-compiler"))
    assert files == []
    assert "without its C library" in said


def test_a_compiler_that_fails(tmp_path):
    # It passes cmake's own trial, then fails on the library's sources.
    compiler = shutil.which("cc") or pytest.skip("no compiler on this machine")
    broken = tmp_path / "cc"
    broken.write_text(
        f'#!/bin/sh\ncase "$*" in *rows.c*) echo "cannot compile rows.c" >&2; exit 1;; esac\nexec {compiler} "$@"\n'
    )
    broken.chmod(0o755)
    files, said = build(tmp_path, CC=str(broken))
    assert files == []
    assert "cannot compile rows.c" in said


def test_switched_off(tmp_path):
    assert build(tmp_path, "-DGRADFILTER_NATIVE=OFF")[0] == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler on this machine")
def test_a_compiler(tmp_path):
    assert build(tmp_path)[0] == ["libgradfilter.so"]


@pytest.mark.skipif(shutil.which(ARM) is None, reason=f"no {ARM} on this machine")
def test_another_processor(tmp_path):
    """A Raspberry Pi's: compiled here without a warning. test_native_arm.py runs it."""
    options = (
        f"-DCMAKE_C_COMPILER={ARM}",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_BUILD_TYPE=Debug",
    )
    source = ROOT / "src" / "gradfilter" / "native"
    for command in (["cmake", "-S", str(source), "-B", str(tmp_path), *options], ["cmake", "--build", str(tmp_path)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
    assert (tmp_path / "libgradfilter.so").read_bytes()[18:20] == AARCH64
