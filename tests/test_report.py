"""The report: its records, its page and its picture. tests/test_report_browser.py opens the page in a browser."""

import io
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gradfilter.errors import GradFilterError, MissingExtraError
from gradfilter.models import make_model
from gradfilter.models.extras import import_extra
from gradfilter.report import Layer, ReportError, Results, ResultsError, text, write_report
from gradfilter.report.colours import IGNORED, WRONG, find_colours, paint, paint_differences, to_hex
from gradfilter.report.figures import draw_loss, find_frontier, kind_of
from gradfilter.report.headline import make_headline
from gradfilter.report.loading import make_loading_code
from gradfilter.report.page import make_page
from gradfilter.report.picture import make_picture
from gradfilter.report.samples import choose_samples, to_thumbnail
from gradfilter.report.scenes import draw_scenes
from gradfilter.report.style import LIGHT, drawing, make_figure
from gradfilter.report.svg import to_svg
from gradfilter.scores import find_ious
from report_examples import RANKS, SCRIPT, make_layers, make_results, make_samples, make_scenes, make_street, with_losses

NAN, INF = math.nan, math.inf
RESULTS = make_results()
BIRDS = make_results(
    classes=[f"{i:03d}.Bird_with_a_rather_long_name_{i}" for i in range(200)], epochs=50, layers=300, trained=290
)
ODD = ('$x^2$ "quoted" & <b>', "猫\x00\udcff\ufffe\nnew line", "word " * 40)
SECTIONS = "curves cost samples confusion classes layers loading plan skipped settings environment".split()

COST = RESULTS.cost
assert COST is not None
TWO = make_results(classes=("cat", "dog"), epochs=1)
MANY = make_results(classes=[f"breed {i}" for i in range(37)])
STREET = make_street()
ROOMS = make_street([f"thing {i}" for i in range(150)])
STRANGE = replace(make_results(classes=ODD), data="nested/" * 40)

CASES = {
    "plain": (RESULTS, make_samples(RESULTS)),
    "two classes, one epoch, no cost": (replace(TWO, cost=None), make_samples(TWO)),
    "37 classes, small images, none wrong": (MANY, make_samples(MANY, wrong=0, size=(28, 20))),
    "200 classes, 300 layers": (BIRDS, make_samples(BIRDS, 40, 40)),
    "odd names": (STRANGE, make_samples(STRANGE)),
    "exact time unknown, no samples": (replace(RESULTS, cost=replace(COST, step_ratio=NAN, exact_step_seconds=NAN)), []),
    "some losses not finite, none right": (with_losses(RESULTS, NAN, INF, NAN), make_samples(RESULTS, right=0)),
    "no loss finite, nothing trained": (with_losses(replace(RESULTS, layers=make_layers(5, 0)), *[NAN] * 12), []),
    "losses that explode, all trained": (with_losses(replace(RESULTS, layers=make_layers(20, 20)), 40.0, 4e7), []),
    "pixels": (STREET, make_scenes(STREET)),
    "pixels of 150 classes, one small image": (ROOMS, make_scenes(ROOMS, ["best"], (20, 14))),
    "no layers, nothing held out": (replace(RESULTS, layers=(), val_counts=(0,) * 10, confusion=((0,) * 10,) * 10), []),
}


class Checker(HTMLParser):
    """Collect ids and references of a page; fail where an element is not closed in turn."""

    VOID = ("meta", "img", "br")

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice in <{tag}>: {names}"
        assert not [name for name in names if name.startswith("on")], f"<{tag}> runs code: {names}"
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "action")]
        self.references += [url for _, value in attrs for url in re.findall(r"url\(([^)]*)\)", value or "")]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize("name", CASES)
def test_the_page_is_well_formed_and_needs_nothing_else(name):
    page = make_page(*CASES[name])
    checker = Checker(page)
    assert len(checker.ids) == len(set(checker.ids))
    for reference in checker.references:
        assert reference.startswith("data:image/") or reference[1:] in checker.ids, reference[:80]
    assert "script" not in checker.tags
    assert "@import" not in page
    assert page.encode("utf-8")


@pytest.mark.parametrize("name", CASES)
def test_the_picture_is_one_readable_size(name):
    picture = Image.open(io.BytesIO(make_picture(*CASES[name])))
    assert picture.width == 1560
    assert 800 < picture.height < 1300
    assert len(picture.convert("RGB").getcolors(maxcolors=1 << 24) or []) > 50


