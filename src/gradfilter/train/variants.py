"""The variants of a comparison: what `--try` says, read strictly, as changes of the settings that all have in common."""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gradfilter.errors import PlanError, SettingsError
from gradfilter.keep import parse_keep
from gradfilter.plan import is_plan_file
from gradfilter.train.settings import BatchNorm, Kernel, Settings, TrunkType, make_word

KEYS = ("plan", "patch", "grid", "kernel", "keep", "exact", "batch_norm", "trunk")
"""The settings that choose a plan: what a variant may change."""
WORDS: dict[str, tuple[str, ...]] = {"kernel": get_args(Kernel), "batch_norm": get_args(BatchNorm), "exact": ("true", "false")}
WORDS["trunk"] = get_args(TrunkType)
HEAD = {"classify": "plan=head", "segment": "plan=head patch=1"}
"""The classifier alone, by task; where it is a convolution, a grid of 4 would be far too coarse for it."""
USUAL = ("plan=head", "exact", "grid=4", "patch=2", "patch=4")
"""The variants where none are given."""
CACHE = "cache"


@dataclass(frozen=True)
class Variant:
    """One of several plans.

    Attributes:
        text: As the user wrote it.
        name: For tables and pictures.
        folder: Name of the folder of its run.
        settings: Those that all variants have in common, with what this one changes.
    """

    text: str
    name: str
    folder: str
    settings: Settings


def make_variants(settings: Settings, texts: Sequence[str]) -> list[Variant]:
    """Return the variants that the texts describe.

    Raises:
        SettingsError: A text is none; two are the same; there are fewer than two.
    """
    variants: list[Variant] = []
    wrong: list[str] = []
    for text in texts:
        try:
            variant = make_variant(settings, text)
            check_new(variant, variants)
            variants.append(variant)
        except (SettingsError, PlanError) as error:
            wrong.append(f"--try {shlex.quote(text)}: {error}")
    if wrong:
        raise SettingsError(" ".join(wrong))
    if len(variants) < 2:
        raise SettingsError(f"a comparison takes two variants or more, not {len(variants)}. Give --try again, or not at all.")
    return variants


def find_usual(settings: Settings) -> tuple[str, ...]:
    """Return the variants to take where none are given: the usual ones, and what the settings themselves choose."""
    chosen = [f"{key}={value}" for key in ("patch", "grid") if (value := getattr(settings, key)) is not None]
    chosen += [shlex.quote(settings.plan)] if is_plan_file(settings.plan) and not chosen else []
    return tuple(dict.fromkeys([HEAD[settings.task], *USUAL[1:], *chosen]))


def make_variant(settings: Settings, text: str) -> Variant:
    """Return one variant, whose plan can be read."""
    changes = parse_changes(text)
    changed = dataclasses.replace(settings, **find_replaced(changes), **changes)
    changed.make_plan()
    words = {key: describe(key, changes[key]) for key in KEYS if key in changes}
    folder = "-".join(make_word(changes[key]) if key == "keep" else re.sub(r"[^\w-]+", "", word) for key, word in words.items())
    return Variant(text, ", ".join(words.values()), folder or "plan", changed)


def parse_changes(text: str) -> dict[str, Any]:
    """Return the settings that a text changes: words `key=value`, "exact", or a file with a plan."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SettingsError(f"a quotation mark is left open ({error}).") from error
    if not words:
        raise SettingsError(f"it changes nothing. Give one or more of {', '.join(f'{key}=…' for key in KEYS)}.")
    changes: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            key, value = ("exact", "true") if word == "exact" else ("plan", word) if is_plan_file(word) else refuse_word(word)
        if key in changes:
            raise SettingsError(f"{key} is said twice. Give one.")
        changes[key] = parse_value(key, value)
    idle = [key for key in ("patch", "grid", "kernel", "keep", "trunk") if key in changes and changes.get("exact")]
    if idle:
        raise SettingsError(f"exact backprop has no {' and no '.join(idle)}. Give one or the other.")
    return changes


def refuse_word(word: str) -> Any:
    """Raise the error for a word that is no `key=value`."""
    hint = f"plan={word}" if word == "all" or word.startswith(("head", "last")) else "patch=2"
    raise SettingsError(f"{word!r} is neither 'exact', nor a plan file that ends in .yaml, nor key=value, as in '{hint}'.")


def parse_value(key: str, value: str) -> Any:
    """Return the value of a setting from its text."""
    if key not in KEYS:
        near = difflib.get_close_matches(key, KEYS, 1, 0.6)
        hint = f" Did you mean {near[0]}?" if near else ""
        if key in {field.name for field in dataclasses.fields(Settings)}:
            hint = f" All variants have the same {key}: give --{key}."
        raise SettingsError(f"{key!r} does not choose a plan; {', '.join(KEYS)} do.{hint}")
    if key in WORDS:
        if value not in WORDS[key]:
            raise SettingsError(f"{key} is {value!r}, but must be one of {', '.join(WORDS[key])}.")
        return value == "true" if key == "exact" else value
    if key in ("plan", "keep"):
        return value
    if not (value.isascii() and value.isdigit()):
        raise SettingsError(f"{key} is {value!r}, but must be a whole number.")
    return int(value)


def find_replaced(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the common settings that do not reach a variant: its own choices, or a plan file's, replace them."""
    replaced: dict[str, Any] = {}
    if changes.keys() & {"patch", "grid", "kernel", "keep"}:
        replaced = {"exact": False}
    if changes.keys() & {"patch", "grid"}:
        replaced |= {"exact": False, "patch": None, "grid": None}
    if changes.get("exact"):
        replaced |= {"patch": None, "grid": None, "keep": None, "trunk": None}
    if is_plan_file(changes.get("plan", "")):
        replaced |= {"exact": False, "patch": None, "grid": None, "kernel": None, "keep": None}
    return {key: value for key, value in replaced.items() if key not in changes}


def check_new(variant: Variant, others: Sequence[Variant]) -> None:
    """Refuse a variant that is there already, or whose folder is taken."""
    for other in others:
        if spell_out(other.settings) == spell_out(variant.settings):
            raise SettingsError(f"it is the same as --try {shlex.quote(other.text)}. Leave one out.")
        if other.folder.lower() == variant.folder.lower():  # some file systems do not tell them apart
            raise SettingsError(
                f"its folder '{variant.folder}' is that of --try {shlex.quote(other.text)}. Give the plan file another name."
            )
    if variant.folder.lower() == CACHE:
        raise SettingsError(f"the folder '{CACHE}' is that of the trunk cache. Give the plan file another name.")


def spell_out(settings: Settings) -> Settings:
    """Return settings with the keep as it is always written."""
    return dataclasses.replace(settings, keep=settings.keep and str(parse_keep(settings.keep)))


def describe(key: str, value: Any) -> str:
    """Return a change in a word or two."""
    if key == "plan":
        return Path(value).stem if is_plan_file(value) else value
    if key == "exact":
        return "exact" if value else "filtered"
    return value if key in ("kernel", "keep") else f"{key.replace('_', ' ')} {value}"
