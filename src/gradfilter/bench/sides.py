"""The sides of the comparison: inference, exact training and its variants, the papers' method, and plans."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.checkpoint import checkpoint

from gradfilter.apply import apply_, freeze_
from gradfilter.bench.layerwise import filter_layers_, is_plain
from gradfilter.bench.setup import EXACT, INFERENCE, freeze_statistics_, shake_
from gradfilter.errors import GradFilterError
from gradfilter.geometry.tiling import map_size
from gradfilter.outputs import find_logits, sum_outputs
from gradfilter.plan import Backward, Conv, Plan, find_norms, resolve

FOLDED = "folded inference"
CHECKPOINTED = "exact, checkpointed"
COMPILED = "exact, compiled"
HEAD = "head only"
DEFAULT_PLANS = {
    "all layers, patch 4": Plan.all(Backward(patch=4)),
    "last 4, patch 2": Plan.last(4, Backward(patch=2)),
    "all layers, grid 4": Plan.all(Backward(grid=4)),
    "all layers, grid 7": Plan.all(Backward(grid=7)),
}
ALL = frozenset({"*"})
AGREE = 1e-3
"""Folded and unfolded outputs agree up to this share of the largest."""


class NotAvailableError(GradFilterError):
    """Report a side that this model, or this machine, does not have."""


@dataclass(frozen=True)
class Side:
    """One side of the comparison.

    Attributes:
        make: From a copy of the network in training mode, which it may change, and images to what runs.
        trains: Whether it runs training steps; else forward passes.
        exact: The exact side that trains the same layers.
    """

    make: Callable[[nn.Module, Tensor], nn.Module]
    trains: bool = True
    exact: str = EXACT


def make_sides(plans: Mapping[str, Plan], compile_seconds: float = 0, peers: bool = True) -> dict[str, Side]:
    """Return all sides by name, in the order of the table.

    Args:
        plans: The plans by name.
        compile_seconds: How long torch.compile may take; 0 leaves that side out.
        peers: Whether others that train are measured, too.
    """
    sides = {INFERENCE: Side(lambda model, _: model.eval(), trains=False), FOLDED: Side(fold, trains=False)}
    if not peers:
        return sides | {name: Side(partial(apply_plan, plan)) for name, plan in plans.items()}
    sides[EXACT] = Side(lambda model, _: freeze_statistics_(model))
    sides[CHECKPOINTED] = Side(lambda model, _: checkpoint_blocks_(freeze_statistics_(model)))
    if compile_seconds:
        sides[COMPILED] = Side(partial(compile_exactly, compile_seconds))
    first = next(iter(plans))
    sides[f"lumped layer by layer, {first.rpartition(', ')[2]}"] = Side(partial(filter_each, plans[first]))
    sides[HEAD] = Side(lambda model, _: freeze_(model, Plan.last(0)))
    ours: dict[str, Side] = {}
    for name, plan in plans.items():
        exact = EXACT if ALL & plan.layers.keys() else f"exact, {name.partition(', ')[0]}"
        sides.setdefault(exact, Side(partial(freeze_exactly, plan), exact=exact))
        ours[name] = Side(partial(apply_plan, plan), exact=exact)
    return sides | ours


def apply_plan(plan: Plan, model: nn.Module, _: Tensor) -> nn.Module:
    """Return the model under a plan."""
    return apply_(model, plan)


def freeze_exactly(plan: Plan, model: nn.Module, _: Tensor) -> nn.Module:
    """Return the model that trains what a plan trains, with torch's own backward."""
    return freeze_(model, plan)


def filter_each(plan: Plan, model: nn.Module, images: Tensor) -> nn.Module:
    """Return the model that trains what a plan trains, the lumped filter applied layer by layer."""
    return filter_layers_(model, plan, map_size(images))


