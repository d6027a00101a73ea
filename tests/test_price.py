"""`gradfilter bench`: rows, flops and bytes to the last one, peers that are what they say. No times are checked."""

import copy
import json
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfilter as gf
from gradfilter.bench import curves, energy, price, sides, step
from gradfilter.bench.allocator import SETTINGS, set_allocator
from gradfilter.bench.energy import Rails, find_counter
from gradfilter.bench.fresh import run_fresh
from gradfilter.bench.layerwise import filter_layers_
from gradfilter.bench.report import Report
from gradfilter.bench.setup import EXACT, INFERENCE, freeze_statistics_, make_images, shake_
from gradfilter.bench.step import Case, Found, find_ratio, find_row, run_sides, set_up
from gradfilter.cli import main
from gradfilter.cli.bench import make_cases, make_parser, make_plans
from gradfilter.cost import measure_saved_bytes
from gradfilter.cost_table import Seconds
from gradfilter.errors import GradFilterError, SettingsError
from gradfilter.loss import StepLoss
from gradfilter.models import make_model
from gradfilter.plan import Backward, Plan

PNG = b"\x89PNG\r\n\x1a\n"
TINY = Case("cifar-resnet20", None, 2, 16, 1)
ONE_PLAN = {"all layers, patch 4": Plan.all(Backward(patch=4))}
LAYERWISE = "lumped layer by layer, patch 4"


