"""Linear layers on grids of tokens: vision transformers, mixers, channels-last maps."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from cases import draw, seeded
from gradfilter.cost import measure_saved_bytes, predict_saved_bytes
from gradfilter.errors import ExitWarning, PlanError
from gradfilter.hooks import find_applied
from helpers_safety import applied, assert_close, gradients, plain, randomise

WIDTH = 12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, WIDTH))


class Mix(nn.Module):
    """Mixes tokens by a Linear layer over them, as MLP-Mixer does: no map of channels."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.fc = nn.Linear(length, length)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.transpose(1, 2)).transpose(1, 2)


class Tokens(nn.Module):
    """A small vision transformer, with a class token or without, that ends in a classifier of three classes."""

    def __init__(self, make_mixer=Attention, prefix: int = 1, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, prefix, WIDTH))
        self.position = nn.Parameter(torch.zeros(1, prefix + 24, WIDTH))
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            self.blocks.append(nn.ModuleList([nn.LayerNorm(WIDTH), make_mixer(), nn.LayerNorm(WIDTH), mlp]))
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        for norm1, mix, norm2, mlp in self.blocks:  # type: ignore[misc]
            x = x + mix(norm1(x))
            x = x + mlp(norm2(x))
        x = self.norm(x)
        return self.fc(x[:, 0] if self.token.shape[1] else x.mean(1))


def make(prefix: int, mixer=Attention) -> Tokens:
    model = Tokens(mixer, prefix).double()
    randomise(model, 0)
    return model


IMAGES = draw(2, 3, 16, 24)  # tokens 4×6


@pytest.mark.parametrize(
    ("mixer", "prefix"),
    [(Attention, 0), (Attention, 1), (Attention, 5), (lambda: Mix(24), 0)],
    ids=["attention", "class token", "registers", "mixer"],
)
@pytest.mark.parametrize("tokens", [None, (4, 6)])
def test_tokens_are_exact_at_patch_one(prefix, mixer, tokens):
    model = make(prefix, mixer)
    got = gradients(applied(model, gf.Backward(patch=1, tokens=tokens)), IMAGES)
    want = gradients(plain(model), IMAGES)
    # A number added to all channels of a token does not pass the norm behind it: that gradient is nothing but rounding.
    zero = {name for name, g in want.items() if g is not None and 0 < float(g.norm()) < 1e-12}
    got, want = ({name: g for name, g in grads.items() if name not in zero} for grads in (got, want))
    assert_close(got, want)
    assert len(zero) <= 2


@pytest.mark.parametrize("prefix", [0, 1])
def test_a_whole_transformer_is_at_patch_resolution_but_for_attention(prefix):
    model = gf.apply_(make(prefix), gf.Plan.all(gf.Backward(patch=2, tokens=(4, 6))))
    exact = measure_saved_bytes(make(prefix), IMAGES)
    filtered = measure_saved_bytes(model, IMAGES)
    assert filtered == predict_saved_bytes(model, IMAGES)
    found = find_applied(model)
    assert found is not None
    assert not found.log.find_unexpected()
    assert {"blocks.1.1.qkv", "blocks.0.3.2"} <= found.patches.keys()
    assert "fc" not in found.patches
    # What is left at full length is attention's own: q, k, v, its output twice and a number per token and head.
    attention = 2 * 2 * 8 * (5 * (prefix + 24) * WIDTH + 2 * (prefix + 24))
    assert filtered - attention < (exact - attention) / 3


def test_linear_layers_enter_alone_where_the_plan_says_how_large_the_grid_is():
    """The frozen part before them tells nothing of a grid."""
    model = make(1)
    for tokens, layers in ((None, set()), ((4, 6), {"blocks.1.3.0", "blocks.1.3.2"})):
        gf.apply_(model, gf.Plan({"blocks.1.3": gf.Backward(patch=2, tokens=tokens)}))
        model(IMAGES).sum().backward()
        found = find_applied(model)
        assert found is not None
        assert set(found.patches) == layers


def test_the_filtered_gradient_of_a_linear_layer_is_that_of_patch_means():
    linear, x = nn.Linear(5, 3).double(), draw(2, 4, 6, 5)
    model = gf.apply_(nn.Sequential(linear), gf.Plan.all(gf.Backward(patch=2, tokens=(2, 3))))
    gy = draw(2, 4, 6, 3, seed=1)
    (gw,) = torch.autograd.grad(model(x), linear.weight, gy)
    means = F.avg_pool2d(x.permute(0, 3, 1, 2), 2), F.avg_pool2d(gy.permute(0, 3, 1, 2), 2, divisor_override=1)
    torch.testing.assert_close(gw, torch.einsum("ndhw,nchw->dc", means[1], means[0]))


def test_a_transformer_learns_with_filtered_gradients():
    model = gf.apply_(make(1), gf.Plan.all(gf.Backward(patch=2, tokens=(4, 6)))).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    images, labels = torch.randn(6, 3, 16, 24, generator=seeded(), dtype=torch.float64), torch.arange(6) % 3
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


def test_tokens_are_part_of_a_plan():
    plan = gf.Plan({"blocks": gf.Backward(patch=2, tokens=(4, 6)), "*": gf.Backward(tokens=14)})
    assert gf.Plan.from_yaml(plan.to_yaml()) == plan
    assert str(gf.Backward(patch=2, tokens=14)) == "patch 2 tokens 14"
    with pytest.raises(PlanError, match="tokens=0"):
        gf.Backward(tokens=0)
    with pytest.raises(PlanError, match=r"has no Conv2d.*Backward\(tokens=14\)"):
        gf.apply_(nn.Linear(3, 3), gf.Plan.all())


def test_a_grid_of_tokens_that_fits_nothing_is_told_once():
    model = gf.apply_(make(1), gf.Plan({"blocks": gf.Backward(patch=2, tokens=9)}))
    with pytest.warns(
        ExitWarning, match=r"blocks\.0\.1\.qkv got \[2, 25, 12\], which is no grid of 9×9 tokens.*trained exactly"
    ):
        model(IMAGES)
    model(IMAGES)  # a second warning would be an error here


@pytest.mark.parametrize(
    ("shape", "fits"), [((4, 6), True), ((2, 3), True), ((12, 18), True), ((4, 4), False), ((3, 96), False), ((6, 9), False)]
)
def test_maps_of_other_stages_fit_a_grid_that_fits_the_first(shape, fits):
    model = gf.apply_(nn.Sequential(nn.Linear(5, 3)), gf.Plan.all(gf.Backward(patch=2, tokens=(4, 6))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExitWarning)
        model(torch.zeros(2, *shape, 5))
    found = find_applied(model)
    assert found is not None
    assert bool(found.patches) == fits
    assert bool(found.exact) != fits
