"""The gradient-filtering paper's accounting: its formulas, and its tables."""

import json

import pytest
import torch
from torch import nn

import gradfilter as gf
from gradfilter.accounting import count_as_paper
from gradfilter.bench import paper, paper_segment
from gradfilter.bench.__main__ import main
from gradfilter.bench.paper import CIFAR, IMAGENET, NETS, UNITS, count, read
from gradfilter.bench.report import Report
from gradfilter.errors import InputError
from gradfilter.models import make_model
from gradfilter.models.torchvision_ops import declare_torchvision_ops
from gradfilter.plan import resolve
from helpers_safety import make_net


@pytest.fixture(scope="module")
def nets():
    return {name: make() for name, make in NETS.items()}


def half_digit(text):
    """Half of what the last digit of a printed number stands for."""
    number = text.rstrip("GMKB")
    return 0.5 * 10.0 ** -len(number.partition(".")[2]) * UNITS[text[len(number) :]]


def name_row(row):
    return f"{row.net}-{row.layers or 'all'}-{row.patch or 'exact'}"


RESNET18 = [row for row in (*IMAGENET, *CIFAR) if row.net.startswith("ResNet18")]


@pytest.mark.parametrize("row", RESNET18, ids=name_row)
def test_flops_of_resnet18_are_the_papers(row, nets):
    away = abs(count(nets[row.net], row).flops - read(row.flops))
    assert max(0.0, away - half_digit(row.flops)) < 0.003 * read(row.flops)


@pytest.mark.parametrize("row", [row for row in IMAGENET if row.layers], ids=name_row)
def test_memory_is_the_papers_to_the_byte(row, nets):
    assert abs(count(nets[row.net], row).input_bytes - read(row.memory)) <= half_digit(row.memory)


@pytest.mark.parametrize("row", [row for row in IMAGENET if row.net in ("MobileNetV2", "MCUNet") and row.layers], ids=name_row)
def test_depthwise_networks_are_close_where_few_layers_are_trained(row, nets):
    assert count(nets[row.net], row).flops == pytest.approx(read(row.flops), rel=0.004)


@pytest.mark.parametrize(("patch", "flops"), [(1, None), (2, 3 * 2), (4, 2 * 1)])
def test_one_convolution_by_hand(patch, flops):
    """3 → 4 channels, 3×3, on 5×4 pixels, behind another: gx, gw, the mean of gy."""
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 4, 3, padding=1, groups=1))
    found = count_as_paper(gf.apply_(net, gf.Plan.all(gf.Backward(patch=patch))), torch.empty(7, 2, 5, 4))
    exact = 2 * 3 * 4 * 20 * 9 + 3 * 4 * (9 * 20 + 20 - 1)
    layer = found.layers["1"]
    assert (layer.exact_flops, layer.exact_input_bytes) == (exact, 4 * 3 * 20)
    if flops is None:
        assert (layer.flops, layer.input_bytes, layer.patch) == (exact, 4 * 3 * 20, None)
    else:
        assert layer.flops == flops * 3 * (2 * 4 - 1) + 8 * 12 + 12 * (2 * flops - 1) + 4 * 20
        assert (layer.input_bytes, layer.patch) == (4 * 3 * flops, (patch, patch))
    assert found.layers["0"].exact_flops == 2 * 3 * (20 + 20 - 1)  # no gx


def test_a_frozen_layer_between_trained_ones_only_passes_the_gradient_on():
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1), nn.Flatten(), nn.Linear(5 * 6, 7))
    plan = gf.Plan({"0": gf.Backward(patch=1), "4": gf.Backward()})
    layers = count_as_paper(gf.apply_(net, plan), torch.empty(1, 2, 3, 2)).layers
    assert [row.flops for row in layers.values()] == [6 * 11, 2 * 12 * 6, 2 * 20 * 6, 3 * 30 * 7]
    assert [row.input_bytes for row in layers.values()] == [4 * 2 * 6, 0, 0, 0]


def test_layers_sum_up_and_the_table_has_them():
    model = gf.apply_(make_net(), gf.Plan.last(2, gf.Backward(patch=2)))
    found = count_as_paper(model, torch.empty(2, 3, 19, 15, device="meta"))
    assert found.total.flops == sum(layer.flops for layer in found.layers.values())
    assert list(found.layers) == ["block2.conv1", "block2.conv2", "fc"]
    rows = found.to_table().to_dict()["rows"]
    assert rows[-1]["layer"] == "total"
    assert rows[-1]["exact backward flops"] == found.total.exact_flops
    assert "arXiv 2301.00330" in str(found)


def test_a_model_without_a_plan_is_refused():
    with pytest.raises(InputError, match=r"gradfilter\.apply_\(model, plan\)"):
        count_as_paper(make_net(), torch.empty(1, 3, 9, 9))


def test_the_benchmark_says_how_far_off_it_is(tmp_path, capsys, monkeypatch):
    row = next(row for row in CIFAR if row.patch == 7)
    monkeypatch.setattr(paper, "IMAGENET", ())
    monkeypatch.setattr(paper, "CIFAR", (row,))
    monkeypatch.setattr(paper, "NETS", {row.net: NETS[row.net]})
    monkeypatch.setattr(paper_segment, "measure", lambda: Report("none", "", "", ("a",)))
    assert main(["--save", str(tmp_path), "paper"]) == 0
    (found,) = json.loads((tmp_path / "paper-accounting.json").read_text())["rows"]
    assert (found["FLOPs published"], found["FLOPs ours"], found["FLOPs difference %"]) == ("0.30M", "0.30M", "+0.86")
    assert "| ResNet18, CIFAR-10 |" in capsys.readouterr().out


DIFFER = {
    "PSPNet-R18": [(10, True)],
    "FCN-R18": [(10, False), (10, True)],
    "DeepLabV3-R18": [(0, False), (10, False), (10, True)],
    "UPerNet-R18": [(0, False), (5, False), (10, False), (5, True), (10, True)],
}
"""What of the table of segmentation does not come out: layers, and whether filtered. The benchmark says why."""


@pytest.mark.parametrize("name", paper_segment.NETS)
def test_flops_of_segmentation_are_the_papers(name):
    declare_torchvision_ops()
    pytest.importorskip("segmentation_models_pytorch")
    net = paper_segment.NETS[name]
    model = make_model(net[0], encoder=net[1])
    for column, published in paper_segment.find_columns(name):
        ours = paper_segment.count(model, net, column) / paper_segment.GIGA
        digit = 10.0 ** -len(published.partition(".")[2])
        is_close = abs(ours - float(published)) < max(0.0015 * float(published), digit)
        assert is_close == (tuple(column)[:2] not in DIFFER.get(name, [])), (column, published, ours)


@pytest.mark.parametrize("name", paper_segment.NETS)
@pytest.mark.parametrize("layers", [5, 10])
def test_so_many_layers_are_trained(name, layers):
    declare_torchvision_ops()
    pytest.importorskip("segmentation_models_pytorch")
    net = paper_segment.NETS[name]
    found = resolve(paper_segment.make_plan(net, paper_segment.Column(layers, True)), make_model(net[0], encoder=net[1]))
    trained = len(found.convs) - 1  # the classifier does not count
    assert trained == (9 if (name, layers) == ("PSPNet-R18", 10) else layers)
