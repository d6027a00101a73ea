"""A compiled model trains under the plan in force, whatever happens to the model and its plan in the meantime."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradfilter as gf
from gradfilter.errors import CompileError
from gradfilter.hooks import find_applied
from helpers_safety import Net, make_images, randomise

ALL = gf.Plan.all(gf.Backward(grid=2))
LAST = gf.Plan.last(2, gf.Backward(patch=2))
PLANS = {"all": ALL, "last": LAST}
Call = Callable[..., Any]
# Dynamo asks every tensor that a function is given for its gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def fresh():
    """Let no test meet what another one has compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def runs(monkeypatch):
    """Count how often captured graphs with planned layers run."""
    from gradfilter.compile.backend import Programs

    count, run = [], Programs.__call__

    def counted(self: Any, *inputs: Any) -> Any:
        count.append(self)
        return run(self, *inputs)

    monkeypatch.setattr(Programs, "__call__", counted)
    return count


def make_net(middle: nn.Module | None = None) -> nn.Module:
    return randomise(Net(middle).double())


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="gradfilter", **options)


def make_loss(y: Any) -> Tensor:
    """Return a loss of whatever a network returns."""
    values = y.values() if isinstance(y, dict) else y if isinstance(y, (tuple, list)) else [y]
    return torch.stack([value.square().mean() for value in values]).sum()


def find_gradients(model: nn.Module, call: Call, *inputs: Any) -> dict[str, Tensor | None]:
    """Return the gradient of each parameter after one step of accumulation from none."""
    model.zero_grad()
    torch.manual_seed(0)
    make_loss(call(*inputs)).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def distance(gradients: Any, expected: Any) -> float:
    """Return the relative distance of two sets of gradients; all of it where one has a gradient that the other has not."""
    if any((gradients[name] is None) != (g is None) for name, g in expected.items()):
        return float("inf")
    known = [name for name, g in expected.items() if g is not None]
    difference = sum(float((gradients[name] - expected[name]).square().sum()) for name in known)
    return (difference / sum(float(expected[name].square().sum()) for name in known)) ** 0.5


def exactly(model: nn.Module, *inputs: Any) -> dict[str, Tensor | None]:
    """Return torch's own gradients of a model, of the parameters that the plan trains."""
    twin = copy.deepcopy(model)
    applied = find_applied(twin)
    if applied is not None:
        plan = applied.plan
        gf.freeze_(gf.remove_(twin), plan)
    return find_gradients(twin, twin, *inputs)


