"""Plans compared: the same seed and order for each, nothing twice after an interruption, what the table says."""

import dataclasses
import json
import math
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradfilter.cli import main
from gradfilter.cli.compare import parse
from gradfilter.errors import DataError, SettingsError
from gradfilter.plan import Backward, Plan
from gradfilter.train import InterruptedRunError, train
from gradfilter.train.compare import compare
from gradfilter.train.run import DivergedError
from gradfilter.train.variants import USUAL, make_variants
from gradfilter.train.watch import Step, Watch
from train_runs import assert_same_run, make_photos, make_settings, read_files

DOCS = Path(__file__).parents[1]
PNG = b"\x89PNG\r\n\x1a\n"
FILES = {"compare.json", "compare.md", "compare.png", "compare.yaml"}


@pytest.fixture(autouse=True)
def _quick_report(monkeypatch):
    """Let runs end without drawing their report."""

    def write(folder: Path, *rest: Any) -> None:
        for name in ("report.html", "report.png"):
            (folder / name).write_text("drawn")

    monkeypatch.setattr("gradfilter.train.run.write_report", write)


@pytest.fixture
def photos(tmp_path):
    return make_photos(tmp_path / "photos")


class Steps(Watch):
    """Counts steps, and sends this process a signal after so many."""

    def __init__(self, stop: int = 0) -> None:
        self.stop, self.done, self.told = stop, 0, ""

    def tell(self, text: str) -> None:
        self.told += f"{text}\n"

    def step(self, step: Step) -> None:
        self.done += 1
        if self.done == self.stop:
            os.kill(os.getpid(), signal.SIGINT)


# Runs


def test_every_plan_gets_the_same_seed_and_order(photos, tmp_path):
    """Two spellings of a plan end with the same bits; so does an ordinary run of it."""
    plan = tmp_path / "mine.yaml"
    Plan({"*": Backward(patch=2)}).save(plan)
    out = tmp_path / "out"
    compare(make_settings(photos, out), ["patch=2", str(plan), "patch=2 kernel=lift", "exact"])
    assert_same_run(out / "mine", out / "patch2")
    assert_same_run(out / "patch2-lift", out / "patch2")
    train(make_settings(photos, tmp_path / "alone", patch=2))
    assert_same_run(out / "patch2", tmp_path / "alone")
    with pytest.raises(AssertionError):
        assert_same_run(out / "exact", out / "patch2")


def test_seeds_are_paired(photos, tmp_path):
    out = tmp_path / "out"
    compared = compare(make_settings(photos, out, seed=3, epochs=1), ["patch=1", "patch=1 kernel=lift"], seeds=2)
    assert {path.name for path in out.iterdir()} == {*FILES, "patch1", "patch1-seed4", "patch1-lift", "patch1-lift-seed4"} - {
        "compare.png"
    }
    assert_same_run(out / "patch1-lift-seed4", out / "patch1-seed4")
    train(make_settings(photos, tmp_path / "alone", seed=4, epochs=1, patch=1))  # its own split too
    assert_same_run(out / "patch1-seed4", tmp_path / "alone")
    assert (compared.outcomes[1].difference, compared.outcomes[1].error) == (0, 0)
    assert main(["eval", str(out / "patch1-seed4")]) == 0


@pytest.mark.parametrize("stop", [3, 15, 17, 22])  # 15 steps a run: in the first, at its end, in the second
def test_interrupted_it_goes_on_and_repeats_nothing(photos, tmp_path, stop):
    settings, tries = make_settings(photos, tmp_path / "out"), ["patch=2", "exact", "grid=2"]
    compare(dataclasses.replace(settings, out=str(tmp_path / "expected")), tries)
    with pytest.raises(InterruptedRunError):
        compare(settings, tries, watch=Steps(stop))
    assert not (tmp_path / "out" / "compare.json").exists()
    rest = Steps()
    compare(dataclasses.replace(settings, resume=True), tries, watch=rest)
    assert rest.done == 45 - stop
    for name in ("patch2", "exact", "grid2"):
        assert_same_run(tmp_path / "out" / name, tmp_path / "expected" / name)
    again = Steps()
    compare(dataclasses.replace(settings, resume=True), tries, watch=again)
    assert again.done == 0
    assert again.told.count("done before") == 3


