"""Find and load the library, and say when it may be used."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from gradfilter.ops.native.task import Task, find_mismatch
from gradfilter.ops.native.values import CLAMP, HARDSWISH, IDENTITY, LEAKY, SILU
from gradfilter.switch import Switch

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The numbers that the library computes on, by its own names for them."""

PLAIN = (Tensor, Parameter)
"""The classes of tensors whose memory holds their numbers."""
CHANNELS = 16
"""`GF_CHANNELS` of kernels.h: the widest vector of any level of the instruction set."""

CONSTANTS = {
    "GF_CHANNELS": CHANNELS,
    "GF_FLOAT32": DTYPES[torch.float32],
    "GF_BFLOAT16": DTYPES[torch.bfloat16],
    "GF_IDENTITY": IDENTITY.kind,
    "GF_CLAMP": CLAMP,
    "GF_LEAKY": LEAKY,
    "GF_HARDSWISH": HARDSWISH.kind,
    "GF_SILU": SILU.kind,
}
"""Those of kernels.h that Python has, too."""
_NO_MEMORY = -1
"""A task's code where the library found no memory; below that, it refused the bytes."""


class Recording(threading.local):
    """Whether the calling thread writes down tasks instead of running them.

    Attributes:
        note: Called with each task and its packed struct; `None` where tasks run. What it is given reads and writes memory
            that is there, but whose numbers mean nothing.
    """

    note: Callable[[Task, bytes], None] | None = None


RECORDING = Recording()
_switch = Switch("native library")
_depth, _count_modes = _switch.depth, torch._C._len_torch_dispatch_stack
_are_transforms_active, _find_tracer = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state
_is_key_included, _PRE_DISPATCH = torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch


def find_library() -> Path | None:
    """Return the file of the library, or `None` where it was not built or `GRADFILTER_NATIVE=0` switches it off.

    `GRADFILTER_NATIVE_LIBRARY` names another file, such as a build with sanitizers.
    """
    if os.environ.get("GRADFILTER_NATIVE", "1") == "0":
        return None
    path = Path(os.environ.get("GRADFILTER_NATIVE_LIBRARY") or Path(__file__).with_name("libgradfilter.so"))
    return path if path.is_file() else None


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | None:
    """Return the library, loaded once, or `None` where there is none for this machine."""
    path = find_library()
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path))
        _declare(library)
    except (OSError, AttributeError) as error:
        logger.warning("%s cannot be loaded (%s); everything runs in torch. Install gradfilter again.", path, error)
        return None
    mismatch = find_mismatch(_read_description(library), CONSTANTS)
    if mismatch:
        said = "%s is of another version (%s); everything runs in torch. Install gradfilter again."
        logger.warning(said, path, mismatch)
        return None
    library.gf_set_team(find_team())
    return library


def _declare(library: ctypes.CDLL) -> None:
    """Tell ctypes what the library's functions take and return; one that is missing is an `AttributeError`."""
    pointer, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.gf_describe.argtypes, library.gf_describe.restype = [ctypes.c_char_p, long], long
    library.gf_run_tasks.argtypes, library.gf_run_tasks.restype = [pointer, long, number], number
    library.gf_make_tensor.argtypes, library.gf_make_tensor.restype = [ctypes.c_char_p], pointer
    library.gf_block_bytes.argtypes, library.gf_block_bytes.restype = [ctypes.c_char_p], None
    library.gf_trim.argtypes, library.gf_trim.restype = [], None
    library.gf_set_level.argtypes, library.gf_best_level.argtypes = [number], []
    library.gf_set_team.argtypes, library.gf_set_team.restype = [pointer], None


def _read_description(library: ctypes.CDLL) -> str:
    """Return what the library tells of its structs, tasks and constants."""
    size = max(library.gf_describe(None, 0), 0)
    text = ctypes.create_string_buffer(size + 1)
    library.gf_describe(text, size + 1)
    return text.value.decode(errors="replace")


def find_team() -> int | None:
    """Return the address of what runs a function on all threads of torch's OpenMP; None where it has none."""
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"), mode=os.RTLD_NOLOAD)
        return ctypes.cast(torch_library.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):  # another system, or torch on other threads
        return None


