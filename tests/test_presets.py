"""The papers' recipes: what each preset sets, and that they are whole."""

import dataclasses
from collections import Counter

import pytest

from gradfilter.cli import main
from gradfilter.errors import SettingsError
from gradfilter.keep import HOSVD, SVD
from gradfilter.models import find_models
from gradfilter.plan import Backward, Plan
from gradfilter.train.presets import Preset, Published, find_presets, get_preset
from gradfilter.train.settings import Settings

PRESETS = find_presets()
SHORT, LONG = "cifar10-mcunet-hosvd0.8", "cifar10-mcunet-last4-hosvd0.8"


def test_every_preset_is_valid_and_is_named_as_it_is_set():
    for name, preset in PRESETS.items():
        if preset.settings.get("task") == "segment":
            continue
        settings = Settings(**preset.settings)
        assert isinstance(settings.make_plan(), Plan)
        assert settings.model in find_models()
        data, _, plan, *method = (name if name != SHORT else LONG).split("-")
        assert (preset.name, settings.data) == (name, data)
        if plan != "pretrain":
            assert settings.plan == plan
            kind = (
                "exact" if settings.exact else "grid" if settings.grid else "patch" if settings.kernel == "lift" else "lumped"
            )
            if settings.keep is None:
                assert method == [f"{kind}{settings.patch or settings.grid or ''}"]
            else:  # the keep alone: gradients are not filtered
                assert (method, settings.patch, kind) == ([settings.keep.replace(":", "")], 1, "patch")


def test_how_many_there_are():
    count = Counter(name.split("-")[0] for name in PRESETS)
    models, methods = 4, 11
    cifar, others = models * 5 * methods, models * 3 * methods
    assert count == {
        "cifar10": cifar + 1,
        "cifar100": cifar,
        **dict.fromkeys(("cub200", "flowers102", "pets"), others),
        "imagenet": others + models,
        "cityscapes": 6,
        "voc12aug": 6 * (2 + 2 * 3),
    }


def test_cifar_recipe():
    settings = Settings(**get_preset("cifar10-mcunet-last4-patch2"))
    assert (settings.model, settings.weights, settings.plan) == ("mcunet-in3", "pretrained", "last4")
    assert (settings.patch, settings.grid, settings.kernel, settings.exact) == (2, None, "lift", False)
    assert (settings.resolution, settings.mean, settings.std) == (224, (0.5,) * 3, (0.5,) * 3)
    assert (settings.optimizer, settings.lr, settings.momentum, settings.clip) == ("sgd", 0.05, 0, 2.0)
    assert (settings.batch, settings.epochs, settings.batch_norm, settings.parts) == (128, 50, "eval", 1)


def test_the_example_of_the_hosvd_paper():
    settings = Settings(**get_preset(SHORT))
    assert get_preset(SHORT) == get_preset(LONG)
    assert settings == dataclasses.replace(Settings(**get_preset("cifar10-mcunet-last4-patch2")), patch=1, keep="hosvd:0.8")
    assert list(settings.make_plan().layers.values()) == [Backward(patch=1, keep=HOSVD(0.8))]
    assert PRESETS[SHORT].published == PRESETS[LONG].published == Published(77.3, "NeurIPS 2024, arXiv 2411.06346")


@pytest.mark.parametrize(("method", "keep"), [("hosvd0.9", HOSVD(0.9)), ("svd0.8", SVD(0.8))])
def test_keeps_by_name(method, keep):
    plan = Settings(**get_preset(f"pets-mobilenetv2-last2-{method}")).make_plan()
    assert list(plan.layers.values()) == [Backward(patch=1, keep=keep)]


def test_imagenet_recipe():
    settings = Settings(**get_preset("imagenet-mobilenetv2-last2-lumped2"))
    assert (settings.optimizer, settings.lr, settings.schedule, settings.momentum) == ("sgd", 0.05, "cosine", 0.9)
    assert (settings.weight_decay, settings.batch, settings.epochs, settings.warmup) == (1e-4, 64, 90, 4)
    assert (settings.clip, settings.batch_norm, settings.kernel, settings.patch) == (2.0, "eval", "lumped", 2)
    assert settings.mean is settings.std is None  # the model's own


def test_fine_tuning_starts_where_pre_training_on_the_other_part_ends():
    before, after = (Settings(**get_preset(f"imagenet-resnet18-{name}")) for name in ("pretrain", "last4-exact"))
    assert (before.part, before.weights, before.plan, before.exact, before.batch_norm) == (0, "random", "all", True, "train")
    assert after.part == 1
    assert after.weights == f"{before.folder}/best.safetensors"
    same = ("data", "model", "parts", "shards", "partition", "resolution", "lr", "epochs", "batch", "seed")
    assert all(getattr(before, key) == getattr(after, key) for key in same)
    assert before.parts == 2
    assert before.shards is not None
    assert before.partition is not None


@pytest.mark.parametrize(
    ("name", "accuracy", "paper"),
    [
        ("cifar10-resnet18-last4-exact", 94.4, "2301.00330"),
        ("cifar100-resnet34-last2-lumped7", 80.4, "2301.00330"),
        ("imagenet-mcunet-all-exact", 68.5, "2301.00330"),
        ("imagenet-resnet34-last4-lumped2", 70.6, "2301.00330"),
        ("cifar10-mcunet-last4-lumped7", 78.4, "2411.06346"),
        ("pets-mobilenetv2-all-exact", 89.8, "2411.06346"),
        ("cub200-mcunet-last2-lumped2", 10.0, "2411.06346"),
        ("flowers102-mcunet-last4-hosvd0.8", 31.5, "2411.06346"),
        ("cifar10-mobilenetv2-last2-hosvd0.8", 85.6, "2411.06346"),
    ],
)
def test_published_accuracy(name, accuracy, paper):
    published = PRESETS[name].published
    assert published is not None
    assert published.accuracy == accuracy
    assert published.paper.endswith(f"arXiv {paper}")