def test_the_page_has_all_sections_and_links_to_them():
    checker = Checker(make_page(*CASES["plain"]))
    assert [name for name in checker.ids if name in SECTIONS] == SECTIONS
    assert [f"#{name}" for name in SECTIONS] == [reference for reference in checker.references if reference[1:] in SECTIONS]


def test_sections_without_content_are_left_out():
    results = replace(RESULTS, skipped=(), settings={}, environment={}, plan="", layers=())
    left = {"samples", "skipped", "settings", "environment", "plan", "layers"}
    assert {name for name in Checker(make_page(results, [])).ids if name in SECTIONS} == set(SECTIONS) - left


def test_the_numbers_are_on_the_page():
    words = " ".join(Checker(make_page(*CASES["plain"])).words).replace("\N{NO-BREAK SPACE}", " ")
    for fact in make_headline(RESULTS):
        assert fact.value.replace("\N{NO-BREAK SPACE}", " ") in words
    for number in ("17.9× fewer", "1.39 MB", "24.9 MB", "52.0 ms", "126 ms", "41.0 ms", "11 of 53 layers", "52,380 of 172,950"):
        assert number in words, number
    for name in (*RESULTS.classes, *(layer.name for layer in RESULTS.layers), *RESULTS.skipped, "optimizer.momentum", "2.13.0"):
        assert name in words, name
    assert "rest: frozen" in words


def test_names_cannot_smuggle_html_in():
    results = replace(
        RESULTS,
        model=SCRIPT,
        data=f'">{SCRIPT}',
        classes=tuple(f"{SCRIPT}{i}\"'><img src=x onerror=alert(1)>" for i in range(10)),
        settings={SCRIPT: {SCRIPT: SCRIPT}},
        plan=SCRIPT,
        layers=(Layer(SCRIPT, SCRIPT, (2, 2), True, 1),),
        skipped=(f"</pre>{SCRIPT}",),
        environment={SCRIPT: SCRIPT},
        weights_file=f"{SCRIPT}.safetensors",
    )
    samples = [replace(sample, name=f'"{SCRIPT}') for sample in make_samples(results)]
    checker = Checker(make_page(results, samples))
    assert "script" not in checker.tags
    assert "".join(checker.words).count(SCRIPT) > 30


def test_text_stays_text_in_pictures():
    with drawing():
        figure = make_figure(2, 2)
        figure.text(0.5, 0.5, '<b> $x$ & "y"', color=LIGHT["blue"])
        figure.subplots().bar([0], [1], hatch="//", facecolor="#123456", edgecolor=LIGHT["orange"])
        svg = to_svg(figure, "name", 'a "label"')
    checker = Checker(svg)
    assert '<b> $x$ & "y"' in checker.words
    assert checker.ids
    assert all(name.startswith("name-") for name in checker.ids)
    assert "var(--blue)" in svg
    assert "var(--orange)" in svg
    assert "#123456" in svg
    assert LIGHT["orange"] not in svg
    assert not {"style", "metadata"} & checker.tags


@pytest.mark.parametrize(("classes", "numbers"), [(20, True), (21, False)])
def test_few_classes_have_numbers_in_the_matrix(classes, numbers):
    results = make_results(classes=[f"c{i}" for i in range(classes)])
    matrix = re.search(r'<svg[^>]*aria-label="Confusion matrix".*?</svg>', make_page(results, []), re.DOTALL)
    assert matrix is not None
    words = Checker(matrix[0]).words
    assert (str(results.confusion[3][3]) in words) is numbers
    assert "c3" in words


def test_the_most_confused_pair_comes_first():
    confusion = ((8, 2, 0), (0, 5, 5), (1, 0, 9))
    results = replace(make_results(classes=("ant", "bee", "cat")), confusion=confusion)
    table = make_page(results, []).partition("Most confused pairs")[2].partition("</table>")[0]
    assert re.findall(r'<th scope="row">(\w+)</th><td class="text">(\w+)</td><td class="number">(\d)</td>', table) == [
        ("bee", "cat", "5"),
        ("ant", "bee", "2"),
        ("cat", "ant", "1"),
    ]


