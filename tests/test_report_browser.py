"""The report opened in a real browser, without a window."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gradfilter.report.page import make_page
from report_examples import SCRIPT, make_results, make_samples

FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --disable-dev-shm-usage --hide-scrollbars --enable-logging=stderr --v=0"
).split()
SECTIONS = (
    "Learning curves",
    "Saved bytes and time",
    "Sample predictions",
    "Confusion matrix",
    "Classes",
    "Layers",
    "Use the weights",
)


class Browser:
    """Run chromium on a file."""

    def __init__(self, program: str, folder: Path):
        self.program, self.folder, self.messages = program, folder, ""

    def run(self, page: Path, *flags: str) -> str:
        """Return what the browser prints; what it logs is in `messages`."""
        command = [self.program, *FLAGS, f"--user-data-dir={self.folder / 'profile'}", *flags, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        self.messages = done.stderr
        return done.stdout

    def read(self, page: Path, *flags: str) -> str:
        """Return the page as the browser understood it."""
        return self.run(page, "--dump-dom", *flags)

    def look(self, page: Path, width: int, height: int, *flags: str) -> np.ndarray:
        """Return what a reader would see, as [height, width, 3] bytes."""
        target = self.folder / "screenshot.png"
        self.run(page, f"--screenshot={target}", f"--window-size={width},{height}", *flags)
        return np.asarray(Image.open(target).convert("RGB"))

    def complaints(self) -> list[str]:
        """Return what the page made the browser complain about."""
        return [line for line in self.messages.splitlines() if "CONSOLE" in line]


@pytest.fixture
def browser(tmp_path) -> Browser:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed (Debian: apt install chromium)")
    return Browser(program, tmp_path)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    results = make_results()
    results = replace(results, classes=(SCRIPT, "<img src=x onerror=alert(1)>", *results.classes[2:]))
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(make_page(results, make_samples(results)), encoding="utf-8")
    return path


def test_the_browser_shows_every_section_and_runs_nothing(browser, report):
    page = browser.read(report)
    for section in SECTIONS:
        assert f"<h2>{section}</h2>" in page
    assert page.count("<svg") == 7
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert browser.complaints() == []


def test_complaints_would_be_seen(browser, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text("<!DOCTYPE html><title>bad</title><script>console.error('something is wrong')</script>", encoding="utf-8")
    browser.read(page)
    assert "something is wrong" in "".join(browser.complaints())


def test_what_is_smuggled_in_would_not_run(browser, report, tmp_path):
    """The page forbids code and connections itself, should escaping ever fail."""
    page = tmp_path / "smuggled.html"
    smuggled = "<script>document.title = 'it ran'</script><img src='https://example.invalid/x.png'></main>"
    page.write_text(report.read_text(encoding="utf-8").replace("</main>", smuggled), encoding="utf-8")
    assert "<title>it ran</title>" not in browser.read(page)
    assert len(browser.complaints()) == 2
    assert all("Content Security Policy" in complaint for complaint in browser.complaints())


def test_the_page_is_seen_light_and_dark(browser, report):
    light = browser.look(report, 1200, 1600, "--blink-settings=preferredColorScheme=1")
    dark = browser.look(report, 1200, 1600, "--blink-settings=preferredColorScheme=0")
    assert light.shape == dark.shape == (1600, 1200, 3)
    assert light[0, 0].min() > 240
    assert dark[0, 0].max() < 40
    for picture in (light, dark):
        assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 500
        rows = np.ptp(picture.reshape(len(picture), -1), axis=1)
        assert (rows > 60).mean() > 0.5  # something stands in most rows
    # Text and lines of the pictures turn light on dark, the bars stay where they were.
    assert light.mean() > 200
    assert dark.mean() < 80


@pytest.mark.parametrize("width", [390, 768, 1440])
def test_the_page_is_never_wider_than_the_window(browser, report, tmp_path, width):
    """What does not fit, scrolls by itself. A browser window has a least width, a frame has not."""
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"<!DOCTYPE html><iframe src='{report.as_uri()}' style='border: 0; width: {width}px; height: 900px'></iframe>"
        "<script>onload = () => document.title = frames[0].document.documentElement.scrollWidth</script>",
        encoding="utf-8",
    )
    page = browser.read(frame, "--allow-file-access-from-files", "--window-size=1600,1000")
    title = re.search(r"<title>(\d+)</title>", page)
    assert title is not None, browser.messages
    assert int(title[1]) == width
