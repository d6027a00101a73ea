"""Compare plans: the same model, images, seed and order for each; one table and one picture of all."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from gradfilter.data import Data
from gradfilter.environment import find_environment
from gradfilter.errors import PlanError, SettingsError
from gradfilter.files import replace_file
from gradfilter.models import join_encoder
from gradfilter.report import Cost, Results
from gradfilter.report.outcomes import Outcome, find_accuracies, find_first, find_front, find_outcomes, make_table, to_exact
from gradfilter.report.pareto import make_pareto
from gradfilter.table import Table
from gradfilter.train import folder as files
from gradfilter.train import run
from gradfilter.train.cache import Cache
from gradfilter.train.job import choose_images, fill_in, make_trained_model, prepare
from gradfilter.train.settings import Settings
from gradfilter.train.task import find_task
from gradfilter.train.variants import CACHE, Variant, find_usual, make_variants
from gradfilter.train.watch import Watch

STORED, TABLE, DATA, PICTURE = "compare.yaml", "compare.md", "compare.json", "compare.png"
"""Files of a comparison's folder, beside the folders of its runs."""


@dataclass(frozen=True)
class Comparison:
    """Several plans to train, and where.

    Attributes:
        settings: What all have in common; `resume` and `overwrite` are said of the comparison as a whole.
        variants: The plans.
        seeds: Each is trained once with each.
        folder: Where everything is written.
    """

    settings: Settings
    variants: Sequence[Variant]
    seeds: range
    folder: Path

    @classmethod
    def make(cls, settings: Settings, tries: Sequence[str], seeds: int) -> Comparison:
        """Return the comparison that the command line describes."""
        if seeds < 1:
            raise SettingsError(f"--seeds is {seeds}, but must be at least 1.")
        if settings.memory is not None:
            raise SettingsError(f"--memory {settings.memory} chooses one plan; a comparison takes several. Leave it out.")
        variants = make_variants(settings, tries or find_usual(settings))
        return cls(settings, variants, range(settings.seed, settings.seed + seeds), find_folder(settings))

    @property
    def reference(self) -> Variant:
        """Return what the others are compared with: exact backprop, or else the first."""
        return next((variant for variant in self.variants if variant.settings.exact), self.variants[0])

    def find_run_folder(self, variant: Variant, seed: int) -> Path:
        """Return the folder of a run; the first seed is not named, so that more can be added later."""
        return self.folder / (variant.folder + (f"-seed{seed}" if seed != self.seeds[0] else ""))

    def make_settings(self, variant: Variant, seed: int) -> Settings:
        """Return the settings of one run: it goes on where it was begun."""
        folder, beside = self.find_run_folder(variant, seed), self.find_run_folder(self.reference, seed)
        is_known = variant is not self.reference and (beside / files.RESULTS).exists()
        return dataclasses.replace(
            variant.settings,
            seed=seed,
            out=str(folder),
            cache_folder=self.settings.cache_folder or str(self.folder / CACHE),
            beside=self.settings.beside or (str(beside) if is_known else None),
            measure=self.settings.measure and seed == self.seeds[0],  # once: it does not depend on the seed
            resume=is_started(folder),
            overwrite=False,
        )


@dataclass(frozen=True)
class Compared:
    """What came of a comparison.

    Attributes:
        table: A row for each variant.
        outcomes: The same as numbers.
        runs: The runs of each variant by its name, seed by seed; None for one that diverged.
        folder: Where everything lies.
    """

    table: Table
    outcomes: list[Outcome]
    runs: dict[str, list[Results | None]]
    folder: Path


