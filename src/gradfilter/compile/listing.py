"""Tell in readable lines what was compiled: layer, operators fused, shape, bytes."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from gradfilter.ops import CLAMP, HARDSWISH, IDENTITY, LEAKY, SILU, Act
from gradfilter.ops.operator import OPERATORS

ACTS = {CLAMP: "clamp", LEAKY: "leaky", HARDSWISH.kind: "hardswish", SILU.kind: "silu"}
"""What activations are called."""


class Row(NamedTuple):
    """One operator of a program.

    Attributes:
        inputs: The places of the step's inputs that it reads, its weight first.
        what: What it computes.
        shape: The shape of its result.
        bytes: The bytes of it.
    """

    inputs: tuple[int, ...]
    what: str
    shape: tuple[int, ...]
    bytes: int


def list_rows(graph: Graph, places: Sequence[int | None]) -> list[Row]:
    """Return a row for each operator of a graph that computes something.

    Args:
        graph: A forward or a backward graph.
        places: Which input of the step each of its inputs is; `None` for all others.
    """
    inputs = dict(zip(graph.find_nodes(op="placeholder"), places, strict=False))
    rows = []
    for node in graph.nodes:
        value = find_value(node) if node.op == "call_function" and node.target is not operator.getitem else None
        if value is None or is_view(node):
            continue
        read = [(n, inputs[n]) for n in node.all_input_nodes if inputs.get(n) is not None]
        read.sort(key=lambda item: -item[0].meta["val"].dim() if "val" in item[0].meta else 0)  # weights before biases
        shape = tuple(value.shape)
        rows.append(Row(tuple(place for _, place in read), name_operator(node), shape, value.numel() * value.element_size()))  # type: ignore[misc]
    return rows


def find_value(node: Node) -> Tensor | None:
    """Return the first tensor of a node's result, on shapes alone."""
    value = node.meta.get("val")
    if value is None:
        first = [user for user in node.users if user.target is operator.getitem]
        main = 2 if node.target is torch.ops.gradfilter.expand.default else 0  # behind what is left of the hidden map
        first.sort(key=lambda user: (user.args[1] != main, user.args[1]))
        value = next((user.meta["val"] for user in first if "val" in user.meta), None)
    if isinstance(value, (tuple, list)):
        value = next((v for v in value if isinstance(v, Tensor)), None)
    return value if isinstance(value, Tensor) else None


def is_view(node: Node) -> bool:
    """Tell whether a node computes nothing."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info and not r.alias_info.is_write for r in schema.returns)


def name_operator(node: Node) -> str:
    """Return what a node computes, with what is fused into it."""
    name = node.target._opname  # type: ignore[union-attr]
    if node.target.namespace != "gradfilter" or name not in ("convolve", "expand", "norm_act"):  # type: ignore[union-attr]
        return str(name)
    given = OPERATORS[name].unpack([None if isinstance(x, Node) else x for x in node.args])
    parts = [user.args[1] for user in node.users]
    if name == "expand":
        middle, end = (describe_ending(e.act, node.args[i] is not None) for e, i in ((given["middle"], 3), (given["end"], 13)))
        return f"expand{middle}, depthwise{end}"
    residual = node.args[-1] is not None
    scale = node.args[8 if name == "convolve" else 1] is not None
    text = ("convolve" if name == "convolve" else "pass") + describe_ending(given["act"], scale, residual)
    return text + (" + means" if 1 in parts else "") + (" + slopes" if 2 in parts else "")


def describe_ending(act: Act, has_norm: bool, has_residual: bool = False) -> str:
    """Return what follows a map in one pass."""
    text = (" + norm" if has_norm else "") + (" + residual" if has_residual else "")
    if act.kind == IDENTITY.kind:
        return text
    name = "relu" if act.kind == CLAMP and (act.lo, act.hi) == (0, math.inf) else ACTS[act.kind]
    return f"{text} + {name}"


def make_lines(rows: Sequence[Row], names: Mapping[int, str]) -> list[str]:
    """Return rows as text.

    Args:
        rows: The rows.
        names: The name of the layer that each input of the step belongs to, where it belongs to one.
    """
    cells = [
        (next((names[i] for i in row.inputs if i in names), ""), row.what, str(list(row.shape)), f"{row.bytes:,} B")
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)] if cells else []
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
