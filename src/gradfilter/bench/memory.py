"""What autograd holds, and the peak memory of the process, beside exact backprop and plain inference."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from gradfilter.bench.report import Report
from gradfilter.bench.setup import EXACT, INFERENCE, make_batch, prepare
from gradfilter.cost import measure_saved_bytes, predict_saved_bytes
from gradfilter.models import make_model

METHODS = (EXACT, "patch 1", "patch 2", "patch 4", "patch 7", "grid 7", "grid 4", "grid 2", "patch 2 lumped")
PEAKS = (INFERENCE, EXACT, "patch 2", "patch 4", "grid 4")
MB = 1e6


def measure(model: str, batch: int, pixels: int, repeats: int) -> Report:
    """Return saved bytes by method, and peak memory where it is measured (each in fresh processes)."""
    report = Report(
        f"memory-{model}",
        f"Memory of a training step: {model}, all layers, batch {batch}, {pixels} px",
        f"python -m gradfilter.bench memory --model {model} --batch {batch} --pixels {pixels}",
        ("method", "saved MB", "predicted MB", "fewer bytes", "peak MB", "above import MB", "of inference"),
    )
    make_model(model)  # an unknown name is refused here, not in a child process
    images, _ = make_batch(batch, pixels)
    peaks = {method: measure_peak(model, method, batch, pixels, repeats) for method in PEAKS}
    exact = 0
    for method in (INFERENCE, *METHODS):
        saved = predicted = 0
        if method != INFERENCE:
            network = prepare(make_model(model).to(memory_format=torch.channels_last), method)  # type: ignore[call-overload]
            saved, predicted = measure_saved_bytes(network, images), predict_saved_bytes(network, images)
        exact = saved if method == EXACT else exact
        times = f"{exact / saved:.1f}x" if saved else "-"
        peak: tuple[str, str, str] = ("-", "-", "-")
        if method in peaks:
            total, above = peaks[method]
            peak = (f"{total:.0f}", f"{above:.0f}", f"{above / peaks[INFERENCE][1]:.2f}")
        report.rows.append((method, f"{saved / MB:.1f}", f"{predicted / MB:.1f}", times, *peak))
    report.remarks = [
        "Saved: what autograd holds after forward (saved_tensors_hooks, deduplicated by storage, parameters and buffers "
        "excluded). Batch norm in eval mode with its affine trained, on both sides.",
        f"Peak: highest resident memory of a process that does nothing else than {STEPS} such steps, median of {repeats} fresh "
        "processes; above import: less what it had after importing and building the model and the batch.",
    ]
    return report


STEPS = 3


def measure_peak(model: str, method: str, batch: int, pixels: int, repeats: int) -> tuple[float, float]:
    """Return the peak resident megabytes of a fresh process, and how far above its baseline: medians."""
    command = [sys.executable, "-m", "gradfilter.bench.memory", model, method, str(batch), str(pixels)]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() for _ in range(repeats)]
    totals, above = zip(*((float(total), float(total) - float(baseline)) for total, baseline in runs), strict=True)
    return sorted(totals)[repeats // 2], sorted(above)[repeats // 2]


def run_steps(model: str, method: str, batch: int, pixels: int) -> None:
    """Run a few steps and print the peak and the baseline of this process in megabytes."""
    network = prepare(make_model(model).to(memory_format=torch.channels_last), method)  # type: ignore[call-overload]
    images, labels = make_batch(batch, pixels)
    baseline = peak_megabytes()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for _ in range(STEPS):
        if method == INFERENCE:
            with torch.inference_mode():
                network(images)
        else:
            F.cross_entropy(network(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    print(peak_megabytes(), baseline)


def peak_megabytes() -> float:
    """Return the highest resident memory of this process so far."""
    try:  # ru_maxrss would start at what the process that started this one held
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1e3
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (MB if sys.platform == "darwin" else 1e3)


if __name__ == "__main__":
    run_steps(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