def check(model: nn.Module, call: Call, *inputs: Any, tolerance: float = 1e-10) -> None:
    """Check that a step has the gradients of the eager engine under the plan in force, and of torch where there is none."""
    twin = copy.deepcopy(model)
    expected, exact = find_gradients(twin, twin, *inputs), exactly(model, *inputs)
    gradients = find_gradients(model, call, *inputs)
    assert distance(gradients, expected) <= tolerance
    if find_applied(model) is None:
        assert distance(gradients, exact) <= tolerance
    else:
        assert distance(gradients, exact) > 1e-3
    for (name, buffer), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=tolerance, atol=0, msg=name)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("norm", ["eval", "train", "frozen"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_compiled_step_is_the_eager_step(plan, norm, train, runs):
    model = gf.apply_(make_net(), gf.Plan(PLANS[plan].layers, rest="frozen", batch_norm=norm)).train(train)
    call = compiled(model)
    for _ in range(2):
        check(model, call, make_images())
    assert len(runs) == 2


def test_a_plan_that_comes_goes_and_comes_back(runs):
    model = make_net()
    call = compiled(model)
    check(model, call, make_images())
    assert not runs
    gf.apply_(model, ALL)
    check(model, call, make_images())
    check(model, call, make_images())
    assert len(runs) == 2
    gf.remove_(model)
    check(model, call, make_images())
    assert len(runs) == 2
    gf.apply_(model, LAST)
    check(model, call, make_images())
    assert len(runs) == 3


def test_a_plan_for_a_model_that_another_backend_compiled():
    model = make_net()
    call = torch.compile(model, backend="eager")
    check(model, call, make_images())
    gf.apply_(model, ALL)
    with pytest.raises(CompileError, match='backend="gradfilter"'):
        call(make_images())
    gf.remove_(model)
    check(model, call, make_images())


def test_two_plans_in_turn(runs):
    model = make_net()
    call = compiled(model)
    for _ in range(6):
        for plan in (ALL, LAST):
            gf.apply_(model, plan)
            check(model, call, make_images())
    assert len(runs) == 12


def test_layers_frozen_and_thawed(runs):
    model = gf.apply_(make_net(), ALL)
    call = compiled(model)
    for part in (model.block1, model.block2):  # type: ignore[attr-defined]
        for trains in (False, True):
            part.requires_grad_(trains)
            twin = copy.deepcopy(model)
            expected = find_gradients(twin, twin, make_images())
            assert distance(find_gradients(model, call, make_images()), expected) <= 1e-10
    assert len(runs) == 4


def test_more_recompilations_than_dynamo_allows(runs):
    model = gf.apply_(make_net(), ALL)
    call = compiled(model)
    parameters = list(model.parameters())
    for i in range(12):
        parameters[i].requires_grad_(False)
        twin = copy.deepcopy(model)
        expected = find_gradients(twin, twin, make_images())
        assert distance(find_gradients(model, call, make_images()), expected) <= 1e-10, i


def test_more_shapes_than_dynamo_allows(runs, caplog):
    model = gf.apply_(make_net(), ALL)
    call = compiled(model)
    for n in (2, 3, 1, 4, 5, 6, 7, 8, 9, 10, 11, 2):
        check(model, call, make_images(n))
    for size in range(20, 26):
        check(model, call, make_images(2, (size, size)))
    assert len(runs) == 18
    assert "run eagerly" in caplog.text


def test_state_that_is_assigned(runs):
    model, other = gf.apply_(make_net(), ALL), randomise(Net().double(), seed=5)
    call = compiled(model)
    check(model, call, make_images())
    model.load_state_dict(other.state_dict(), assign=True)
    check(model, call, make_images())
    assert len(runs) == 2


def test_a_deep_copy_is_a_model_of_its_own(runs):
    model = gf.apply_(make_net(), ALL)
    model.compile(backend="gradfilter")
    check(model, model, make_images())
    twin = copy.deepcopy(model)
    randomise(twin, seed=3)
    twin.compile(backend="gradfilter")
    check(twin, twin, make_images())
    gf.remove_(model)
    check(twin, twin, make_images())
    check(model, model, make_images())
    del model
    check(twin, twin, make_images())


@pytest.mark.parametrize("way", ["pickle", "save"])
def test_a_pickled_model_compiles_again(way, runs):
    model = gf.apply_(make_net(), ALL)
    check(model, compiled(model), make_images())
    if way == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    del model
    check(twin, compiled(twin), make_images())
    assert len(runs) == 2


def test_two_models_in_two_threads():
    """Each under a plan of its own. Plans come and go when no other thread runs: Dynamo's caches are those of the process."""
    torch._dynamo.lookup_backend("gradfilter")  # two threads that are the first to ask for a backend fail in torch
    models = [gf.apply_(randomise(Net().double(), seed=seed), plan) for seed, plan in enumerate(PLANS.values())]
    calls, images = [compiled(model) for model in models], make_images()
    expected = [find_gradients(twin, twin, images) for twin in map(copy.deepcopy, models)]
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(6):
                assert distance(find_gradients(models[i], calls[i], images), expected[i]) <= 1e-10
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for model, call in zip(models, calls, strict=True):
        gf.remove_(model)
        check(model, call, make_images())


def test_compiled_in_place(runs):
    model = gf.apply_(make_net(), ALL)
    model.compile(backend="gradfilter")
    check(model, model, make_images())
    gf.remove_(model)
    check(model, model, make_images())
    gf.apply_(model, LAST)
    check(model, model, make_images())
    assert len(runs) == 2


@pytest.mark.parametrize("plan", PLANS)
def test_inside_a_larger_function(plan, runs):
    model = gf.apply_(make_net(), PLANS[plan])

    @torch.compile(backend="gradfilter")
    def step(images: Tensor) -> Tensor:
        return model(images * 2).sigmoid()

    twin = copy.deepcopy(model)
    expected = find_gradients(twin, lambda x: twin(x * 2).sigmoid(), make_images())
    assert distance(find_gradients(model, step, make_images()), expected) <= 1e-10
    gf.remove_(model)
    expected = find_gradients(model, lambda x: model(x * 2).sigmoid(), make_images())
    assert distance(find_gradients(model, step, make_images()), expected) <= 1e-10
    assert len(runs) == 1


def test_the_loss_inside_the_compiled_function(runs):
    model = gf.apply_(make_net(), ALL)
    labels = torch.tensor([0, 2])

    @torch.compile(backend="gradfilter")
    def step(images: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels)

    twin = copy.deepcopy(model)
    expected = find_gradients(twin, lambda x: F.cross_entropy(twin(x), labels), make_images())
    assert distance(find_gradients(model, step, make_images()), expected) <= 1e-10
    assert len(runs) == 1


def test_a_plan_on_a_part_of_a_compiled_model(runs):
    model = make_net()
    gf.apply_(model.block2, gf.Plan.all(gf.Backward(patch=2)))  # type: ignore[arg-type]
    call, twin = compiled(model), copy.deepcopy(model)
    expected = find_gradients(twin, twin, make_images())
    assert distance(find_gradients(model, call, make_images()), expected) <= 1e-10
    assert len(runs) == 1


class Heads(nn.Module):
    """A network with two outputs, as a pair or by name; the second comes from the middle."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.net, self.side, self.named = make_net(), nn.Conv2d(5, 2, 1).double(), named

    def forward(self, x: Tensor) -> Any:
        net: Any = self.net
        x = net.block1(net.stem(x))
        side = self.side(x)
        out = net.fc(net.pool(net.block2(x)).flatten(1))
        return {"out": out, "side": side} if self.named else (out, side)


@pytest.mark.parametrize("named", [False, True], ids=["pair", "dict"])
def test_two_outputs(named, runs):
    model = gf.apply_(Heads(named), ALL)
    check(model, compiled(model), make_images())
    assert len(runs) == 1
    call, twin, first = compiled(model), copy.deepcopy(model), "out" if named else 0
    expected = find_gradients(twin, lambda x: twin(x)[first], make_images())
    assert distance(find_gradients(model, lambda x: call(x)[first], make_images()), expected) <= 1e-10


def test_dropout_draws_as_in_eager_mode(runs):
    model = gf.apply_(make_net(nn.Dropout(0.5)), ALL).train()
    call = compiled(model)
    check(model, call, make_images())
    check(model, call, make_images())
    assert len(runs) == 2


def test_gradients_accumulate(runs):
    model = gf.apply_(make_net(), ALL)
    call = compiled(model)

    def twice(net: Call) -> Call:
        def run(x: Tensor) -> Tensor:
            make_loss(net(x)).backward()
            return net(2 * x)

        return run

    twin = copy.deepcopy(model)
    expected = find_gradients(twin, twice(twin), make_images())
    assert distance(find_gradients(model, twice(call), make_images()), expected) <= 1e-10
    assert len(runs) == 2


def test_two_forwards_before_one_backward(runs):
    model = gf.apply_(make_net(), ALL)
    call, twin = compiled(model), copy.deepcopy(model)
    expected = find_gradients(twin, lambda x: (twin(x), twin(2 * x)), make_images())
    assert distance(find_gradients(model, lambda x: (call(x), call(2 * x)), make_images()), expected) <= 1e-10
    assert len(runs) == 2


def test_autocast(runs):
    model = gf.apply_(make_net().float(), ALL)
    call, images = compiled(model), make_images(dtype=torch.float32)
    check(model, call, images, tolerance=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        check(model, call, images, tolerance=1e-2)
    check(model, call, images, tolerance=1e-5)
    assert len(runs) == 3


def test_inference(runs):
    model = gf.apply_(make_net(), ALL)
    call = compiled(model)
    check(model, call, make_images())
    model.eval()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(call(make_images()), model(make_images()))
    model.train()
    check(model, call, make_images())


def test_fidelity_of_a_compiled_model(runs):
    model = gf.apply_(make_net(), ALL)
    model.compile(backend="gradfilter")
    batch = make_images(), torch.tensor([0, 2])
    twin = copy.deepcopy(model)
    check(model, model, make_images())
    expected = gf.fidelity(twin, batch, F.cross_entropy)
    assert gf.fidelity(model, batch, F.cross_entropy).overall.cosine.mean == pytest.approx(expected.overall.cosine.mean)
    check(model, model, make_images())


class Fails(nn.Module):
    """Raise in the middle of a network while told to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("in the middle")
        return x


def test_an_exception_in_the_middle(runs):
    model = gf.apply_(make_net(middle := Fails()), ALL).train()
    call = compiled(model)
    check(model, call, make_images())
    before = copy.deepcopy(model.state_dict())
    middle.fails = True
    with pytest.raises(RuntimeError, match="in the middle"):
        call(make_images())
    for value, expected in zip(model.state_dict().values(), before.values(), strict=True):
        assert torch.equal(value, expected)
    assert all(module.training for module in model.modules())
    middle.fails = False
    check(model, call, make_images())


class Decides(nn.Module):
    """Decide by values, which no graph holds."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().mean()) > 0.1 else x + 1


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_a_graph_that_breaks(train, runs):
    model = gf.apply_(make_net(Decides()), ALL).train(train)
    call = compiled(model)
    for _ in range(2):
        check(model, call, make_images())
    assert runs


class Checkpointed(nn.Module):
    """Run a network's first block and a dropout under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net(nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        net: Any = self.net
        x = checkpoint(lambda x: net.middle(net.block1(x)), net.stem(x), use_reentrant=False)  # type: ignore[assignment]
        return net.fc(net.pool(net.block2(x)).flatten(1))


def count_saved(model: nn.Module, call: Call) -> int:
    """Return how many tensors a forward saves, but for parameters, buffers, and those that a checkpoint computes again."""
    own = {x.data_ptr() for x in (*model.parameters(), *model.buffers())}
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        call(make_images())
    return sum(x.data_ptr() not in own for x in saved)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_a_checkpoint(train, runs):
    model = gf.apply_(Checkpointed(), ALL).train(train)
    call = compiled(model)
    for _ in range(2):
        check(model, call, make_images())
    assert len(runs) == 2
    assert count_saved(model, call) <= count_saved(model, model)


class OwnNorm(nn.BatchNorm2d):
    """A batch norm that computes in a way of its own, and counts batches."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        if self.training:
            var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        assert mean is not None
        assert var is not None
        return (x - mean[:, None, None]) * (self.weight / (var + self.eps).sqrt())[:, None, None] + self.bias[:, None, None]


@pytest.mark.filterwarnings("ignore::gradfilter.errors.ExitWarning")
def test_a_frozen_norm_of_another_kind(caplog):
    model = gf.apply_(make_net(OwnNorm(5)), ALL).train()
    check(model, compiled(model), make_images())
    assert "OwnNorm" in caplog.text


def test_frozen_parts_alone(runs):
    """A part of which nothing is trained runs as torch does, with statistics that do not move."""
    model = gf.apply_(make_net(), LAST).train()
    net: Any = model
    call = compiled(net.stem)
    before = copy.deepcopy(net.stem.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(call(make_images()), net.stem(make_images()))
    assert all(torch.equal(value, before[name]) for name, value in net.stem.state_dict().items())


@pytest.mark.parametrize("backend", ["gradfilter", "aot_eager"])
def test_a_model_that_is_only_frozen(backend):
    """What `freeze_` leaves may be compiled by any backend."""
    model = gf.freeze_(make_net(), LAST).train()
    call, twin = torch.compile(model, backend=backend), copy.deepcopy(model)
    for _ in range(2):
        expected = find_gradients(twin, twin, make_images())
        assert distance(find_gradients(model, call, make_images()), expected) <= 1e-10
    assert all(module.training for module in model.modules())
    for (name, buffer), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, msg=name)
    model.eval()
    call(make_images())
    assert not any(module.training for module in model.modules())


REFUSING = {
    "eager": lambda model: torch.compile(model, backend="eager")(make_images()),
    "aot_eager": lambda model: torch.compile(model, backend="aot_eager")(make_images()),
    "inductor": lambda model: torch.compile(model)(make_images()),
    "export": lambda model: torch.export.export(model, (make_images(),)),
    "strict export": lambda model: torch.export.export(model, (make_images(),), strict=True),
    "trace": lambda model: torch.jit.trace(model, make_images()),
}


@pytest.mark.parametrize("way", REFUSING)
def test_others_say_what_to_use_instead(way):
    model = gf.apply_(make_net(), ALL)
    with pytest.raises(Exception, match=r'torch.compile\(model, backend="gradfilter"\)'):
        REFUSING[way](model)
    check(model, model, make_images())


def test_the_shapes_that_the_user_names(runs, caplog):
    model = gf.apply_(make_net(), ALL)
    call = compiled(model, options={"shapes": [(4, 3, 19, 15), [2, 3, 19, 15]]})
    for n in (3, 4, 2):
        check(model, call, make_images(n))
    assert "[3, 3, 19, 15] run eagerly" in caplog.text
    with pytest.raises(Exception, match="takes a list of shapes"):
        compiled(model, options={"shapes": 3})(make_images())
    with pytest.raises(Exception, match="'size'"):
        compiled(model, options={"size": 3})(make_images())


def test_describe_says_whether_a_model_is_compiled():
    model = gf.apply_(make_net(), ALL)
    assert "compiled" not in gf.describe(model)
    check(model, compiled(model), make_images())
    assert "compiled" in gf.describe(model)
    assert "compiled" not in gf.describe(copy.deepcopy(model))
    assert "compiled" not in gf.describe(gf.apply_(model, LAST))


def test_importing_and_applying_load_no_compiler():
    code = """
import sys, torch, gradfilter as gf
gf.apply_(torch.nn.Conv2d(3, 4, 3), gf.Plan.all(gf.Backward(patch=2)))(torch.ones(1, 3, 8, 8))
assert "torch._dynamo.eval_frame" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_under_a_plan_is_freed_at_once():
    model = gf.apply_(make_net(), ALL)
    make_loss(model(make_images())).backward()
    reference = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_numbers_as_inputs_run_eagerly(caplog):
    model = gf.apply_(make_net(), ALL).train()
    call = compiled(model, dynamic=True)
    for n in (2, 3):
        check(model, call, make_images(n))
    assert "Leave out dynamic=True" in caplog.text


@pytest.mark.filterwarnings("ignore:Profiler record function")
@pytest.mark.parametrize("plan", PLANS)
def test_data_parallel(plan, runs, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = gf.apply_(make_net(), PLANS[plan]).train()
        call = compiled(nn.parallel.DistributedDataParallel(model))
        twin = copy.deepcopy(model)
        for _ in range(2):
            expected = find_gradients(twin, twin, make_images())
            assert distance(find_gradients(model, call, make_images()), expected) <= 1e-10
        assert len(runs) == 2
    finally:
        torch.distributed.destroy_process_group()
