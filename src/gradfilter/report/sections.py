"""The sections of the page, one function each; a function returns "" where there is nothing to show."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gradfilter.report import figures, markup
from gradfilter.report.loading import make_loading_code
from gradfilter.report.results import Layer, Results
from gradfilter.report.style import drawing, make_figure
from gradfilter.report.subject import find_subject
from gradfilter.report.svg import to_svg
from gradfilter.report.text import NOTHING, byte_size, duration, percent, three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PAIRS = 12


def show_curves(results: Results) -> str:
    """Show loss, accuracy and learning rate over the epochs."""
    size, word = (3.7, 2.6), {"accuracy": "Accuracy"}.get(results.metric, results.metric)
    curves = (
        _draw("loss", "Loss of each epoch, training and held out", size, lambda axes: figures.draw_loss(axes, results)),
        _draw(
            "accuracy",
            f"{word} of each epoch, training and held out",
            size,
            lambda axes: figures.draw_accuracy(axes, results),
        ),
        _draw("rate", "Learning rate of each epoch", size, lambda axes: figures.draw_learning_rate(axes, results)),
    )
    seconds = sum(epoch.seconds for epoch in results.history if math.isfinite(epoch.seconds))
    speeds = [epoch.images_per_second for epoch in results.history if math.isfinite(epoch.images_per_second)]
    speed = f", {three_digits(sum(speeds) / len(speeds))} images per second" if speeds else ""
    number = len(results.history)
    remark = f"{number} epoch{'s' * (number != 1)} in {duration(seconds)}{speed}. The star marks the epoch of the best weights."
    return markup.make_section(
        "curves", "Learning curves", _row(map(markup.make_figure_element, curves)), f"<p class='muted'>{remark}</p>"
    )


def show_cost(results: Results) -> str:
    """Show measured saved bytes and time beside exact."""
    cost = results.cost
    if cost is None:
        return markup.make_section("cost", "Saved bytes and time", "<p class='muted'>They were not measured in this run.</p>")
    bars = (
        _draw("bytes", "Saved bytes of a step beside exact", (4.6, 1.25), lambda axes: figures.draw_saved_bytes(axes, cost)),
        _draw(
            "time", "Time of a step beside exact and inference", (4.6, 1.65), lambda axes: figures.draw_step_time(axes, cost)
        ),
    )
    text = (
        f"<p>Measured with batches of {cost.batch:,} images of {cost.resolution} × {cost.resolution} pixels. Exact means "
        "back-propagation at pixel resolution through the same trained layers, by torch itself. Saved bytes are what autograd "
        f"holds from the forward to the backward pass: {byte_size(cost.saved_bytes / max(cost.batch, 1))} per image here, "
        f"{byte_size(cost.exact_saved_bytes / max(cost.batch, 1))} exact.</p>"
    )
    return markup.make_section("cost", "Saved bytes and time", text, _row(map(markup.make_figure_element, bars)))


def show_confusion(results: Results) -> str:
    """Show the confusion matrix and the pairs of classes that were confused most."""
    number = len(results.classes)
    few = number <= figures.FEW_CLASSES
    side = min(max(3.2, 1.6 + 0.46 * number), 6.8)
    svg = _draw("matrix", "Confusion matrix", (side, side), lambda axes: figures.draw_confusion(axes, results, 0.75 * side))
    caption = (
        f"Rows are true classes, columns predicted ones; {find_subject(results).cells}. "
        if few
        else f"Rows are true classes, columns predicted ones, both in the order of the {number} classes. "
    )
    caption += "The stronger the colour, the larger the share of the true class: right is blue (the diagonal), wrong orange."
    figure = markup.make_figure_element(svg, caption, "numbers" if few else "")
    return markup.make_section(
        "confusion", "Confusion matrix", f'<div class="split">{figure}<div>{_confused_pairs(results)}</div></div>'
    )


def show_classes(results: Results) -> str:
    """Show score and number of images of each class, the worst first."""
    subject, largest = find_subject(results), max((*results.train_counts, 1))
    scores = [float(score) for score in next(iter(results.scores.by_class.values()))(results.confusion)]
    order = sorted(range(len(results.classes)), key=lambda index: (_nan_last(scores[index]), results.classes[index]))
    rows = [
        markup.make_row(
            results.classes[index],
            markup.bar_cell(scores[index]),
            markup.number_cell(percent(scores[index])),
            *(markup.number_cell(write(results, index)) for write in subject.columns.values()),
            markup.bar_cell(results.train_counts[index] / largest, "count"),
            markup.number_cell(f"{results.train_counts[index]:,}"),
            mark=subject.make_mark(results, index),
        )
        for index in order
    ]
    columns = ("class", subject.score, "#", *(f"#{name}" for name in subject.columns), "training images", "#")
    return markup.make_section("classes", "Classes", _balance(results, scores), markup.make_table(columns, rows))


def show_layers(results: Results) -> str:
    """Show what was trained at which patch size, and where the frontier is."""
    layers = results.layers
    if not layers:
        return ""
    trained = [layer for layer in layers if layer.trained]
    parameters, all_parameters = (sum(layer.parameters for layer in group) for group in (trained, layers))
    share = percent(parameters / all_parameters) if all_parameters else NOTHING
    text = (
        f"<p>{len(trained):,} of {len(layers):,} layers were trained: {parameters:,} of {all_parameters:,} parameters "
        f"({share}). A patch size is in pixels of the layer's own map. {_explain_keeps(layers)}"
        "Layers before the frontier, the earliest trained layer, run as in inference and keep nothing.</p>"
    )
    svg = _draw("layers", "Patch size of each layer", (11, 2.6), lambda axes: figures.draw_layers(axes, layers))
    frontier = figures.find_frontier(layers)
    before = len(layers) if frontier is None else frontier
    frozen = "" if before == 0 else _frozen_layers(layers[:before])
    return markup.make_section(
        "layers",
        "Layers",
        text,
        markup.make_figure_element(svg, kind="wide"),
        frozen,
        _layer_table(layers[before:]),
    )


def show_loading(results: Results) -> str:
    """Show how to use the weights without gradfilter."""
    file = f"<code>{markup.escape(results.weights_file)}</code>"
    text = f"<p>{file} lies beside this page. It holds plain tensors: loading it does not need gradfilter.</p>"
    return markup.make_section("loading", "Use the weights", text, markup.make_code(make_loading_code(results)))


def show_plan(results: Results) -> str:
    """Show the plan."""
    return markup.make_section("plan", "Plan", markup.make_code(results.plan)) if results.plan.strip() else ""


def show_skipped(results: Results) -> str:
    """Show the files that were not read."""
    number = len(results.skipped)
    if not number:
        return ""
    title = f"Skipped files ({number:,})"
    return markup.make_folded_section(
        "skipped", title, markup.make_code("\n".join(" ".join(line.split()) for line in results.skipped))
    )


def show_settings(results: Results) -> str:
    """Show the settings."""
    pairs = list(_flatten(results.to_dict()["settings"]))
    return markup.make_folded_section("settings", "Settings", markup.make_key_table(pairs)) if pairs else ""


def show_environment(results: Results) -> str:
    """Show where the run took place."""
    table = markup.make_key_table(results.environment.items())
    return markup.make_folded_section("environment", "Environment", table) if results.environment else ""


def _draw(name: str, label: str, size: tuple[float, float], draw: "Callable[[Axes], None]") -> str:
    """Return as SVG what `draw` draws."""
    with drawing():
        figure = make_figure(*size)
        draw(figure.subplots())
        return to_svg(figure, name, label)


def _row(figures_: Iterator[str]) -> str:
    return f'<div class="row">{"".join(figures_)}</div>'


def _confused_pairs(results: Results) -> str:
    pairs = sorted(
        (
            (-count, truth, said)
            for truth, row in enumerate(results.confusion)
            for said, count in enumerate(row)
            if count and truth != said
        ),
    )
    if not pairs:
        return "<p class='muted'>No two classes were confused.</p>"
    rows = [
        markup.make_row(
            results.classes[truth],
            markup.text_cell(results.classes[said]),
            markup.number_cell(f"{-count:,}"),
            markup.number_cell(percent(-count / sum(results.confusion[truth]))),
        )
        for count, truth, said in pairs[:_PAIRS]
    ]
    columns = ("true class", "taken for", f"#{results.scores.unit}s", "#of the class")
    return "<h3>Most confused pairs</h3>" + markup.make_table(columns, rows)


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _balance(results: Results, scores: Sequence[float]) -> str:
    subject, known = find_subject(results), [score for score in scores if not math.isnan(score)]
    mean = f"The mean over the classes is {percent(sum(known) / len(known))}. " if known else ""
    rest = list(results.scores.overall.items())[2:]  # the others are in the headline
    mean += "".join(f"{name.capitalize()} is {percent(rate(results.confusion))}. " for name, rate in rest)
    counts = f"Images per class: {subject.counts(results.train_counts)} for training, "
    counts += f"{subject.counts(results.val_counts)} held out."
    score = subject.score[0].upper() + subject.score[1:]
    return f"<p>{score} on the held-out images, worst class first. {mean}{counts}</p>"


def _frozen_layers(layers: Sequence[Layer]) -> str:
    number, parameters = len(layers), sum(layer.parameters for layer in layers)
    words = f"{number:,} layer{'s' * (number != 1)} before the frontier, {parameters:,} parameters, frozen"
    return f"<details><summary>{words}</summary>{_layer_table(layers, frontier=False)}</details>"


def _explain_keeps(layers: Sequence[Layer]) -> str:
    keeps = list(dict.fromkeys(layer.keep for layer in layers if layer.keep is not None))
    return f"Inputs of layers were held until backward as {markup.escape(', '.join(keeps))}. " if keeps else ""


def _layer_table(layers: Sequence[Layer], frontier: bool = True) -> str:
    if not layers:
        return "<p class='muted'>No layer was trained.</p>"
    mark = '<tr class="frontier"><td colspan="4">frontier: trained from here on</td></tr>' if frontier else ""
    rows = [
        markup.make_row(
            layer.name,
            f'<td><span class="tag {figures.kind_of(layer).name}">{markup.escape(layer.backward)}</span></td>',
            markup.number_cell(NOTHING if layer.patch is None else f"{layer.patch[0]} × {layer.patch[1]}"),
            markup.number_cell(f"{layer.parameters:,}"),
        )
        for layer in layers
    ]
    return markup.make_table(("layer", "gradient", "#patch", "#parameters"), [mark, *rows])


def _flatten(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