def compare(settings: Settings, tries: Sequence[str] = (), seeds: int = 1, watch: Watch | None = None) -> Compared:
    """Train several plans, each as an ordinary run in a folder of its own, and compare what came of them.

    Args:
        settings: What all variants have in common. `out` is the folder of the comparison; `resume` goes on with it.
        tries: The variants, each as `--try` takes it: "exact", "patch=2 kernel=lumped", "patch=1 keep=int8", "plan=head",
            "mine.yaml"; where none are given, the usual ones.
        seeds: How many seeds to train each variant with, counted from that of the settings.
        watch: Is told what happens.

    Raises:
        InterruptedRunError: Ctrl-C or SIGTERM; the checkpoint to go on from was written before.
        GradFilterError: Anything else that a user can mend, as the text says.
    """
    watch, comparison = watch or Watch(), Comparison.make(settings, tries, seeds)
    check_folder(comparison)
    runs: dict[str, list[Results | None]] = {variant.name: [] for variant in comparison.variants}
    first: Data | None = None
    for seed, data in load_for_seeds(comparison):
        shared: dict[str, Cache] = {}  # another seed has other views and another split
        if first is None:
            first = data
            check_plans(comparison, data)
            start(comparison)
        # The reference goes first, so that the reports of the others show it beside them.
        for variant in sorted(comparison.variants, key=lambda variant: variant is not comparison.reference):
            watch.tell(f"\n{variant.name}{f', seed {seed}' if seeds > 1 else ''}")
            runs[variant.name].append(train_one(comparison.make_settings(variant, seed), watch, data, shared))
    variants = {variant.name: comparison.make_settings(variant, comparison.seeds[0]) for variant in comparison.variants}
    outcomes = find_outcomes(runs, comparison.reference.name, lambda name: measure_exact(variants[name], watch, first))
    compared = Compared(describe(comparison, runs, outcomes), outcomes, runs, comparison.folder)
    write(comparison, compared, watch)
    return compared


def find_folder(settings: Settings) -> Path:
    """Return the folder of a comparison."""
    return settings.folder if settings.out is not None else settings.folder.with_name(f"compare-{settings.folder.name}")


def is_started(folder: Path) -> bool:
    """Tell whether a folder holds a run, done or not."""
    return (folder / files.LAST).exists() or (folder / files.CONFIG).exists()


def check_folder(comparison: Comparison) -> None:
    """Refuse to write over another comparison, or to go on with none."""
    settings, folder = comparison.settings, comparison.folder
    is_there = (folder / STORED).exists()
    if settings.resume and not is_there:
        raise SettingsError(
            f"--resume was given, but the folder '{folder}' holds no comparison to go on with. Check --out, or leave --resume "
            "out to start one."
        )
    is_there = is_there or any(map(is_started, find_run_folders(comparison)))
    if is_there and not settings.resume and not settings.overwrite:
        raise SettingsError(
            f"the folder '{folder}' holds a comparison already, or runs of its names. Go on with it (--resume), replace it "
            "(--overwrite), or give another folder (--out)."
        )


def find_run_folders(comparison: Comparison) -> list[Path]:
    """Return the folders of all runs."""
    return [comparison.find_run_folder(variant, seed) for variant in comparison.variants for seed in comparison.seeds]


def load_for_seeds(comparison: Comparison) -> Iterator[tuple[int, Data]]:
    """Give the data for each seed: they are loaded once, or, where the seed chooses what is held out, once for each."""
    data: Data | None = None
    for seed in comparison.seeds:
        if data is None or data.made:
            data = find_task(comparison.settings.task).load(dataclasses.replace(comparison.settings, seed=seed))
        yield seed, data


def check_plans(comparison: Comparison, data: Data) -> None:
    """Refuse a plan that does not fit the model now, not after the runs before it."""
    for variant in comparison.variants:
        try:
            make_trained_model(fill_in(variant.settings), variant.settings.make_plan(), data.train)
        except PlanError as error:
            raise SettingsError(f"--try '{variant.text}': {error}") from error


def start(comparison: Comparison) -> None:
    """Write what to go on from; a comparison that is replaced loses its runs first: a resumed one would take them for done."""
    folder = comparison.folder
    stored = {
        **comparison.settings.make_absolute().to_dict(),
        "out": str(folder.absolute()),
        "resume": False,
        "overwrite": False,
    }
    stored |= {"try": [variant.text for variant in comparison.variants], "seeds": len(comparison.seeds)}
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not comparison.settings.resume:
            for name in (STORED, TABLE, DATA, PICTURE):
                (folder / name).unlink(missing_ok=True)
            for one in find_run_folders(comparison):
                files.remove_run(one)
        replace_file(folder / STORED, yaml.safe_dump(stored, sort_keys=False))


def train_one(settings: Settings, watch: Watch, data: Data, shared: dict[str, Cache]) -> Results | None:
    """Return the results of a run that is done, or train it, from its checkpoint where there is one; None if it diverges."""
    results = find_results(settings)
    if results and all((settings.folder / name).exists() for name in files.REPORTS):
        check_images(settings, data)
        watch.tell(f"done before, in {settings.folder}")
        return results
    try:
        return run.train(settings, watch, data, shared)
    except run.DivergedError as error:
        watch.tell(str(error))
        return None


