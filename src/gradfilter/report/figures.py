"""The pictures of a report. Each function draws one thing on the axes it is given, so that page and picture show the same."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradfilter.report.results import Cost, Epoch, Layer, Results
from gradfilter.report.style import LIGHT, MARKS
from gradfilter.report.subject import find_subject
from gradfilter.report.text import byte_size, duration, how_many_fewer, ratio, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RUN, EXACT, INFERENCE = MARKS[:3]
FEW_CLASSES = 20
"""Up to so many classes a confusion matrix shows numbers."""

_SMALLEST_LETTER = 5.0  # points
_RIGHT, _WRONG = (38, 118, 200), (222, 104, 24)  # seen on light and on dark pages alike: what varies is how opaque they are


def draw_loss(axes: "Axes", results: Results) -> None:
    """Draw the loss of each epoch."""
    train = [epoch.train_loss for epoch in results.history]
    held_out = [epoch.val_loss for epoch in results.history]
    _draw_curves(axes, results, train, held_out)
    finite = [loss for loss in (*train, *held_out) if math.isfinite(loss)]
    if finite and min(finite) > 0 and max(finite) > 50 * min(finite):
        axes.set_yscale("log")
    axes.set_title("Loss")


def draw_accuracy(axes: "Axes", results: Results) -> None:
    """Draw the accuracy of each epoch, in percent."""
    train = [100 * epoch.train_accuracy for epoch in results.history]
    held_out = [100 * epoch.val_accuracy for epoch in results.history]
    _draw_curves(axes, results, train, held_out)
    axes.set_title("Accuracy (%)" if results.metric == "accuracy" else f"{results.metric} (%)")


def draw_learning_rate(axes: "Axes", results: Results) -> None:
    """Draw the learning rate of each epoch."""
    epochs = [epoch.epoch for epoch in results.history]
    rates = _finite([epoch.lr for epoch in results.history])
    axes.plot(epochs, rates, color=LIGHT["muted"], marker=_marker(results.history, "."), clip_on=False)
    axes.set_ylim(bottom=0)
    _set_epochs(axes, epochs)
    axes.set_title("Learning rate")


def draw_confusion(axes: "Axes", results: Results, side: float) -> None:
    """Draw the confusion matrix: the colour is the share of the true class, the number (for few classes) is the subject's.

    Args:
        axes: Where to draw.
        results: What to draw.
        side: About how large the matrix will be, in inches: what would not be readable is left out.
    """
    counts = np.asarray(results.confusion, dtype=int)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(_shade(shares), interpolation="none", aspect="equal")
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color(LIGHT["line"])
    cell = 72 * side / len(counts)
    if len(counts) <= FEW_CLASSES:
        write = find_subject(results).write_cell
        texts = {place: write(int(counts[place]), shares[place]) if counts[place] else "" for place in np.ndindex(counts.shape)}
        _draw_texts(axes, texts, shares, size=min(9, 1.4 * cell / max(1, *map(len, texts.values()))))
    if cell > _SMALLEST_LETTER:
        _name_classes(axes, results.classes, size=min(8.5, 0.9 * cell))
    else:
        _use_whole_numbers(axes)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")


def draw_layers(axes: "Axes", layers: Sequence[Layer]) -> None:
    """Draw every layer as a bar, input on the left: the higher, the coarser its gradient. A line marks the frontier."""
    top, few = 1.0, len(layers) <= 100
    for kind in KINDS:
        rows = [(index, layer) for index, layer in enumerate(layers, 1) if kind_of(layer) == kind]
        if rows:
            heights = [_height(layer) for _, layer in rows]
            top = max(top, *heights)
            places = [index for index, _ in rows]
            axes.bar(
                places, heights, width=0.86 if few else 1.0, label=kind.label, **kind.bar, linewidth=kind.edge if few else 0.3
            )
    frontier = find_frontier(layers)
    if frontier is not None:
        axes.axvline(frontier + 0.5, color=LIGHT["ink"], linestyle="--", linewidth=1.2)
        on_right = frontier > 0.6 * len(layers)
        axes.annotate(
            f"frontier: {shorten(layers[frontier].name, 36)}",
            (frontier + 0.5, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if on_right else 4, -3),
            textcoords="offset points",
            ha="right" if on_right else "left",
            va="top",
            fontsize=8.5,
        )
    sizes = range(math.ceil(top))
    axes.set_yticks([size + 1 for size in sizes], [str(2**size) for size in sizes])
    axes.set_ylim(0, 1.3 * top + 0.4)
    axes.set_xlim(0.2, max(len(layers), 1) + 0.8)
    _use_whole_numbers(axes)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("layer, from input to output")
    axes.set_title("Patch size of each layer's gradient")
    if layers:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=4, handlelength=1.4, columnspacing=1.4)


def draw_saved_bytes(axes: "Axes", cost: Cost) -> None:
    """Draw the bytes held for one step beside exact."""
    _draw_bars(axes, {"this run": cost.saved_bytes, "exact": cost.exact_saved_bytes}, byte_size)
    fewer = how_many_fewer(cost.saved_bytes, cost.exact_saved_bytes)
    axes.set_title(f"Saved bytes of a step: {fewer}" if fewer else "Saved bytes of a step")


def draw_step_time(axes: "Axes", cost: Cost) -> None:
    """Draw the time of one step beside exact, and beside a forward pass alone."""
    times = {"this run": cost.step_seconds, "exact": cost.exact_step_seconds, "inference": cost.inference_seconds}
    _draw_bars(axes, times, duration)
    axes.set_title(f"Time of a step: {ratio(cost.step_ratio)} exact" if math.isfinite(cost.step_ratio) else "Time of a step")


class Kind(NamedTuple):
    """Name what is done with a layer, and how it is drawn."""

    name: str
    label: str
    bar: dict[str, Any]
    edge: float


KINDS = (
    Kind("frozen", "frozen", {"facecolor": LIGHT["line"], "edgecolor": "none"}, 0),
    Kind("filtered", "trained, filtered gradient", {"facecolor": LIGHT["blue"], "edgecolor": LIGHT["blue"]}, 0),
    Kind("kept", "trained, input compressed", {"facecolor": "none", "edgecolor": LIGHT["green"], "hatch": MARKS[2].hatch}, 1),
    Kind("exact", "trained, exact gradient", {"facecolor": "none", "edgecolor": LIGHT["orange"], "hatch": EXACT.hatch}, 1),
    Kind("passed", "not trained, gradient passes", {"facecolor": "none", "edgecolor": LIGHT["blue"]}, 1),
)


def kind_of(layer: Layer) -> Kind:
    """Return what was done with a layer."""
    frozen, filtered, kept, exact, passed = KINDS
    if not layer.trained:
        return frozen if layer.backward == "frozen" else passed
    if layer.patch is None or tuple(layer.patch) == (1, 1):
        return exact if layer.keep is None else kept
    return filtered


def find_frontier(layers: Sequence[Layer]) -> int | None:
    """Return the index of the earliest trained layer, None where none is trained."""
    return next((index for index, layer in enumerate(layers) if layer.trained), None)


def _height(layer: Layer) -> float:
    """Return the height of a layer's bar: one step for each doubling of the patch size."""
    if layer.backward == "frozen":
        return 0.3
    height, width = layer.patch or (1, 1)
    return 1 + math.log2(max(height * width, 1)) / 2


