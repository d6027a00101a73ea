"""report.html: the whole report in one page that needs nothing else."""

import re
from collections.abc import Sequence
from importlib.resources import files
from string import Template

from gradfilter.report import sections
from gradfilter.report.headline import make_headline
from gradfilter.report.markup import escape
from gradfilter.report.results import MaskSample, Results, Sample
from gradfilter.report.style import DARK, LIGHT
from gradfilter.report.subject import find_subject
from gradfilter.report.text import shorten


def make_page(results: Results, samples: Sequence[Sample] | Sequence[MaskSample]) -> str:
    """Return the report as one HTML page."""
    parts = (
        sections.show_curves(results),
        sections.show_cost(results),
        find_subject(results).show_samples(results, samples),
        sections.show_confusion(results),
        sections.show_classes(results),
        sections.show_layers(results),
        sections.show_loading(results),
        sections.show_plan(results),
        sections.show_skipped(results),
        sections.show_settings(results),
        sections.show_environment(results),
    )
    template = Template(files("gradfilter.report").joinpath("page.html").read_text(encoding="utf-8"))
    name = f"{shorten(results.model, 60)} on {shorten(results.data, 80)}"
    return template.substitute(
        title=escape(f"{name}: gradfilter report"),
        light=_variables(LIGHT),
        dark=_variables(DARK),
        heading=escape(name),
        headline=_headline(results),
        nav=" ".join(map(_link, filter(None, parts))),
        sections="\n".join(filter(None, parts)),
        footer="Made by <code>gradfilter train</code>. This page needs no network and runs no code.",
    )


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


def _headline(results: Results) -> str:
    facts = (
        f'<div class="fact"><dt>{escape(fact.name)}</dt><dd class="value">{escape(fact.value)}</dd>'
        f'<dd class="remark">{escape(fact.remark)}</dd></div>'
        for fact in make_headline(results)
    )
    return f'<dl class="facts">{"".join(facts)}</dl>'


def _link(section: str) -> str:
    found = re.search(r'<section id="([a-z]+)">.*?<h2>(.*?)</h2>', section, re.DOTALL)
    assert found is not None
    return f'<a href="#{found[1]}">{found[2]}</a>'
