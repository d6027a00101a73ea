"""A whole step traces to a graph; the core import stays lean."""

from __future__ import annotations

import ast
import copy
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx

import gradfilter as gf
from gradfilter import ops
from helpers_safety import (
    PLANS,
    applied,
    assert_close,
    assert_differ,
    make_everything,
    make_images,
    make_labels,
    make_net,
    randomise,
)

# Tracing


def make_step(model: nn.Module) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """Return a whole training step as a function of its inputs and parameters."""

    def step(images: Tensor, labels: Tensor, lr: Tensor, params: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        loss = F.cross_entropy(functional_call(model, leaves, (images,)), labels)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        return loss.detach(), {name: p.detach() - lr * g for (name, p), g in zip(leaves.items(), grads, strict=True)}

    return step


@pytest.mark.parametrize("backward", [gf.Backward(patch=1), gf.Backward(patch=2), gf.Backward(grid=2)], ids=str)
def test_a_whole_step_traces_to_a_graph_that_trains(backward):
    model = applied(make_net(nn.Hardswish()), backward)
    params = {name: p.detach() for name, p in model.named_parameters()}
    step, lr = make_step(model), torch.tensor(0.05, dtype=torch.float64)
    graph = make_fx(step)(make_images(), make_labels(), lr, params)
    targets = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert "aten.convolution.default" in targets
    assert not [name for name in targets if name.startswith("aten.convolution_backward")]

    images, labels = make_images(seed=11), make_labels(seed=12)
    loss, updated = graph(images, labels, lr, params)
    expected_loss, expected = step(images, labels, lr, params)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-9, atol=1e-12)
    assert_close(updated, expected, 1e-9)
    assert_differ(updated, params, "stem.0.weight")

    losses = []
    for _ in range(8):
        loss, params = graph(images, labels, lr, params)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]


def test_what_is_recorded_before_autograd_computes_from_its_inputs():
    """No kernel runs while torch's operators are recorded: the graph would hold the memory of its result, not the numbers."""
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 3))
    model = gf.apply_(randomise(net).eval(), gf.Plan.all(gf.Backward(patch=2)))
    images, others = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    graph = make_fx(model, pre_dispatch=True)(images)
    torch.testing.assert_close(graph(others), model(others), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", [PLANS["patch 2"], PLANS["lumped"], PLANS["train"]], ids=["patch 2", "lumped", "train"])
def test_every_kind_of_rule_traces(plan):
    net = make_everything(torch.float64)
    net.get_submodule("point.2").p = 0.0  # type: ignore[assignment]
    model = gf.apply_(net, plan).train()
    buffers = copy.deepcopy(dict(model.named_buffers()))
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    lr = torch.tensor(0.05, dtype=torch.float64)
    graph = make_fx(make_step(model))(make_images(), make_labels(), lr, params)
    model.load_state_dict({**model.state_dict(), **buffers})
    args = (make_images(seed=11), make_labels(seed=12), lr, params)
    assert_close(graph(*args)[1], make_step(model)(*args)[1], 1e-9)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(5),
    "batch, no affine": lambda: nn.BatchNorm2d(5, affine=False),
    "batch, momentum": lambda: nn.BatchNorm2d(5, momentum=0.7),
    "instance": lambda: nn.InstanceNorm2d(5, affine=True, track_running_stats=True),
    "no statistics": lambda: nn.BatchNorm2d(5, track_running_stats=False),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())
def test_running_statistics_move_in_a_graph_without_changes_in_place(norm):
    net = nn.Sequential(nn.Conv2d(3, 5, 3), norm(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))
    plan = gf.Plan.all(gf.Backward(patch=2), batch_norm="train")
    model = gf.apply_(randomise(net.double()), plan).train()
    params = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}

    def step(images: Tensor, labels: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        loss = F.cross_entropy(functional_call(model, (leaves, state), (images,)), labels)
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    eager, moved = ({name: b.clone() for name, b in buffers.items()} for _ in range(2))
    images, labels = make_images(), make_labels()
    expected = step(images, labels, eager)
    traced = make_fx(step)(images, labels, {name: b.clone() for name, b in buffers.items()})
    graph = make_fx(functionalize(traced, remove="mutations"))(images, labels, {name: b.clone() for name, b in buffers.items()})
    operators = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    written = [operator for operator in operators if operator._schema.is_mutable]
    assert set(written) <= {torch.ops.aten.copy_.default}  # to the buffers, at the end
    assert_close(graph(images, labels, moved), expected, 1e-9)
    assert len(written) == sum(not torch.equal(b, buffers[name]) for name, b in eager.items())
    for name, buffer in eager.items():
        torch.testing.assert_close(moved[name], buffer, rtol=1e-12, atol=1e-12)
        assert name.endswith("num_batches_tracked") or not torch.equal(buffer, buffers[name])


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(5, 2, 1), nn.Conv2d(2, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))