def test_a_run_killed_before_its_report_gets_it(photos, tmp_path):
    settings = make_settings(photos, tmp_path / "out", epochs=1)
    compare(settings, ["patch=2", "exact"])
    (tmp_path / "out" / "exact" / "report.html").unlink()
    steps = Steps()
    compare(dataclasses.replace(settings, resume=True), ["patch=2", "exact"], watch=steps)
    assert steps.done == 0
    assert (tmp_path / "out" / "exact" / "report.html").exists()


def test_plans_and_seeds_can_be_added(photos, tmp_path):
    settings = make_settings(photos, tmp_path / "out", epochs=1)
    compare(settings, ["patch=2", "exact"])
    steps = Steps()
    compared = compare(dataclasses.replace(settings, resume=True), ["exact", "grid=2", "patch=2"], seeds=2, watch=steps)
    assert steps.done == 4 * 5
    assert [outcome.method for outcome in compared.outcomes] == ["exact", "grid 2", "patch 2"]


@pytest.fixture
def done(photos, tmp_path):
    settings = make_settings(photos, tmp_path / "out", epochs=1)
    compare(settings, ["patch=2", "exact"])
    return settings


def test_what_is_there_is_not_written_over_unasked(done):
    before = read_files(done.folder)
    with pytest.raises(SettingsError, match=r"holds a comparison already, or runs of its names\. Go on with it \(--resume\)"):
        compare(done, ["patch=2", "exact"])
    (done.folder / "compare.yaml").rename(done.folder / "elsewhere")
    with pytest.raises(SettingsError, match="holds a comparison already, or runs of its names"):
        compare(done, ["patch=7", "exact"])
    with pytest.raises(SettingsError, match=r"the folder '.*out' holds no comparison to go on with\. Check --out"):
        compare(dataclasses.replace(done, resume=True), ["patch=2", "exact"])
    (done.folder / "elsewhere").rename(done.folder / "compare.yaml")
    assert read_files(done.folder) == before


def test_other_settings_or_images_are_not_gone_on_with(done, photos):
    with pytest.raises(SettingsError, match=r"the run in '.*exact' cannot be resumed: --lr was 0.05, now 0.1"):
        compare(dataclasses.replace(done, resume=True, lr=0.1), ["patch=2", "exact"])
    for path in photos.rglob("*.png"):
        path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(SettingsError, match=r"the images are not those of the run in '.*exact', which is done"):
        compare(dataclasses.replace(done, resume=True), ["patch=2", "exact"])


def test_a_replaced_comparison_leaves_no_run_behind(done):
    """A resumed one must not take a run of the replaced one for its own."""
    settings = dataclasses.replace(done, overwrite=True)
    with pytest.raises(InterruptedRunError):
        compare(settings, ["patch=2", "exact"], watch=Steps(2))
    assert not (done.folder / "compare.md").exists()
    assert not (done.folder / "patch2" / "results.json").exists()
    steps = Steps()
    compare(dataclasses.replace(done, resume=True), ["patch=2", "exact"], watch=steps)
    assert steps.done == 8


def test_what_cannot_start_writes_nothing_and_replaces_nothing(done, tmp_path):
    before = read_files(done.folder)
    replacing = dataclasses.replace(done, overwrite=True)
    with pytest.raises(SettingsError, match=r"--try 'plan=last9': the plan asks for the last 9 convolutions; the model has 3"):
        compare(replacing, ["patch=2", "plan=last9"])
    with pytest.raises(DataError, match="neither a folder nor a known set"):
        compare(dataclasses.replace(replacing, data="absent"), ["patch=2", "exact"])
    with pytest.raises(SettingsError, match="--seeds is 0, but must be at least 1"):
        compare(replacing, ["patch=2", "exact"], seeds=0)
    with pytest.raises(SettingsError, match="--memory 1MB chooses one plan; a comparison takes several"):
        compare(dataclasses.replace(replacing, memory="1MB", patch=None), ["patch=2", "exact"])
    assert read_files(done.folder) == before
    with pytest.raises(SettingsError, match="plan=last9"):
        compare(dataclasses.replace(done, out=str(tmp_path / "new")), ["plan=last9", "exact"])
    assert not (tmp_path / "new").exists()