@contextmanager
def off() -> Iterator[None]:
    """Run everything that the calling thread runs in torch, as if there were no library.

    On a CPU a backward runs in the thread that calls it, with what a checkpoint computes again.
    """
    with _switch.hold_off():
        yield


def is_on() -> bool:
    """Tell whether the library is there, not switched off, and nobody watches torch's functions."""
    # Every operator asks: the same as `not is_watched()`, without the calls, but for a recording of tasks, which is a mode.
    if _depth() or load() is None or _is_key_included(_PRE_DISPATCH) or (_count_modes() and RECORDING.note is None):
        return False
    return not (_are_transforms_active() or _find_tracer() is not None)


def is_watched() -> bool:
    """Tell whether somebody follows torch's operators in this thread one by one: a mode, a tracer, a transform."""
    return bool(_count_modes() or is_before_dispatch() or _are_transforms_active() or _find_tracer() is not None)


def is_before_dispatch() -> bool:
    """Tell whether a mode gets torch's operators before autograd does: torch counts those modes apart from the others."""
    return _is_key_included(_PRE_DISPATCH)


def has_tangent(*values: Any) -> bool:
    """Tell whether forward differentiation follows one of the tensors in some values: the library knows no tangents.

    A level is open for all threads at once, but only tensors that `make_dual` has made, and what comes of them, have tangents.
    """
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x, level=0).tangent is not None for x in tree_leaves(values))


def can_run(x: Tensor) -> bool:
    """Tell whether the library is on and can read x."""
    # In this order: transforms do not know memory formats.
    return is_on() and is_readable(x) and not has_tangent(x)


def is_readable(x: Tensor) -> bool:
    """Tell whether the library can read x: a plain dense map [N, C, H, W] in main memory, float32 or bfloat16."""
    return (
        type(x) is Tensor
        and x.layout is torch.strided
        and x.dim() == 4
        and x.dtype in DTYPES
        and x.is_cpu
        and (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last))
        and x.data_ptr() != 0  # that of an empty tensor is 0, and of one whose memory was freed or is not written out
        and not x.is_neg()
    )


def is_here(x: Tensor) -> bool:
    """Tell whether the numbers of a tensor are in main memory as it shows: a subclass's may be elsewhere, a view's negated."""
    return type(x) in PLAIN and x.layout is torch.strided and x.is_cpu and x.data_ptr() != 0 and not x.is_neg()


def is_plain(x: Tensor | None, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> bool:
    """Tell whether the library can read a further tensor: of this shape and dtype, in memory of any order, or none."""
    return x is None or (is_here(x) and x.dtype is dtype and x.shape == shape)


def is_row(x: Tensor | None) -> bool:
    """Tell whether the library can read one of the rows that `fused.are_rows` as it is: dense float32, or none."""
    return x is None or (x.dtype is torch.float32 and x.is_contiguous() and not x.is_neg())


def call(task: Task, packed: bytes, *tensors: Tensor | None) -> int:
    """Run a task on torch's number of threads; torch's profiler sees it as an operator.

    Args:
        task: What is run.
        packed: What `task.pack` returns.
        tensors: What it reads and what it writes, twice where it does both: the profiler is told their bytes.

    Returns:
        What the task has to say: 0 where there is only one way for it to end.
    """
    if profiler._is_profiler_enabled:
        moved = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        with profiler.record_function(f"gradfilter::{task.name}", str(moved)):
            return run(task, packed)
    return run(task, packed)


def run(task: Task, packed: bytes) -> int:
    """Run a task as `call` does, unseen by torch's profiler."""
    if RECORDING.note is not None:
        RECORDING.note(task, packed)
        return 0
    given = task.header + packed
    code = load().gf_run_tasks(given, len(given), torch.get_num_threads())  # type: ignore[union-attr]
    if code == _NO_MEMORY:
        raise MemoryError("gradfilter's native library found no memory for its scratch; use a smaller batch")
    if code < 0:
        raise RuntimeError(
            f"gradfilter's native library refuses a task {task.name!r} of {len(packed)} bytes, for it takes "
            f"{task.record.size}. This is a mistake in gradfilter: please report it. GRADFILTER_NATIVE=0 runs it in torch."
        )
    return code