def test_a_squeeze_excite_traces_without_convolution_backward():
    model = applied(make_net(SqueezeExcite()), gf.Backward(patch=2))
    params = {name: p.detach() for name, p in model.named_parameters()}
    graph = make_fx(make_step(model))(make_images(), make_labels(), torch.tensor(0.05, dtype=torch.float64), params)
    assert not [node for node in graph.graph.nodes if "convolution_backward" in str(node.target)]


def test_a_prelu_is_recorded_by_its_operator():
    model = applied(make_net(nn.PReLU()), gf.Backward(patch=2))
    params = {name: p.detach() for name, p in model.named_parameters()}
    graph = make_fx(make_step(model))(make_images(), make_labels(), torch.tensor(0.05, dtype=torch.float64), params)
    assert torch.ops.gradfilter.count_steep.default in [node.target for node in graph.graph.nodes]


# Imports


def test_the_core_import_is_lean():
    heavy = "timm torchvision sklearn lightning scipy PIL flwr onnx pandas matplotlib hypothesis pytest".split()
    code = f"import sys, gradfilter, gradfilter.cost; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


PACKAGE, ROOMS = Path(gf.__file__).parent, ("rules", "keep", "geometry")


def list_imports(text: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of all that a source takes from this package, with attributes of `ops` among them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ops":
            yield "gradfilter.ops", node.attr


def is_allowed(room: str, module: str, name: str) -> bool:
    """Tell whether a room may import it: of operators rules and keeps know what is exported, and geometry knows nobody."""
    if module.partition(".")[0] != "gradfilter":
        return True
    if room == "geometry":
        return module == "gradfilter.errors" or module.startswith("gradfilter.geometry")
    return not module.startswith("gradfilter.ops") or (module == "gradfilter.ops" and name in ops.__all__)


def list_forbidden(room: str, text: str) -> list[tuple[str, str]]:
    """List what a module of a room imports and must not."""
    return [(module, name) for module, name in list_imports(text) if not is_allowed(room, module, name)]


def name_path(path: Path) -> str:
    """Return the id of a test of a module."""
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("path", [path for room in ROOMS for path in sorted((PACKAGE / room).glob("*.py"))], ids=name_path)
def test_rules_keeps_and_geometry_import_no_internals(path):
    assert list_forbidden(path.parent.name, path.read_text(encoding="utf-8")) == []


def list_rooms(text: str) -> Iterator[str]:
    """Yield which modules and packages of this one a source imports when it runs: not for types alone."""
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    for module, name in list_imports(ast.unparse(tree)):
        package, _, inner = module.partition(".")
        if package == "gradfilter":
            yield inner.partition(".")[0] or name


def test_imports_point_downwards():
    """In the order that CONTRIBUTING.md gives, which names the rooms that others stand on."""
    text = (PACKAGE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = text.partition("Imports point downwards only:")[2].partition("The core")[0]
    order = re.findall(r"`(\w+)`", listed)
    assert order[:2] + order[-1:] == ["errors", "switch", "cli"]
    upwards = set()
    for room in order:
        paths = [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").is_file() else sorted((PACKAGE / room).rglob("*.py"))
        assert paths, room
        above = order[order.index(room) + 1 :]
        upwards |= {(path.name, to) for path in paths for to in list_rooms(path.read_text(encoding="utf-8")) if to in above}
    assert upwards == set()


def test_internals_are_found():
    text = "import gradfilter.ops.native\nfrom gradfilter import ops\nfrom gradfilter.ops import native, pool_mean\n"
    text += "from gradfilter.ops.operator import Operator\nops.native.off()\nops.pool_mean(x)\n"
    native = ("gradfilter.ops", "native")
    internals = [("gradfilter.ops.native", ""), native, ("gradfilter.ops.operator", "Operator"), native]
    assert sorted(list_forbidden("rules", text)) == sorted(internals)
    assert len(list_forbidden("geometry", text)) == 7
    assert list_forbidden("geometry", "from gradfilter.keep import FULL\nfrom gradfilter.errors import InputError\n") == [
        ("gradfilter.keep", "FULL")
    ]