def test_a_plan_that_diverges_does_not_end_the_comparison(photos, tmp_path, monkeypatch):
    def diverge(settings, *rest):
        if settings.grid == 2:
            raise DivergedError("loss or weights are no finite numbers any more")
        return train(settings, *rest)

    monkeypatch.setattr("gradfilter.train.run.train", diverge)
    compared = compare(make_settings(photos, tmp_path / "out", epochs=1, measure=True), ["grid=2", "exact", "patch=2"], seeds=2)
    assert compared.runs["grid 2"] == [None, None]
    text = (tmp_path / "out" / "compare.md").read_text()
    assert "| grid 2  | –           | –             | –                  | –      | –       |" in text
    assert "came to a loss that is no finite number: grid 2." in text
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["rows"][0]["accuracy, %"] is None
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(("place", "where"), [("disk", "on disk, in"), ("memory", "in memory")])
def test_the_cache_is_shared(photos, tmp_path, place, where):
    settings = make_settings(photos, tmp_path / "out", epochs=1, plan="last1", cache=place, augment="none")
    steps = Steps()
    compare(settings, ["patch=2", "exact", "grid=2"], watch=steps)
    assert steps.told.count(f"MB, found {where}") == 4  # training and held-out images, twice
    caches = {"cache"} if place == "disk" else set()
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {"patch2", "exact", "grid2"} | caches
    train(dataclasses.replace(settings, out=str(tmp_path / "alone")))
    assert_same_run(tmp_path / "out" / "patch2", tmp_path / "alone")


# What is told


def test_table_data_and_picture(photos, tmp_path, capsys):
    out = tmp_path / "out"
    flags = {**make_settings(photos, out, measure=True, epochs=1).to_dict(), "try": ["plan=head", "exact", "patch=2"]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(flags))
    assert main(["compare", "--config", str(tmp_path / "run.yaml")]) == 0
    text = (out / "compare.md").read_text()
    assert capsys.readouterr().out == f"{text}\npicture: {out / 'compare.png'}\n"
    data = json.loads((out / "compare.json").read_text())
    assert [row["method"] for row in data["rows"]] == ["head", "exact", "patch 2"]
    assert data["reference"] == "exact"
    head, exact, patch = data["rows"]
    assert list(exact) == [
        *("method", "accuracy, %", "95 % interval", "less exact, paired"),
        *("MB held", "times fewer", "step / exact"),
    ]
    assert (exact["times fewer"], exact["step / exact"], exact["less exact, paired"]) == (1, 1, None)
    assert patch["times fewer"] == pytest.approx(exact["MB held"] / patch["MB held"])
    assert head["times fewer"] == pytest.approx(exact["MB held"] / head["MB held"])
    assert head["MB held"] < patch["MB held"] < exact["MB held"]
    assert patch["less exact, paired"] == pytest.approx(patch["accuracy, %"] - exact["accuracy, %"])
    assert [(one["method"], one["seed"], one["folder"]) for one in data["runs"]] == [
        ("head", 0, "head"),
        ("exact", 0, "exact"),
        ("patch 2", 0, "patch2"),
    ]
    assert "measured in turns with exact backprop" in text
    assert (out / "compare.png").read_bytes().startswith(PNG)
    stored = json.loads((out / "patch2" / "results.json").read_text())
    assert stored["beside"] == {"name": "exact", "accuracy": pytest.approx(exact["accuracy, %"] / 100)}


