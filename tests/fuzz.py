"""Draw new examples for all tests that Hypothesis drives, for a stated time, and say how to repeat what fails.

`make fuzz MINUTES=60` calls this. Rounds follow each other until the time is up; in the middle of a round, too. Each round runs
the tests with a new seed. A failure does not end the run: other tests may still fail. The exit code is 1 if any test failed.

The file is also the pytest plugin with which a round tells what it ran.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import pytest

ROOT = Path(__file__).resolve().parents[1]
REPORTS = "GRADFILTER_FUZZ_REPORTS"
"""The environment variable that names the file in which a round notes what it ran."""
PATIENCE = 5.0
"""Seconds that pytest has to end after it was interrupted; then it is killed."""


@dataclass
class Tally:
    """What all rounds ran.

    Attributes:
        rounds: Rounds that were begun.
        tests: Tests that were run to their end.
        examples: Examples that passed.
        failed: How many times a test failed.
        failures: For each test that failed, the command that repeats its first failure.
    """

    rounds: int = 0
    tests: int = 0
    examples: int = 0
    failed: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, report: dict[str, Any], seed: int) -> None:
        """Count a test; print it if it failed for the first time."""
        self.tests += 1
        self.examples += report["examples"]
        self.failed += report["failed"]
        test = report["test"]
        if report["failed"] and test not in self.failures:
            self.failures[test] = make_repeat_command(seed, test)
            print(f"\nFAILED {test}\n{report['text']}\nTo repeat it:\n  {self.failures[test]}\n", flush=True)

    def describe(self, seconds: float) -> str:
        """Return a summary of one line, and below it what failed."""
        count = f"{self.rounds} rounds, {self.tests} tests run, {self.examples} examples, {len(self.failures)} tests failed"
        failures = [f"FAILED {test}\n  {command}" for test, command in self.failures.items()]
        return "\n".join([*failures, f"fuzz: {seconds / 60:.1f} minutes, {count}"])


def make_repeat_command(seed: int, test: str) -> str:
    """Return the command that draws the same examples for a test, in any checkout of the same commit."""
    settings = [f"{name}={shlex.quote(os.environ[name])}" for name in ("GRADFILTER_NATIVE",) if name in os.environ]
    options = f"--hypothesis-profile=fuzz --hypothesis-seed={seed}"
    return " ".join([*settings, f".venv/bin/python -m pytest {options} {shlex.quote(test)}"])


def run_round(seed: int, end: float, workers: int, tests: list[str], tally: Tally) -> bool:
    """Run the tests once with a seed, until a point of `time.monotonic` at the latest; return whether to go on.

    Raises:
        RuntimeError: pytest could not run the tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        reports, output = Path(folder, "reports"), Path(folder, "output")
        reports.touch()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "fuzz",
            "-p",
            "no:cacheprovider",
            "-m",
            "hypothesis",
            "-n",
            str(workers),
        ]
        command += ["--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}", *tests]
        paths = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, REPORTS: str(reports), "PYTHONPATH": paths}
        with output.open("wb") as log, reports.open(encoding="utf-8") as lines:
            # In a session of its own: Ctrl-C reaches this process alone, which then ends the round as it does when time is up.
            pytest_run = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            failed = tally.failed
            try:
                while (code := pytest_run.poll()) is None and time.monotonic() < end:
                    add_reports(lines, seed, tally)
                    time.sleep(0.2)
            finally:
                stop(pytest_run)
            if code is not None:  # else no test ended by itself since the last look
                add_reports(lines, seed, tally)
        if code not in (None, 0) and not (code == pytest.ExitCode.TESTS_FAILED and tally.failed > failed):
            raise RuntimeError(f"pytest ended with exit code {code}:\n{output.read_text(encoding='utf-8', errors='replace')}")
        return code is not None


def add_reports(lines: TextIO, seed: int, tally: Tally) -> None:
    """Count the tests that a round has noted since the last call, one per line; leave a line that is not written to its end."""
    place = lines.tell()
    while (line := lines.readline()).endswith("\n"):
        tally.add(json.loads(line), seed)
        place = lines.tell()
    lines.seek(place)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End pytest and all that it started, if they still run."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)  # not pytest alone: it would give its workers ten seconds more
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(argv: list[str] | None = None) -> int:
    """Run rounds until the time is up; return the exit code: 0, 1 if a test failed, 2 if pytest could not run."""
    parser = argparse.ArgumentParser(description="Draw new examples for the tests that Hypothesis drives, for a stated time.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0 for none beside pytest's own")
    parser.add_argument(
        "--rounds", type=int, default=sys.maxsize, help="how many at most; as many as the time allows by default"
    )
    parser.add_argument("tests", nargs="*", help="files, folders or tests as pytest takes them; all by default")
    arguments = parser.parse_args(argv)
    start, tally = time.monotonic(), Tally()
    end = start + 60 * arguments.minutes
    try:
        going = True
        while going and tally.rounds < arguments.rounds and time.monotonic() < end:
            seed = secrets.randbits(32)
            tally.rounds += 1
            print(f"round {tally.rounds}: seed {seed}", flush=True)
            going = run_round(seed, end, arguments.workers, arguments.tests, tally)
    except KeyboardInterrupt:
        print("interrupted")
    except RuntimeError as error:
        print(error)
        return 2
    print(tally.describe(time.monotonic() - start), flush=True)
    return 1 if tally.failures else 0


class Recorder:
    """Notes every test that ends, in the process that hears of all of them."""

    def __init__(self, path: str):
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that ran, or whose set-up, clean-up or process failed."""
        if not report.failed and (report.when != "call" or report.skipped):
            return
        examples = sum(value for key, value in report.user_properties if key == "examples" and isinstance(value, int))
        note = {"test": report.nodeid, "failed": report.failed, "text": report.longreprtext, "examples": examples}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Let the main process of a round take notes."""
    if REPORTS in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(os.environ[REPORTS]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Attach how many examples Hypothesis tried, as it says itself."""
    report = yield
    if report.when == "call":
        counts = re.findall(r"(\d+) passing", getattr(item, "hypothesis_statistics", ""))
        report.user_properties.append(("examples", sum(map(int, counts))))
    return report


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or pytest would go on without this process
    sys.exit(main())