def _draw_curves(axes: "Axes", results: Results, train: list[float], held_out: list[float]) -> None:
    epochs = [epoch.epoch for epoch in results.history]
    known = (
        dict(zip(epochs, train, strict=True)),
        {e.epoch: v for e, v in zip(results.history, held_out, strict=True) if e.is_judged},
    )
    for name, points, mark in zip(("training", "held out"), known, (EXACT, RUN), strict=True):
        seen = any(map(math.isfinite, points.values()))
        style = {**mark.curve(), "marker": _marker(results.history, mark.marker)}
        style["markerfacecolor"] = "none" if mark is EXACT else LIGHT[mark.colour]
        axes.plot(list(points), _finite(list(points.values())), label=name if seen else f"{name}: no number", **style)
    best = held_out[epochs.index(results.best_epoch)]
    axes.axvline(results.best_epoch, color=LIGHT["muted"], linestyle=":", linewidth=1.2)
    if math.isfinite(best):
        star = {"marker": "*", "markersize": 11, "linestyle": "none", "color": LIGHT["blue"]}
        axes.plot([results.best_epoch], [best], label="best", clip_on=False, zorder=3, **star)
    _mark_missing(axes, [points for points in known if any(map(math.isfinite, points.values()))])
    _set_epochs(axes, epochs)
    axes.legend(loc="best")


