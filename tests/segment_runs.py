"""Small runs of `gradfilter train --task segment` to test on."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn

from gradfilter.train import Settings

SMALL: dict[str, Any] = {
    "task": "segment",
    "model": "segment_runs:small",
    "weights": "random",
    "resolution": 16,
    "plan": "all",
    "patch": 2,
    "epochs": 3,
    "batch": 4,
    "lr": 0.1,
    "measure": False,
    "device": "cpu",
}


class Small(nn.Module):
    """An encoder of stride 2 and a decoder, with dropout."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.decoder = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.Dropout(0.1))
        self.segmentation_head = nn.Sequential(nn.Conv2d(8, classes, 1), nn.Upsample(scale_factor=2, mode="bilinear"))

    def forward(self, x: Tensor) -> Tensor:
        return self.segmentation_head(self.decoder(self.encoder(x)))


def small() -> nn.Module:
    return Small()


class TwoHeaded(Small):
    """The same with an auxiliary head, whose scores come second, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Any:
        maps = self.encoder(x)
        scores = self.segmentation_head(self.decoder(maps))
        return (scores, nn.functional.interpolate(self.auxiliary(maps), x.shape[2:])) if self.training else scores


def two_headed() -> nn.Module:
    return TwoHeaded()


def classifier() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def make_scenes(folder: Path, **counts: int) -> Path:
    """Write noisy images of three stripes, a colour for each class, with a border that is ignored."""
    generator = np.random.default_rng(0)
    for part, count in counts.items():
        for number in range(count):
            edges = sorted(generator.integers(3, 17, 2).tolist())
            mask = np.zeros((14, 20), np.uint8)
            mask[:, edges[0] :] = 1
            mask[:, edges[1] :] = 2
            pixels = generator.integers(0, 100, (14, 20, 3))
            pixels += 150 * (mask[..., None] == np.arange(3))
            mask[0] = 255
            for kind, array in (("images", pixels), ("masks", mask)):
                path = folder / part / kind / f"{number:02}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array.astype(np.uint8)).save(path)
    return folder


def make_settings(scenes: Path, out: Path, **changes: Any) -> Settings:
    return Settings(**{**SMALL, "data": str(scenes), "out": str(out), **changes})
