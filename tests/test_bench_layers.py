"""The benchmark of single layers: what it runs and what it counts. No times are checked."""

import json

import pytest
import torch
from torch import nn

from gradfilter.bench import layers, profile
from gradfilter.bench.__main__ import main
from gradfilter.bench.layers import Layer
from gradfilter.ops.constants import make_areas
from gradfilter.ops.pooling import unpool


def test_every_layer_has_its_rows(tmp_path, monkeypatch, capsys):
    small = (Layer(4, (6, 8)), Layer(3, (7, 7)))
    monkeypatch.setattr(layers, "LAYERS", small)
    assert main(["--save", str(tmp_path), "layers", "--batch", "2", "--rounds", "1", "--threads", "1"]) == 0
    assert "Backward of a lone 3×3 convolution" in capsys.readouterr().out
    coarse, lone = (json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("layers", "layers-alone"))
    for rows, methods in ((coarse, layers.METHODS), (lone, layers.LONE)):
        assert [(row["layer"], row["method"]) for row in rows] == [
            (str(layer), method) for layer in small for method in methods
        ]
    fewer = {(row["layer"], row["method"]): row["times fewer products"] for row in coarse}
    assert fewer["4 ch, 6×8", "patch 2"] == "4.00"
    assert fewer["4 ch, 6×8", "patch 4"] == "12.00"  # 2 × 2 patches, two of them partial
    assert fewer["3 ch, 7×7", "patch 2 lumped"] == "27.56"
    assert all((row["time / two products"] == "–") == ("lumped" not in row["method"]) for row in coarse)
    for row in coarse:
        assert float(row["share"]) == pytest.approx(
            float(row["times faster than exact"]) / float(row["times fewer products"]), abs=0.02, rel=0.02
        )


def test_the_two_products_are_those_of_the_lumped_kernel():
    layer = Layer(5, (9, 14))
    x, _, _ = layers.make_data(layer, 2)
    gx, gw = layers.make_products(x, layers.find_geometry(layer, "patch 4 lumped"))()
    assert gx.shape == (2 * 3 * 4, 5)
    assert gw.shape == (5, 5)


@pytest.mark.parametrize("method", layers.LONE)
def test_all_sides_give_the_gradients_they_stand_for(method):
    layer = Layer(5, (9, 14))
    x, gy, conv = layers.make_data(layer, 2)
    geometry = layers.find_geometry(layer, method)
    g, gw = layers.make_coarse(x, gy, conv.weight, geometry)()
    gx = unpool(g / make_areas(layer.size, geometry.out_patch, g), geometry.out_patch, layer.size)
    torch.testing.assert_close(layers.make_lone(x, gy, conv, method)(), (gx, gw))
    want = torch.autograd.grad(conv(leaf := x.requires_grad_()), [leaf, conv.weight], gy)
    for layout in layers.LAYOUTS.values():
        torch.testing.assert_close(layers.make_exact(x, gy, conv.weight, layout)()[:2], want)


def test_the_profile_counts_work_and_adds_up():
    report = profile.measure("cifar-resnet20", "patch 4", 2, 32, rounds=1, threads=1)
    sides = {row[0] for row in report.rows}
    assert sides == {"inference", "step, patch 4"}
    for side in sides:
        times = {row[1]: row[3] for row in report.rows if row[0] == side}
        assert times["all"] == pytest.approx(sum(ms for name, ms in times.items() if name != "all"))
    network = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 1))
    flops, moved = profile.count_work(network, torch.zeros(2, 3, 8, 8))
    assert flops == 2 * 2 * 16 * (4 * 27 + 8 * 4)
    assert moved == 4 * 2 * (3 * 64 + 4 * 16 + 4 * 16 + 8 * 16)
