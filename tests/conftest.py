"""Set-up for all tests."""

import os

import pytest
import torch
from hypothesis import settings

from gradfilter.ops import native

# Tests run in several processes: one thread each, or they wait for each other's cores.
torch.set_num_threads(1)

# In CI the same examples every time: a change fails for what it changed. At home, new ones every time.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture
def photos(tmp_path):
    """Return a folder of small images to train on."""
    from train_runs import make_photos

    return make_photos(tmp_path / "photos")


@pytest.fixture
def quick(monkeypatch):
    """Let runs end without drawing their report, where a test does not look at it."""
    monkeypatch.setattr("gradfilter.train.run.write_report", lambda *arguments: None)


LEVELS = range(native.load().gf_best_level() + 1) if native.load() else ()  # type: ignore[union-attr]


@pytest.fixture(params=LEVELS, ids=lambda level: f"level{level}")
def level(request):
    """Run a test at each level that this CPU has."""
    library = native.load()
    assert library is not None
    assert library.gf_set_level(request.param) == request.param
    yield request.param
    library.gf_set_level(-1)
