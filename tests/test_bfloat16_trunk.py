"""A trunk in bfloat16: close to the one in single precision, and nobody's business outside of the frozen part."""

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import gradfilter as gf
from gradfilter import environment, frozen
from gradfilter.bench.setup import shake_
from gradfilter.errors import PlanError, SettingsError, TrunkWarning
from gradfilter.frozen import FrozenTensor, convolve_short
from gradfilter.models import make_model
from gradfilter.ops import native
from gradfilter.train import Settings

pytestmark = pytest.mark.filterwarnings("ignore::gradfilter.errors.TrunkWarning")
BACKWARD = gf.Backward(patch=2)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """A frozen part with all that one can do to a map: fused, in place, by functions that frozen maps do not know."""

    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16)
        self.third = nn.Conv2d(16, 16, 1)
        self.last, self.fc = nn.Conv2d(16, 8, 3, padding=1), nn.Linear(8, 5)
        self.act, self.seen = nn.ReLU6(inplace=True), []

    def forward(self, x):
        x = self.act(self.norm1(self.first(x)))
        self.seen.append(x)
        y = torch.relu(self.norm2(self.second(x)) + x)
        y *= 0.5 + y.mean((2, 3), keepdim=True).sigmoid()
        assert y.dtype is torch.float32
        y = torch.nn.functional.leaky_relu(self.third(y)) + x.to(y.dtype)
        return self.fc(torch.relu(self.last(y)).mean((2, 3)))


def make_net(layout=torch.channels_last):
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        net = shake_(Net())
    return net.to(memory_format=layout)  # type: ignore[call-overload]


def run(model, trunk, images, library=True):
    """Return the output and all gradients of a step, in one row each."""
    model = gf.apply_(copy.deepcopy(model), gf.Plan.last(1, BACKWARD, trunk=trunk)).train()
    with contextlib.nullcontext() if library else native.off():
        y = model(images)
        y.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert {g.dtype for g in grads.values()} == {y.dtype} == {torch.float32}
    return y.detach(), torch.cat([g.flatten() for g in grads.values()])


def find_distance(x, y):
    return float((x - y).norm() / y.norm())


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("has", [True, False])
def test_it_is_close_to_single_precision(library, layout, has, monkeypatch):
    monkeypatch.setattr(frozen, "has_bfloat16", lambda: has)
    net, images = make_net(layout), draw(2, 3, 9, 9).contiguous(memory_format=layout)
    short, whole = (run(net, trunk, images, library) for trunk in ("bfloat16", "float32"))
    for x, y in zip(short, whole, strict=True):
        assert 1e-5 < find_distance(x, y) < 0.02


@pytest.mark.parametrize("name", ["cifar-resnet20", "mcunet-in2"])
def test_it_is_close_in_real_networks(name):
    model, images = shake_(make_model(name, classes=5)), draw(2, 3, 40, 40)
    short, whole = (run(model, trunk, images) for trunk in ("bfloat16", "float32"))
    assert 1e-5 < find_distance(short[0], whole[0]) < 0.05
    assert torch.cosine_similarity(short[1], whole[1], 0) > 0.99


@pytest.mark.parametrize("library", [True, False])
def test_only_frozen_maps_are_in_bfloat16(library):
    net, before = make_net(), {k: v.clone() for k, v in make_net().state_dict().items()}
    gf.apply_(net, gf.Plan.last(1, BACKWARD, trunk="bfloat16")).train()
    seen = []
    net.second.register_forward_pre_hook(lambda module, args: seen.append((args[0], args[0].value.dtype, args[0].dtype)))
    with contextlib.nullcontext() if library else native.off():
        net(draw(2, 3, 9, 9))
    ((x, inside, outside),) = seen
    assert isinstance(x, FrozenTensor)
    assert (inside, outside) == (torch.bfloat16, torch.float32)
    assert x.element_size() == 4
    assert (x + 0).dtype is torch.float32
    assert all(torch.equal(v, before[k]) and v.dtype is before[k].dtype for k, v in net.state_dict().items())


def test_autograd_holds_the_same():
    def find_saved(trunk):
        net, saved = gf.apply_(make_net(), gf.Plan.last(1, BACKWARD, trunk=trunk)).train(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append((x.shape, x.dtype)) or x, lambda x: x):
            net(draw(2, 3, 8, 8))
        return saved

    assert find_saved("bfloat16") == find_saved("float32")
    assert torch.bfloat16 not in {dtype for _, dtype in find_saved("bfloat16")}


def test_without_gradients_the_model_is_as_ever():
    net, images = make_net().eval(), draw(2, 3, 9, 9)
    with torch.no_grad():
        expected = net(images)
        assert torch.equal(gf.apply_(net, gf.Plan.last(1, trunk="bfloat16"))(images), expected)


def test_maps_that_the_model_returns_are_plain_and_in_single_precision():
    class Both(Net):
        def forward(self, x):
            return super().forward(x), self.seen.pop()

    y, features = gf.apply_(shake_(Both()), gf.Plan.last(1, BACKWARD, trunk="bfloat16")).train()(draw(2, 3, 9, 9))
    assert type(features) is torch.Tensor
    assert features.dtype is y.dtype is torch.float32