@pytest.fixture(autouse=True)
def same_threads():
    """Benchmarks set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny():
    """The report of a small network, as the command writes it."""
    return price.measure([TINY], options=price.Options(rounds=1, compile_seconds=0))


def read(report):
    """Return the rows by method, each by column."""
    return {row["method"]: row for row in report.to_table().to_dict()["rows"]}


def cost_under(plan, batch=2, pixels=16):
    model = make_model("cifar-resnet20").train().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    images = torch.empty(batch, 3, pixels, pixels, device="meta")
    labels = torch.zeros(batch, dtype=torch.long, device="meta")
    return gf.cost(gf.apply_(model, plan), (images, labels), measure=False)


def test_there_is_a_row_for_every_method(tiny):
    assert [row[2] for row in tiny.rows] == [
        *(INFERENCE, sides.FOLDED, EXACT, sides.CHECKPOINTED, LAYERWISE, sides.HEAD, "exact, last 4"),
        *sides.DEFAULT_PLANS,
    ]
    assert list(tiny.columns) == list(price.COLUMNS)
    rows = read(tiny)
    assert rows[INFERENCE]["step / inference"] == rows[EXACT]["step / exact"] == 1
    assert rows["exact, last 4"]["step / exact"] == rows[sides.FOLDED]["step / folded"] == 1
    for method, row in rows.items():
        assert None not in row.values(), method
        assert row["step / inference"] == pytest.approx(row["forward / inference"] + row["backward / inference"]), method


@pytest.mark.parametrize("name", sides.DEFAULT_PLANS)
def test_flops_and_bytes_of_plans_are_those_of_cost(tiny, name):
    found, row = cost_under(sides.DEFAULT_PLANS[name]), read(tiny)[name]
    assert row["backward flops"] == found.plan.total.backward_flops
    assert row["saved bytes"] == found.plan.total.saved_bytes
    exact = read(tiny)["exact, last 4" if "last" in name else EXACT]
    assert exact["backward flops"] == found.exact.total.backward_flops
    assert exact["saved bytes"] == found.exact.total.saved_bytes


def test_flops_and_bytes_of_peers(tiny):
    rows = read(tiny)
    for name in (INFERENCE, sides.FOLDED):
        assert rows[name]["backward flops"] == rows[name]["saved bytes"] == 0
    # The classifier alone, but for the gradient of its input: 2 images, 64 features, 10 classes.
    last = cost_under(Plan.last(4)).exact.layers
    assert (
        rows[sides.HEAD]["backward flops"]
        == sum(last[name].backward_flops for name in ("classifier", "(loss)")) - 2 * 2 * 64 * 10
    )
    assert rows[sides.HEAD]["saved bytes"] == 2 * 64 * 4 + last["(loss)"].saved_bytes
    assert last["(loss)"].saved_bytes == 2 * (10 * 4 + 8) + 4  # logarithms of probabilities, labels, what the mean divides by
    # What is run again is the blocks: all convolutions and norms but the stem, and the activations.
    again = cost_under(Plan.all(Backward(patch=1))).exact.layers
    blocks = sum(layer.forward_flops for name, layer in again.items() if name.startswith("layer"))
    extra = rows[sides.CHECKPOINTED]["backward flops"] - rows[EXACT]["backward flops"]
    assert 0.97 * blocks <= extra <= blocks  # the pooling in front of the classifier counts as the last block's
    held = rows[sides.CHECKPOINTED]["saved bytes"]
    assert rows["all layers, patch 4"]["saved bytes"] < held < rows[EXACT]["saved bytes"] / 2
    # Layer by layer, norms and activations still hold their maps.
    assert rows[LAYERWISE]["saved bytes"] > rows[EXACT]["saved bytes"] / 2
    assert rows[LAYERWISE]["backward flops"] < rows["all layers, patch 4"]["backward flops"] < rows[EXACT]["backward flops"] / 4


def test_without_peers_there_is_inference_and_the_plans():
    options = price.Options(rounds=1, compile_seconds=0, peers=False)
    report = price.measure([TINY], ONE_PLAN, options)
    methods = [row[list(report.columns).index("method")] for row in report.rows]
    assert methods == [INFERENCE, sides.FOLDED, *ONE_PLAN]
    assert all(row[list(report.columns).index("step / exact")] is None for row in report.rows)
    assert report.name.endswith("-alone")
    kept = price.measure([TINY], ONE_PLAN, replace(options, allocator="keep"))
    assert kept.name.endswith("-alone-keep")  # another file


def test_sides_take_turns(monkeypatch):
    calls, seconds = [], iter(range(1, 100))

    def make_run(self, side, model, images=None):
        def run():
            calls.append(side)
            return Seconds(float(next(seconds)), 0.0, 0.0)

        return run

    monkeypatch.setattr(step.Stage, "make_run", make_run)
    monkeypatch.setattr(step, "measure_peak", lambda run, device: 7)
    two = {name: sides.make_sides(sides.DEFAULT_PLANS)[name] for name in (INFERENCE, EXACT)}
    found, runs = run_sides(set_up(TINY, "contiguous"), two, 3)
    assert calls == [*two.values()] * 4
    # 1 and 2 warm up; medians are of ratios within rounds: 4/3, 6/5, 8/7.
    assert find_ratio({name: one.times for name, one in found.items()}, EXACT, INFERENCE) == 6 / 5
    assert find_row(TINY, EXACT, two[EXACT], found)["step / folded"] is None
    assert set(runs) == set(two)


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    arguments = ["--model", "cifar-resnet20", "--pixels", "16", "--batch", "2", "1", "--rounds", "1", "--compile", "0"]
    assert main(["bench", *arguments, "--plan", "last2", "--patch", "2", "--save", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    stored = json.loads((tmp_path / "bench-cifar-resnet20.json").read_text())
    assert (tmp_path / "bench-cifar-resnet20.md").read_text() in out
    assert (tmp_path / "bench-cifar-resnet20.png").read_bytes().startswith(PNG)
    assert stored["command"].startswith("gradfilter bench --model cifar-resnet20 --pixels 16")
    assert stored["environment"]["torch"] == torch.__version__
    assert [(row["batch"], row["method"]) for row in stored["rows"]][-2:] == [(1, "exact, last2"), (1, "last2, patch 2")]
    row = stored["rows"][-1]
    assert row["saved bytes"] == cost_under(Plan.last(2, Backward(patch=2)), batch=1).plan.total.saved_bytes
    assert f"{row['step / inference']:.2f}" in out
    assert any("9 blocks (layer1.0 to layer3.2)" in remark for remark in stored["remarks"])
    assert price.FRESH in stored["remarks"]
    assert energy.NONE in stored["remarks"] or any(remark.startswith("Energy: ") for remark in stored["remarks"])


def test_what_a_report_holds_is_what_its_file_holds(tmp_path):
    report = Report("r", "A title", "command", {"method": str, "ratio": price.show_ratio}, [["a", 1.234], ["b", None]])
    report.save(tmp_path)
    stored = json.loads((tmp_path / "r.json").read_text())
    assert stored["rows"] == [{"method": "a", "ratio": 1.234}, {"method": "b", "ratio": None}]
    assert "| a      | 1.23  |\n| b      | –     |" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no-such-net"], "no-such-net"),
        (["--batch", "8", "0"], "--batch is 0, but must be at least 1"),
        (["--threads", "-1"], "--threads is -1"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--pixels", "0"], "--pixels is 0"),
        (["--compile", "-5"], "--compile is -5 seconds"),
        (["--plan", "last"], "'last' is no plan"),
        (["--curves"], "give --save FOLDER"),
        (["--weights", "no-such-file.pth"], "no-such-file.pth"),
        (["--model", "resnet18", "--pixels", "1", "--batch", "1", "--plan", "last99"], "the last 99 convolutions"),
    ],
)
def test_errors_say_what_was_given_and_what_to_do(arguments, words, capsys):
    assert main(["bench", *arguments, *([] if "--compile" in arguments else ["--compile", "0"])]) == 2
    assert words in capsys.readouterr().err


def test_flags_make_plans_and_cases():
    def make(*arguments):
        args = make_parser().parse_args(arguments)
        return make_plans(args), make_cases(args)

    plans, cases = make()
    assert plans is sides.DEFAULT_PLANS
    assert cases == [Case("mobilenet_v2", None, 32, 224, 1)]
    plans, cases = make("--patch", "7", "--batch", "1", "8", "1", "--threads", "1", "2", "--model", "mcunet-in3")
    assert plans == {"all layers, patch 7": Plan.all(Backward(patch=7))}
    assert [(case.batch, case.threads, case.pixels) for case in cases] == [(1, 1, 176), (8, 1, 176), (1, 2, 176), (8, 2, 176)]
    assert list(make("--plan", "last4", "--keep", "int8")[0]) == ["last4, grid 4 int8"]
    assert make_parser().parse_args(["--allocator", "keep"]).allocator == "keep"
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--allocator", "mine"])


def test_more_threads_than_cores_are_said(monkeypatch):
    monkeypatch.setattr(price.os, "cpu_count", lambda: 1)
    report = price.measure([Case("cifar-resnet20", None, 1, 8, 2)], ONE_PLAN, price.Options(rounds=1, compile_seconds=0))
    assert "2 threads share 1 cores: they wait for each other." in report.remarks
    assert report.rows[0][1] == 2


def test_a_side_that_does_not_fit_is_not_run(monkeypatch):
    monkeypatch.setattr(step, "find_free_memory", lambda: 100_000)
    report = price.measure([TINY], ONE_PLAN, price.Options(rounds=1, compile_seconds=0))
    row = read(report)[EXACT]
    assert row["step / inference"] is row["peak bytes"] is None
    assert row["saved bytes"] == cost_under(Plan.all()).exact.total.saved_bytes
    assert any(re.search(r"exact: not available: a step would take \S+ .B of the 100 kB", remark) for remark in report.remarks)


class Twisted(nn.Module):
    """A network whose norms run in another order than they are registered in."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.norm_b, self.norm_a = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.norm_b(self.b(self.norm_a(self.a(x)))).mean((2, 3)))