def test_classes_come_worst_first_and_those_without_images_last():
    results = replace(make_results(classes=("ant", "bee", "cat")), confusion=((9, 1, 0), (0, 0, 0), (5, 0, 5)))
    table = make_page(results, []).partition('<section id="classes">')[2].partition("</table>")[0]
    assert re.findall(r'<th scope="row">(\w+)</th>', table) == ["cat", "ant", "bee"]
    assert [share.replace("\N{NO-BREAK SPACE}", " ") for share in re.findall(r">([\d.]+\s%|–)<", table)] == [
        "50.0 %",
        "90.0 %",
        "–",
    ]


def test_layers_are_told_apart():
    layers = (
        Layer("a", "frozen", None, False, 1),
        Layer("b", "patch 2", (2, 2), True, 1),
        Layer("c", "exact", None, True, 1),
        Layer("d", "patch 1", (1, 1), True, 1),
        Layer("e", "patch 2", (2, 2), False, 1),
        Layer("f", "patch 1 int8", (1, 1), True, 1, "int8"),
        Layer("g", "patch 2 int8", (2, 2), True, 1, "int8"),
    )
    kinds = ["frozen", "filtered", "exact", "exact", "passed", "kept", "filtered"]
    assert [kind_of(layer).name for layer in layers] == kinds
    assert find_frontier(layers) == 1
    assert find_frontier(layers[:1]) is None


def test_wrong_samples_come_surest_first_and_no_more_than_wanted():
    samples = make_samples(RESULTS, right=5, wrong=6)
    right, wrong = choose_samples(samples, 4)
    assert right == samples[:4]
    assert [sample.confidence for sample in wrong] == sorted((sample.confidence for sample in samples[5:]), reverse=True)[:4]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_thumbnails_of_any_kind_of_image(mode):
    image = Image.new(mode, (400, 300))
    thumbnail = to_thumbnail(image)
    assert (thumbnail.mode, thumbnail.size) == ("RGB", (160, 120))
    assert image.size == (400, 300)


def test_transparent_is_white():
    assert to_thumbnail(Image.new("RGBA", (8, 8), (255, 0, 0, 0))).getpixel((3, 3)) == (255, 255, 255)


def test_results_survive_json():
    results = with_losses(replace(RESULTS, settings={"betas": [0.9, 0.99], "folder": None}), NAN, INF, -INF)
    written = json.dumps(results.to_dict(), allow_nan=False)
    again = Results.from_dict(json.loads(written))
    assert json.dumps(again.to_dict()) == written
    assert again.layers == results.layers
    assert again.cost == results.cost
    assert math.isnan(again.history[-3].val_loss)
    assert [epoch.val_loss for epoch in again.history[-2:]] == [INF, -INF]
    assert again.confusion == results.confusion


def test_settings_of_any_type_become_json():
    settings = {
        "path": Path("photos"),
        "sizes": (1, 2),
        "device": torch.device("cpu"),
        3: {"x"},
        "count": torch.tensor(3).numpy()[()],
    }
    plain = replace(RESULTS, settings=settings).to_dict()["settings"]
    assert plain == {"path": "photos", "sizes": [1, 2], "device": "cpu", "3": ["x"], "count": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_counts": (1,)}, "10 classes but 1 train_counts"),
        ({"val_counts": (1,) * 11}, "10 classes but 11 val_counts"),
        ({"confusion": ((1,) * 10,) * 9}, "10 classes but 9 rows of confusion"),
        ({"confusion": (*((1,) * 10,) * 9, (1,))}, "10 classes but 1 columns of row 9"),
        ({"best_epoch": 13}, "name 13 as the best epoch; their history has the epochs 1 to 12"),
        ({"history": ()}, "history has no epochs"),
    ],
)
def test_results_that_contradict_themselves_are_refused(change, message):
    with pytest.raises(ResultsError, match=re.escape(message)):
        replace(RESULTS, **change)


@pytest.mark.parametrize("data", [{}, {"history": 3}, {**RESULTS.to_dict(), "extra": 1}, {**RESULTS.to_dict(), "layers": [{}]}])
def test_other_json_is_no_results(data):
    with pytest.raises(ResultsError, match="not the results of a gradfilter run"):
        Results.from_dict(data)


