"""Where the time of a step goes, operator by operator, beside inference and beside what the machine could do at best."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from gradfilter.apply import apply_
from gradfilter.bench.report import Report
from gradfilter.bench.setup import INFERENCE, make_images, parse_backward
from gradfilter.bench.traffic import count_bytes
from gradfilter.measure import median, silent
from gradfilter.models import make_model
from gradfilter.plan import Conv, Plan

MOST_ROWS = 9
REST = "(Python, and what no operator takes)"


def measure(model: str, choice: str, batch: int, pixels: int, rounds: int, threads: int) -> Report:
    """Return the operators that take longest in inference and in a step, and the bound of the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return profile_both(model, choice, batch, pixels, rounds, threads)
    finally:
        torch.set_num_threads(before)


def profile_both(model: str, choice: str, batch: int, pixels: int, rounds: int, threads: int) -> Report:
    """Return the report, at the number of threads that is set."""
    options = f"--model {model} --choice {choice.replace(' ', '')} --batch {batch} --pixels {pixels} --threads {threads}"
    report = Report(
        f"profile-{model}",
        f"Where the time goes: {model}, all layers, {choice}, batch {batch}, {pixels} px, {threads} thread(s)",
        f"python -m gradfilter.bench profile {options}",
        {"side": str, "operator": str, "calls": str, "ms": tenths, "share": lambda v: f"{v:.2f}", "MB": tenths, "GB/s": tenths},
    )
    images = make_images(batch, pixels).contiguous(memory_format=torch.channels_last)
    network = make_model(model).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    flops, moved = count_work(network, images)
    inference = make_inference(network, images)
    report.rows += find_rows(INFERENCE, inference, rounds)
    network = make_model(model).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    step = make_step(apply_(network, Plan.all(parse_backward(choice))), images)
    report.rows += find_rows(f"step, {choice}", step, rounds)
    speed, bandwidth = measure_machine()
    report.remarks = [
        f"The convolutions' forward is {flops / 1e9:.1f} G flops and reads and writes {moved / 1e6:.0f} MB of maps once. A "
        f"matrix product runs at {speed / 1e9:.0f} G flops a second here, a copy moves {bandwidth / 1e9:.1f} GB a second (read "
        f"and written): at best {flops / speed * 1e3:.0f} ms for the products, {moved / bandwidth * 1e3:.0f} ms for the maps.",
        f"Self times of torch's profiler, medians of {rounds} runs; gradfilter:: is the C library. The last row but one of a "
        "side is what its wall clock, without the profiler, has beyond its operators.",
        "MB is what an operator's tensors hold: each that it is given is read once, each that it returns or changes is written "
        "once, whether they are in a cache or not. Views, allocations and operators that hand their tensors on to others count "
        "nothing, nor does a map that stays in the library, such as the hidden one of gradfilter::expand. GB/s is MB by self "
        "time; of all, by the wall clock.",
    ]
    return report


def count_work(network: nn.Module, images: Tensor) -> tuple[int, int]:
    """Return the flops of a network's convolutions, and the bytes of the maps that they read and write."""
    totals = [0, 0]

    def look(module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        totals[0] += 2 * y.numel() * module.weight[0].numel()
        totals[1] += args[0].nbytes + y.nbytes

    handles = [layer.register_forward_hook(look) for layer in network.modules() if isinstance(layer, Conv)]
    with torch.inference_mode():
        network(images)
    for handle in handles:
        handle.remove()
    return totals[0], totals[1]


def make_inference(network: nn.Module, images: Tensor) -> Callable[[], Any]:
    """Return a function that runs a network forward."""

    def run() -> None:
        with torch.inference_mode():
            network(images)

    return run


def make_step(network: nn.Module, images: Tensor) -> Callable[[], Any]:
    """Return a function that does a training step; with a learning rate of 0 nothing diverges."""
    optimizer, labels = torch.optim.SGD(network.parameters(), lr=0.0), torch.zeros(len(images), dtype=torch.long)

    def run() -> None:
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def find_rows(side: str, run: Callable[[], Any], rounds: int) -> list[tuple[Any, ...]]:
    """Return a row for each of the operators that take longest, and one for the rest."""
    run()
    moved = count_bytes(run)
    found: list[dict[str, tuple[int, float]]] = []
    walls: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        walls.append((time.perf_counter() - start) * 1e3)
        with silent(), profiler(activities=[ProfilerActivity.CPU]) as profiled:
            run()
        found.append({e.key: (e.count, e.self_cpu_time_total / 1e3) for e in profiled.key_averages()})
    names = set.intersection(*(set(one) for one in found))
    times = {name: median([one[name][1] for one in found]) for name in names}
    wall = median(walls)
    # Functions of autograd are Python around operators that are counted by themselves.
    operators = sorted((name for name in names if name.startswith(("aten::", "gradfilter::"))), key=lambda n: -times[n])
    rest = wall - sum(times[name] for name in operators)
    groups = {name: [name] for name in operators[:MOST_ROWS]} | {"(other operators)": operators[MOST_ROWS:]}
    rows: list[tuple[Any, ...]] = []
    for title, group in groups.items():
        ms, size = sum(times[name] for name in group), sum(moved.get(name, 0) for name in group) / 1e6
        rows.append((side, title, sum(found[0][name][0] for name in group), ms, ms / wall, size, find_rate(size, ms)))
    size = sum(row[-2] for row in rows)
    return [*rows, (side, REST, "", rest, rest / wall, None, None), (side, "all", "", wall, 1.0, size, find_rate(size, wall))]


def find_rate(size: float, ms: float) -> float | None:
    """Return GB a second from MB and milliseconds; `None` where nothing moves."""
    return size / ms if size and ms else None


def tenths(value: float) -> str:
    """Return a number with one digit after the point."""
    return f"{value:.1f}"


def measure_machine() -> tuple[float, float]:
    """Return the flops a second of a large matrix product, and the bytes a second that a large copy reads and writes."""
    a, b, out = (torch.zeros(1024, 1024) for _ in range(3))
    x, y = (torch.zeros(1 << 25) for _ in range(2))

    def clock(run: Callable[[], Any]) -> float:
        run()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    product = median([clock(lambda: torch.mm(a, b, out=out)) for _ in range(9)])
    copy = median([clock(lambda: y.copy_(x)) for _ in range(9)])
    return 2 * 1024**3 / product, 2 * x.nbytes / copy
