"""The package without its C library: an install with no compiler, and a compiler that fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gradfilter as gf
from gradfilter.ops import native
from helpers_safety import applied, assert_close, assert_differ, gradients, make_images, make_net, plain

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


@pytest.mark.skipif(shutil.which(ARM) is None, reason=f"no {ARM} on this machine")
def test_another_processor(tmp_path):
    """A Raspberry Pi's: compiled here without a warning. test_native_arm.py runs it."""
    options = (
        f"-DCMAKE_C_COMPILER={ARM}",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_BUILD_TYPE=Debug",
    )
    source = ROOT / "src" / "gradfilter" / "ops" / "native"
    for command in (["cmake", "-S", str(source), "-B", str(tmp_path), *options], ["cmake", "--build", str(tmp_path)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
    assert (tmp_path / "libgradfilter.so").read_bytes()[18:20] == AARCH64


SOURCES = ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml")
DROPPED = ("CMAKE_", "SKBUILD_", "GRADFILTER_", "PYTHON")
STEP = """
import sys
import torch
import gradfilter as gf
from gradfilter.ops import native
from helpers_safety import applied, gradients, make_images, make_net
torch.set_num_threads(1)
model = applied(make_net(dtype=torch.float32), gf.Backward(patch=4))
found = {"package": gf.__file__, "library": native.load() is not None, "on": native.is_on()}
found["gradients"] = gradients(model, make_images(size=(35, 31), dtype=torch.float32))
torch.save(found, sys.argv[1])
"""


def install_and_step(folder: Path, **environment: str) -> tuple[dict[str, Any], str]:
    """Install the package by pip and train a step with it; return what that process found and what pip said.

    The sources are a copy, since a checkout may hold a library. `-S` leaves out the path files of site-packages, of which one
    leads to the checkout.
    """
    pytest.importorskip("scikit_build_core", reason="the package is built by scikit-build-core")
    source, target, out = folder / "source", folder / "target", folder / "found.pt"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)} | environment
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--verbose", "--target", str(target)]
    pip = [sys.executable, "-m", "pip", "install", *options, str(source)]
    installed = subprocess.run(pip, capture_output=True, text=True, env=clean, timeout=600)
    said = installed.stdout + installed.stderr
    assert installed.returncode == 0, said
    clean["PYTHONPATH"] = os.pathsep.join([str(target), *filter(None, sys.path)])
    step = [sys.executable, "-S", "-W", "error", "-c", STEP, str(out)]
    stepped = subprocess.run(step, capture_output=True, text=True, env=clean, cwd=folder, timeout=600)
    assert stepped.returncode == 0, stepped.stderr
    found = torch.load(out)
    assert Path(found["package"]).is_relative_to(target)
    return found, said


def libraries(folder: Path) -> list[str]:
    """Return the libraries that were installed."""
    return [path.relative_to(folder / "target").as_posix() for path in folder.glob("target/**/*.so")]


def check_step(found: dict[str, Any]) -> None:
    """Compare gradients with those of this process in torch alone, and make sure that they are of a patch."""
    net, images = make_net(dtype=torch.float32), make_images(size=(35, 31), dtype=torch.float32)
    with native.off():
        expected = gradients(applied(net, gf.Backward(patch=4)), images)
    assert_close(found["gradients"], expected, 1e-5)
    assert_differ(found["gradients"], gradients(plain(net), images), "block1.conv1.weight")


def test_an_install_without_a_compiler_trains(tmp_path):
    missing = str(tmp_path / "no-such-compiler")
    found, said = install_and_step(tmp_path, CC=missing, CXX=missing)
    assert "without its C library" in said
    assert libraries(tmp_path) == []
    assert not found["library"]
    check_step(found)


@pytest.fixture
def quick_compiler(tmp_path) -> str:
    """Return a compiler that does not optimise, so that the library is built sooner."""
    compiler = shutil.which("cc") or pytest.skip("no compiler on this machine")
    quick = tmp_path / "quick-cc"
    quick.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    quick.chmod(0o755)
    return str(quick)


def test_an_install_with_a_compiler_trains_with_the_library(tmp_path, quick_compiler):
    found, said = install_and_step(tmp_path, CC=quick_compiler)
    assert "without its C library" not in said
    assert libraries(tmp_path) == ["gradfilter/ops/native/libgradfilter.so"]
    assert found["on"]
    check_step(found)
