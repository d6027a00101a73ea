"""Auxiliary heads of networks that label pixels, and the papers' decoders."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.cost import count_saved
from gradfilter.errors import SettingsError
from gradfilter.models import make_model
from gradfilter.models.papers import PAPERS, make_block
from gradfilter.models.segmenters import Segmenter, add_auxiliary
from gradfilter.models.torchvision_ops import declare_torchvision_ops
from gradfilter.plan import find_last
from gradfilter.train import Settings, train
from gradfilter.train.job import fill_in
from gradfilter.train.task import SEGMENT
from helpers_safety import (
    applied,
    assert_close,
    assert_differ,
    find_unexpected,
    grads_of,
    make_images,
    plain,
    randomise,
    seeded,
)
from segment_nets import CLASSES, segment_loss
from segment_runs import make_scenes, make_settings, two_headed

declare_torchvision_ops()
pytest.importorskip("segmentation_models_pytorch")


class Encoder(nn.Module):
    """A small encoder: the image, and five maps of it."""

    channels = (3, 4, 5, 6, 7, 8)

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(make_block(i, o, stride=2) for i, o in pairwise(self.channels))

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = [x]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return maps


def make_net(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    decoder, head = PAPERS[name][0](Encoder.channels, 6), nn.Sequential(nn.Conv2d(6, CLASSES, 1))  # type: ignore[call-arg]
    second = nn.Sequential(*make_block(Encoder.channels[-2], 4), nn.Conv2d(4, CLASSES, 1))
    return randomise(Segmenter(Encoder(), decoder, head, second).to(dtype))


def run(model: nn.Module, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the loss of what a model says of a batch, both heads together."""
    labels = torch.randint(CLASSES, (2, 96, 64), generator=seeded(3))
    labels[:, :5] = 255
    return segment_loss(dict(enumerate(model(make_images(2, (96, 64), dtype=dtype)))), labels)  # type: ignore[arg-type]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    run(model).backward()
    return grads_of(model)


def twin(model: nn.Module) -> nn.Module:
    """Return a plain copy in training mode but for the batch norms, as under a plan."""
    copy = plain(model).train()
    for module in copy.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return copy


@pytest.mark.parametrize("name", PAPERS)
def test_patch_one_is_exact_and_a_region_reaches_both_losses(name):
    model = make_net(name)
    exact = gradients(twin(model))
    assert exact["auxiliary.0.weight"] is not None
    assert_close(gradients(applied(model)), exact)
    coarse = applied(model, gf.Backward(patch=2))
    assert_differ(gradients(coarse), exact, "encoder.stages.0.0.weight")
    assert not find_unexpected(coarse)


@pytest.mark.parametrize("name", PAPERS)
def test_little_is_held_with_an_auxiliary_head(name):
    model = make_net(name, torch.float32)

    def held(model: nn.Module) -> int:
        return count_saved(lambda: run(model, torch.float32), [*model.parameters(), *model.buffers()])

    assert held(twin(model)) > 10 * held(applied(model, gf.Backward(patch=4)))


@pytest.mark.parametrize("name", ["paper-fcn", "unet"])
def test_it_is_for_training_alone_and_is_none_of_the_last_layers(name):
    model = make_model(add_auxiliary(name), classes=4)
    images = torch.randn(2, 3, 64, 64, generator=seeded(0))
    scores, second = model(images)
    assert scores.shape == second.shape == (2, 4, 64, 64)
    with torch.no_grad():
        assert model.eval()(images).shape == (2, 4, 64, 64)
    assert find_last(model, 0) == {"segmentation_head.0"}


def test_weights_with_and_without_it_load_into_each_other(tmp_path):
    whole, bare = (make_model(name, classes=4) for name in ("unet/resnet18/auxiliary", "unet/resnet18"))
    torch.save(whole.state_dict(), tmp_path / "whole.pth")
    torch.save(bare.state_dict(), tmp_path / "bare.pth")
    loaded = make_model("unet", weights=tmp_path / "whole.pth", classes=4)
    again = make_model("unet/resnet18/auxiliary", weights=tmp_path / "bare.pth", classes=4)
    for key in ("encoder.conv1.weight", "decoder.blocks.0.conv1.0.weight", "segmentation_head.0.weight"):
        assert torch.equal(loaded.get_parameter(key), whole.get_parameter(key))
        assert torch.equal(again.get_parameter(key), bare.get_parameter(key))
    same, other = (make_model("unet/resnet18/auxiliary", weights=tmp_path / "whole.pth", classes=n) for n in (4, 5))
    assert torch.equal(same.get_parameter("auxiliary.3.weight"), whole.get_parameter("auxiliary.3.weight"))
    assert other.get_parameter("auxiliary.3.weight").shape[0] == 5


def test_a_papers_encoder_loads_a_classifier_but_for_the_stem(tmp_path):
    classifier = make_model("resnet18", generator=torch.Generator().manual_seed(5))
    torch.save(classifier.state_dict(), tmp_path / "classifier.pth")
    model = make_model("paper-fcn", weights=tmp_path / "classifier.pth", classes=3)
    name = "layer4.1.conv2.weight"
    assert torch.equal(model.get_parameter(f"encoder.{name}"), classifier.get_parameter(name))
    assert model.get_parameter("encoder.conv1.0.weight").shape == (32, 3, 3, 3)


def test_the_loss_weighs_it():
    logits, second = (torch.randn(2, 3, 4, 4, generator=seeded(n)) for n in (0, 1))
    labels = torch.randint(3, (2, 4, 4), generator=seeded(2))
    images = type("Images", (), {"classes": ("a", "b", "c")})
    loss = SEGMENT.make_loss(Settings(task="segment", auxiliary=0.4), images)
    alone = SEGMENT.make_loss(Settings(task="segment"), images)
    torch.testing.assert_close(loss((logits, second), labels), alone(logits, labels) + 0.4 * alone(second, labels))
    with pytest.raises(SettingsError, match=r"--auxiliary 0\.4 is for a model with an auxiliary head"):
        loss(logits, labels)
    with pytest.raises(SettingsError, match=r"--auxiliary 0\.4 is for --task segment"):
        Settings(auxiliary=0.4)


def test_a_run_trains_it(tmp_path):
    scenes = make_scenes(tmp_path / "scenes", train=4, val=2)
    results = train(make_settings(scenes, tmp_path / "run", model="segment_runs:two_headed", auxiliary=0.4, epochs=1))
    assert results.model == "segment_runs:two_headed"
    before, after = two_headed(), load_file(tmp_path / "run" / "best.safetensors")
    assert not torch.allclose(after["auxiliary.bias"], before.get_parameter("auxiliary.bias"), atol=1e-4)


def test_the_name_of_a_model_says_that_it_has_one():
    settings = make_settings(Path(), Path("run"), model="unet", auxiliary=0.4)
    filled = fill_in(settings)
    assert filled.model == fill_in(filled).model == "unet/resnet18/auxiliary"
