"""A keep covers what stands around a layer: no activation and no norm holds a full tensor, in conv and Linear chains."""

import copy

import pytest
import torch
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.cost import measure_saved_bytes, predict_saved_bytes
from gradfilter.errors import PlanError
from gradfilter.keep import parse_keep
from gradfilter.meter import Saved
from gradfilter.tensor import PatchTensor, plain_torch


class Residual(nn.Module):
    """A block of a transformer, attention left out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def conv(norm: nn.Module, activation: nn.Module) -> nn.Sequential:
    layers = (nn.Conv2d(3, 16, 3, padding=1, bias=False), norm, activation, nn.Conv2d(16, 16, 3, padding=1), nn.SiLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 64), *between, nn.Linear(64, 64), *copy.deepcopy(between), nn.Linear(64, 4))


IMAGES, FEATURES = (8, 3, 20, 20), (48, 12)
CHAINS = {
    "conv, batch norm, ReLU": (conv(nn.BatchNorm2d(16), nn.ReLU()), IMAGES),
    "conv, batch norm, hardswish": (conv(nn.BatchNorm2d(16), nn.Hardswish()), IMAGES),
    "conv, group norm, GELU": (conv(nn.GroupNorm(4, 16), nn.GELU()), IMAGES),
    "conv, instance norm, PReLU": (conv(nn.InstanceNorm2d(16, affine=True), nn.PReLU()), IMAGES),
    "pointwise on one pixel": (
        nn.Sequential(nn.Conv2d(12, 64, 1), nn.ReLU(), nn.Conv2d(64, 4, 1), nn.Flatten()),
        (48, 12, 1, 1),
    ),
    "Linear, ReLU": (mlp(nn.ReLU()), FEATURES),
    "Linear, SiLU, dropout": (mlp(nn.SiLU(), nn.Dropout(0.0)), FEATURES),
    "Linear, batch norm, GELU": (mlp(nn.BatchNorm1d(64), nn.GELU()), FEATURES),
    "tokens, layer norm": (nn.Sequential(nn.Linear(12, 32), Residual(32), Residual(32), nn.Linear(32, 4)), (6, 10, 12)),
    "maps, layer norm": (nn.Sequential(nn.Linear(12, 32), Residual(32), nn.Linear(32, 4)), (4, 5, 7, 12)),
}
MOST_BYTES = {"bfloat16": 2.01, "int8": 1.4, "int8:32": 1.4, "subspace:2": 1.4, "fixed:2": 1.4}
"""For each keep, the most bytes that may be held of any map, per number; two numbers per range are on top in small channels."""


def make(chain: str, keep: str, batch_norm: str = "eval") -> tuple[nn.Module, Tensor]:
    net, shape = CHAINS[chain]
    generator = torch.Generator().manual_seed(0)
    model = copy.deepcopy(net).train()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / max(1, parameter[0].numel()) ** 0.5
    gf.apply_(model, gf.Plan.all(gf.Backward(patch=1, keep=parse_keep(keep)), batch_norm=batch_norm))
    return model, torch.randn(shape, generator=generator)


def find_maps(model: nn.Module, x: Tensor) -> set[int]:
    """Return the sizes of the maps that pass through a model's layers, the input's and the output's apart."""
    sizes: set[int] = set()

    def note(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        sizes.update((args[0].numel(), y.numel()))

    handles = [m.register_forward_hook(note) for m in model.modules() if not list(m.children())]
    with torch.no_grad():
        y = model(x)
    for handle in handles:
        handle.remove()
    return {n for n in sizes - {x.numel(), y.numel()} if n > 1000}  # statistics of a batch may have as many as a small map


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
@pytest.mark.parametrize("keep", MOST_BYTES)
@pytest.mark.parametrize("chain", CHAINS)
def test_no_full_tensor_is_held_around_a_layer(chain, keep, batch_norm):
    model, x = make(chain, keep, batch_norm)
    maps = find_maps(model, x)
    saved = Saved()
    with saved:
        y = model(x)
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    with plain_torch():
        held = [entry.tensor for ref in saved.held if (entry := ref()) is not None]
    held = [t for t in held if t.untyped_storage()._cdata not in own]
    assert held
    for t in held:
        if t.numel() in maps:
            assert t.untyped_storage().nbytes() <= MOST_BYTES[keep] * t.numel(), (t.shape, t.dtype)
    assert type(y) is Tensor


@pytest.mark.parametrize("keep", MOST_BYTES)
@pytest.mark.parametrize("chain", CHAINS)
def test_what_is_held_around_a_layer_is_predicted_to_the_byte(chain, keep):
    model, x = make(chain, keep)
    for _ in range(9):
        model(x)  # Fixed is calibrated
    assert predict_saved_bytes(model, x) == measure_saved_bytes(model, x)


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
@pytest.mark.parametrize("chain", CHAINS)
def test_all_energy_is_exact_through_chains(chain, batch_norm):
    model, x = make(chain, "hosvd:1", batch_norm)
    model, x = model.double(), x.double()
    plain = gf.remove_(copy.deepcopy(model))
    for module in plain.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.InstanceNorm2d):
            module.train(batch_norm == "train")
    targets = torch.arange(len(x)) % 4
    for net in (model, plain):
        nn.functional.cross_entropy(net(x).reshape(len(x), 4, -1).mean(-1), targets).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("chain", CHAINS)
def test_derivatives_in_eight_bits_are_close(chain):
    """The gradient of the input passes all activations and norms: off by what eight bits are."""
    model, x = make(chain, "int8")
    plain = gf.remove_(copy.deepcopy(model))
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.eval()
    found = []
    for net in (model, plain):
        image = x.clone().requires_grad_()
        net(image).square().sum().backward()
        found.append(image.grad)
    error = (found[0] - found[1]).norm() / found[1].norm()
    assert 0 <= error < 0.01


def test_features_come_out_as_plain_tensors_and_may_be_used_by_anything(recwarn):
    model, x = make("Linear, ReLU", "int8")
    y = model(x)
    assert type(y) is Tensor
    torch.linalg.svd(y)[1].sum().backward()  # no rule has this: an exit that costs nothing, and no warning
    assert not recwarn.list
    inner = model.get_submodule("0")(x)
    assert isinstance(inner, PatchTensor)
    assert gf.describe(model).count("int8") == 3


def test_a_network_of_linear_layers_needs_a_keep():
    net = copy.deepcopy(CHAINS["Linear, ReLU"][0])
    with pytest.raises(PlanError, match="keep='int8'"):
        gf.apply_(net, gf.Plan.all(gf.Backward(patch=1)))


def test_layers_with_one_input_hold_it_once():
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 16, 3, padding=1)
            self.left, self.right = nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(16, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.left(x) + self.right(x)

    x = torch.randn(IMAGES, generator=torch.Generator().manual_seed(0))
    model = gf.apply_(Branches(), gf.Plan.all(gf.Backward(patch=1, keep=gf.Int8())))
    numbers = x.numel() + 16 * x[:, :1].numel()
    assert numbers <= measure_saved_bytes(model, x) < 1.05 * numbers


@pytest.mark.parametrize("keep", [gf.HOSVD(0.99), gf.SVD(0.99), gf.Subspace(energy=0.99)], ids=str)
def test_the_cap_holds_where_two_layers_enter_on_one_plain_tensor(keep):
    class Siblings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) + self.right(x)

    x = torch.randn(32, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    model = gf.apply_(Siblings(), gf.Plan.all(gf.Backward(patch=1, keep=keep)))
    cap = predict_saved_bytes(model, x)
    assert 0 < measure_saved_bytes(model, x) <= cap
