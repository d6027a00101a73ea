"""The time of an epoch with the trunk cache and without it, alternating in one process."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import get_args

import torch.nn.functional as F

from gradfilter.bench.report import Report
from gradfilter.data import Data, load_data
from gradfilter.train import Settings
from gradfilter.train.batches import shuffle
from gradfilter.train.cache import Place
from gradfilter.train.job import Job, fill_in, prepare
from gradfilter.train.watch import Watch


def make_settings(data: Path, model: str, weights: str, plan: str) -> Settings:
    """Return the settings of a run whose images are the same each epoch."""
    return Settings(data=str(data.absolute()), model=model, weights=weights, plan=plan, patch=2, augment="none", device="cpu")


def measure(settings: Settings, label: str, rounds: int) -> Report:
    """Return the seconds per epoch by place of the cache: medians over rounds in which all places take turns.

    An epoch is what it is in training: images are read and transformed, or else rows of the cache are read; then forward,
    loss, backward and update. Held-out images are left out.
    """
    s = settings
    report = Report(
        f"cache-{s.model}-{s.plan}",
        f"Time of an epoch with the trunk cache: {s.model}, {s.plan}, {s.limit} images of {label}, batch {s.batch}, "
        f"{s.resolution} px, {s.threads} thread(s)",
        f"python -m gradfilter.bench cache --data FOLDER --weights FILE --label {label} --model {s.model} --plan {s.plan} "
        f"--pixels {s.resolution} --images {s.limit} --batch {s.batch} --rounds {rounds} --threads {s.threads}",
        ("cache", "seconds per epoch", "epoch / off", "seconds to fill", "pays after epochs", "cached MB"),
    )
    data, places = load_data(s.data), get_args(Place)
    times: dict[str, list[float]] = {place: [] for place in places}
    with tempfile.TemporaryDirectory() as work:
        jobs = {place: make_job(dataclasses.replace(s, out=f"{work}/{place}"), data) for place in places}
        filling = {place: fill(job, place, Path(work)) for place, job in jobs.items()}
        for epoch in range(rounds + 1):
            for place, job in jobs.items():
                seconds = run_epoch(job, epoch)
                if epoch:  # the first round warms up
                    times[place].append(seconds)
        report.rows += [make_row(place, times, filling[place], count_megabytes(job)) for place, job in jobs.items()]
    report.remarks = [
        "An epoch: images read, transformed, run forward, backward (patch 2), one SGD step per batch; from a cache, what the "
        "frozen layers made of them is read. Median over rounds, ratios within each round; the first round does not count. "
        "Filling includes checking the model. A cache pays after as many epochs as save the time that it took to fill.",
    ]
    return report


def make_job(settings: Settings, data: Data) -> Job:
    """Return a run that is ready to start."""
    return prepare(fill_in(settings), Watch(), data)


def fill(job: Job, place: Place, work: Path) -> float:
    """Fill the cache of the images to train on; return the seconds."""
    start = time.perf_counter()
    if place != "off":
        job.train.keep(place, work / "cache", job.watch)
    return time.perf_counter() - start


def run_epoch(job: Job, epoch: int) -> float:
    """Train for an epoch; return the seconds."""
    job.model.train()
    start = time.perf_counter()
    for labels, forward in job.train.run(shuffle(len(job.train.images), 0, epoch), epoch):
        F.cross_entropy(forward(), labels).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    return time.perf_counter() - start


def count_megabytes(job: Job) -> float:
    """Return the size of a run's cache."""
    columns = job.train.cache.columns if job.train.cache else ()
    return sum(column.nbytes for column in columns) / 1e6


def make_row(place: str, times: dict[str, list[float]], filling: float, megabytes: float) -> tuple[str, ...]:
    """Return the row of a place."""
    seconds = statistics.median(times[place])
    if place == "off":
        return place, f"{seconds:.2f}", "1.00", "", "", ""
    ratio = statistics.median(own / off for own, off in zip(times[place], times["off"], strict=True))
    saved = statistics.median(times["off"]) - seconds
    pays = f"{filling / saved:.1f}" if saved > 0 else "never"
    return place, f"{seconds:.2f}", f"{ratio:.3f}", f"{filling:.2f}", pays, f"{megabytes:.1f}"
