"""Marks: what the hooks of a plan leave in a graph that `torch.compile` captures, where in eager mode they would act.

A mark is a node `gradfilter::mark(x, key)`. The backend "gradfilter" finds the hook by its key and lets it act on x; any other
backend runs into the mark, and says so in one sentence: it would train exactly, and nobody would know.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.library import register_autograd, register_fake

from gradfilter.errors import CompileError
from gradfilter.ops.operator import LIBRARY

REFUSAL = (
    'a model under a plan of gradfilter is compiled by torch.compile(model, backend="gradfilter"). Other backends, '
    "torch.export and torch.jit.trace would lose the plan: use that backend, or call gradfilter.remove_(model) first."
)
OUTPUT = " output"
"""The end of the key of a mark behind a module, where a hook has one in front of it, too."""


class Marking(Protocol):
    """A hook that leaves marks."""

    def act(self, key: str, x: Tensor) -> Any:
        """Do to x what the hook does in eager mode."""


_marking: weakref.WeakValueDictionary[str, Marking] = weakref.WeakValueDictionary()
_count = itertools.count()


def make_key(hook: Marking, name: str) -> str:
    """Return a key by which marks find a hook, as long as the hook lives.

    No two hooks of a process have the same, so that what was compiled for one is never taken for another. It is a string:
    an attribute that is a number would become a symbol in a graph that is compiled a second time.
    """
    key = f"{name} #{next(_count)}"
    _marking[key] = hook
    return key


def drop_key(key: str) -> None:
    """Forget a hook that is taken off its module."""
    _marking.pop(key, None)


def find_hook(key: str) -> Any:
    """Return the hook that left a mark."""
    hook = _marking.get(key.removesuffix(OUTPUT))
    if hook is None:
        raise CompileError(
            f"a compiled graph belongs to a plan that is no longer applied (mark '{key}'). Call torch.compiler.reset(), and "
            "the model is compiled anew under the plan in force."
        )
    return hook


def mark(x: Tensor, key: str) -> Tensor:
    """Leave a mark on x in the graph that is being captured."""
    if torch.compiler.is_exporting():
        refuse()
    return torch.ops.gradfilter.mark(x, key)


def check_not_traced() -> None:
    """Refuse to run a model under a plan for `torch.export` or `torch.jit.trace`, which run its hooks as they are."""
    if torch.jit.is_tracing() or (torch.compiler.is_exporting() and torch._C._len_torch_dispatch_stack()):
        refuse()


def mark_input(
    key: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_meant: Callable[[Any], bool] = torch.is_tensor
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a module with a mark on the first one that is meant; `None` where there is none."""
    for i, value in enumerate(args):
        if is_meant(value):
            return (*args[:i], mark(value, key), *args[i + 1 :]), kwargs
    for name, value in kwargs.items():
        if is_meant(value):
            return args, {**kwargs, name: mark(value, key)}
    return None


def refuse(*_: Any) -> Any:
    """Say what to use instead, to whoever runs or transforms a mark."""
    raise CompileError(REFUSAL)


LIBRARY.define("mark(Tensor x, str key) -> Tensor")
LIBRARY.impl("mark", refuse, "CompositeExplicitAutograd")
register_fake("gradfilter::mark", lambda x, key: torch.empty_like(x), lib=LIBRARY)
# What is captured asks marked tensors whether they need a gradient; none is ever computed here.
register_autograd("gradfilter::mark", lambda ctx, g: (g, None), lib=LIBRARY)
# AOTAutograd, and with it inductor, would get as far as machine code that fails when it runs.
torch.ops.gradfilter.mark.default.py_functionalize_impl(refuse)


class Owner:
    """A weak reference to the module that a hook is on. A copy of both refers to the copy; so does a pickle."""

    def __init__(self, module: nn.Module | None) -> None:
        """Refer to a module."""
        self.find = (lambda: None) if module is None else weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Owner:
        """Refer to the copy, which is begun before its hooks are copied; to the same module where a hook is copied alone."""
        module = self.find()
        return Owner(memo.get(id(module), module))

    def __reduce__(self) -> Any:
        """Let pickle find the module, of which the hook is a part."""
        return Owner, (self.find(),)


def forget_compiled() -> None:
    """Let `torch.compile` forget what it compiled, for all models: they are compiled again when they are next called.

    Its guards do not look at hooks that come or go: a model compiled before would run on without the plan, or with one that
    was taken off. Which compiled code holds a given model, perhaps inlined into a function, nobody can tell.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and hasattr(dynamo, "reset_code_caches"):  # else it is being imported
        dynamo.reset_code_caches()
