"""Run every operator on a device that this machine does not have, rightly and wrongly; the exit code tells whether all do.

A program of its own, for torch takes one such device per process and never forgets it. Its tensors have no values: what reads
one, or mixes devices, fails.
"""

from __future__ import annotations

import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from operator_cases import CASES, WRITING, Case, list_parts, move
from test_operators import check_wrong_numbers, check_wrong_tensors, to_kind

DEVICE = "elsewhere"


def find_mistake(case: Case) -> str | None:
    """Return what is wrong with a reference's result on the device, or with what is refused there, if anything is."""
    args = case.make()
    expected = list_parts(case.operator.reference(**args))
    mode = FakeTensorMode()
    try:
        with mode:
            found = list_parts(case.operator(**move(args, DEVICE)))
            check_wrong_tensors(case, move(to_kind(case.make(), torch.float32, last=True), DEVICE))
            check_wrong_numbers(case, move(to_kind(case.make(), torch.float32, last=True), DEVICE))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for fake, real in zip(found, expected, strict=True):
        if (fake is None) != (real is None):
            return f"{fake} in the place of {real}"
        if fake is not None and real is not None:
            kinds = [(x.shape, x.dtype, x.device.type) for x in (fake, real)]
            if kinds[0] != (*kinds[1][:2], DEVICE):
                return f"{kinds[0]} in the place of {kinds[1]}"
    return None


def main() -> int:
    """Print the cases that fail and return their number."""
    _setup_privateuseone_for_python_backend(DEVICE)
    mistakes = {case.name: find_mistake(case) for case in [*CASES, *WRITING]}
    for name, mistake in mistakes.items():
        if mistake is not None:
            print(f"{name}: {mistake}")
    print(f"{len(mistakes)} cases on {torch.device(DEVICE)}")
    return sum(mistake is not None for mistake in mistakes.values())


if __name__ == "__main__":
    sys.exit(main())
