"""`gradfilter fidelity` and its picture."""

import json
import math
import re

import pytest
import torch
import yaml
from torch import nn

from gradfilter.cli import main
from gradfilter.fidelity import Fidelity, LayerFidelity, Spread
from gradfilter.report.fidelity import make_fidelity_picture
from gradfilter.train.batches import shuffle
from gradfilter.train.job import choose_images, fill_in, make_feeds
from gradfilter.train.settings import Settings
from gradfilter.train.watch import Watch
from train_nets import small


def make_found(*snr):
    spread = Spread(1.0, 1.0, 1.0)
    layers = {f"{i}": LayerFidelity(spread, spread, spread, gy_snr_db=Spread.over([db])) for i, db in enumerate(snr)}
    return Fidelity(layers, LayerFidelity(spread, spread, spread), tuple(layers), 1)


def test_rising_share_counts_steps_from_loss_to_input():
    assert make_found(1.0, 2.0, 1.5, math.inf, 3.0).rising_share == pytest.approx(2 / 3)
    assert math.isnan(make_found(1.0).rising_share)
    assert Spread.over([1.0, math.nan, 3.0]) == Spread(2, 1, 3)


def is_png(data):
    return data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5000


@pytest.mark.parametrize(
    "found", [make_found(1.0, math.inf, 2.0), make_found(), make_found(*[1.0] * 80)], ids=["three", "none", "many"]
)
def test_picture_is_a_png(found):
    assert is_png(make_fidelity_picture(found, "a title"))


def run(*args):
    return main(["fidelity", "--model", "train_nets:small", "--weights", "random", "--limit", "12", "--batch", "4", *args])


def test_command_on_digits(tmp_path, capsys):
    args = [
        "--plan",
        "last2",
        "--patch",
        "2",
        "--resolution",
        "32",
        "--batches",
        "2",
        "--out",
        str(tmp_path / "new" / "folder"),
    ]
    assert run(*args) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "new" / "folder"
    assert sorted(file.name for file in folder.iterdir()) == ["fidelity.json", "fidelity.md", "fidelity.png"]
    rows = json.loads((folder / "fidelity.json").read_text())["rows"]
    assert [row["layer"] for row in rows] == ["3", "7", "12", "all"]
    assert "2 batches" in out
    assert "train_nets:small on digits, plan last2, patch 2, batch 4" in (folder / "fidelity.md").read_text()
    assert is_png((folder / "fidelity.png").read_bytes())
    assert run(*args[:-2]) == 0
    assert capsys.readouterr().out == out[: out.index("table and picture")]


def test_command_takes_the_settings_of_a_run(tmp_path, capsys):
    settings = Settings(plan="last1", grid=2, resolution=32, lr=0.5, out=str(tmp_path / "run"))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings.to_dict()))
    assert run("--config", str(tmp_path / "config.yaml"), "--batches", "1") == 0
    assert re.search(r"\| 7 +\| 8 ", capsys.readouterr().out)
    assert not (tmp_path / "run").exists()


def test_command_compares_the_first_batches_of_training():
    settings = fill_in(Settings(model="train_nets:small", weights="random", limit=12, batch=4, resolution=32))
    data = choose_images(settings, Watch(), None)
    feed, _ = make_feeds(settings, data, small(), torch.device("cpu"))
    seen = []
    feed.model = Keep(seen)
    labels = [y for y, forward in feed.run(shuffle(len(feed.images), 0, 0), 0) if forward() is not None]
    batches = list(feed.first(2))
    assert len(batches) == 2
    for i, (x, y) in enumerate(batches):
        assert torch.equal(x, seen[i])
        assert torch.equal(y, labels[i])


class Keep(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def forward(self, x):
        self.seen.append(x)
        return x


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--batches", "0"], "--batches is 0"),
        (["--exact"], "--exact leaves nothing to compare"),
        (["--pacth", "2"], "Did you mean --patch"),
        (["--plan", "lats4"], "no plan"),
    ],
)
def test_command_says_what_is_wrong(args, message, capsys):
    assert run(*args) == 2
    assert message in capsys.readouterr().err


def test_command_cannot_write(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run("--plan", "last1", "--resolution", "32", "--batches", "1", "--out", str(tmp_path / "file" / "x")) == 2
    assert "cannot be written" in capsys.readouterr().err