def test_exact_is_measured_where_no_run_trains_its_layers(photos, tmp_path):
    compared = compare(
        make_settings(photos, tmp_path / "out", measure=True, epochs=1), ["exact", "plan=last1 exact", "plan=head"]
    )
    whole, last, head = compared.outcomes
    assert (whole.fewer, whole.step_ratio, whole.kind, last.kind) == (1, 1, "exact backprop", "exact backprop")
    assert whole.saved_bytes > last.saved_bytes > head.saved_bytes > 0
    assert last.fewer == pytest.approx(whole.saved_bytes / last.saved_bytes)
    assert math.isfinite(last.step_ratio)


def test_the_command_line_goes_on(photos, tmp_path, capsys, monkeypatch):
    out = tmp_path / "a comparison"
    settings = make_settings(photos, out, epochs=1)
    (tmp_path / "run.json").write_text(json.dumps(settings.to_dict()))
    arguments = ["compare", "--config", str(tmp_path / "run.json"), "--try", "patch=2", "--try=exact", "--seeds", "2"]
    monkeypatch.setattr("gradfilter.cli.compare.make_screen", lambda stream: Screen(7))
    assert main(arguments) == 130
    errors = capsys.readouterr().err
    assert "stopped in epoch 1 after 2 of 5 batches. All is saved. Go on with:" in errors
    (line,) = (line for line in errors.splitlines() if line.startswith("    gradfilter compare"))
    screen = Screen(0)
    monkeypatch.setattr("gradfilter.cli.compare.make_screen", lambda stream: screen)
    assert main(shlex.split(line)[1:]) == 0
    assert screen.done == 13
    assert f"folder: {out}" in capsys.readouterr().out  # nothing was measured
    assert main(["compare", "--out", str(out), "--resume"]) == 0  # the folder knows the rest
    assert screen.done == 13


class Screen(Steps):
    def close(self) -> None:
        """Nothing is on the screen."""


def test_flags(tmp_path, capsys):
    words = shlex.split("--data d --try patch=2 --plan last4 --try=plan=head --seeds 3 --lr 0.5 --grid 2")
    settings, tries, seeds = parse(words)
    assert (settings.data, settings.plan, settings.lr, settings.grid) == ("d", "last4", 0.5, 2)
    assert (tries, seeds) == (["patch=2", "plan=head"], 3)
    config = tmp_path / "c.yaml"
    config.write_text("try: [exact, 'patch=2 kernel=lumped']\nseeds: 2\nlr: 0.3")
    settings, tries, seeds = parse(["--config", str(config), "--lr", "0.4"])
    assert (settings.lr, tries, seeds) == (0.4, ["exact", "patch=2 kernel=lumped"], 2)
    assert parse(["--config", str(config), "--try", "grid=2"])[1] == ["grid=2"]
    settings, tries, _ = parse(["--preset", "cifar10-mcunet-last4-patch2"])
    assert (settings.plan, settings.patch, tries) == ("last4", 2, [])
    with pytest.raises(SettingsError, match=r"there is no setting 'tryy'\. Did you mean --try\? 'gradfilter compare --help'"):
        parse(["--tryy", "3"])
    with pytest.raises(SettingsError, match=r"--seeds: Expected a int\. Got value: x\. 'gradfilter compare --help'"):
        parse(["--seeds", "x"])
    with pytest.raises(SettingsError, match="--try: which plan"):
        parse(["--try"])
    assert main(["compare", "--try", "exact"]) == 2
    assert "error: a comparison takes two variants or more" in capsys.readouterr().err


# What the documents say


def test_the_commands_parse(tmp_path, monkeypatch):
    for name in ("examples/digits.yaml", "runs/depths/compare.yaml"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("data: digits\ntry: [exact, patch=2]")
    Plan.all().save(tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    lines = [line for page in ("README.md", "docs/compare.md") for line in (DOCS / page).read_text("utf-8").splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("gradfilter compare ")]
    for settings, tries, _ in (parse(words[2:]) for words in commands):
        assert len(make_variants(settings, tries or USUAL)) >= 2
    assert len(commands) == 6


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "docs/compare.md").read_text("utf-8"), re.DOTALL)
    exec(block, {})
    assert "\n| patch 2 |" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "runs" / "compared").iterdir()} == {*FILES, "exact", "patch2"}
