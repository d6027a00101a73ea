"""Made-up results of training runs, for the tests of the report."""

import math
from dataclasses import replace

import numpy as np
from PIL import Image

from gradfilter.report import Cost, Epoch, Layer, MaskSample, Results, Sample

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SCRIPT = "<script>alert(1)</script>"


def make_results(classes=CIFAR, epochs=12, layers=53, trained=13, seed=0) -> Results:
    """Return plausible results: a loss that falls, classes that are confused with their neighbours."""
    random = np.random.default_rng(seed)
    number = len(classes)
    train_counts = random.integers(60, 480, number)
    val_counts = np.maximum(train_counts // 4, 1)
    confusion = np.stack([random.multinomial(count, confusions(number, row, random)) for row, count in enumerate(val_counts)])
    history = make_history(epochs, np.trace(confusion) / confusion.sum(), random)
    return Results(
        model="mcunet-in3",
        data="photos",
        classes=tuple(classes),
        train_counts=tuple(map(int, train_counts)),
        val_counts=tuple(map(int, val_counts)),
        settings={
            "data": "photos",
            "model": "mcunet-in3",
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
            "resolution": 176,
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "clip": 2.0,
            "resume": None,
        },
        plan="layers:\n  blocks.1[4-7]*:\n    patch: 2\n  classifier: {}\nrest: frozen\nbatch_norm: eval\n",
        history=history,
        best_epoch=max(history, key=lambda epoch: epoch.val_accuracy).epoch,
        confusion=tuple(tuple(map(int, row)) for row in confusion),
        layers=make_layers(layers, trained),
        cost=Cost(32, 176, 1_392_640, 24_903_680, 0.412, 0.052, 0.126, 0.041),
        skipped=("photos/cat/notes.txt: not an image", "photos/dog/broken.jpg: truncated after 1,024 bytes"),
        environment={"gradfilter": "0.1.0", "torch": "2.13.0", "cpu": "2 cores", "seed": "0"},
        weights_file="best.safetensors",
    )


def confusions(number, row, random):
    """Return the chances of each answer for one class: mostly right, some neighbours, a little of everything."""
    chances = np.full(number, 0.02 / number)
    chances[(row + np.array([1, 2, number - 1])) % number] += random.uniform(0, 0.06, 3)
    chances[row] = 0
    chances[row] = 1 - chances.sum()
    return chances


def make_history(epochs, accuracy, random) -> tuple[Epoch, ...]:
    progress = [(epoch + 1) / epochs for epoch in range(epochs)]
    return tuple(
        Epoch(
            epoch=index + 1,
            train_loss=0.25 + 1.6 * math.exp(-3 * t) + random.normal(0, 0.01),
            train_accuracy=min(1.0, accuracy + 0.05 - 0.35 * math.exp(-4 * t)),
            val_loss=0.38 + 1.3 * math.exp(-3.4 * t) + random.normal(0, 0.015),
            val_accuracy=accuracy - 0.3 * math.exp(-4 * t) * (1 - t),
            lr=0.05 * (1 + math.cos(math.pi * t)) / 2,
            images_per_second=210 + random.normal(0, 4),
            seconds=17.0,
        )
        for index, t in enumerate(progress)
    )


def make_layers(number, trained) -> tuple[Layer, ...]:
    """Return layers, the last ones filtered and trained (every fifth only passed through), and an exact Linear."""
    frozen = [Layer(f"blocks.{i // 3}.conv{i % 3}", "frozen", None, False, 1000 + 90 * i) for i in range(number - trained)]
    filtered = [
        Layer(f"blocks.{i // 3}.conv{i % 3}", "patch 2", (2, 2), i % 5 != 4, 1000 + 90 * i)
        for i in range(number - trained, number - 1)
    ]
    head = [Layer("classifier", "exact", None, True, 1610)] if trained else []
    return (*frozen, *filtered, *head)


def make_samples(results, right=8, wrong=8, size=(96, 96), seed=0) -> list[Sample]:
    random = np.random.default_rng(seed)
    number = len(results.classes)
    samples = []
    for index in range(right + wrong):
        label = int(random.integers(number))
        predicted = label if index < right else (label + 1) % number
        pixels = np.kron(random.integers(0, 256, (8, 8, 3)), np.ones((12, 12, 1))).astype(np.uint8)
        name = f"{results.classes[label]}/IMG_{2000 + index}.jpg"
        samples.append(Sample(name, label, predicted, float(random.uniform(0.4, 1)), Image.fromarray(pixels).resize(size)))
    return samples


def make_street(classes=("sky", "road", "car", "never seen"), seed=0) -> Results:
    """Return plausible results of a run that labels pixels."""
    results = make_results(classes, seed=seed)
    confusion = np.asarray(results.confusion) * 1000
    confusion[:, -1] = confusion[-1] = 0
    settings = {**results.settings, "task": "segment"}
    return replace(results, confusion=tuple(map(tuple, confusion.tolist())), settings=settings, held_out=101)


RANKS = ("worst", "lower quartile", "median", "upper quartile", "best")


def make_scenes(results, ranks=RANKS, size=(96, 72)) -> list[MaskSample]:
    """Return images of stripes, of which some are labelled wrongly and some do not count."""
    width, height = size
    labels = np.tile(np.arange(width) * (len(results.classes) - 1) // width, (height, 1)).astype(np.uint8)
    truth = labels.copy()
    truth[: height // 8] = 255
    samples = []
    for number, rank in enumerate(ranks):
        said = np.roll(labels, 4 * (len(ranks) - number), axis=1)
        pixels = np.stack([80 + 20 * labels] * 3, -1).astype(np.uint8)
        pictures = [Image.fromarray(array) for array in (pixels, truth, said)]
        samples.append(MaskSample(f"val/images/{number:04}.png", rank, 0.2 * number, *pictures))
    return samples


def with_losses(results, *losses) -> Results:
    """Return the results with other losses in the last epochs."""
    kept = results.history[: len(results.history) - len(losses)]
    rest = results.history[len(kept) :]
    changed = tuple(replace(epoch, train_loss=loss, val_loss=loss) for epoch, loss in zip(rest, losses, strict=True))
    return replace(results, history=(*kept, *changed))