@pytest.mark.parametrize("name", ["cifar-resnet20", "mcunet-in3", "mobilenet_v2", "efficientnet-lite0"])
def test_folded_models_give_the_same_outputs(name):
    model, images = shake_(make_model(name)).eval(), make_images(2, 64)
    folded = sides.fold(copy.deepcopy(model), images)
    with torch.no_grad():
        torch.testing.assert_close(folded(images), model(images), rtol=1e-3, atol=1e-4)
    assert not [module for module in folded.modules() if isinstance(module, nn.BatchNorm2d)]


def test_what_cannot_be_folded_says_so():
    with pytest.raises(sides.NotAvailableError, match="the outputs differ"):
        sides.fold(Twisted(), make_images(2, 16))
    with pytest.raises(sides.NotAvailableError, match="no batch norm stands behind"):
        sides.fold(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), make_images(2, 16))
    with pytest.raises(sides.NotAvailableError, match="no sequence of blocks"):
        sides.find_blocks(Twisted())


def gradients(model, images):
    F.cross_entropy(model(images), torch.arange(len(images)) % 5).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_checkpointed_gradients_are_the_exact_ones():
    model, images = shake_(make_model("cifar-resnet20")).train(), make_images(2, 16)
    exact = gradients(freeze_statistics_(copy.deepcopy(model)), images)
    again = gradients(sides.checkpoint_blocks_(freeze_statistics_(model)), images)
    assert len(exact) == len(list(model.parameters()))
    assert all(torch.equal(exact[name], again[name]) for name in exact)