def test_in_place_functions_reach_the_map():
    class Scaled(Net):
        def forward(self, x):
            x = self.first(x)
            alias = x
            x.mul_(3).clamp_(min=-1)
            assert torch.equal(alias + 0, x + 0)
            return self.fc(torch.relu(self.last(self.third(alias))).mean((2, 3)))

    net, images = shake_(Scaled()), draw(2, 3, 9, 9)
    short, whole = (run(net, trunk, images) for trunk in ("bfloat16", "float32"))
    assert 1e-5 < find_distance(short[0], whole[0]) < 0.02


def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.conv2d(x, w)


def test_scripted_code_takes_the_maps():
    scripted = torch.jit.script(convolve)

    class Scripted(Net):
        def forward(self, x):
            return self.fc(torch.relu(self.last(scripted(self.norm1(self.first(x)), self.third.weight))).mean((2, 3)))

    net, images = shake_(Scripted()), draw(2, 3, 9, 9)
    short, whole = (run(net, trunk, images) for trunk in ("bfloat16", "float32"))
    assert 1e-5 < find_distance(short[0], whole[0]) < 0.02


@pytest.mark.parametrize(
    ("w", "where"), [((16, 8, 1, 1), (1, 0, 1, 1)), ((8, 1, 3, 3), (2, 1, 1, 8)), ((4, 4, 3, 2), ((1, 2), 1, 2, 2))]
)
def test_processors_without_it_compute_the_same(w, where, monkeypatch):
    x, w = draw(2, 8, 9, 11), draw(*w, seed=1)
    found = []
    for has in (True, False):
        monkeypatch.setattr(frozen, "has_bfloat16", lambda has=has: has)
        found.append(convolve_short(torch.conv2d, x, w, w[:, 0, 0, 0], *where))
    ours, torchs = found
    assert ours.dtype is torchs.dtype is torch.bfloat16
    scale = torchs.float().abs().clamp(min=0.5)  # sums that nearly cancel keep the error of their terms
    assert ((ours.float() - torchs.float()).abs() / scale).max() <= 2**-7


def test_other_dtypes_stay_as_they_are():
    net, images = make_net().double(), draw(2, 3, 9, 9).double()
    found = []
    for trunk in ("bfloat16", "float32"):
        gf.apply_(net, gf.Plan.last(1, BACKWARD, trunk=trunk))
        net.__class__ = type("Double", (Net,), {"forward": lambda self, x: self.last(self.third(self.second(self.first(x))))})
        found.append(net(images))
    assert torch.equal(*found)


def test_a_processor_without_it_is_told_of(monkeypatch):
    plan = gf.Plan.last(1, BACKWARD, trunk="bfloat16")
    monkeypatch.setattr("gradfilter.apply.has_bfloat16", lambda: False)
    with pytest.warns(TrunkWarning, match=r"no instructions \(avx512_bf16, amx_bf16, bf16\).* Use .*trunk='float32'") as caught:
        gf.apply_(make_net(), plan)
    assert caught[0].filename == __file__


@pytest.mark.filterwarnings("error")
def test_nobody_is_told_of_what_is_not_there(monkeypatch):
    monkeypatch.setattr("gradfilter.apply.has_bfloat16", lambda: False)
    gf.apply_(make_net(), gf.Plan.all(BACKWARD, trunk="bfloat16"))
    gf.freeze_(make_net(), gf.Plan.last(1, trunk="bfloat16"))
    monkeypatch.setattr("gradfilter.apply.has_bfloat16", lambda: True)
    gf.apply_(make_net(), gf.Plan.last(1, BACKWARD, trunk="bfloat16"))


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("model name\t: x\nflags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("flags\t\t: fpu avx2 avx512f\nbugs\t: bf16\n", False),
        ("nothing\n", False),
        (None, False),
    ],
)
def test_what_a_processor_has(text, has, monkeypatch):
    def read(*_args, **_options):
        if text is None:
            raise OSError
        return text

    monkeypatch.setattr(Path, "read_text", read)
    assert environment.has_bfloat16.__wrapped__() is has


def test_plans_say_it():
    plan = gf.Plan.last(1, trunk="bfloat16")
    assert "trunk: bfloat16" in plan.to_yaml()
    assert gf.Plan.from_yaml(plan.to_yaml()) == plan
    assert "trunk" not in gf.Plan.last(1).to_yaml()
    assert gf.describe(gf.apply_(make_net(), plan)).splitlines()[0].endswith("batch norm eval, trunk bfloat16")
    assert "trunk" not in gf.describe(gf.apply_(make_net(), gf.Plan.last(1)))
    with pytest.raises(PlanError, match=r"trunk='half'.* 'float32', 'bfloat16'"):
        gf.Plan.last(1, trunk="half")


def test_settings_say_it(tmp_path):
    assert Settings(trunk="bfloat16").make_plan() == gf.Plan.all(trunk="bfloat16")
    gf.Plan.last(1, trunk="bfloat16").save(tmp_path / "plan.yaml")
    assert Settings(plan=str(tmp_path / "plan.yaml")).make_plan().trunk == "bfloat16"
    assert Settings(plan=str(tmp_path / "plan.yaml"), trunk="float32").make_plan().trunk == "float32"
    with pytest.raises(SettingsError, match="--trunk is 'half', but must be one of float32, bfloat16"):
        Settings(trunk="half")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"--trunk bfloat16 .* --exact"):
        Settings(trunk="bfloat16", exact=True)


def test_budgets_leave_it_to_the_user():
    plan = gf.plan_for(make_net(), (draw(2, 3, 8, 8), torch.tensor([0, 1])), memory="1MB", keep="full", trunk="bfloat16")
    assert plan.trunk == "bfloat16"