def test_a_report_is_two_files_and_the_same_page_each_time(tmp_path):
    write_report(tmp_path, *CASES["plain"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.png"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == make_page(*CASES["plain"])
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_that_cannot_be_written_leaves_the_former_one(tmp_path, monkeypatch):
    for name in ("report.html", "report.png"):
        (tmp_path / name).write_text(f"the former {name}")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ReportError, match=r"cannot write report\.html into the folder .*No space left on device"):
        write_report(tmp_path, *CASES["odd names"])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "report.html": "the former report.html",
        "report.png": "the former report.png",
    }


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(GradFilterError, match=r"nowhere.*No such file"):
        write_report(tmp_path / "nowhere", *CASES["plain"])


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"The report needs the package 'matplotlib'.*pip install matplotlib"):
        write_report(tmp_path, *CASES["plain"])
    assert not list(tmp_path.iterdir())


def test_pictures_leave_no_trace_in_matplotlib(tmp_path):
    """In a fresh process: importing loads no matplotlib; drawing loads no pyplot and changes no setting."""
    code = """
import sys
import gradfilter.report
assert "matplotlib" not in sys.modules
import matplotlib
before = matplotlib.rcParams.copy()  # without asking for a window system, as dict() would
from report_examples import make_results, make_samples
results = make_results()
gradfilter.report.write_report(__import__("pathlib").Path(sys.argv[1]), results, make_samples(results))
assert matplotlib.rcParams.copy() == before
assert "matplotlib.pyplot" not in sys.modules
"""
    root = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (root / "src", root / "tests")))
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("model", ["resnet18", "efficientnet-lite0", "timm/regnetx_002", "fpn", "unet/efficientnet_lite0"])
def test_the_code_on_the_page_loads_the_weights(model, tmp_path, monkeypatch):
    for package in ("torchvision", "timm", "segmentation_models_pytorch"):
        import_extra(package, "This test")
    from safetensors.torch import save_file

    trained = make_model(model, classes=10).eval()
    save_file(trained.state_dict(), tmp_path / RESULTS.weights_file)
    code = make_loading_code(replace(RESULTS, model=model))
    assert "gradfilter" not in code
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    x = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(names["model"](x), trained(x))


@pytest.mark.parametrize(
    ("evaluate", "seen"), [("whole", "their long side 64 pixels"), ("window", "windows of 64 x 64 pixels")]
)
def test_the_code_tells_how_images_with_masks_are_seen(evaluate, seen):
    settings = {"task": "segment", "evaluate": evaluate, "resolution": 64, "mean": [0.5] * 3, "std": [0.5] * 3}
    assert f"# Images: RGB, {seen}, scaled to [0, 1]" in make_loading_code(replace(STREET, settings=settings))


def test_code_for_other_models():
    assert "from nets.mine import make" in make_loading_code(replace(RESULTS, model="nets.mine:make"))
    assert "mcunet-in3 with 10 outputs" in make_loading_code(RESULTS)
    assert "paper-fcn/resnet18 with 10 outputs" in make_loading_code(replace(RESULTS, model="paper-fcn/resnet18"))
    assert "model = ..." in make_loading_code(replace(RESULTS, model="unet/resnet18/auxiliary"))  # has a head more
    injected = make_loading_code(replace(RESULTS, model="x:y\nimport os", weights_file="it's.safetensors"))
    compile(injected, "code", "exec")
    assert "\nimport os" not in injected


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.percent(0.8724), "87.2 %"),
        (text.percent(NAN), "–"),
        (text.byte_size(999), "999 B"),
        (text.byte_size(999_950), "1.00 MB"),
        (text.byte_size(24_903_680), "24.9 MB"),
        (text.byte_size(3.2e9), "3.20 GB"),
        (text.duration(0.0521), "52.1 ms"),
        (text.duration(0.9999), "1.00 s"),
        (text.duration(200), "3 min"),
        (text.duration(7260), "2 h 01 min"),
        (text.duration(NAN), "–"),
        (text.three_digits(0), "0"),
        (text.three_digits(12345), "12,345"),
        (text.three_digits(1e-7), "1e-07"),
        (text.how_many_fewer(10, 100), "10.0× fewer"),
        (text.how_many_fewer(100, 50), "2.00× more"),
        (text.how_many_fewer(0, 50), ""),
        (text.shorten("a b\nc", 9), "a b c"),
        (text.shorten("abcdefghij", 7), "abcd…ij"),
        (text.clean("a\x00\ud800b\n"), "a\ufffd\ufffdb\n"),
    ],
)
def test_numbers_and_names_read_well(shown, expected):
    assert shown.replace("\N{NO-BREAK SPACE}", " ") == expected