def filter_as_written(conv, x, gy, patch):
    """Gradient filtering of one convolution of stride 1 that keeps the size, as the paper writes it, patch by patch."""
    gx, gw = torch.zeros_like(x), torch.zeros_like(conv.weight)
    kernel = conv.weight.sum((2, 3))
    for i in range(0, x.shape[2], patch):
        for j in range(0, x.shape[3], patch):
            here = (..., slice(i, i + patch), slice(j, j + patch))
            mean = gy[here].mean((2, 3))
            gx[here] = (mean @ kernel)[:, :, None, None]
            gw += (mean.T @ x[here].sum((2, 3)))[:, :, None, None]
    return gx, gw, gy.sum((0, 2, 3))


@pytest.mark.parametrize("patch", [1, 2, 3])
def test_layer_by_layer_is_the_papers_filter(patch):
    generator = torch.Generator().manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, padding=1).double()
    x, gy = (torch.randn(2, c, 7, 8, dtype=torch.float64, generator=generator) for c in (3, 4))
    model = filter_layers_(nn.Sequential(conv), Plan.all(Backward(patch=patch)), (7, 8))
    x.requires_grad_()
    y = model(x)
    assert torch.equal(y, F.conv2d(x, conv.weight, conv.bias, padding=1))
    y.backward(gy)
    tensors = (x, *conv.parameters())
    for tensor, expected in zip(tensors, filter_as_written(conv, x, gy, patch), strict=True):
        torch.testing.assert_close(tensor.grad, expected.detach())


def test_layer_by_layer_trains_strides_groups_and_grids():
    model = shake_(make_model("mobilenet_v2", classes=5)).train()
    images = make_images(2, 50)
    found = gradients(filter_layers_(model, Plan.all(Backward(grid=3)), (50, 50)), images)
    assert len(found) == len(list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in found.values())
    with pytest.raises(GradFilterError, match="no convolution of the plan"):
        filter_layers_(nn.Sequential(nn.Conv2d(3, 4, 3, padding_mode="reflect")), Plan.all(), (8, 8))


def test_what_cannot_be_compiled_says_so(monkeypatch):
    def fail(model):
        def call(images):
            raise OSError("no compiler was found\nand so on")

        return call

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(sides.NotAvailableError, match=r"torch\.compile fails: OSError: no compiler was found$"):
        sides.compile_exactly(60, make_model("cifar-resnet20"), make_images(1, 16))

    def hang(model):
        def call(images):
            while True:
                pass

        return call

    monkeypatch.setattr(torch, "compile", hang)
    with pytest.raises(sides.NotAvailableError, match="takes more than 0 s"):
        sides.compile_exactly(0.05, make_model("cifar-resnet20"), make_images(1, 16))


def test_curves_vary_one_thing_at_a_time():
    plan = Plan.all(Backward(patch=4))
    values = {"batch": (1, 3), "pixels": (8, 16), "patch": (1, 2), "threads": (1,)}
    options = price.Options(rounds=1, picture=True)
    report = curves.measure(TINY, "all layers, patch 4", plan, options, "command", values)
    rows = report.to_table().to_dict()["rows"]
    assert [(row["varied"], row["value"]) for row in rows[::2]] == [(name, v) for name in values for v in values[name]]
    assert [row["method"] for row in rows] == [EXACT, curves.OURS] * 7
    saved = {(row["varied"], row["value"]): row["saved bytes"] for row in rows[1::2]}
    assert saved["batch", 3] == cost_under(plan, batch=3).plan.total.saved_bytes
    assert saved["pixels", 8] == cost_under(plan, pixels=8).plan.total.saved_bytes
    assert saved["patch", 2] == cost_under(Plan.all(Backward(patch=2))).plan.total.saved_bytes
    assert report.picture is not None
    assert report.picture.startswith(PNG)


