"""Every operator against its oracle: reference, kernel, entry in torch's registry, fake, gradient; and what it refuses."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gradfilter import ops
from gradfilter.errors import DoubleBackwardError, InputError, RuleError
from gradfilter.geometry.axes import Axis
from gradfilter.geometry.tiling import Layout, Pair
from gradfilter.geometry.windows import Windows
from gradfilter.ops import native
from gradfilter.ops.check import Check
from gradfilter.ops.operator import operator
from operator_cases import CASES, WRITING, Args, Case, N, list_parts, move
from views import View

each_case = pytest.mark.parametrize("case", CASES, ids=str)
needs_library = pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")
ROOT = Path(__file__).parents[1]


def to_kind(args: Args, dtype: torch.dtype, last: bool = False) -> Args:
    """Return arguments with floating point tensors in another dtype, and maps in channels-last memory."""

    def convert(x: Tensor) -> Tensor:
        x = x.to(dtype) if x.is_floating_point() else x
        return x.contiguous(memory_format=torch.channels_last) if last and x.dim() == 4 else x

    return tree_map_only(Tensor, convert, args)


def complete(case: Case, args: Args) -> dict[str, Any]:
    """Return all arguments in the operator's order."""
    bound = case.operator.signature.bind(**args)
    bound.apply_defaults()
    return dict(bound.arguments)


def run_oracle(case: Case, args: Args) -> Any:
    """Return what the oracle says of arguments, which it takes in the operator's order."""
    return case.oracle(*(args[name] for name in case.operator.signature.parameters if name in args))


def assert_parts(got: Any, expected: Any, tolerance: float) -> None:
    """Check tensors one by one: integers are equal, others within a tolerance relative to the largest element."""
    for g, e in zip(list_parts(got), list_parts(expected), strict=True):
        assert (g is None) == (e is None)
        if g is None or e is None:
            continue
        assert g.shape == e.shape
        if e.is_floating_point():
            assert g.is_floating_point()
            most = float(e.abs().max()) if e.numel() else 0.0
            torch.testing.assert_close(g.double(), e.double(), rtol=0, atol=tolerance * max(1.0, most))
        else:
            assert torch.equal(g, e)


def call_entry(case: Case, args: Args) -> Any:
    """Return an operator's result by way of torch's dispatcher."""
    found = case.operator.entry(*case.operator.pack(complete(case, args)))
    return case.operator.unpack_result([found] if isinstance(found, Tensor) else found)


# What is computed


def test_every_operator_has_a_case():
    assert {case.operator.name for case in CASES} == set(ops.OPERATORS)
    assert len({case.name for case in CASES}) == len(CASES)


