"""Set-up for all tests."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from gradfilter.ops import native
from skips import describe_skips

# Tests run in several processes: one thread each, or they wait for each other's cores.
torch.set_num_threads(1)

# The same examples everywhere and every time: a change fails for what it changed. `make fuzz` draws new ones: it chooses the
# other profile and gives a seed (`--hypothesis-profile=fuzz --hypothesis-seed=N`). That option is read after this file and
# before any test file, so settings that test files make at import take their defaults from the chosen profile.
# Neither profile has a database: examples that failed once would be tried again on this machine and on no other.
fuzz = settings(derandomize=False, database=None, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fuzz", fuzz)
settings.register_profile("same", fuzz, derandomize=True)
settings.load_profile("same")

# Hypothesis also draws constants that it reads in the sources of all local modules imported so far. What is drawn would then
# depend on which tests ran before in the same process, on the folder of the checkout, and on edits anywhere in the library.
# There is no setting for it, so the function that collects them is replaced.
if not hasattr(providers, "_get_local_constants"):
    raise RuntimeError(
        "this version of hypothesis has no providers._get_local_constants, so tests/conftest.py cannot make it draw the same "
        "examples everywhere. Install the version that constraints.txt names, or find out how this one reads local constants."
    )
NO_CONSTANTS = providers.Constants()
providers._get_local_constants = lambda: NO_CONSTANTS


def pytest_terminal_summary(terminalreporter):
    """Say what was skipped, and how to run it."""
    reasons = [str(report.longrepr[-1]) for report in terminalreporter.getreports("skipped")]
    if reasons:
        terminalreporter.section("tests skipped")
        for line in describe_skips(reasons):
            terminalreporter.write_line(line)


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
