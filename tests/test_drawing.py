"""What Hypothesis draws: the same everywhere, unless a seed is given."""

import importlib

from hypothesis import given, settings
from hypothesis import strategies as st

made_at_import = settings(max_examples=500)


def draw(chosen):
    """Return what is drawn for a test under some settings."""
    drawn = []

    @settings(chosen, max_examples=500)
    @given(st.integers(), st.text(max_size=3))
    def note(number, text):
        drawn.append((number, text))

    note()
    return drawn


def test_examples_are_the_same_whatever_is_imported(tmp_path, monkeypatch):
    same = settings.get_profile("same")
    before = draw(same)
    (tmp_path / "many_numbers.py").write_text(f"NUMBERS = {[10**9 + 7919 * i for i in range(500)]}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("many_numbers")
    assert draw(same) == before


def test_the_chosen_profile_holds_for_settings_made_at_import(request):
    chosen = request.config.getoption("--hypothesis-profile") or "same"
    assert settings.get_current_profile_name() == chosen
    assert made_at_import.derandomize == settings().derandomize == (chosen == "same")