@each_case
def test_the_reference_is_what_the_oracle_says(case):
    args = case.make()
    result = case.operator.reference(**args)
    assert_parts(result, run_oracle(case, args), 2e-7 if case.operator.name == "fold_norm" else 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_case
def test_the_reference_runs_in_half_precision(case, dtype):
    """Counts and integers aside, which a rounded input may move."""
    args = to_kind(case.make(), dtype)
    got, expected = case.operator.reference(**args), run_oracle(case, to_kind(args, torch.float64))
    for g, e in zip(list_parts(got), list_parts(expected), strict=True):
        assert (g is None) == (e is None)
        if g is not None and e is not None and e.is_floating_point():
            torch.testing.assert_close(g.double(), e.double(), rtol=0, atol=0.04 * max(1.0, float(e.abs().max())))


@needs_library
@pytest.mark.parametrize("threads", [1, 2])
@each_case
def test_the_kernel_is_what_the_reference_says(case, threads):
    args = to_kind(case.make(), torch.float32, last=True)
    kernel = case.operator.kernel
    result = None if kernel is None else run_on(threads, lambda: kernel(**args))
    assert (result is not None) == case.has_kernel
    if result is not None:
        assert_parts(result, case.operator.reference(**args), case.tolerance)
        assert_parts(result, run_oracle(case, to_kind(args, torch.float64)), case.tolerance)


def run_on(threads: int, run: Callable[[], Any]) -> Any:
    """Return what a function returns on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


class Plain(TorchDispatchMode):
    """Run each operator of torch as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def ran(monkeypatch):
    """Return what lists which of kernel and reference gave the result of each call of a case's operator from outside."""

    def record(case: Case) -> list[str]:
        found: list[str] = []
        within: list[str] = []

        def watch(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                within.append(name)
                try:
                    result = real(*args, **kwargs)
                finally:
                    within.pop()
                if result is not None and not within:  # a reference may call its operator on a part
                    found.append(name)
                return result

            return run

        monkeypatch.setattr(case.operator, "reference", watch("reference", case.operator.reference))
        if case.operator.kernel is not None:
            monkeypatch.setattr(case.operator, "kernel", watch("kernel", case.operator.kernel))
        return found

    return record


@each_case
def test_a_call_runs_the_kernel_or_the_reference(case, ran):
    args, found = to_kind(case.make(), torch.float32, last=True), ran(case)
    usual = "kernel" if case.has_kernel and native.is_on() else "reference"

    def check(expected: str, args: Args = args) -> None:
        for run in (lambda: case.operator(**args), lambda: call_entry(case, args)):
            run()
            assert found == [expected]
            found.clear()

    check(usual)
    with native.off():
        check("reference")
    case.operator(*complete(case, args).values())
    with Plain():
        case.operator(**args)
    assert found == [usual, "reference"]
    found.clear()
    name = next(name for name, value in args.items() if isinstance(value, Tensor))
    case.operator(**{**args, name: args[name].clone().requires_grad_()})
    assert found == ["reference" if case.operator.adjoint else usual]


@pytest.mark.parametrize("hold_off", [nullcontext, native.off], ids=["library", "torch"])
@pytest.mark.parametrize("case", [case for case in CASES if not case.operator.adjoint], ids=str)
def test_what_has_no_adjoint_is_not_followed(case, hold_off):
    """Neither by the kernel nor by the reference: rules say what the gradient is."""
    args = to_kind(case.make(), torch.float32, last=True)
    needing = {name: part for name, part in args.items() if name not in ("out", "cells")}
    needing = tree_map_only(Tensor, lambda x: x.requires_grad_() if x.is_floating_point() else x, needing)
    with hold_off():
        result = case.operator(**{**args, **needing})
    assert not any(part.requires_grad for part in list_parts(result) if part is not None)


# What torch's registry has


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels last"])
@each_case
def test_the_entry_is_right(case, last):
    args = to_kind(case.make(), torch.float32, last)
    assert_parts(call_entry(case, args), case.operator.reference(**args), case.tolerance)
    opcheck(case.operator.entry, tuple(case.operator.pack(complete(case, args))))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@each_case
def test_a_fake_tells_shape_memory_dtype_and_device(case, device):
    args = to_kind(case.make(), torch.float32, last=True)
    expected = case.operator.entry(*case.operator.pack(complete(case, args)))
    with FakeTensorMode():
        fakes = move(args, device)
        found = case.operator.entry(*case.operator.pack(complete(case, fakes)))
    for fake, real in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert fake.device.type == device
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@each_case
def test_the_reference_runs_on_shapes_alone(case):
    args = to_kind(case.make(), torch.float32)
    expected = case.operator.reference(**args)
    found = case.operator(**move(args, "meta"))
    for fake, real in zip(list_parts(found), list_parts(expected), strict=True):
        assert (fake is None) == (real is None)
        if fake is not None and real is not None:
            assert (fake.shape, fake.dtype, fake.device.type) == (real.shape, real.dtype, "meta")


def test_references_run_on_another_device_and_refuse_what_they_do_here():
    run = subprocess.run([sys.executable, str(ROOT / "tests/other_device.py")], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout == f"{len(CASES) + len(WRITING)} cases on elsewhere\n"


@pytest.mark.parametrize("before", [False, True], ids=["behind autograd", "before autograd"])
@each_case
def test_a_graph_has_one_node_for_it(case, before):
    args = to_kind(case.make(), torch.float32, last=True)
    graph = make_fx(lambda args: case.operator(**args), pre_dispatch=before)(args)
    called = [node.target for node in graph.graph.nodes if node.op == "call_function" and "gradfilter" in str(node.target)]
    assert called == [case.operator.entry]
    assert_parts(graph(args), case.operator.reference(**args), case.tolerance)


@each_case
def test_it_is_spelled_out_in_operators_of_torch(case):
    args = case.make()
    graph = make_fx(lambda args: case.operator(**args), decomposition_table=ops.find_decompositions())(args)
    assert not [node for node in graph.graph.nodes if "gradfilter" in str(node.target)]
    assert_parts(graph(args), case.operator.reference(**args), 1e-9 if case.operator.name != "fold_norm" else 1e-6)


@each_case
def test_the_gradient_is_its_adjoint_or_refused(case):
    args = case.make()
    name = next(name for name, value in args.items() if isinstance(value, Tensor))
    x = args[name].requires_grad_()
    if case.operator.adjoint is None:
        results = [part for part in list_parts(call_entry(case, args)) if part is not None]
        followed = [part.sum() for part in results if part.requires_grad]
        assert len(followed) == sum(part.is_floating_point() for part in results)
        for y in followed:
            with pytest.raises(DoubleBackwardError, match=f"gradfilter::{case.operator.name} has no derivative"):
                y.backward(retain_graph=True)
        return
    expected = run_oracle(case, args)
    g = torch.ones_like(expected) + torch.arange(expected.numel(), dtype=expected.dtype).reshape(expected.shape) / 10
    (gx,) = torch.autograd.grad(expected, x, g)
    for run in (lambda: case.operator(**args), lambda: call_entry(case, args)):
        torch.testing.assert_close(torch.autograd.grad(run(), x, g)[0], gx, rtol=1e-9, atol=1e-9)


@needs_library
@pytest.mark.parametrize("case", [case for case in CASES if case.operator.adjoint], ids=str)
def test_no_kernel_hides_a_gradient(case):
    args = to_kind(case.make(), torch.float32, last=True)
    name = next(name for name, value in args.items() if isinstance(value, Tensor))
    assert case.operator(**{**args, name: args[name].requires_grad_()}).requires_grad


def test_a_second_operator_of_a_name_is_refused():
    def pool_mean(x: Tensor, patch: Pair) -> Tensor:
        return x

    with pytest.raises(RuleError, match=r"operator 'pool_mean' already, in gradfilter\.ops\.pooling"):
        operator()(pool_mean)


def test_an_argument_that_no_schema_has_is_refused():
    def halve(x: Tensor, names: dict[str, int]) -> Tensor:
        return x / 2

    with pytest.raises(RuleError, match="argument 'names' has the type dict"):
        operator()(halve)
    assert "halve" not in ops.OPERATORS


# What is written about it


@pytest.mark.parametrize("name", ops.OPERATORS)
def test_a_docstring_says_three_things(name):
    text = ops.OPERATORS[name].__doc__ or ""
    for heading in ("Equation:", "Cost:", "Exact when:", "Args:"):
        assert heading in text


def test_the_table_of_operators_is_complete():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (yes|no|part) \|", (ROOT / "docs/operators.md").read_text(encoding="utf-8"), re.M)
    with_kernel = {case.operator.name for case in CASES if case.has_kernel}
    without = {case.operator.name for case in CASES if not case.has_kernel}
    with_kernel.add("conv_norm_gradients")  # what it does before and after `conv_gradients`
    kinds = {name: ("part" if name in without else "yes") if name in with_kernel else "no" for name in ops.OPERATORS}
    assert dict(rows) == kinds


# Views


VIEWS = {
    "offset and step": View(offset=3, step=2, stepped=-1),
    "transposed": View(order="transposed"),
    "last axis first": View(order="last axis first", offset=1),
    "negated": View(negated=True),
    "negated channels last": View(order="channels last", negated=True),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@each_case
def test_tensors_may_lie_anywhere_in_memory(case, view):
    args = to_kind(case.make(), torch.float32)
    expected = case.operator.reference(**args)
    viewed = tree_map_only(Tensor, lambda x: view(x) if x.dim() > 1 and x.is_floating_point() >= view.negated else x, args)
    assert_parts(case.operator(**viewed), expected, case.tolerance)
    assert_parts(call_entry(case, viewed), expected, case.tolerance)


@each_case
def test_tensors_may_overlap_themselves(case):
    """One image, row of a matrix or number is all of them."""
    args = tree_map_only(Tensor, lambda x: x[:1].expand(x.shape), to_kind(case.make(), torch.float32, last=True))
    dense = tree_map_only(Tensor, torch.clone, args)
    expected = case.operator.reference(**dense)
    assert_parts(case.operator(**args), expected, case.tolerance)
    assert_parts(call_entry(case, args), expected, case.tolerance)


# What is refused


TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "integers or not": lambda x: x.long() if x.is_floating_point() else x.float(),
    "complex": lambda x: torch.complex(x.float(), x.float()),
    "booleans": lambda x: x > 0,
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "eight bits": lambda x: x.to(torch.float8_e4m3fn),
    "on meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.reshape(len(x), -1).to_sparse_csr(),
    "mkldnn": lambda x: x.float().to_mkldnn(),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
    "no axis": lambda x: x.new_zeros(()),
    "flat": lambda x: x.flatten(),
    "an axis less": lambda x: x[0],
    "an axis more": lambda x: x[None],
    "no image": lambda x: x[:0],
    "no channel": lambda x: x[:, :0] if x.dim() > 1 else x[:0],
    "no row": lambda x: x[..., :0, :] if x.dim() > 1 else x[:0],
    "no column": lambda x: x[..., :0],
    "an image more": lambda x: torch.cat([x, x[:1]]),
    "a channel more": lambda x: torch.cat([x, x[:, :1]], 1) if x.dim() > 1 else x,
    "a row more": lambda x: torch.cat([x, x[..., :1, :]], -2) if x.dim() > 1 else x,
    "a column more": lambda x: torch.cat([x, x[..., :1]], -1),
    "an image less": lambda x: x[1:],
    "a channel less": lambda x: x[:, 1:] if x.dim() > 1 else x,
    "a column less": lambda x: x[..., 1:],
    "one number": lambda x: x.reshape(-1)[:1],
    "a list": lambda x: x.tolist(),
    "an array": lambda x: x.numpy(),
    "nothing": lambda x: None,
    "text": lambda x: "x",
    "sixteen bits": lambda x: x.to(torch.int16),
    "thirty-two bits": lambda x: x.to(torch.int32),
    "elsewhere": lambda x: torch.zeros_like(x, device="meta" if x.is_cpu else "cpu"),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "on memory that was freed": lambda x: free(x.clone()),
    "zeros that are not written out": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device),
    "a subclass": lambda x: Wrapper(x),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "of inference mode": lambda x: torch.inference_mode()(x.clone)(),
    "in another order": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x,
    "overlapping itself": lambda x: x[:1].clone().expand(x.shape),
    "half overlapping itself": lambda x: x.flatten().as_strided(
        x.shape, (x.numel() // len(x) // 2, *x[:1].contiguous().stride()[1:])
    ),
    "the first of the last axis": lambda x: x[..., 0],
}
"""What may be given in the place of a tensor."""


class Wrapper(Tensor):
    """A tensor whose numbers another one holds."""

    inner: Tensor

    @staticmethod
    def __new__(cls, x: Tensor) -> Wrapper:
        """Wrap a tensor."""
        options = {"dtype": x.dtype, "layout": x.layout, "device": x.device}
        made = Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), **options)
        made.inner = x
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch on what is wrapped."""
        return func(*tree_map_only(cls, lambda x: x.inner, args), **tree_map_only(cls, lambda x: x.inner, kwargs or {}))


def free(x: Tensor) -> Tensor:
    """Return a tensor without its memory."""
    x.untyped_storage().resize_(0)
    return x


def list_places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each tensor in arguments."""
    if isinstance(value, Tensor):
        yield path
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from list_places(part, (*path, name))
    elif hasattr(value, "_fields"):
        for name in value._fields:
            yield from list_places(getattr(value, name), (*path, name))


def put(value: Any, path: tuple[Any, ...], new: Callable[[Any], Any]) -> Any:
    """Return arguments with another value at a path."""
    if not path:
        return new(value)
    name, *rest = path
    if isinstance(value, dict):
        return {**value, name: put(value[name], tuple(rest), new)}
    return value._replace(**{name: put(getattr(value, name), tuple(rest), new)})


def check_refused_or_right(case: Case, args: Args) -> None:
    """Check that arguments are refused by name, or that the result is the reference's."""
    refusal = find_refusal(case, args)
    if refusal is not None:
        assert re.match(rf"gradfilter::{case.operator.name} got [a-z]\w*(\.\w+)? ", refusal), refusal
        with pytest.raises(InputError):
            case.operator(**args)
        if is_writing(case, args) or any(isinstance(part, Tensor) and part._is_zerotensor() for part in tree_leaves(args)):
            return  # entries have no such parameters, and torch's dispatcher writes such zeros out
        # Torch's dispatcher refuses by itself what is no tensor.
        with pytest.raises(InputError if are_tensors(case, args) else (InputError, RuntimeError, TypeError)):
            call_entry(case, args)
        return
    calls = [case.operator] if is_writing(case, args) else [case.operator, lambda **args: call_entry(case, args)]
    given = [part for part in tree_leaves(args) if isinstance(part, Tensor)]
    if not all(part.is_cpu and not is_fake(part) for part in given):
        for call in (
            calls[1:] if any(part.device.type not in ("cpu", "meta") for part in given) else calls
        ):  # torch's own functions want such a device
            call(**args)
        return
    expected = tree_map_only(Tensor, torch.clone, case.operator.reference(**args))
    is_half = any(getattr(part, "dtype", None) in HALF for part in [*given, *list_parts(expected)])
    for result in (call(**args) for call in calls):
        assert_parts(result, expected, 2e-2 if is_half else case.tolerance)


def is_writing(case: Case, args: Args) -> bool:
    """Tell whether there is something to write to among arguments, which entries do not take."""
    return any(args.get(name) is not None for name in case.operator.eager)


def find_refusal(case: Case, args: Args) -> str | None:
    """Return what an operator's check says of arguments, if it refuses them."""
    try:
        case.operator.check(Check(case.operator.name), **args)
    except InputError as error:
        return str(error)
    return None


HALF = (torch.float16, torch.bfloat16)


def are_tensors(case: Case, args: Args) -> bool:
    """Tell whether there is a tensor that torch dispatches wherever the schema has one."""
    flat = case.operator.pack(complete(case, args))
    kinds = [str(argument.type) for argument in case.operator.entry._schema.arguments]
    return all(
        (isinstance(v, Tensor) and not v.is_nested) or (v is None and "Optional" in kind) or "Tensor" not in kind
        for v, kind in zip(flat, kinds, strict=True)
    )


PLACES = ["cpu", "meta", "cuda"]
"""Where tensors are: those of "cuda" are fakes, without values, for this machine may have none."""
every_case = pytest.mark.parametrize("case", [*CASES, *WRITING], ids=str)


@contextmanager
def placed(args: Args, place: str) -> Iterator[Args]:
    """Give arguments that are in a place."""
    if place == "cpu":
        yield args
    elif place == "meta":
        yield move(args, place)
    else:
        with FakeTensorMode():
            yield move(args, place)


def check_wrong_tensors(case: Case, args: Args) -> None:
    """Check what an operator says of each tensor that may be given in the place of each of its own."""
    for path, (kind, change) in itertools.product(list_places(args), TENSORS.items()):
        if kind == "on meta" and any(map(is_fake, tree_leaves(args))):
            continue  # torch runs entries on these as on what is no fake
        try:
            changed = put(args, path, change)
        except (RuntimeError, IndexError, TypeError, AssertionError):
            continue  # there is no such tensor
        try:
            check_refused_or_right(case, changed)
        except Exception as error:
            raise AssertionError(f"{'.'.join(path)}: {kind}") from error


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(("last", "place"), [(False, "cpu"), *((True, place) for place in PLACES)])
@every_case
def test_what_is_no_such_tensor_is_refused(case, last, place):
    """Torch has no negative strides: views with a negative bit take their place, in `VIEWS`."""
    with placed(to_kind(case.make(), torch.float32, last), place) as args:
        check_wrong_tensors(case, args)


HUGE = [(1, 2**31), (2**31, 1), (2**40, 2**40), (2**62, 2**62), (2**63 - 1, 2**63 - 1)]
NUMBERS: dict[str, list[Any]] = {
    "patch": [(0, 4), (3, 0), (-1, 2), (3, -4), (3,), (2, 2, 2), *HUGE],
    "size": [(0, 10), (7, -1), (70, 10), (7, 100), *HUGE],
    "stride": [(0, 1), (1, -1), *HUGE],
    "padding": [(-1, 0), (0, -3), (2**30, 2**30), *HUGE],
    "dilation": [(0, 1), (1, -2), (2**29, 2**29), *HUGE],
    "out_size": [(0, 4), (4, -1), (2**30, 2**30), *HUGE],
    "groups": [0, -1, 3, 1000, 2**62],
    "act": [ops.Act(9), ops.Act(-1), ops.Act(2**40), ops.Act(ops.CLAMP, math.nan), ops.Act(ops.CLAMP, 0.0, math.nan)],
    "slopes": [(), (0.0,), (0.0, 1.0, 2.0)],
    "layout": [
        *(Layout(*axes) for axes in ((1, 1), (3, 3), (-2, -1), (2, -1), (9, 9), (2, 9))),
        *(Layout(2, 3, None, prefix) for prefix in (1, -1)),
        *(Layout(1, 1, tokens, prefix) for tokens, prefix in (((-4, -4), 0), ((7, 10), -7), ((2**31, 1), 0))),
    ],
}
"""By parameter, what means nothing there."""
act_of: Any = ops.Act
layout_of: Any = Layout
PAIRS = [3, None, "ab", (3.0, 4.0), (1.0, 1.0), (1, None), (True, 2), [3, 4], [1, 1]]
BEYOND = 10**400
"""A whole number that is larger than any of double precision."""
FORMS: dict[str, list[Any]] = {
    **dict.fromkeys(("patch", "size", "stride", "padding", "dilation", "out_size"), PAIRS),
    "groups": [None, 1.0, 16.0, "1", (1,), True],
    "act": [
        None,
        1,
        "relu",
        (1, 0.0, 6.0, 0.0),
        *(act_of(*numbers) for numbers in ((1.0,), (1.5,), ("1",), (None,), (1, "a"), (1, 0.0, None), (1, BEYOND))),
    ],
    "slopes": [None, 0.5, [0.0, 1.0], ("a", "b"), (0.0, None), (0.0, BEYOND)],
    "layout": [None, (2, 3, None, 0), "map", *(layout_of(*axes) for axes in ((1, 1, (0, 5)), (1, 1, 5), (2.5, 3)))],
    "windows": [None, (7, 10), "windows"],
    "geometry": [None, (7, 10), "geometry"],
    "norm": [None, (None, torch.ones(16), torch.ones(16), 1e-3), "norm"],
    "eps": [None, "a", (1e-3,), BEYOND],
    "ignore_index": [None, "a", 2.5, 2**70, True],
    "middle": [None, (None, None, None, ops.RELU, (2, 2)), "end"],
    "end": [None, (None, None, None, ops.RELU, (2, 2)), "end"],
    "cells": [(None, None), "cells", ops.Cells(None, None), ops.Cells(torch.ones(1), None), ops.Cells(None, torch.ones(1))],
}
"""By parameter, what is of another type than it takes; a schema says so for entries."""


def check_wrong_numbers(case: Case, args: Args) -> None:
    """Check that an operator refuses numbers that mean nothing by the argument's name, on each path."""

    def run_reference(**args: Any) -> None:
        with native.off():
            case.operator(**args)

    for table, calls in ((NUMBERS, [lambda **args: call_entry(case, args)]), (FORMS, [])):
        for path, wrong in list_wrong_numbers(table, complete(case, args)):
            changed = put(complete(case, args), path, lambda _, wrong=wrong: wrong)
            for call in [case.operator, run_reference, *([] if is_writing(case, args) else calls)]:
                said = None
                try:
                    call(**changed)
                except InputError as error:
                    said = str(error)
                except Exception as error:
                    raise AssertionError(f"{'.'.join(path)} = {wrong}") from error
                assert said is not None, f"{'.'.join(path)} = {wrong} was taken"
                assert said.startswith(f"gradfilter::{case.operator.name} got "), said


@pytest.mark.parametrize("place", PLACES)
@every_case
def test_numbers_that_mean_nothing_are_refused(case, place):
    with placed(to_kind(case.make(), torch.float32, last=True), place) as args:
        check_wrong_numbers(case, args)


def list_wrong_numbers(table: dict[str, list[Any]], args: Args) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield paths to numbers in arguments, and what means nothing there."""
    for name, value in args.items():
        for wrong in table.get(name, ()):
            yield (name,), wrong
        if isinstance(value, ops.Ending | ops.FixedNorm):
            yield from (((name, field), wrong) for field in value._fields for wrong in table.get(field, ()))


@pytest.mark.parametrize(
    "numbers",
    [
        *(((9, 10), (5, 5), (2, 2), patch, (3, 3), (2, 2), (1, 1)) for patch in ((2**31, 1), (0, 1), 2, (2.0, 2.0), None)),
        *(((9, 10), size, (2, 2), (2, 2), (3, 3), (2, 2), (1, 1)) for size in ((5, 7), (6, 5), (6, 6), (3, 3), (40, 40))),
        ((9, 10), (9, 10), (2, 2), (2, 2), (3, 3), (1, 1), (2, 2)),
        ((9, 10), (10, 10), (2, 2), (2, 2), (1, 1), (2**62, 2**62)),
        ((9, 10), (5, 5), (2, 2), (2, 2), (0, 3)),
    ],
    ids=str,
)
def test_windows_that_no_max_pooling_has_are_refused(numbers):
    with pytest.raises(InputError, match=r"^the windows of a max pooling got "):
        Windows(*numbers)


@pytest.mark.parametrize(
    "numbers", [(0,), (3, 2**31), (3, 1, 2**40), (3, 1, 1, -(2**40)), (3, 1, 1, 1.5), (3.0,), (None,)], ids=str
)
def test_axes_that_no_convolution_has_are_refused(numbers):
    with pytest.raises(InputError, match=r"^one axis of a convolution got "):
        Axis(*numbers, *(3, 1, 1, 1, 8, 8, 2, 2)[len(numbers) :])


@pytest.mark.parametrize("bound", [2**63, 2**64 - 1])
@pytest.mark.parametrize("hold_off", [nullcontext, native.off], ids=["library", "torch"])
def test_a_bound_may_be_as_large_as_torch_takes(bound, hold_off):
    x = torch.tensor([-1.0, 0.5, 1e19, 1e30]).reshape(1, 1, 2, 2)
    with hold_off():
        result = ops.norm_act(x, None, None, ops.Act(ops.CLAMP, 0.0, bound), (2, 2))
    torch.testing.assert_close(result.y, x.clamp(0.0, bound))


@pytest.mark.parametrize("label", [5, -1, 100, 2**62])
def test_a_label_without_a_class_is_refused(label):
    x, target = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)), torch.zeros(2, 7, dtype=torch.int64)
    target[1, 3] = label
    for call in (ops.cross_entropy_gradient, torch.ops.gradfilter.cross_entropy_gradient):
        with pytest.raises(
            InputError, match=r"^gradfilter::cross_entropy_gradient got target with a label out of range\. Give labels"
        ):
            call(x, target, None, -100)
        call(x, target, None, label)


@pytest.mark.parametrize("numbers", [[], [math.inf], [math.nan], [1.7], [1.0, 2.0, 3.0, 4.0, 5.0]], ids=str)
def test_numbers_of_no_activation_are_refused_by_an_entry(numbers):
    with pytest.raises(InputError, match=r"^gradfilter::norm_act got act "):
        torch.ops.gradfilter.norm_act(torch.ones(1, 2, 3, 3), None, None, numbers, [2, 2], None)


def test_a_fake_without_a_tensor_is_refused_by_name():
    with FakeTensorMode(), pytest.raises(InputError, match=r"^gradfilter::pool_mean got x of type NoneType"):
        ops.OPERATORS["pool_mean"].fake(None, [2, 2], [2, 3, 0, 0, 0])


# What is not refused


@each_case
def test_a_batch_may_be_empty(case):
    args = tree_map_only(Tensor, lambda x: x[:0] if len(x) == N and x.dim() > 1 else x, to_kind(case.make(), torch.float32))
    if not any(x.numel() == 0 for x in tree_leaves(args) if isinstance(x, Tensor)):
        pytest.skip("it has another batch")
    expected = case.operator(**move(args, "meta"))
    for result in (case.operator(**args), call_entry(case, args)):
        for got, wanted in zip(list_parts(result), list_parts(expected), strict=True):
            assert getattr(got, "shape", None) == getattr(wanted, "shape", None)
            assert got is None or got.isfinite().all()


@pytest.mark.parametrize("case", WRITING, ids=str)
def test_what_is_written_to_tells_the_result(case):
    args = to_kind(case.make(), torch.float32, last=True)
    alone = {name: value for name, value in args.items() if name not in case.operator.eager}
    expected = case.operator.reference(**alone)
    for last in (True, False):
        args = to_kind(case.make(), torch.float32, last)
        assert_parts(case.operator(**args), expected, case.tolerance)
        given = [x for name in case.operator.eager for x in list_parts(args[name]) if x is not None]
        found = [x for x in list_parts(expected) if x is not None]
        for x in given:
            assert any(f.shape == x.shape and torch.allclose(f.double(), x.double(), atol=1e-4) for f in found)


@pytest.mark.parametrize("case", [case for case in CASES if case.operator.name == "max_route"], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stays_where_something_was_won(case, value):
    args = to_kind(case.make(), torch.float32, last=True)
    args["g"][0, :, 1, 1] = value
    winners = args["winners"]
    if winners.dim() == 5:
        winners[0, :, 1, 1, 1:] = 0
    expected = run_oracle(case, args)
    with native.off():
        results = [case.operator(**args)]
    for result in (*results, case.operator(**args)):
        torch.testing.assert_close(result, expected, equal_nan=True)