def _mark_missing(axes: "Axes", curves: Sequence[Mapping[int, float]]) -> None:
    """Hatch the epochs where a value is NaN or infinite."""
    missing = {epoch for points in curves for epoch, value in points.items() if not math.isfinite(value)}
    for index, epoch in enumerate(sorted(missing)):
        label = "not a finite number" if index == 0 else None
        axes.axvspan(epoch - 0.5, epoch + 0.5, facecolor="none", edgecolor=LIGHT["line"], hatch="xx", linewidth=0, label=label)


def _marker(history: Sequence[Epoch], marker: str) -> str:
    """Return the marker, or none where there are so many epochs that markers would hide the line."""
    return marker if len(history) <= 30 else ""


def _finite(values: Sequence[float]) -> list[float]:
    """Return the values with NaN, which is not drawn, for infinity, which cannot be."""
    return [value if math.isfinite(value) else math.nan for value in values]


def _set_epochs(axes: "Axes", epochs: Sequence[int]) -> None:
    axes.set_xlim(min(epochs) - 0.5, max(epochs) + 0.5)
    if len(epochs) == 1:
        axes.set_xticks(epochs)
    else:
        _use_whole_numbers(axes)
    axes.set_xlabel("epoch")


def _use_whole_numbers(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def _shade(shares: np.ndarray) -> np.ndarray:
    """Return RGBA pixels: right answers blue, wrong ones orange, as opaque as the root of their share: small ones show."""
    pixels = np.zeros((*shares.shape, 4), dtype=np.uint8)
    pixels[..., :3] = _WRONG
    pixels[np.arange(len(shares)), np.arange(len(shares)), :3] = _RIGHT
    pixels[..., 3] = np.where(shares > 0, 30 + 225 * np.sqrt(shares), 0)
    return pixels


def _draw_texts(axes: "Axes", texts: Mapping[tuple[int, ...], str], shares: np.ndarray, size: float) -> None:
    for (row, column), text in texts.items():
        if text:
            colour = "#ffffff" if shares[row, column] > 0.4 else LIGHT["ink"]
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=size)


def _name_classes(axes: "Axes", classes: Sequence[str], size: float) -> None:
    names = [shorten(name, 16) for name in classes]
    few = len(names) <= 6
    axes.set_xticks(range(len(names)), names, rotation=30 if few else 90, fontsize=size)
    if few:
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), names, fontsize=size)


def _draw_bars(axes: "Axes", values: dict[str, float], text: Callable[[float], str]) -> None:
    numbers = [value if math.isfinite(value) else 0.0 for value in values.values()]
    for row, (value, mark) in enumerate(zip(numbers, MARKS, strict=False)):
        axes.barh(row, value, height=0.62, **mark.bar())
    largest = max(numbers) or 1.0
    for row, value in enumerate(values.values()):
        axes.text(numbers[row] + 0.02 * largest, row, text(value) if math.isfinite(value) else "not measured", va="center")
    axes.set_xlim(0, 1.3 * largest)
    axes.set_ylim(len(numbers) - 0.5, -0.5)
    axes.set_yticks(range(len(numbers)), list(values))
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
