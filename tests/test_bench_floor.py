"""`python -m gradfilter.bench floor`: replayed calls compute what the step did, and what a row says. No times are checked."""

import ctypes
import json
import sys
from functools import partial

import pytest
import torch

from gradfilter.bench import before, floor, replay
from gradfilter.bench.__main__ import main
from gradfilter.bench.setup import make_images, shake_
from gradfilter.bench.sides import NotAvailableError, Side, apply_plan
from gradfilter.bench.step import Case, set_up
from gradfilter.errors import GradFilterError, SettingsError
from gradfilter.models import make_model
from gradfilter.ops import native
from gradfilter.ops.native import fused
from gradfilter.plan import Backward, Plan

PLAN = Plan.all(Backward(grid=4))
native_only = pytest.mark.skipif(native.load() is None, reason="the C library was not built, or is switched off")


@pytest.fixture(autouse=True)
def same_threads():
    """Benchmarks set the number of threads."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


@pytest.fixture
def stage():
    """A small network with depthwise convolutions and residuals, and two images."""
    torch.manual_seed(0)
    stage = set_up(Case("mobilenet_v2", None, 2, 32, 1), "channels last")
    shake_(stage.network)
    return stage


@pytest.fixture
def trial(stage):
    """A step of it that has run once."""
    trial = floor.make_trial(stage, Side(partial(apply_plan, PLAN)))
    trial.step()
    return trial


def read(recording):
    """Return a copy of all memory of a recording by its address."""
    return {at: read_bytes(*replay.find_span(memory)) for at, memory in recording.memory.items()}


def read_bytes(begin, end):
    return ctypes.string_at(begin, end - begin)


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_without_a_package_of_the_extra_the_error_says_what_to_install(missing, monkeypatch, capsys):
    for name in floor.onnx_runtime.PACKAGES:
        monkeypatch.setitem(sys.modules, name, None if name == missing else sys)
    assert main(["floor", "--model", "cifar-resnet20"]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"error: bench floor needs the package '{missing}', which is not installed. Install it with: pip install {missing}\n"
    )


@native_only
def test_a_row_for_each_case(tmp_path, capsys):
    for name in floor.onnx_runtime.PACKAGES:
        pytest.importorskip(name)
    plans = ["all:grid4", "last2:grid4"]
    tiny = ["--model", "cifar-resnet20", "--batch", "2", "--threads", "1", "--pixels", "16", "--rounds", "2"]
    assert main(["--save", str(tmp_path), "floor", "--plan", *plans, *tiny]) == 0
    table = json.loads((tmp_path / "floor.json").read_text())
    assert [row["plan"] for row in table["rows"]] == plans
    assert "floor --model cifar-resnet20 --plan all:grid4 last2:grid4 --batch 2 --threads 1" in table["command"]
    calls = [row["calls"] for row in table["rows"]]
    assert calls[0] > calls[1] > 20  # a batch norm that is folded for each of its 19 convolutions, at least
    for row in table["rows"]:
        compiled = row.pop("compiled"), row.pop("compiled / floor")
        assert None not in row.values()
        assert min(value for value in row.values() if isinstance(value, float)) > 0
        assert (None in compiled) == any(remark.startswith("Compiled: not available") for remark in table["remarks"])
    assert "1/1 cifar-resnet20, batch 2, 1 thread: all:grid4 step " in capsys.readouterr().err


def test_onnx_runtime_computes_what_torch_does_and_a_stranger_is_refused():
    for name in floor.onnx_runtime.PACKAGES:
        pytest.importorskip(name)
    network = make_model("cifar-resnet20")
    assert floor.onnx_runtime.make_inference(network, make_images(2, 16), 1)() > 0
    assert network.training

    class Answers(torch.nn.Module):
        """Answers otherwise when it is exported."""

        def forward(self, x):
            return x.mean((2, 3)) * (2 if torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting() else 1)

    with pytest.raises(GradFilterError, match="the outputs of ONNX Runtime differ from torch's"):
        floor.onnx_runtime.make_inference(Answers(), make_images(2, 16), 1)


@native_only
@pytest.mark.parametrize("joined", [True, False])
def test_a_replay_computes_what_the_step_did(trial, joined):
    recording = replay.record(trial.step)
    run, computed = recording.make_replay(joined), read(recording)
    assert recording.starts  # gradients that are scaled in place
    parameters, changed = list(trial.model.parameters()), 0
    with torch.no_grad():
        for p in parameters:
            p.mul_(2)
        run()
        changed = sum(content != computed[at] for at, content in read(recording).items())
        for p in parameters:
            p.mul_(0.5)
    assert changed > 2 * len(parameters)
    for _ in range(2):  # in place or not, each replay begins as the step did
        run()
        again = read(recording)
        assert all(again[at] == content for at, content in computed.items() if at not in recording.starts)
        assert all(torch.equal(tensor, content) for tensor, content in recording.starts.values())


@native_only
def test_recording_changes_neither_the_step_nor_the_library(trial):
    library = replay.load()
    run_tasks, start = library.gf_run_tasks, [p.detach().clone() for p in trial.model.parameters()]
    first, second = replay.record(trial.step), replay.record(trial.step)
    assert library.gf_run_tasks is run_tasks
    assert list(map(replay.find_kind, first.tasks)) == list(map(replay.find_kind, second.tasks))
    assert all(torch.equal(p, q) for p, q in zip(trial.model.parameters(), start, strict=True))


@native_only
def test_a_task_that_tells_something_ends_a_call(stage):
    """A norm whose factors hold a 0 has no gradient by division: the library says so, and runs nothing behind it."""
    norms = [module for module in stage.network.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    with torch.no_grad():
        norms[-1].weight[0] = 0
    trial = floor.make_trial(stage, Side(partial(apply_plan, PLAN)))
    trial.step()
    recording = replay.record(trial.step)
    assert len(recording.join()) == 2
    assert b"".join(task for task, _ in recording.join()) == b"".join(recording.tasks)
    assert recording.make_replay(joined=True)() > 0


@native_only
def test_memory_that_nobody_holds_is_refused():
    recording = replay.Recording()
    task = fused._FOLD
    given = task.header + task.pack(0, 0, 1 << 20, 0, 1e-5, 1, 0, 0)
    with pytest.raises(GradFilterError, match="a task 'fold' points to memory that no variable of its callers holds"):
        recording.hold(given, sys._getframe())


def test_a_step_without_the_library_has_no_floor(trial, monkeypatch):
    with pytest.raises(GradFilterError), native.off():
        replay.record(trial.step)
    monkeypatch.setattr(native, "load", lambda: None)
    with pytest.raises(GradFilterError, match=r"there is no C library\. Install gradfilter again"):
        replay.load()


def test_the_compiled_step_is_left_out_where_it_cannot_run(stage, monkeypatch):
    monkeypatch.setattr(torch._dynamo, "list_backends", lambda exclude_tags: [])
    with pytest.raises(NotAvailableError, match=r'torch\.compile has no backend "gradfilter" here'):
        floor.make_compiled(stage, PLAN)
    monkeypatch.setattr(torch._dynamo, "list_backends", lambda exclude_tags: ["gradfilter"])
    monkeypatch.setattr(torch, "compile", lambda model, backend: torch.nn.Linear(1, 1))
    with pytest.raises(NotAvailableError, match="it fails with RuntimeError: "):
        floor.make_compiled(stage, PLAN)
    monkeypatch.setattr(torch, "compile", lambda model, backend: model)
    assert floor.make_compiled(stage, PLAN)() > 0


def test_products_are_told_by_name():
    names = "aten::mkldnn_convolution aten::convolution_backward aten::addmm aten::mm aten::bmm aten::mkldnn_linear".split()
    assert all(map(floor.is_product, names))
    assert not any(map(floor.is_product, ["gradfilter::dense", "aten::mul", "aten::sum", "aten::max_pool2d_with_indices"]))


def test_slow_runs_get_fewer_rounds(monkeypatch):
    monkeypatch.setattr(before, "SHORT", 0)
    assert len(before.alternate({"a": lambda: 1.0}, 9, fewest=2, longest=0)["a"]) == 2
    assert len(before.alternate({"a": lambda: 1.0}, 9, fewest=2, longest=60)["a"]) == 9


def test_choices_are_the_usual_ones_where_nothing_is_said():
    choices = floor.make_choices(batches=[4], models=None)
    assert (choices.models, choices.plans, choices.batches) == (floor.MODELS, floor.PLANS, [4])
    with pytest.raises(SettingsError):
        floor.make_choices(plans=["all"])