def test_only_exact_backprop_and_the_papers_own_methods_have_published_accuracies():
    methods = Counter(
        name.split("-")[-1]
        for name, preset in PRESETS.items()
        if preset.published and name != SHORT and not name.startswith("voc12aug")
    )
    # CIFAR: 4 rows of 4; ImageNet: 4 of 3 and 2; the other paper: 2 models, 4 sets, of 3 and 2.
    assert methods == {"exact": 16 + 12 + 24, "lumped2": 16 + 8 + 16, "lumped4": 16, "lumped7": 16 + 16, "hosvd0.8": 16}


def test_presets_cannot_be_changed():
    preset = PRESETS["pets-resnet18-all-grid4"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset.name = "other"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        preset.settings["lr"] = 1  # pyright: ignore[reportIndexIssue]
    get_preset(preset.name)["lr"] = 1
    find_presets().clear()
    assert get_preset(preset.name)["lr"] == 0.05
    assert isinstance(find_presets()[preset.name], Preset)


def test_unknown_preset_names_near_ones_and_the_grammar():
    with pytest.raises(SettingsError, match=r"'cifar10-mcunet-last5-patch2'\. Did you mean 'cifar10-mcunet-last4-patch2' or "):
        get_preset("cifar10-mcunet-last5-patch2")
    with pytest.raises(SettingsError, match=r"named 'x'\. Names are .* DATA: cifar10, .*MODEL: mobilenetv2, .*METHOD: exact, "):
        get_preset("x")


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("cifar10-mcunet-last4-patch2", "give --weights FILE"),
        (SHORT, "give --weights FILE"),
        ("pets-mobilenetv2-all-exact", "pretrained"),
        ("imagenet-mcunet-pretrain", "random"),
        ("imagenet-resnet18-last2-lumped2", "of imagenet-resnet18-pretrain"),
        ("voc12aug-fcn-resnet18-last5-lift", "of voc12aug-fcn-resnet18-calibrated"),
    ],
)
def test_the_list_tells_where_weights_come_from(capsys, name, weights):
    assert main(["presets", name]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in row.split("|")[1:3]] == [name, weights]


NETS = (
    "pspnet-resnet18",
    "pspnet-mobilenetv2",
    "fcn-resnet18",
    "deeplabv3-resnet18",
    "deeplabv3-mobilenetv2",
    "upernet-resnet18",
)
COLUMNS = ("calibrated", "all-exact", *(f"last{n}-{method}" for n in (5, 10) for method in ("exact", "lift", "lumped")))


@pytest.mark.parametrize("net", NETS)
def test_segmentation_recipes(net):
    pretrain = Settings(**get_preset(f"cityscapes-{net}-pretrain"))
    assert (pretrain.data, pretrain.plan, pretrain.exact, pretrain.auxiliary) == ("cityscapes", "all", True, 0.4)
    before = pretrain
    for column in COLUMNS:
        settings = Settings(**get_preset(f"voc12aug-{net}-{column}"))
        assert (settings.task, settings.data, settings.model, settings.encoder) == (
            "segment",
            "voc12aug",
            before.model,
            before.encoder,
        )
        assert (settings.optimizer, settings.lr, settings.momentum, settings.weight_decay) == ("sgd", 0.01, 0.9, 5e-4)
        assert (settings.batch, settings.resolution, settings.schedule) == (8, 512, "poly")
        assert abs(settings.epochs * 10582 / settings.batch - 20_000) < 10582 / settings.batch / 2  # the nearest there is
        assert settings.weights == f"{before.folder}/best.safetensors"
        assert settings.auxiliary == (0.4 if column == "all-exact" else 0)
        before = settings if column == "calibrated" else before
        if column.startswith("last"):
            assert settings.exact == column.endswith("exact")
            kernels = {backward.kernel for backward in settings.make_plan().layers.values()}
            assert kernels == {"lumped" if column.endswith("lumped") else "lift"}


def test_patch_sizes_of_segmentation():
    plan = Settings(**get_preset("voc12aug-upernet-resnet18-last5-lumped")).make_plan()
    sizes = {name: backward.patch for name, backward in plan.layers.items()}
    assert sorted(map(str, sizes.values())) == list("224888")  # and the classifier
    assert sizes["segmentation_head"] == sizes["decoder.fuse"] == 8


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("voc12aug-pspnet-resnet18-last5-lumped", (39.34, 51.86)),
        ("voc12aug-upernet-resnet18-all-exact", (64.88, 77.13)),
        ("voc12aug-deeplabv3-mobilenetv2-calibrated", (21.96, 36.15)),
        ("voc12aug-fcn-resnet18-last10-exact", (43.87, 57.58)),
    ],
)
def test_published_mean_iou(name, published, capsys):
    found = PRESETS[name].published
    assert found is not None
    assert (found.accuracy, found.class_accuracy) == published
    assert main(["presets", name]) == 0
    assert "mIoU {:.2f}, mAcc {:.2f}".format(*published) in capsys.readouterr().out