def test_the_interval_is_wilsons():
    """From the definition: the ends p solve |share - p| = z sqrt(p (1 - p) / n)."""
    share, count = 0.9, 50
    half = text.half_interval(share, count)
    middle = (share + 1.96**2 / (2 * count)) / (1 + 1.96**2 / count)
    for end in (middle - half, middle + half):
        assert abs(share - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / count), rel=1e-9)
    assert math.isnan(text.half_interval(0.5, 0))


def test_pictures_of_labels_come_with_a_legend_of_what_is_seen():
    page = make_page(*CASES["pixels"])
    words = " ".join(Checker(page).words).replace("\N{NO-BREAK SPACE}", " ")
    assert re.findall(r"<b>([a-z ]+)</b> mIoU", page) == list(RANKS)
    legend = re.search(r'<ul class="legend">(.*?)</ul>', page)
    assert legend is not None
    assert re.findall(r"</i>(.*?)</li>", legend[1]) == ["sky", "road", "car", "does not count", "labelled wrongly"]
    for index in range(3):
        assert page.count(to_hex(find_colours(4)[index])) == 2  # in the legend and in the table of classes
    for text_ in ("mAcc ", "Pixel accuracy is ", "on 101 held-out images", "IoU on the held-out images"):
        assert text_ in words, text_


def test_scores_by_class_are_ious():
    page = make_page(*CASES["pixels"])
    section = page[page.index('<section id="classes">') :]
    ious = find_ious(STREET.confusion)
    order = [*np.argsort(ious[:3]), 3]
    assert re.findall(r'</i>([a-z ]+)</th><td><span class="bar">', section) == [STREET.classes[index] for index in order]
    for index in range(3):
        assert f"{100 * ious[index]:.1f}" in section


def test_pictures_show_labels_and_what_is_wrong():
    truth, said = np.array([[0, 1], [255, 1]], np.uint8), np.array([[0, 0], [1, 1]], np.uint8)
    image = Image.new("RGB", (2, 2), (100, 100, 100))
    assert np.asarray(paint(truth, 2)).tolist() == [
        [find_colours(2)[0].tolist(), find_colours(2)[1].tolist()],
        [list(IGNORED), find_colours(2)[1].tolist()],
    ]
    grey = [178, 178, 178]
    assert np.asarray(paint_differences(image, truth, said, 255)).tolist() == [[grey, list(WRONG)], [list(IGNORED), grey]]


def test_the_picture_shows_what_is_wrong_too():
    part: Any = make_figure(12, 2).subfigures()
    draw_scenes(part, STREET, make_scenes(STREET))
    titles = [axes.get_title(loc="left") for axes in part.axes]
    assert titles[:4] == ["worst, 0\N{NO-BREAK SPACE}%", "truth", "predicted", "wrong"]
    assert len(titles) == 12


def test_colours_of_classes_differ_and_stay():
    colours = find_colours(256)
    assert len({tuple(colour) for colour in colours.tolist()}) == 256
    assert np.array_equal(find_colours(12), colours[:12])
    shown = [*colours[:20].tolist(), list(IGNORED)]
    assert min(np.linalg.norm(np.subtract(a, b)) for i, a in enumerate(shown) for b in shown[:i]) > 40


def test_epochs_without_a_judgement_are_no_numbers_that_went_wrong():
    some = tuple(e if e.epoch % 4 == 0 else replace(e, val_loss=NAN, val_accuracy=NAN) for e in RESULTS.history)
    assert count_hatched(replace(RESULTS, history=some)) == 0
    assert count_hatched(with_losses(replace(RESULTS, history=some), NAN, INF, NAN)) == 3


def count_hatched(results):
    """Count the epochs that the picture of losses marks as not finite."""
    with drawing():
        axes = make_figure(4, 3).subplots()
        draw_loss(axes, results)
        return sum(bool(patch.get_hatch()) for patch in axes.patches)