def test_resident_memory_of_a_fresh_process():
    case = Case("cifar-resnet20", None, 32, 32, 1)
    found = price.measure_resident(case, "contiguous", "default", ONE_PLAN, EXACT)
    assert found > 20e6  # autograd alone holds 49 MB, of which a little may have been there before
    large = Case("cifar-resnet20", None, 2048, 32, 1)
    plan = {"mine, patch 2": Plan.last(0)}
    assert price.measure_resident(large, "contiguous", "default", plan, INFERENCE) > 2048 * 3 * 32 * 32 * 4  # with its batch
    with pytest.raises(GradFilterError, match="no-such-net"):
        price.measure_resident(Case("no-such-net", None, 1, 8, 1), "contiguous", "default", ONE_PLAN, EXACT)


def test_a_case_in_a_process_of_its_own_has_the_same_rows(tiny):
    told = []
    options = price.Options(rounds=1, compile_seconds=0, fresh=True, watch=told.append)
    rows, mine = read(price.measure([TINY], options=options)), read(tiny)
    assert list(rows) == list(mine)
    for method, row in rows.items():
        for column in ("backward flops", "saved bytes"):
            assert row[column] == mine[method][column], (method, column)
    assert f"batch 2, 1 thread: {LAYERWISE}" in told
    with pytest.raises(GradFilterError, match="no-such-net"):
        price.measure([replace(TINY, model="no-such-net")], options=options)


def test_points_of_curves_have_processes_of_their_own():
    plan, values = Plan.all(Backward(patch=4)), {"batch": (3,)}
    report = curves.measure(TINY, "all layers, patch 4", plan, price.Options(rounds=1, fresh=True), "command", values)
    exact, mine = report.to_table().to_dict()["rows"]
    assert (exact["method"], mine["method"]) == (EXACT, curves.OURS)
    assert mine["saved bytes"] == cost_under(plan, batch=3).plan.total.saved_bytes


