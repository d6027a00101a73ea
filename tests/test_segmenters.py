"""Networks that label every pixel, by name, with any encoder and its weights."""

import sys

import pytest
import torch

from gradfilter.cli import main
from gradfilter.errors import GradFilterError, MissingExtraError, ModelNameError, WeightsError
from gradfilter.models import find_info, list_models, make_model
from gradfilter.models.efficientnet_lite import _PACKAGE as LITE
from gradfilter.models.segmenters import DECODERS, SEGMENTERS, find_decoder
from gradfilter.models.torchvision_ops import declare_torchvision_ops

declare_torchvision_ops()
smp = pytest.importorskip("segmentation_models_pytorch")

NAMES = sorted(set(DECODERS) - {"deeplabv3+", "unet++"})


@pytest.mark.parametrize("encoder", ["resnet18", "mobilenet_v2", "efficientnet-lite0"])
@pytest.mark.parametrize("name", NAMES)
def test_every_pixel_gets_a_score_for_each_class(name, encoder):
    model = make_model(name, encoder=encoder, classes=4).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 64, 96)).shape == (1, 4, 64, 96)


@pytest.mark.parametrize("name", ["DeepLabV3+", "deeplab_v3-plus", "deeplabv3plus/resnet18"])
def test_names_and_their_spellings(name):
    assert type(make_model(name, classes=2)).__name__ == "DeepLabV3Plus"


@pytest.mark.parametrize("encoder", ["efficientnet_lite0", "EfficientNet-Lite0"])
def test_our_encoders_and_their_spellings(encoder):
    keys = make_model("unet", encoder="tu-tf_efficientnet_lite0", classes=2).state_dict().keys()
    assert make_model("unet", encoder=encoder, classes=2).state_dict().keys() == keys


def test_they_are_listed(capsys):
    rows = {row.name: row for row in list_models("*deeplab*")}
    assert list(rows)[:3] == ["deeplabv3", "deeplabv3plus", "paper-deeplabv3"]
    assert rows["deeplabv3"].parameters == sum(p.numel() for p in make_model("deeplabv3").parameters())
    assert {find_decoder(name) for name in SEGMENTERS} == set(DECODERS.values())
    assert main(["models"]) == 0
    assert "For --task segment: fcn, deeplabv3, " in capsys.readouterr().out


def test_the_same_seed_gives_the_same_weights_and_the_global_state_does_not_matter():
    before = torch.get_rng_state()
    first, again = (make_model("unet", classes=3).state_dict() for _ in range(2))
    other = make_model("unet", classes=3, generator=torch.Generator().manual_seed(1)).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["segmentation_head.0.weight"], other["segmentation_head.0.weight"])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["fpn", "fcn"])
@pytest.mark.parametrize("encoder", ["resnet18", "mobilenet_v2", "tu-resnet18"])
def test_a_classifiers_file_is_the_encoders(tmp_path, name, encoder):
    classifier = make_model(encoder.removeprefix("tu-"), generator=torch.Generator().manual_seed(5)).state_dict()
    torch.save(classifier, tmp_path / "classifier.pth")
    model = make_model(name, encoder=encoder, weights=tmp_path / "classifier.pth", classes=3)
    loaded = model.get_submodule("encoder").state_dict()
    assert loaded
    assert all(torch.equal(value, classifier[key.removeprefix("model.")]) for key, value in loaded.items())
    weight = model.get_parameter("segmentation_head.0.weight")
    assert 0.005 < float(weight.detach().std()) < 0.015  # a fresh classifier behind trained layers starts small


def test_the_decoder_behind_a_loaded_encoder_is_seeded(tmp_path):
    torch.save(make_model("resnet18").state_dict(), tmp_path / "classifier.pth")
    first, again, other = (
        make_model(
            "fpn", weights=tmp_path / "classifier.pth", classes=3, generator=torch.Generator().manual_seed(seed)
        ).state_dict()
        for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[key], again[key]) for key in first)
    key = "decoder.p5.weight"
    assert not torch.equal(first[key], other[key])


@pytest.mark.parametrize("classes", [None, 3, 7])
def test_a_whole_networks_file(tmp_path, classes):
    whole = make_model("fpn", classes=3, generator=torch.Generator().manual_seed(5)).state_dict()
    torch.save(whole, tmp_path / "whole.pth")
    loaded = make_model("fpn", weights=tmp_path / "whole.pth", classes=classes).state_dict()
    fresh = [key for key in whole if not torch.equal(whole[key], loaded[key])] if classes != 7 else []
    assert fresh == []
    assert len(loaded["segmentation_head.0.bias"]) == (classes or 3)
    assert torch.equal(loaded["decoder.p5.weight"], whole["decoder.p5.weight"])


def test_a_file_of_another_encoder_is_refused(tmp_path):
    torch.save(make_model("mobilenet_v2").state_dict(), tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=r"other\.pth' does not fit model 'fpn/resnet18': 100 missing"):
        make_model("fpn", encoder="resnet18", weights=tmp_path / "other.pth", classes=3)


def test_weights_without_a_classifier_need_classes(tmp_path):
    torch.save(make_model("resnet18").state_dict(), tmp_path / "classifier.pth")
    with pytest.raises(WeightsError, match="Give classes"):
        make_model("fpn", weights=tmp_path / "classifier.pth")


@pytest.mark.skipif(LITE.find_file() is None, reason="the package with weights is not installed")
@pytest.mark.parametrize("name", ["deeplabv3", "upernet"])
def test_efficientnet_lite0_is_pretrained_without_a_network(name):
    model = make_model(name, encoder="efficientnet-lite0", weights="pretrained", classes=11).eval()
    classifier = make_model("efficientnet-lite0", weights="pretrained").eval()
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    encoder = smp.encoders.get_encoder("tu-tf_efficientnet_lite0", weights=None).eval()  # not dilated
    encoder.load_state_dict(model.get_submodule("encoder").state_dict())
    with torch.no_grad():
        expected = classifier.blocks(classifier.bn1(classifier.conv_stem(x)))  # pyright: ignore[reportCallIssue]
        assert torch.allclose(encoder(x)[-1], expected, atol=1e-5)
    info = find_info(name, "efficientnet-lite0")
    assert (info.mean, info.resolution) == (find_info("efficientnet-lite0").mean, 512)


def test_encoders_that_are_not_known():
    with pytest.raises(ModelNameError, match=r"no encoder is named 'resnet19'. Did you mean 'resnet1"):
        make_model("unet", encoder="resnet19")
    with pytest.raises(ModelNameError, match="no encoder is named 'tu-nothing'"):
        make_model("unet", encoder="tu-nothing")
    with pytest.raises(GradFilterError, match="Model 'deeplabv3/densenet121' cannot be built: DenseNet"):
        make_model("deeplabv3", encoder="densenet121")
    with pytest.raises(ModelNameError, match=r"Did you mean 'deeplabv3'.*, which label pixels"):
        make_model("deeplabv4/resnet18")
    with pytest.raises(ModelNameError, match="which has none of its own"):
        make_model("resnet18", encoder="resnet18")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(MissingExtraError, match="pip install segmentation-models-pytorch"):
        make_model("unet")