def find_results(settings: Settings) -> Results | None:
    """Return the results of a run that is done, where it had these settings and this plan."""
    try:
        results = Results.from_dict(json.loads((settings.folder / files.RESULTS).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
    is_same = results.plan == settings.make_plan().to_yaml() and not fill_in(settings).find_changes(results.settings)
    return results if is_same else None


def check_images(settings: Settings, data: Data) -> None:
    """Refuse to compare a run that is done with runs on other images."""
    chosen, before = choose_images(settings, Watch(), data), files.load_last(settings.folder)[2]["data"]
    if before != {"training images": chosen.train.fingerprint(), "held-out images": chosen.val.fingerprint()}:
        raise SettingsError(
            f"the comparison cannot be resumed: the images are not those of the run in '{settings.folder}', which is done. Put "
            "them back, start again (--overwrite), or give another --out."
        )


def measure_exact(settings: Settings, watch: Watch, data: Data | None) -> Cost | None:
    """Measure an exact step beside a filtered one, where no run that trains the same layers has done so."""
    if not settings.measure:
        return None
    watch.tell(f"measuring exact backprop of what the run in {settings.folder} trains")
    cost = run.find_cost(prepare(fill_in(dataclasses.replace(settings, exact=False)), Watch(), data))
    return to_exact(cost) if cost else None


def describe(comparison: Comparison, runs: dict[str, list[Results | None]], outcomes: list[Outcome]) -> Table:
    """Return the table of a comparison, with remarks on what its numbers are."""
    settings, reference = comparison.settings, comparison.reference
    title = f"{join_encoder(settings.model, settings.encoder)} on {settings.data}: {len(outcomes)} plans"
    table = make_table(title, outcomes, reference.name)
    first = next((found for these in runs.values() if (found := find_first(these))), None)
    seeds = "one seed" if len(comparison.seeds) == 1 else f"{len(comparison.seeds)} seeds"
    epochs = "one epoch" if settings.epochs == 1 else f"{settings.epochs} epochs"
    table.remarks = [
        f"{first.train_images if first else 0} training images, {epochs}, {settings.optimizer}, learning rate "
        f"{settings.lr}, batch {settings.batch}, plan {settings.plan} where a method names no other, {seeds}. Split, new "
        "weights, order, augmentation and dropout are the seed's: the same for every method.",
        find_task(settings.task).certainty.format(images=first.val_images if first else 0)
        + (" The standard error is that of the difference, paired by seed." if len(comparison.seeds) > 1 else ""),
        f"MB held: what autograd holds for a batch, measured; times fewer: than exact backprop of the layers that "
        f"'{reference.name}' trains. Step / exact: the time of a training step beside an exact one of those layers. Each was "
        "measured in turns with exact backprop of its own layers and with inference, in one process, so that other work on the "
        "machine slows all alike; methods that train other layers are compared by way of inference.",
    ]
    front = find_front(outcomes, lambda outcome: outcome.saved_bytes)
    if front:
        names = "; ".join(outcome.method for outcome in front)
        table.remarks.append(f"On the front, where no other is better and holds no more: {names}.")
    diverged = [name for name, these in runs.items() if None in these]
    if diverged:
        table.remarks.append(f"Diverged, that is, came to a loss that is no finite number: {'; '.join(diverged)}.")
    return table


def write(comparison: Comparison, compared: Compared, watch: Watch) -> None:
    """Write table, data and picture."""
    folder, table = comparison.folder, compared.table
    runs = [
        {
            "method": variant.name,
            "try": variant.text,
            "seed": seed,
            "folder": comparison.find_run_folder(variant, seed).name,
            f"{find_task(comparison.settings.task).metric}, %": None if math.isnan(share) else 100 * share,
        }
        for variant in comparison.variants
        for seed, share in zip(comparison.seeds, find_accuracies(compared.runs[variant.name]), strict=True)
    ]
    stored = {**table.to_dict(), "reference": comparison.reference.name, "runs": runs, "environment": find_environment()}
    picture = make_pareto(table.title, compared.outcomes)
    with files.writing(folder):
        replace_file(folder / TABLE, table.to_markdown())
        replace_file(folder / DATA, json.dumps(stored, indent=1, allow_nan=False) + "\n")
        if picture is None:
            (folder / PICTURE).unlink(missing_ok=True)
            watch.tell("no picture: neither memory nor time was measured")
        else:
            replace_file(folder / PICTURE, picture)
