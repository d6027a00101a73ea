"""Losses of every pixel: a region that reaches the loss, alone and behind the last enlargement to the size of the labels."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from cases import draw, seeded
from gradfilter.cost import count_saved
from gradfilter.emit import enter
from gradfilter.errors import ExitWarning
from gradfilter.geometry.tiling import Tiling, count_cells
from gradfilter.rules import loss as loss_rules
from gradfilter.tensor import Choices, PatchTensor
from test_rules import choose, clamp, run_rule, sides, sizes

CLASSES = 3
IGNORED = 255
WEIGHTS = torch.tensor([0.3, 2.0, 1.1], dtype=torch.float64)


def draw_labels(x, ignored=IGNORED):
    """Return a class for every pixel of a batch of logits; a fifth of the pixels have none."""
    labels = torch.randint(CLASSES, (len(x), *x.shape[2:]), generator=seeded(3))
    return labels.masked_fill(torch.rand(labels.shape, generator=seeded(4)) < 0.2, ignored)


def draw_shares(x):
    return draw(*x.shape, seed=5).softmax(1)


def draw_mask(x):
    return (draw(*x.shape, seed=6) > 0).to(x.dtype)


LOSSES = {
    "mean": lambda x: F.cross_entropy(x, draw_labels(x, -100)),
    "sum": lambda x: F.cross_entropy(x, draw_labels(x, 1), ignore_index=1, reduction="sum"),
    "weighted": lambda x: F.cross_entropy(x, draw_labels(x), WEIGHTS, ignore_index=IGNORED),
    "weighted_sum": lambda x: F.cross_entropy(x, draw_labels(x), weight=WEIGHTS, ignore_index=IGNORED, reduction="sum"),
    "module": lambda x: torch.nn.CrossEntropyLoss(WEIGHTS, ignore_index=IGNORED)(x, draw_labels(x)),
    "smoothed": lambda x: F.cross_entropy(x, draw_labels(x), WEIGHTS, ignore_index=IGNORED, label_smoothing=0.1),
    "smoothed_sum": lambda x: F.cross_entropy(x, draw_labels(x, -100), reduction="sum", label_smoothing=0.3),
    "shares": lambda x: F.cross_entropy(x, draw_shares(x)),
    "shares_smoothed": lambda x: F.cross_entropy(x, draw_shares(x), WEIGHTS, label_smoothing=0.1),
    "tokens": lambda x: F.cross_entropy(x.flatten(2), draw_labels(x, -100).flatten(1)),
    "nll": lambda x: F.nll_loss(x, draw_labels(x), WEIGHTS, ignore_index=IGNORED),
    "log_softmax_nll": lambda x: F.nll_loss(F.log_softmax(x, 1), draw_labels(x), ignore_index=IGNORED, reduction="sum"),
    "log_softmax_twice": lambda x: F.cross_entropy(F.log_softmax(x, 1), draw_labels(x, -100), label_smoothing=0.1),
    "unreduced": lambda x: F.cross_entropy(x, draw_labels(x, -100), reduction="none").mean(),
    "binary": lambda x: F.binary_cross_entropy_with_logits(x, draw_mask(x)),
    "binary_weighted": lambda x: F.binary_cross_entropy_with_logits(
        x, draw_mask(x), weight=draw(len(x), 1, *x.shape[2:], seed=7).abs(), pos_weight=WEIGHTS[:, None, None]
    ),
    "binary_squeezed": lambda x: F.binary_cross_entropy_with_logits(x[:, 0], draw_mask(x[:, 0]), reduction="sum"),
    "binary_shares": lambda x: F.binary_cross_entropy(torch.sigmoid(x), draw_shares(x), reduction="sum"),
    "mse": lambda x: F.mse_loss(x, draw(*x.shape, seed=8)),
    "l1": lambda x: F.l1_loss(x, draw(*x.shape, seed=8), reduction="sum"),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, draw(*x.shape, seed=8), beta=0.3),
    "huber": lambda x: F.huber_loss(x, draw(*x.shape, seed=8), delta=0.3),
}  # fmt: skip
EXACT_AT_ONE = {"binary_shares"}
"""What goes through a function before the loss sees it: two projections are not one."""


def differentiate(f, x, patch=None):
    """Return a loss and the gradient of x, exactly or at patch resolution."""
    leaf = x.clone().requires_grad_()
    y = f(leaf if patch is None else enter(leaf, choose(patch)))  # an exit would warn, and a warning is an error
    assert type(y) is torch.Tensor
    return y.detach(), torch.autograd.grad(y, leaf)[0]


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None, max_examples=25)
@given(size=sizes, patch=sides, n=st.integers(1, 3))
def test_a_loss_leaves_a_region_as_the_projected_gradient(name, size, patch, n):
    x = draw(n, CLASSES, *size)
    patch = (1, 1) if name in EXACT_AT_ONE else patch
    (want, pixels), (got, gx) = differentiate(LOSSES[name], x), differentiate(LOSSES[name], x, patch)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(gx, oracles.project(pixels, clamp(patch, x)), rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(size=sizes, patch=sides)
def test_an_unreduced_cross_entropy_goes_on_as_the_projected_jacobian(size, patch):
    def f(x):
        return F.cross_entropy(x, draw_labels(x), WEIGHTS, ignore_index=IGNORED, reduction="none")[:, None]

    x = draw(2, CLASSES, *size)
    y, gx, _, g, out_patch = run_rule(f, x, [], patch)
    torch.testing.assert_close(y, f(x))
    torch.testing.assert_close(gx, oracles.coarse_backward(f, x, [], g, clamp(patch, x), out_patch)[0])


@settings(deadline=None, max_examples=25)
@given(size=sizes, patch=sides)
def test_an_unreduced_loss_of_values_is_elementwise(size, patch):
    def f(x):
        return F.binary_cross_entropy_with_logits(x, draw_mask(x), reduction="none")

    x = draw(2, CLASSES, *size)
    y, gx, _, g, out_patch = run_rule(f, x, [], patch)
    torch.testing.assert_close(y, f(x))
    torch.testing.assert_close(gx, oracles.coarse_backward(f, x, [], g, clamp(patch, x), out_patch)[0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_that_are_all_ignored_give_no_gradient(smoothing):
    def f(x):
        return F.cross_entropy(x, torch.full((2, 5, 6), IGNORED), ignore_index=IGNORED, label_smoothing=smoothing)

    loss, gx = differentiate(f, draw(2, CLASSES, 5, 6), (2, 3))
    assert loss.isnan()
    assert torch.equal(gx, torch.zeros_like(gx))


@pytest.mark.parametrize("name", ["mean", "weighted", "shares_smoothed", "binary_weighted"])
def test_a_few_images_at_a_time_give_the_same(name, monkeypatch):
    def f(x):
        return LOSSES[name](F.interpolate(x, scale_factor=2))

    x = draw(5, CLASSES, 9, 7)
    loss, gx = differentiate(f, x, (2, 3))
    seen, real = [], loss_rules.apply_axes
    monkeypatch.setattr(loss_rules, "apply_axes", lambda g, *axes: seen.append(len(g)) or real(g, *axes))
    monkeypatch.setattr(loss_rules, "MOST_AT_ONCE", 2 * CLASSES * 18 * 14)
    again, gx_again = differentiate(f, x, (2, 3))
    assert seen == [2, 2, 1]
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(gx_again, gx)


def test_cross_entropy_keeps_a_number_per_cell_and_class():
    labels = draw_labels(draw(2, CLASSES, 30, 41))
    px = enter(draw(2, CLASSES, 30, 41).requires_grad_(), choose((4, 8)))
    held = count_saved(lambda: F.cross_entropy(px, labels, ignore_index=IGNORED))
    assert held == 8 * (2 * CLASSES * 8 * 6 + 1)  # and what the sum is divided by


ENLARGED = {
    "bilinear": {"scale_factor": 4, "mode": "bilinear"},
    "corners": {"scale_factor": 8, "mode": "bilinear", "align_corners": True},
    "size": {"size": (37, 64), "mode": "bilinear", "align_corners": False},
    "nearest": {"scale_factor": 16},
    "bicubic": {"scale_factor": (4.0, 8.0), "mode": "bicubic"},
}


def classify(z):
    return F.cross_entropy(z, draw_labels(z), WEIGHTS, ignore_index=IGNORED)


def classify_log(z):
    return F.nll_loss(z.log_softmax(1), draw_labels(z), WEIGHTS, ignore_index=IGNORED)


@pytest.mark.parametrize("f", [classify, classify_log])
@pytest.mark.parametrize("name", ENLARGED)
@settings(deadline=None, max_examples=10)
@given(size=st.tuples(st.integers(1, 9), st.integers(1, 9)), patch=sides)
def test_behind_an_enlargement_the_loss_keeps_the_cells_of_the_smaller_map(name, f, size, patch):
    x = draw(2, CLASSES, *size)
    (want, pixels), (got, gx) = (differentiate(lambda x: f(F.interpolate(x, **ENLARGED[name])), x, p) for p in (None, patch))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gx, oracles.project(pixels, clamp(patch, x)), rtol=1e-9, atol=1e-12)
    px = enter(x.requires_grad_(), choose(patch))
    y = F.interpolate(px, **ENLARGED[name])
    h, w = count_cells(size, clamp(patch, x))
    assert count_saved(lambda: f(y)) == 8 * (2 * CLASSES * h * w + 1)


def test_behind_a_reduction_in_size_the_loss_keeps_the_cells_of_its_own_map():
    px = enter(draw(2, CLASSES, 32, 32).requires_grad_(), choose((2, 2)))
    y = F.interpolate(px, scale_factor=0.25, mode="bilinear")
    assert count_saved(lambda: classify(y)) == 8 * (2 * CLASSES * 4 * 4 + 1)


@pytest.mark.parametrize(("tiling", "patch"), [(Tiling(grid=(4, 4), image=(64, 64)), (16, 16)), (Tiling((2, 2)), (2, 2))])
def test_enlarged_logits_have_as_many_cells_as_a_grid_says(tiling, patch):
    y = F.interpolate(enter(draw(2, CLASSES, 8, 8).requires_grad_(), Choices("layer", tiling)), scale_factor=8, mode="bilinear")
    assert isinstance(y, PatchTensor)
    assert y.patch == patch


def test_enlarged_logits_that_were_changed_are_not_those_before():
    def f(x):
        z = F.interpolate(x, scale_factor=4)
        z.mul_(2)
        return classify(z) + classify(z[:, [2, 0, 1]]) + z.square().mean()

    x = draw(2, CLASSES, 5, 6)
    (want, pixels), (got, gx) = differentiate(f, x), differentiate(f, x, (1, 1))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gx, pixels, rtol=1e-9, atol=1e-12)


def test_two_losses_of_the_same_logits_add_up():
    def f(x):
        z = F.interpolate(x, scale_factor=4, mode="bilinear")
        p = z.log_softmax(1)
        return classify(z) + 0.5 * p.exp().mean() + F.mse_loss(p, torch.zeros_like(z)) + F.nll_loss(p, draw_labels(z, -100))

    x = draw(2, CLASSES, 5, 6)
    (want, pixels), (got, gx) = differentiate(f, x), differentiate(f, x, (1, 1))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gx, pixels, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_gives_a_loss_of_torchs_dtype(dtype, autocast):
    x = draw(2, CLASSES, 200, 200)
    half = x.to(dtype).requires_grad_()
    labels = draw_labels(x)
    with torch.autocast("cpu", dtype, enabled=autocast):
        want = F.cross_entropy(half.detach(), labels, ignore_index=IGNORED)
        loss = F.cross_entropy(enter(half, choose((4, 4))), labels, ignore_index=IGNORED)
    assert loss.dtype == want.dtype
    torch.testing.assert_close(loss.double(), F.cross_entropy(x, labels, ignore_index=IGNORED), rtol=1e-2, atol=0)
    (gx,) = torch.autograd.grad(loss * 1024, half)  # as a scaler does it: half precision knows no smaller gradients
    _, pixels = differentiate(lambda x: F.cross_entropy(x, labels, ignore_index=IGNORED), x)
    assert gx.dtype == dtype
    torch.testing.assert_close(gx.double() / 1024, oracles.project(pixels, (4, 4)), rtol=2e-2, atol=2e-7)


@pytest.mark.parametrize(
    ("labels", "error"),
    [
        (torch.zeros(2, 5, 7, dtype=torch.long), RuntimeError),
        (torch.zeros(3, 5, 6, dtype=torch.long), ValueError),
        (torch.full((2, 5, 6), CLASSES), IndexError),
    ],
    ids=["size", "batch", "class"],
)
@pytest.mark.filterwarnings("ignore::gradfilter.errors.ExitWarning")
def test_targets_that_do_not_fit_are_refused_in_torchs_words(labels, error):
    x = draw(2, CLASSES, 5, 6)
    with pytest.raises(error) as said:
        F.cross_entropy(x, labels, WEIGHTS)
    with pytest.raises(error) as got:
        F.cross_entropy(enter(x.requires_grad_(), choose((2, 2))), labels, WEIGHTS)
    assert str(got.value) == str(said.value)


EXITS = {
    "trained_shares": lambda x, p: F.cross_entropy(x, (draw_shares(x) * p).softmax(1)),
    "trained_target": lambda x, p: F.mse_loss(x, x.detach() * p),
    "weighted_mean": lambda x, p: F.mse_loss(x, torch.zeros_like(x), weight=draw_mask(x)) * p,  # pyright: ignore[reportCallIssue]
    "legacy": lambda x, p: F.cross_entropy(x, draw_labels(x, -100), size_average=False) * p,
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
@pytest.mark.parametrize("name", EXITS)
def test_other_losses_are_exits_and_exact(name):
    x, p = draw(2, CLASSES, 5, 6), torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    leaf = x.clone().requires_grad_()
    want = torch.autograd.grad(EXITS[name](leaf, p), [leaf, p])
    x.requires_grad_()
    with pytest.warns(ExitWarning):
        y = EXITS[name](enter(x, choose((2, 4))), p)
    gx, gp = torch.autograd.grad(y, [x, p])
    torch.testing.assert_close(gx, oracles.project(want[0], (2, 4)))
    torch.testing.assert_close(gp, want[1])
