"""One process at a time trains in a folder."""

import json
import signal

import pytest

from gradfilter.cli import main
from gradfilter.errors import SettingsError
from gradfilter.train import lock, train
from gradfilter.train.lock import Lock
from gradfilter.train.watch import Watch
from train_runs import Process, assert_same_run, make_command, make_settings, read_files

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def config(photos, tmp_path):
    """The settings of a run that waits in a step."""
    settings = make_settings(photos, tmp_path / "out", model="train_nets:gated", workers=2, save_every=1)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(settings.to_dict()))
    return path


def test_a_second_process_is_refused_and_changes_nothing(config, tmp_path, capsys):
    other, out = Process(tmp_path, make_command("train", "--config", str(config)), inputs=4), tmp_path / "out"
    (out / ".last.safetensors.1.tmp").write_text("being written")
    before = read_files(out)
    for flags in ([], ["--resume"], ["--overwrite"]):
        assert main(["train", "--config", str(config), *flags]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: another run is at work in the folder '{out}'.")
        assert read_files(out) == before
    code, errors = other.finish()
    assert code == 0, errors
    assert not (out / lock.NAME).exists()


def test_a_killed_process_locks_nothing(photos, config, tmp_path):
    """Not even while the processes that load its images are still there."""
    run = Process(tmp_path, make_command("train", "--config", str(config)), inputs=4)
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    train(make_settings(photos, tmp_path / "out", model="train_nets:gated", resume=True))
    run.finish()
    train(make_settings(photos, tmp_path / "expected", model="train_nets:gated"))
    assert_same_run(tmp_path / "out", tmp_path / "expected")


def test_one_run_after_the_other(photos, tmp_path):
    for overwrite in (False, True, True):
        train(make_settings(photos, tmp_path / "out", epochs=1, overwrite=overwrite))
    with pytest.raises(SettingsError, match="holds a run already"):
        train(make_settings(photos, tmp_path / "out"))
    train(make_settings(photos, tmp_path / "out", epochs=1, resume=True))
    assert not lock._open


def test_a_run_that_began_at_the_same_moment(photos, tmp_path):
    """Neither folder nor lock were there when this one looked."""

    class Other(Watch):
        def tell(self, text: str) -> None:
            if not (tmp_path / "out").exists():
                train(make_settings(photos, tmp_path / "out", epochs=1))

    with pytest.raises(SettingsError, match="holds a run already"):
        train(make_settings(photos, tmp_path / "out", epochs=2), Other())


def test_a_lock_file_that_was_removed_is_no_lock(tmp_path, monkeypatch):
    """Between opening and locking it, its owner may have ended."""
    flock, calls = lock.fcntl.flock, []

    def remove_first(file, how):
        calls.append(how)
        if len(calls) == 1:
            (tmp_path / lock.NAME).unlink()
        flock(file, how)

    monkeypatch.setattr(lock.fcntl, "flock", remove_first)
    with Lock(tmp_path):
        monkeypatch.undo()
        assert len(calls) == 2
        with pytest.raises(SettingsError, match="another run is at work"):
            Lock(tmp_path).take()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["fcntl", "flock"])
def test_where_there_are_no_locks_runs_go_on(photos, tmp_path, monkeypatch, missing):
    def refuse(*arguments):
        raise OSError("no locks available")

    if missing == "fcntl":
        monkeypatch.setattr(lock, "fcntl", None)
    else:
        monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with Lock(tmp_path):
        train(make_settings(photos, tmp_path / "out", epochs=1))