def test_a_process_may_print_and_die(tmp_path, monkeypatch):
    lines = ["from gradfilter.bench.fresh import answer", "def run(order): print('{}'); return order['n'] + 1", "answer(run)"]
    (tmp_path / "chatty.py").write_text("\n".join(lines))
    (tmp_path / "dying.py").write_text("import os, sys; print('so sorry', file=sys.stderr, flush=True); os._exit(3)")
    (tmp_path / "silent.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_fresh("chatty", {"n": 41}, "counts") == 42
    with pytest.raises(GradFilterError, match=r"^the process that counts failed: so sorry$"):
        run_fresh("dying", {"n": 41}, "counts")
    with pytest.raises(GradFilterError, match=r"^the process that counts failed: it ended with 3$"):
        run_fresh("silent", {"n": 41}, "counts")


def test_the_allocator_is_told():
    calls = []
    set_allocator("default", lambda *call: pytest.fail("was told"))
    set_allocator("keep", lambda *call: calls.append(call) or 1)
    assert calls == list(SETTINGS.values())
    with pytest.raises(SettingsError, match="glibc refuses M_MMAP_MAX=0"):
        set_allocator("keep", lambda *call: 0)


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")
    return folder


def test_no_counter_of_energy(tmp_path):
    assert find_counter(tmp_path) == (None, "Energy: no counter on this machine.")


def test_rapl_counts_packages_and_memory_and_wraps(tmp_path):
    powercap = tmp_path / "class" / "powercap"
    package = write(powercap / "intel-rapl:0", name="package-0", energy_uj=900, max_energy_range_uj=1000)
    dram = write(powercap / "intel-rapl:0:1", name="dram", energy_uj=10, max_energy_range_uj=1000)
    write(powercap / "intel-rapl:0:0", name="core", energy_uj=5, max_energy_range_uj=1000)
    counter, sentence = find_counter(tmp_path)
    assert counter is not None
    assert sentence.startswith("Energy: RAPL (package-0, dram), of the whole machine")

    def run():
        write(package, energy_uj=150)  # past its largest number
        write(dram, energy_uj=60)
        write(powercap / "intel-rapl:0:0", energy_uj=500)  # a part of the package

    assert counter.measure(run) == pytest.approx((150 - 900 + 1000 + 50) / 1e6)
    (package / "energy_uj").unlink()
    counter, sentence = find_counter(tmp_path)
    assert counter is None
    assert "cannot be read" in sentence


def test_rails_of_a_jetson(tmp_path):
    driver = tmp_path / "bus" / "i2c" / "drivers" / "ina3221"
    write(driver / "1-0040" / "hwmon" / "hwmon3", in1_label="VDD_IN", in1_input=5000, curr1_input=2000)
    write(driver / "1-0040" / "hwmon" / "hwmon3", in2_label="VDD_CPU", in2_input=5000, curr2_input=500)
    counter, sentence = find_counter(tmp_path)
    assert isinstance(counter, Rails)
    assert sentence.startswith("Energy: power rails (VDD_IN)")
    assert counter.find_watts() == 10
    ticks = iter([100.0, 102.5])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(energy.time, "perf_counter", lambda: next(ticks))
        assert counter.measure(lambda: None) == 25
    old = tmp_path / "old"
    write(old / "bus/i2c/drivers/ina3221x/6-0040/iio:device0", rail_name_0="CPU", in_power0_input=1500)
    write(old / "bus/i2c/drivers/ina3221x/6-0041/iio:device1", rail_name_0="GPU", in_power0_input=500)
    counter, _ = find_counter(old)
    assert isinstance(counter, Rails)
    assert counter.find_watts() == 2


def test_joules_stand_beside_those_of_inference(monkeypatch):
    class Fake(energy.Counter):
        name = "fake"

        def measure(self, run):
            run()
            return 6.0

    monkeypatch.setattr(price, "find_counter", lambda: (Fake(), "Energy: fake."))
    monkeypatch.setattr(price, "LEAST_SECONDS", 0.001)
    report = price.measure([TINY], ONE_PLAN, price.Options(rounds=1, compile_seconds=0))
    row = read(report)[EXACT]
    assert row["joules"] == 6 / 1  # a step takes longer than that
    assert row["joules / inference"] >= 1
    assert "Energy: fake." in report.remarks


def test_a_row_holds_what_was_found():
    second = [Seconds(1.0, 2.0, 1.0)]
    found = {
        INFERENCE: Found(times=[Seconds(2.0, 0.0, 0.0)], joules=2.0, resident_bytes=10),
        EXACT: Found(times=second, small=[Seconds(0.5, 0.0, 0.0)], joules=5.0, resident_bytes=30),
    }
    row = find_row(TINY, EXACT, sides.make_sides(sides.DEFAULT_PLANS)[EXACT], found)
    assert (row["step / inference"], row["forward / inference"], row["backward / inference"]) == (2, 0.5, 1.5)
    assert (row["ms"], row["32 px / inference"]) == (4000, 0.25)
    assert (row["joules / inference"], row["resident / inference"]) == (2.5, 3)


def test_a_fresh_process_runs_the_side_that_is_asked_for():
    case, plans = Case("cifar-resnet20", None, 64, 32, 1), {"mine, patch 2": Plan.last(2, Backward(patch=2))}
    mine, exact = (price.measure_resident(case, "channels last", "default", plans, side) for side in (*plans, EXACT))
    assert exact > 2 * mine > 0


def test_saved_bytes_are_those_that_autograd_holds(tiny):
    model = freeze_statistics_(make_model("cifar-resnet20").train())
    loss = StepLoss(targets=torch.zeros(2, dtype=torch.long))
    assert read(tiny)[EXACT]["saved bytes"] == measure_saved_bytes(model, make_images(2, 16), loss=loss)
