"""What a measured number depends on besides the code."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import lru_cache
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


@lru_cache(maxsize=1)
def has_bfloat16() -> bool:
    """Tell whether the processor multiplies in bfloat16, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def find_commit() -> str:
    """Return the commit of the checkout this runs from, marked where files differ from it; "unknown" elsewhere."""
    package = Path(gradfilter.__file__).parent

    def ask(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=package, check=True, capture_output=True, text=True).stdout.strip()

    try:
        if Path(ask("rev-parse", "--show-toplevel")) != package.parents[1]:
            return "unknown"  # installed inside the checkout of something else
        return ask("rev-parse", "--short", "HEAD") + ("+changes" if ask("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def find_free_memory() -> int:
    """Return how many bytes of memory can be had; what the system keeps of files, and would give, counts where it tells."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        known = os.sysconf_names if hasattr(os, "sysconf_names") else {}
        pages = next((name for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in known), None)
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if pages else sys.maxsize
