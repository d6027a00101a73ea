"""`gradfilter check`: does it work for this model?"""

from __future__ import annotations

import argparse
import warnings

import torch
from torch import Tensor, nn

from gradfilter.apply import apply_, freeze_, remove_
from gradfilter.bench.coverage import LARGEST_ERROR, measure_error
from gradfilter.cli.common import add_model_and_plan, make_plan
from gradfilter.cost import measure_saved_bytes
from gradfilter.describe import describe
from gradfilter.errors import ExitWarning, InputError
from gradfilter.hooks import Applied, find_applied
from gradfilter.models import find_info, make_model
from gradfilter.outputs import explain_failure, find_outputs
from gradfilter.plan import Plan


def run(argv: list[str]) -> int:
    """Run one training step of a model on random images, under a plan; tell what the plan does, meets and saves."""
    return check(make_parser().parse_args(argv))


def make_parser() -> argparse.ArgumentParser:
    """Say what `gradfilter check` takes."""
    parser = argparse.ArgumentParser(prog="gradfilter check", description=run.__doc__)
    add_model_and_plan(parser)
    parser.add_argument("--tokens", type=int, metavar="N", help="side of the grid of tokens: filters Linear layers on tokens")
    parser.add_argument("--verify", action="store_true", help="also compare all gradients with torch's own: float64, patch 1")
    parser.add_argument("--resolution", type=int, metavar="N", help="side of the random images (default: the model's own)")
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="number of random images (default: 2)")
    return parser


def check(args: argparse.Namespace) -> int:
    """Do as the options say."""
    plan = make_plan(args, tokens=args.tokens)
    side = find_info(args.model, args.encoder).resolution if args.resolution is None else args.resolution
    if side < 1 or args.batch < 1:
        raise InputError(f"--resolution {side} --batch {args.batch} is no batch of images. Give whole numbers of at least 1.")
    images = torch.randn(args.batch, 3, side, side, generator=torch.Generator().manual_seed(0))
    model = make_model(args.model, encoder=args.encoder).train()
    exact_bytes, exact_gradients = run_exactly(model, plan, images)
    applied = get_applied(apply_(model, plan))
    with warnings.catch_warnings(), explain_failure(images, "under the plan, though not without it. Please report this"):
        warnings.simplefilter("ignore", ExitWarning)  # describe lists them all
        saved_bytes, outputs = run_forward(model, images)
        text, exits = describe(model), applied.log.find_unexpected()  # before our own loss adds an exit
        gradients = run_backward(model, outputs)
    print(text, end="\n\n")
    times = f"{exact_bytes / saved_bytes:.1f}x fewer" if saved_bytes else "nothing held"
    print(
        f"saved bytes: {exact_bytes / 1e6:.2f} MB by exact backprop of the same layers, {saved_bytes / 1e6:.2f} MB under this "
        f"plan ({times}), batch {args.batch} at {side} px"
    )
    print(f"unexpected exits: {len(exits) or 'none'}")
    code = report_gradients(model, gradients, exact_gradients)
    return max(code, verify(model, images)) if args.verify else code


def verify(model: nn.Module, images: Tensor) -> int:
    """Print how far all gradients at patch 1 are from torch's own, in float64; return the exit code."""
    with warnings.catch_warnings(), explain_failure(images, "in float64"):
        warnings.simplefilter("ignore", ExitWarning)
        error = measure_error(remove_(model).double(), images.double())
    wrong = error > LARGEST_ERROR
    print(f"patch 1 against torch, float64: largest error {error:.0e}{'. Please report this' if wrong else ''}")
    return int(wrong)


def report_gradients(model: nn.Module, gradients: set[str], exact: set[str]) -> int:
    """Print whether every trained parameter got a gradient that exact backprop gives it; return the exit code."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    lost, neither = sorted(exact - gradients), len(trained - exact - gradients)
    line = f"gradients: {len(gradients)} of {len(trained)} trained parameters got one"
    if neither:
        line += f"; exact backprop gives {'the other' if not lost else 'another'} {neither} none either"
    if lost:
        line += f"; lost under the plan: {', '.join(lost)}. Please report this"
    print(line)
    return 1 if lost else 0


def get_applied(model: nn.Module) -> Applied:
    """Return what a model under a plan has on record."""
    applied = find_applied(model)
    assert applied is not None
    return applied


def run_exactly(model: nn.Module, plan: Plan, images: Tensor) -> tuple[int, set[str]]:
    """Run a step by exact backprop that trains what the plan trains; return saved bytes and gradients, leave no trace."""
    freeze_(model, plan)
    try:
        with explain_failure(images, "already without a plan. Does it take such images? See --resolution and --batch"):
            saved, outputs = run_forward(model, images)
            return saved, run_backward(model, outputs)
    finally:
        remove_(model)


def run_forward(model: nn.Module, images: Tensor) -> tuple[int, list[Tensor]]:
    """Return the saved bytes of a forward pass, and its outputs as far as they have a gradient."""
    saved = measure_saved_bytes(model, images)
    return saved, [y for y in find_outputs(model(images)) if y.requires_grad]


def run_backward(model: nn.Module, outputs: list[Tensor]) -> set[str]:
    """Run backward from all outputs; return the names of the parameters that got a finite gradient."""
    torch.stack([y.square().mean() for y in outputs]).sum().backward()
    got = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.isfinite().all())}
    model.zero_grad()
    return got
