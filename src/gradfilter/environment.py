"""What a measured number depends on besides the code."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

import gradfilter


def find_environment() -> dict[str, str]:
    """Return what a number depends on besides the code: machine, threads, versions, commit."""
    return {
        "cpu": find_cpu(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gradfilter": gradfilter.__version__,
        "commit": find_commit(),
    }


def find_cpu() -> str:
    """Return the processor's name and its widest vector instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def find_commit() -> str:
    """Return the commit of the checkout this runs from, marked where files differ from it."""
    package = Path(gradfilter.__file__).parent
    head, status = (
        subprocess.run(["git", *command], cwd=package, check=False, capture_output=True, text=True)
        for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", "."])
    )
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + ("+changes" if status.stdout.strip() else "")
