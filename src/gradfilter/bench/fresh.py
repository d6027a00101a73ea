"""Parts of a benchmark in processes of their own: what earlier parts have left in the allocator does not change them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from tempfile import TemporaryFile
from typing import Any

from gradfilter.errors import GradFilterError
from gradfilter.plan import Plan

MARK = "\x1e"
"""Begins a line in which a process tells what it is doing."""


def run_fresh(module: str, order: Mapping[str, Any], what: str, watch: Callable[[str], None] = lambda _: None) -> Any:
    """Return what a module of this package answers in a fresh process.

    Args:
        module: Run as a program, it calls `answer`.
        order: What is asked for, in JSON's own types.
        what: What the process does, for the error of one that dies.
        watch: Told what it is doing.

    Raises:
        GradFilterError: As the process raised it, or that it died.
    """
    last = ""
    with TemporaryFile("w+", encoding="utf-8") as out:
        command = [sys.executable, "-m", module]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=out, stderr=pipe, text=True, encoding="utf-8") as process:
            assert process.stdin is not None
            assert process.stderr is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # why it is gone, it has told
                stdin.write(json.dumps(order))
            for line in process.stderr:
                if line.startswith(MARK):
                    watch(line.strip(f"{MARK}\n"))
                else:
                    last = line.strip() or last
        out.seek(0)
        lines = out.read().splitlines()
    if process.returncode or not lines:
        raise GradFilterError(f"the process that {what} failed: {last or f'it ended with {process.returncode}'}")
    answered = json.loads(lines[-1])
    if "error" in answered:
        raise GradFilterError(answered["error"])
    return answered["result"]


def answer(run: Callable[[Mapping[str, Any]], Any]) -> None:
    """Be the process that `run_fresh` starts: print what `run` returns, in the last line, for a model may print, too."""
    try:
        result = {"result": run(json.load(sys.stdin))}
    except GradFilterError as error:
        result = {"error": str(error)}
    print(f"\n{json.dumps(result)}")


def tell(text: str) -> None:
    """Let whoever started this process know what it is doing."""
    print(f"{MARK}{text}", file=sys.stderr, flush=True)


def pack_plans(plans: Mapping[str, Plan]) -> dict[str, str]:
    """Return plans as an order holds them."""
    return {name: plan.to_yaml() for name, plan in plans.items()}


def unpack_plans(texts: Mapping[str, str]) -> dict[str, Plan]:
    """Return the plans of an order."""
    return {name: Plan.from_yaml(text) for name, text in texts.items()}
