"""What an operator is: a reference in torch, perhaps a kernel of the C library, and an entry in torch's registry.

Called from Python an operator runs at once, without torch's dispatcher, which takes 6 to 25 µs a call. Where a graph is being
recorded it calls its entry `torch.ops.gradfilter.<name>` instead, so that the graph holds one node for it. The entry's schema
follows from the signature of the reference. This file is the one place that chooses between kernel, reference and entry:
`Operator.__call__` between the entry and the other two, `run_kernel` and `Operator._run` between these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library, register_autograd, register_fake
from torch.utils._python_dispatch import _disable_current_modes

from gradfilter.errors import DoubleBackwardError, InputError, RuleError
from gradfilter.geometry.convolution import Geometry, geometry_from
from gradfilter.geometry.tiling import Layout, is_nhwc, layout_from
from gradfilter.geometry.windows import Windows, windows_from
from gradfilter.ops.check import Check
from gradfilter.ops.native.library import has_tangent, is_before_dispatch, is_on
from gradfilter.ops.native.values import Act, act_from

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

LIBRARY = Library("gradfilter", "DEF")
"""The entries in torch's registry; they live as long as this."""
OPERATORS: dict[str, Operator[..., Any]] = {}
"""The operators by name."""
NO_KWARGS: Mapping[str, Any] = {}


class Numbers(NamedTuple):
    """How an argument that is no tensor is written in a graph.

    Attributes:
        schema: Its type in a schema.
        pack: From the argument to numbers.
        unpack: And back.
    """

    schema: str
    pack: Callable[[Any], Sequence[float]]
    unpack: Callable[[Sequence[Any]], Any]


NUMBERS: dict[Any, Numbers] = {
    tuple[int, int]: Numbers("int[]", tuple, tuple),
    tuple[float, float]: Numbers("float[]", tuple, tuple),
    Layout: Numbers("int[]", lambda layout: layout.numbers, layout_from),
    Geometry: Numbers("int[]", lambda geometry: geometry.numbers, geometry_from),
    Windows: Numbers("int[]", lambda windows: windows.numbers, windows_from),
    Act: Numbers("float[]", tuple, act_from),
}
"""The types that a schema writes as a list of numbers."""
PLAIN = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", float: "float", bool: "bool"}
"""The types that a schema has itself."""


def find_fields(name: str, hint: Any) -> Iterator[tuple[str, str]]:
    """Yield name and schema type of each value that an argument of some type is made of: a tuple with names has several."""
    if hint in PLAIN:
        yield name, PLAIN[hint]
    elif hint in NUMBERS:
        yield name, NUMBERS[hint].schema
    elif hasattr(hint, "_fields"):
        for field, inner in get_type_hints(hint).items():
            yield from find_fields(f"{name}_{field}" if name else field, inner)
    elif getattr(hint, "__origin__", None) is tuple:
        for i, inner in enumerate(get_args(hint)):
            yield from find_fields(f"{name}{i}", inner)
    else:
        raise RuleError(f"an operator's argument {name!r} has the type {hint}, which no schema has. Add it to NUMBERS.")


def flatten(hint: Any, value: Any) -> Iterator[Any]:
    """Yield the values that an argument is made of, as the schema orders them."""
    if hint in PLAIN:
        yield value
    elif hint in NUMBERS:
        yield list(NUMBERS[hint].pack(value))
    else:
        for inner, part in zip(find_parts(hint), value, strict=True):
            yield from flatten(inner, part)


def unflatten(hint: Any, values: Iterator[Any]) -> Any:
    """Return the argument that `flatten` has taken apart."""
    if hint in PLAIN:
        return next(values)
    if hint in NUMBERS:
        return NUMBERS[hint].unpack(tuple(next(values)))
    parts = [unflatten(inner, values) for inner in find_parts(hint)]
    return hint(*parts) if hasattr(hint, "_fields") else tuple(parts)


def find_parts(hint: Any) -> Sequence[Any]:
    """Return the types that a tuple type is made of."""
    return tuple(get_type_hints(hint).values()) if hasattr(hint, "_fields") else get_args(hint)


def list_plain(hint: Any) -> list[Any]:
    """Return the types of the tensors that a result is made of."""
    return [hint] if hint in PLAIN else [plain for inner in find_parts(hint) for plain in list_plain(inner)]


_get_mode, _PROXY = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY
_is_key_included, _PRE_DISPATCH = torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch


def is_recorded() -> bool:
    """Tell whether a graph is being recorded, operator by operator.

    Before autograd sees the operators (`make_fx(..., pre_dispatch=True)`, `torch.export`) or behind it.
    """
    return _get_mode(_PROXY) is not None or is_before_dispatch()


