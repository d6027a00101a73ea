"""Train: the loop, from the first batch or from the last checkpoint, to the report."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gradfilter.cost import count_saved
from gradfilter.data import Data
from gradfilter.environment import find_environment
from gradfilter.errors import CheckpointError, GradFilterError, SettingsError
from gradfilter.files import replace_file
from gradfilter.outputs import explain_failure, find_logits
from gradfilter.report import Beside, Cost, Epoch, Results, write_report
from gradfilter.scores import find_mean_accuracy
from gradfilter.train.batches import STEP, explain_workers, seeded, shuffle
from gradfilter.train.cache import Cache
from gradfilter.train.checkpoint import (
    load_checkpoint,
    pack_keeps,
    pack_optimizer,
    save_checkpoint,
    unpack_keeps_,
    unpack_optimizer_,
)
from gradfilter.train.feed import untouched
from gradfilter.train.folder import (
    BEST,
    CONFIG,
    LAST,
    METRICS,
    PLAN,
    RESULTS,
    check_run,
    load_last,
    refuse_changes,
    remove_run,
    writing,
)
from gradfilter.train.interrupt import InterruptedRunError, interruptible
from gradfilter.train.job import Job, fill_cache, fill_in, prepare
from gradfilter.train.judge import Judged, find_samples, judge
from gradfilter.train.lock import Lock
from gradfilter.train.measure import measure_cost
from gradfilter.train.settings import Settings
from gradfilter.train.task import find_task
from gradfilter.train.watch import Step, Watch, write_csv


class DivergedError(GradFilterError, RuntimeError):
    """Report a loss that is no number any more."""


@dataclass
class State:
    """How far a run is: with settings, weights and the states of optimizer and keeps, all that its future depends on.

    Attributes:
        epoch: The epoch at work, from 0.
        batch: Batches of it that are done.
        loss: Their summed loss, and
        right: how many of their images' worth were right, as the task counts it.
        images: How many these were.
        seconds: Time spent in this epoch.
        history: The epochs that are done.
        best_epoch: The one with the best held-out accuracy, from 1.
    """

    epoch: int = 0
    batch: int = 0
    loss: float = 0.0
    right: float = 0
    images: int = 0
    seconds: float = 0.0
    history: list[Epoch] = field(default_factory=list)
    best_epoch: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)

    def finish_epoch(self, epoch: Epoch, is_best: bool) -> None:
        """Go on to the next epoch."""
        self.history.append(epoch)
        self.best_epoch = epoch.epoch if is_best else self.best_epoch
        self.epoch, self.batch, self.loss, self.right, self.images, self.seconds = epoch.epoch, 0, 0.0, 0, 0, 0.0

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> State:
        """Return the state from plain data."""
        return cls(**{**data, "history": [Epoch(**epoch) for epoch in data["history"]]})


def train(
    settings: Settings, watch: Watch | None = None, data: Data | None = None, shared: dict[str, Cache] | None = None
) -> Results:
    """Fine-tune a model as the settings say; return what came of it.

    Args:
        settings: What to train, on what, and how.
        watch: Is told what happens.
        data: Images that are loaded already, in place of those that the settings name.
        shared: Trunk caches in memory that runs of one process share: give all of them the same, empty at first.

    The folder of the run gets the resolved settings (config.yaml), the plan, metrics.csv, the best weights
    (best.safetensors, which loads into a plain model), the last checkpoint, results.json and the report.

    Raises:
        InterruptedRunError: Ctrl-C or SIGTERM; the checkpoint to go on from was written before.
        GradFilterError: Anything else that a user can mend, as the text says.
    """
    watch = watch or Watch()
    settings = fill_in(settings)
    watch.metric = find_task(settings.task).metric
    with Lock(settings.folder) as lock, explain_workers():
        check_run(settings)
        beside = find_beside(settings)
        job = prepare(settings, watch, data)
        if lock.take():  # the folder was made only now: another run may have come and gone
            check_run(settings)
        state = restore(job) if settings.resume else State()
        try_step(job)
        fill_cache(job, shared)
        write_config(job)
        watch.tell(describe_size(job))
        best: Judged | None = None
        with interruptible() as stop:
            while state.epoch < job.settings.epochs:
                train_epoch(job, state, stop)
                best = finish_epoch(job, state) or best
                if stop:
                    raise InterruptedRunError(f"stopped after epoch {state.epoch} of {job.settings.epochs}")
        return finish(job, state, best, beside)


def try_step(job: Job) -> None:
    """Run the model on a batch, before anything is written: it must take the images, and give a score for each class."""
    images, labels = job.train.make_batch(job.settings.batch)
    there = [*job.model.parameters(), *job.model.buffers()]

    def forward() -> Any:
        outputs = job.model(images)
        job.task.check_output(job.settings.model, find_logits(outputs), images, len(job.data.train.classes))
        return outputs, job.loss(outputs, labels)

    job.model.train()
    where = "in training mode. Does it take such images? See --resolution and --batch"
    with untouched(job.model), explain_failure(images, where), job.fabric.autocast():
        job.saved_bytes = count_saved(forward, there)


def train_epoch(job: Job, state: State, stop: list[int]) -> None:
    """Train on what is left of an epoch."""
    job.model.train()
    settings, count = job.settings, len(job.data.train)
    order = shuffle(count, settings.seed, state.epoch)
    begin = time.perf_counter() - state.seconds
    for labels, forward in job.train.run(order, state.epoch, state.batch):
        step = state.epoch * job.batches + state.batch
        for group in job.optimizer.param_groups:
            group["lr"] = find_rate(settings, step, job.batches)
        with seeded(settings.seed, STEP, step, device=job.fabric.device), job.fabric.autocast():
            output = forward()
            loss = job.loss(output, labels)
        job.fabric.backward(loss)
        if settings.clip:
            job.fabric.clip_gradients(job.model, job.optimizer, max_norm=settings.clip, error_if_nonfinite=False)
        job.optimizer.step()
        job.optimizer.zero_grad()
        state.batch += 1
        state.loss += float(loss.detach()) * len(labels)
        state.right += job.task.count_right(find_logits(output).detach(), labels)
        state.images += len(labels)
        state.seconds = time.perf_counter() - begin
        check_numbers(job, state, state.loss)
        job.watch.step(describe_step(job, state))
        if stop or (settings.save_every and (step + 1) % settings.save_every == 0):
            check_numbers(job, state, *sum_weights(job))
            save(job, state)
        if stop:
            raise InterruptedRunError(f"stopped in epoch {state.epoch + 1} after {state.batch} of {job.batches} batches")


def finish_epoch(job: Job, state: State) -> Judged | None:
    """Judge the model on the held-out images; where it is the best yet, keep it and return that; write the checkpoint."""
    begin, number, settings = time.perf_counter(), state.epoch + 1, job.settings
    is_due = number % settings.val_every == 0 or number == settings.epochs
    check_numbers(job, state, *sum_weights(job))
    judged = judge(job.model, job.val, job.fabric, job.watch) if is_due else None
    check_numbers(job, state, judged.loss if judged else 0)
    epoch = Epoch(
        epoch=number,
        train_loss=state.loss / state.images,
        train_accuracy=state.right / state.images,
        val_loss=judged.loss if judged else math.nan,
        val_accuracy=judged.accuracy if judged else math.nan,
        lr=find_rate(settings, number * job.batches - 1, job.batches),
        images_per_second=state.images / state.seconds,
        seconds=state.seconds + time.perf_counter() - begin,
        val_mean_accuracy=find_mean_accuracy(judged.confusion) if judged else math.nan,
    )
    is_best = judged is not None and not any(judged.accuracy <= earlier.val_accuracy for earlier in state.history)
    if is_best:
        about = {**job.describe_model(), "epoch": number, "val_accuracy": epoch.val_accuracy}
        save_checkpoint(job.folder / BEST, job.model, {}, about)
    state.finish_epoch(epoch, is_best)
    save(job, state)
    with writing(job.folder):
        write_csv(job.folder / METRICS, state.history)
    job.fabric.log_dict({k: v for k, v in dataclasses.asdict(epoch).items() if k != "epoch"}, step=number)
    job.watch.epoch(epoch, settings.epochs, is_best)
    return judged if is_best else None


def finish(job: Job, state: State, best: Judged | None, beside: Beside | None) -> Results:
    """Load the best weights, and write the results and the report."""
    layers = job.describe_layers()
    cost = find_cost(job)
    weights, _, _ = load_checkpoint(job.folder / BEST)
    job.model.load_state_dict(weights)
    best = best or judge(job.model, job.val, job.fabric, job.watch)  # a resumed run may not have seen its best epoch
    results = Results(
        model=job.settings.model,
        data=job.data.train.name,
        classes=job.data.train.classes,
        train_counts=job.data.train.counts(),
        val_counts=job.data.val.counts(),
        settings=job.settings.to_dict(),
        plan=job.plan.to_yaml(),
        history=tuple(state.history),
        best_epoch=state.best_epoch,
        confusion=best.confusion,
        layers=layers,
        cost=cost,
        skipped=job.data.skipped,
        environment=find_environment(),
        weights_file=BEST,
        beside=beside,
        held_out=len(job.data.val),
        trained_on=len(job.data.train),
    )
    with writing(job.folder):
        replace_file(job.folder / RESULTS, json.dumps(results.to_dict(), indent=1))
    with job.fabric.autocast():
        samples = find_samples(job.val, best.kept)
    write_report(job.folder, results, samples)
    return results


def find_cost(job: Job) -> Cost | None:
    """Measure memory and time beside exact backprop; a measurement that fails does not fail the run."""
    if not job.settings.measure or job.settings.exact:
        return None
    images, labels = job.train.make_batch(job.settings.batch)
    try:
        with job.fabric.autocast():
            return measure_cost(job.model, job.plan, images, labels, job.loss)
    except (RuntimeError, MemoryError) as error:
        job.watch.tell(f"memory and time could not be measured: {error}")
        return None


def find_beside(settings: Settings) -> Beside | None:
    """Return the earlier run that the settings name."""
    if settings.beside is None:
        return None
    file = Path(settings.beside) / RESULTS
    try:
        earlier = Results.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"--beside {settings.beside} names no run that was finished: {file} cannot be read ({error}). Give the folder of "
            "one."
        ) from error
    return Beside("exact" if earlier.settings.get("exact") else file.parent.name, earlier.best.val_accuracy)


def find_rate(settings: Settings, step: int, batches: int) -> float:
    """Return the learning rate of a step: a linear rise, then half a cosine or a power down to nothing, or no change."""
    warm = settings.warmup * batches
    if step < warm:
        return settings.lr * (step + 1) / warm
    if settings.schedule == "constant":
        return settings.lr
    done = (step - warm) / max(1.0, settings.epochs * batches - warm)
    if settings.schedule == "poly":
        return settings.lr * (1 - done) ** 0.9
    return settings.lr * 0.5 * (1 + math.cos(math.pi * done))


def write_config(job: Job) -> None:
    """Write the resolved settings and the plan, in place of a run that is replaced."""
    with writing(job.folder):
        if not job.settings.resume:
            remove_run(job.folder)
        stored = {**job.settings.to_dict(), "resume": False, "overwrite": False}
        replace_file(job.folder / CONFIG, yaml.safe_dump(stored, sort_keys=False))
        job.plan.save(job.folder / PLAN)


def save(job: Job, state: State) -> None:
    """Write the checkpoint to go on from."""
    about = {
        **job.describe_model(),
        "settings": job.settings.to_dict(),
        "plan": job.plan.to_yaml(),
        "data": job.fingerprints,
        "state": state.to_dict(),
    }
    save_checkpoint(job.folder / LAST, job.model, {**pack_optimizer(job.optimizer), **pack_keeps(job.model)}, about)


def restore(job: Job) -> State:
    """Load the checkpoint to go on from; where the run was stopped before its first one, start at the beginning."""
    if not (job.folder / LAST).exists():
        return State()
    weights, extra, about = load_last(job.folder)
    now = {"plan": job.plan.to_yaml(), "classes": list(job.data.train.classes), **job.fingerprints}
    before = {**about, **about["data"]}
    refuse_changes(job.settings, [f"the {what} changed" for what in now if before.get(what) != now[what]])
    try:
        job.model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint '{job.folder / LAST}' does not fit the model {job.settings.model!r} any more: {error}"
        ) from error
    unpack_optimizer_(job.optimizer, extra)
    unpack_keeps_(job.model, extra)
    return State.from_dict(about["state"])


def describe_size(job: Job) -> str:
    """Return one line on what is trained."""
    trained, total = sum(p.numel() for p in job.trained), sum(p.numel() for p in job.model.parameters())
    held = f"autograd holds {job.saved_bytes / 1e6:.1f} MB for a batch of {job.settings.batch}"
    return f"{job.settings.model}: {trained:,} of {total:,} parameters trained; {held}"


def describe_step(job: Job, state: State) -> Step:
    """Return how far the run is."""
    done = state.epoch * job.batches + state.batch
    past = sum(epoch.seconds for epoch in state.history) + state.seconds
    return Step(
        epoch=state.epoch + 1,
        epochs=job.settings.epochs,
        batch=state.batch,
        batches=job.batches,
        loss=state.loss / state.images,
        accuracy=state.right / state.images,
        images_per_second=state.images / max(state.seconds, 1e-9),
        saved_bytes=job.saved_bytes,
        seconds_left=past / done * (job.settings.epochs * job.batches - done),
    )


def sum_weights(job: Job) -> Iterator[float]:
    """Give the sum of each trained parameter, which is no finite number where one of its values is none."""
    return (float(p.detach().sum()) for p in job.trained)


def check_numbers(job: Job, state: State, *numbers: float) -> None:
    """Stop a run whose loss or weights are no finite numbers any more, before they reach a checkpoint."""
    if all(map(math.isfinite, numbers)):
        return
    kept = f"The checkpoint before it is in '{job.folder}'. " if (job.folder / LAST).exists() else ""
    raise DivergedError(
        f"loss or weights are no finite numbers any more, in epoch {state.epoch + 1}, batch {state.batch}. {kept}Start again "
        f"with a lower --lr (now {job.settings.lr}), a --warmup, or a smaller --clip (now {job.settings.clip})."
    )