def fold(model: nn.Module, images: Tensor) -> nn.Module:
    """Return the model in eval mode, batch norms folded into the convolutions before them by torch's own utility.

    Pairs are those that stand side by side in a module. Whether that is how they run is seen by their outputs, with batch norms
    that are not trivial.
    """
    trial = shake_(copy.deepcopy(model)).eval()
    with torch.inference_mode():
        whole, folded = (find_logits(net(images[:2])) for net in (trial, fold_pairs_(copy.deepcopy(trial))))
    if not torch.allclose(whole, folded, rtol=0, atol=AGREE * float(whole.abs().max())):
        raise NotAvailableError("with batch norms folded into the convolutions beside them the outputs differ")
    return fold_pairs_(model.eval())


def fold_pairs_(model: nn.Module) -> nn.Module:
    """Fold batch norms into the convolutions that stand before them, in place."""
    modules = dict(model.named_modules())
    pairs = [(norm, conv) for norm, conv in find_norms(model).items() if is_foldable(modules[norm])]
    if not pairs:
        raise NotAvailableError("no batch norm stands behind a convolution")
    for norm, conv in pairs:
        before, behind = modules[conv], modules[norm]
        assert isinstance(before, Conv)
        fused = fuse_conv_bn_eval(before, behind, transpose=isinstance(before, nn.ConvTranspose2d))  # type: ignore[type-var]
        model.set_submodule(conv, fused)
        model.set_submodule(norm, nn.Sequential(*behind.children()))  # the activation that timm's batch norms have inside
    return model


def is_foldable(module: nn.Module) -> bool:
    """Tell whether a norm has statistics of its own to fold."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None


def checkpoint_blocks_(model: nn.Module) -> nn.Module:
    """Let the model's blocks hold their input alone, and run once more in backward, in place."""
    for block in find_blocks(model).values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model: the members of its outermost sequences that convolve."""
    blocks: dict[str, nn.Module] = {}

    def look(module: nn.Module, name: str) -> None:
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            if not isinstance(module, nn.Sequential | nn.ModuleList):
                look(child, path)
            elif any(isinstance(part, Conv) for part in child.modules()):
                blocks[path] = child

    look(model, "")
    if not blocks:
        raise NotAvailableError("the model has no sequence of blocks that convolve")
    return blocks


def compile_exactly(seconds: float, model: nn.Module, images: Tensor) -> nn.Module:
    """Return the model compiled, forward and backward, or say why it is not."""
    import torch._inductor.config as inductor  # not at import: it takes a while

    torch._dynamo.reset()
    compiled: Any = torch.compile(freeze_statistics_(model))
    try:
        # In this thread alone: workers that go on past the limit would take the time of others.
        with inductor.patch(compile_threads=1), alarm(seconds):
            sum_outputs(compiled(images)).backward()
    except TimeIsUp:
        raise NotAvailableError(f"torch.compile takes more than {seconds:.0f} s (--compile sets the limit)") from None
    except Exception as error:  # it fails in as many ways as there are compilers
        reason = (str(error).strip().splitlines() or [""])[0]
        raise NotAvailableError(f"torch.compile fails: {type(error).__name__}: {reason[:200]}") from error
    finally:
        model.zero_grad()
    return compiled


class TimeIsUp(BaseException):
    """End what takes too long; no `Exception`, for compilers catch all of those."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise `TimeIsUp` inside after so many seconds; only the main thread, and not on Windows, can be called back."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def describe_sides(model: nn.Module, plans: Mapping[str, Plan]) -> str:
    """Return what there is to say of one model's sides: which blocks are checkpointed, which layers filtered one by one."""
    try:
        names = list(find_blocks(model))
        blocks = f"{len(names)} blocks ({names[0]} to {names[-1]}) hold their input and run again in backward"
    except NotAvailableError as error:
        blocks = str(error)
    first = next(iter(plans.values()))
    convs = [model.get_submodule(name) for name in resolve(first, model).convs]
    plain = sum(map(is_plain, convs))
    return (
        f"Checkpointed: {blocks}. Lumped layer by layer: {plain} of {len(convs)} convolutions of the first plan filter their "
        "own gradient, all between them at pixel resolution; those with a forward of their own stay exact."
    )