def needs_graph(x: Any) -> bool:
    """Tell whether autograd follows what is done with x: a kernel is no part of its graph."""
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def run_kernel(kernel: Callable[..., R | None], args: tuple[Any, ...], kwargs: Mapping[str, Any] = NO_KWARGS) -> R | None:
    """Return what a kernel of the library gives; `None` where it must not run, or does not take the arguments."""
    if is_on() and not (forward_ad._current_level >= 0 and has_tangent(args, kwargs)):
        return kernel(*args, **kwargs)
    return None


class Operator(Generic[P, R]):
    """One computation of a coarse step.

    Attributes:
        name: Its name in torch's registry, behind `gradfilter::`.
        reference: What it computes, in torch: right on any device and in any floating point dtype.
        kernel: The same by the C library, or `None` for arguments that the library does not take: all that it could not read.
        check: Raises where an argument is invalid, with the argument's name.
        spelled: The same as the reference in operators that any exporter knows.
        entry: What torch's registry has of it; `None` where it does not register.
        adjoint: For one that is linear in its first argument, from the gradient of its result, the first argument's shape and
            the other arguments to the gradient of the first.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        kernel: Callable[P, R | None] | None = None,
        check: Callable[..., None] | None = None,
        spelled: Callable[P, R] | None = None,
        adjoint: Callable[..., Tensor] | None = None,
        eager: tuple[str, ...] = (),
    ) -> None:
        """Describe an operator, which `register` makes known to torch."""
        self.name, self.reference, self.kernel, self.check = reference.__name__, reference, kernel, check
        self.spelled, self.adjoint, self.eager = spelled or reference, adjoint, eager
        self.signature = signature(reference)
        self.first = next(iter(self.signature.parameters))
        self.entry: Callable[..., Any] | None = None
        self.__doc__, self.__name__, self.__module__, self.__wrapped__ = (
            *(reference.__doc__, reference.__name__, reference.__module__),
            reference,
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it, or let a graph record it."""
        # Every operator asks: the same as `is_recorded()`, without the calls.
        if (_get_mode(_PROXY) is not None or _is_key_included(_PRE_DISPATCH)) and self.entry is not None:
            return self.record(args, kwargs)
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        """Run the kernel where the library takes the arguments, else the reference.

        A kernel looks at what it reads anyway. What it declines, or fails at, is checked thoroughly, which takes longer.
        Without an adjoint, neither of them gives a result that autograd follows.
        """
        kernel = self.kernel
        if kernel is not None and (self.adjoint is None or not needs_graph(args[0] if args else kwargs.get(self.first))):
            try:
                result = run_kernel(kernel, args, kwargs)
            except Exception as error:
                self.verify(args, kwargs)
                if isinstance(error, MemoryError | RuntimeError):
                    raise
                result = None  # numbers that a task cannot hold, say
            if result is not None:
                return result
        self.verify(args, kwargs)
        if self.adjoint is not None or not torch.is_grad_enabled():
            return self.reference(*args, **kwargs)
        with torch.no_grad():
            return self.reference(*args, **kwargs)

    def verify(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise an `InputError` that names the argument where one is invalid."""
        if self.check is not None:
            self.check(Check(self.name), *args, **kwargs)

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Call the entry in torch's registry, which whoever records sees as one node."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if any(bound.arguments[name] is not None for name in self.eager):
            return self.reference(*args, **kwargs)
        assert self.entry is not None
        found = self.entry(*self.pack(bound.arguments))
        return self.unpack_result([found] if isinstance(found, Tensor) else found)

    def register(self) -> None:
        """Define the entry in torch's registry: schema, implementation, fake and gradient."""
        if self.name in OPERATORS:
            raise RuleError(f"there is an operator {self.name!r} already, in {OPERATORS[self.name].reference.__module__}.")
        hints = get_type_hints(self.reference)
        self.result = hints.pop("return")
        self.hints = {name: hint for name, hint in hints.items() if name not in self.eager}
        fields = [field for name, hint in self.hints.items() for field in find_fields(name, hint)]
        results = list_plain(self.result)
        self.optional = [plain is not Tensor for plain in results]
        returns = "Tensor" if len(results) == 1 else f"({', '.join(['Tensor'] * len(results))})"
        LIBRARY.define(f"{self.name}({', '.join(f'{kind} {name}' for name, kind in fields)}) -> {returns}")
        LIBRARY.impl(self.name, self.dispatch, "CompositeExplicitAutograd")
        register_fake(f"gradfilter::{self.name}", self.fake, lib=LIBRARY)
        register_autograd(f"gradfilter::{self.name}", self.differentiate, setup_context=self.remember, lib=LIBRARY)
        self.entry = getattr(torch.ops.gradfilter, self.name).default
        OPERATORS[self.name] = self

    def pack(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Return what its entry is called with for these arguments, all of them by name."""
        return [value for name, hint in self.hints.items() for value in flatten(hint, arguments[name])]

    def unpack(self, flat: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments that an entry was called with."""
        values, args = iter(flat), {}
        for name, hint in self.hints.items():
            try:
                args[name] = unflatten(hint, values)
            except (InputError, TypeError, ValueError, IndexError, OverflowError) as error:
                raise InputError(f"gradfilter::{self.name} got {name} of invalid values: {error}") from error
        return args

    def unpack_result(self, found: Sequence[Tensor]) -> R:
        """Return a result that an entry gave: a tensor of shape [0] stands for none."""
        parts = (None if optional and tuple(x.shape) == (0,) else x for x, optional in zip(found, self.optional, strict=True))
        return unflatten(self.result, parts)

    def pack_result(self, result: Any, flat: Sequence[Any]) -> Any:
        """Return a result as entries give it: dense, laid out as the first argument, and never an argument itself."""
        like = find_first(flat)
        given = {v.untyped_storage()._cdata for v in flat if isinstance(v, Tensor)}
        found = [like.new_empty(0) if x is None else lay_out(x, like, given) for x in flatten(self.result, result)]
        return found[0] if len(found) == 1 else tuple(found)

    def dispatch(self, *flat: Any) -> Any:
        """Run it for torch's dispatcher."""
        return self.pack_result(self._run((), self.unpack(flat)), flat)

    def decompose(self, *flat: Any) -> Any:
        """Run it in operators that any exporter knows: an entry of a decomposition table."""
        return self.pack_result(self.spelled(**self.unpack(flat)), flat)  # type: ignore[call-arg]

    def fake(self, *flat: Any) -> Any:
        """Return tensors without values, as the reference gives them on shapes alone; sizes that are symbols become numbers."""
        args = self.unpack(flat)
        self.verify((), args)  # of the tensors themselves: shapes have lost their devices
        like = find_first(flat)
        with _disable_current_modes():
            shapes = [to_shape(v) if isinstance(v, Tensor) else v for v in flat]
            found = self.pack_result(self.reference(**self.unpack(shapes)), shapes)  # type: ignore[call-arg]
        found = [found] if isinstance(found, Tensor) else found
        made = [like.new_empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in found]
        return made[0] if len(made) == 1 else tuple(made)

    def remember(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save for `differentiate` what the adjoint takes."""
        ctx.shape, ctx.places = inputs[0].shape, [i for i, v in enumerate(inputs) if i and isinstance(v, Tensor)]
        ctx.others = [None if isinstance(v, Tensor) else v for v in inputs]
        ctx.save_for_backward(*(inputs[i] for i in ctx.places))

    def differentiate(self, ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient of the first argument, where there is one."""
        if self.adjoint is None:
            raise DoubleBackwardError(
                f"gradfilter::{self.name} has no derivative: the rules that call it say what the gradient is. Call it under "
                "torch.no_grad(), or on tensors that need no gradient."
            )
        others = list(ctx.others)
        for i, x in zip(ctx.places, ctx.saved_tensors, strict=True):
            others[i] = x
        args = self.unpack([gradients[0], *others[1:]])
        g, *rest = args.values()
        return self.adjoint(g, ctx.shape, *rest), *[None] * (len(others) - 1)


def find_first(flat: Sequence[Any]) -> Tensor:
    """Return the first tensor among an entry's arguments."""
    return next(v for v in flat if isinstance(v, Tensor))


def lay_out(x: Tensor, like: Tensor, given: set[int]) -> Tensor:
    """Return x dense, in the memory format of `like` where both are maps, on a storage that is not one of those given."""
    last = x.dim() == like.dim() == 4 and is_nhwc(like)
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    return x.clone() if x.untyped_storage()._cdata in given else x


def to_shape(x: Tensor) -> Tensor:
    """Return a tensor of the same shape, strides and dtype, without values."""
    sizes, strides = [int(n) for n in x.shape], [int(n) for n in x.stride()]
    return torch.empty_strided(sizes, strides, dtype=x.dtype, device="meta")


def operator(
    *,
    kernel: Callable[..., Any] | None = None,
    check: Callable[..., None] | None = None,
    spelled: Callable[..., Any] | None = None,
    adjoint: Callable[..., Tensor] | None = None,
    eager: tuple[str, ...] = (),
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Make an operator of its reference; see `Operator`.

    Args:
        kernel: The same by the C library; returns `None` for arguments that the library does not take.
        check: Called with a `Check` and then the arguments, before the reference runs and where the kernel fails.
        spelled: The reference in operators that any exporter knows, where that is another function.
        adjoint: Of an operator that is linear in its first argument.
        eager: Parameters that no graph has: where they are given, the reference is recorded in the operator's place.
    """

    def make(reference: Callable[P, R]) -> Operator[P, R]:
        made = Operator(reference, kernel, check, spelled, adjoint, eager)
        made.register()
        return made

    return make


def find_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return a decomposition table: from the entry of each operator to what spells it out in torch's own operators.

    For `make_fx(f, decomposition_table=...)` and `ExportedProgram.run_decompositions(...)`.
    """
    return {made.entry: made.decompose for made in OPERATORS.values()}
