"""Decoders for segmentation: the region goes from the first layer through the last enlargement to the loss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import gradfilter as gf
from gradfilter.cost import count_saved
from gradfilter.hooks import find_applied
from gradfilter.models.torchvision_ops import declare_torchvision_ops
from gradfilter.shapes import on_shapes, to_meta
from helpers_safety import applied, assert_close, assert_differ, find_unexpected, grads_of, make_images, plain, seeded
from segment_nets import CLASSES, DECODERS, make_segmenter, segment_loss

SIZE = (48, 64)


def make_batch(dtype: torch.dtype = torch.float64, size: tuple[int, int] = SIZE) -> tuple[Tensor, Tensor]:
    """Return images and labels, some of them the one that does not count."""
    labels = torch.randint(CLASSES, (2, *size), generator=seeded(3))
    labels[:, :5] = 255
    return make_images(2, size, dtype=dtype), labels


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor | None]:
    model.zero_grad()
    segment_loss(model(batch[0]), batch[1]).backward()
    return grads_of(model)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_is_exact_at_patch_one(name):
    model, batch = make_segmenter(name), make_batch()
    exact = step(plain(model), batch)
    assert_close(step(applied(model), batch), exact)
    assert_differ(step(applied(model, gf.Backward(patch=2)), batch), exact, "stem.0.weight")


@pytest.mark.parametrize("backward", [gf.Backward(patch=2), gf.Backward(patch=(3, 4)), gf.Backward(grid=4)], ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_a_region_reaches_the_loss(name, backward):
    model = applied(make_segmenter(name), backward)
    got = step(model, make_batch())  # an exit would warn, and a warning is an error
    found = find_applied(model)
    assert found is not None
    ends = {layer for (layer, function), _ in found.log.exits.items() if "cross_entropy" in function}
    assert ends == {"classifier", "auxiliary"}
    assert not find_unexpected(model)
    # What a loss sends to the biases of its logits is their whole gradient, at any patch.
    exact = step(plain(make_segmenter(name)), make_batch())
    for layer in ends:
        assert_close({"bias": got[f"{layer}.bias"]}, {"bias": exact[f"{layer}.bias"]})


@pytest.mark.parametrize("name", DECODERS)
def test_predicted_saved_bytes_are_the_measured_ones_with_the_loss(name):
    model, (images, labels) = applied(make_segmenter(name, torch.float32), gf.Backward(patch=4)), make_batch(torch.float32)
    state = [*model.parameters(), *model.buffers()]
    measured = count_saved(lambda: segment_loss(model(images), labels), [*state, images, labels])
    with on_shapes(model) as (run, meta):
        shapes = to_meta(labels)
        assert count_saved(lambda: segment_loss(run(images), shapes), [*meta.values(), shapes]) == measured
    exact = make_segmenter(name, torch.float32).eval()
    held = count_saved(lambda: segment_loss(exact(images), labels), [*exact.parameters(), *exact.buffers(), images, labels])
    assert held > 15 * measured


def test_a_step_through_a_decoder_and_its_loss_traces():
    model, (images, labels) = applied(make_segmenter("pyramid"), gf.Backward(patch=2)), make_batch()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def run(images, labels, params):
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        loss = segment_loss(functional_call(model, leaves, (images,)), labels)
        return torch.autograd.grad(loss, list(leaves.values()))

    graph = make_fx(run)(images, labels, params)
    images = make_images(2, SIZE, seed=5)
    for got, want in zip(graph(images, labels, params), run(images, labels, params), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


ARCHITECTURES = "deeplabv3 deeplabv3plus pspnet upernet fpn unet unetplusplus linknet segformer".split()


@pytest.mark.parametrize("encoder", ["resnet18", "mobilenet_v2"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_published_decoder_is_exact_at_patch_one_and_has_no_exit(name, encoder):
    declare_torchvision_ops()
    smp = pytest.importorskip("segmentation_models_pytorch")
    from gradfilter.bench.setup import shake_

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = shake_(smp.create_model(name, encoder, encoder_weights=None, classes=CLASSES)).double()
    assert_exact_without_exit(model)


@pytest.mark.parametrize("encoder", ["resnet18", "mobilenet_v2"])
@pytest.mark.parametrize("name", ["fcn", "paper-fcn", "paper-pspnet", "paper-deeplabv3", "paper-upernet"])
def test_a_network_of_ours_is_exact_at_patch_one_and_has_no_exit(name, encoder):
    declare_torchvision_ops()
    pytest.importorskip("segmentation_models_pytorch")
    from gradfilter.bench.setup import shake_
    from gradfilter.models import make_model

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = shake_(make_model(name, encoder=encoder, classes=CLASSES)).double()
    assert_exact_without_exit(model)


def assert_exact_without_exit(model: nn.Module) -> None:
    """Compare the gradients of all parameters at patch 1 with torch's own; at patch 4 the region reaches the loss."""
    images, labels = make_batch(size=(64, 64))

    def gradients(model: nn.Module) -> dict[str, Tensor | None]:
        segment_loss({"out": model(images)}, labels).backward()
        return grads_of(model)

    assert_close(gradients(applied(model)), gradients(plain(model)), 1e-8)
    coarse = applied(copy.deepcopy(model), gf.Backward(patch=4))
    gradients(coarse)
    assert not find_unexpected(coarse)
