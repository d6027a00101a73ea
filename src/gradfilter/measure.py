"""Measure a piece of work: time in turns, what torch's allocator gives out, what the process holds."""

from __future__ import annotations

import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gradfilter.ops import native

T = TypeVar("T")
ROUNDS = 5
MOST_SHARE = 0.5
"""A step is measured where it takes at most this share of the memory that is free: it must not end the process."""
STATM = Path("/proc/self/statm")


def take_turns(runs: dict[str, Callable[[], T]], rounds: int = ROUNDS) -> dict[str, list[T]]:
    """Return what each run says, round by round; a first round warms up."""
    turns = [{name: run() for name, run in runs.items()} for _ in range(rounds + 1)][1:]
    return {name: [turn[name] for turn in turns] for name in runs}


def find_time(images: Tensor) -> float:
    """Return the time, once all work on the images' device is done."""
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
    return time.perf_counter()


def median(values: list[float]) -> float:
    """Return the median, NaN of nothing."""
    return statistics.median(values) if values else math.nan


def measure_peak(run: Callable[[], Any], device: torch.device) -> int:
    """Return the most bytes that torch's allocator has given out at once in `run()`, beyond those before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # On a CPU the allocator keeps no tally, but tells a profiler of every block that it gives and takes back.
    # Memory that is used again comes from elsewhere: for once, all of it is torch's.
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with silent():
        profiler.start()
    try:
        with native.plain_memory():
            run()
    finally:
        with silent():
            profiler.stop()
    results: Any = profiler.profiler and profiler.profiler.kineto_results
    now = peak = 0
    for event in results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@contextmanager
def silent() -> Iterator[None]:
    """Send what native code writes to standard error nowhere: torch's profiler greets and takes its leave there."""
    try:
        screen = os.dup(2)
    except OSError:  # closed
        yield
        return
    if sys.stderr is not None:
        sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(screen, 2)
        os.close(nowhere)
        os.close(screen)


def measure_rss(run: Callable[[], Any], pause: float = 0.001) -> int | None:
    """Return the most bytes that the process had resident in `run()`, looked at every millisecond; None where nobody tells.

    That is libraries, parameters, other people's tensors and what the C library keeps for later too.
    """
    if not STATM.exists():
        run()
        return None
    done, seen = threading.Event(), [find_rss()]

    def watch() -> None:
        while not done.wait(pause):
            seen.append(find_rss())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return max(seen)


def find_rss() -> int:
    """Return the bytes that the process has resident now, on Linux."""
    return int(STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
