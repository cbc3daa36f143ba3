"""Text and shapes stand out from their ground, in the light and in the dark."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from colocert.report.palette import DARK, LIGHT, OTHERS, TAGS, figure_css, others, tag_class

TEXTS = ("ink", "muted", "link", "pass", "fail", "warn")
GROUNDS = ("bg", "panel")
SOFT = {"pass-soft": ("ink", "pass"), "fail-soft": ("ink", "muted", "fail"), "warn-soft": ("ink", "warn", "link")}


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = ((p / 12.92) if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_measure_itself() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_has_a_contrast_of_4_5(colours: Mapping[str, str]) -> None:
    pairs = [(text, ground) for text in TEXTS for ground in GROUNDS]
    pairs += [(text, ground) for ground, texts in SOFT.items() for text in texts]
    pairs += [("bg", "fail"), ("ink", "line")]  # the number on a flag; a call's name on its bar
    weak = {(t, g): round(contrast(colours[t], colours[g]), 2) for t, g in pairs}
    assert {pair: ratio for pair, ratio in weak.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_shapes_have_a_contrast_of_3(colours: Mapping[str, str]) -> None:
    shapes = (*TAGS, *OTHERS, "fail", "ink")
    assert [s for s in shapes if contrast(colours[s], colours["panel"]) < 3] == []


def test_both_grounds_name_the_same_colours() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert "{" not in figure_css(LIGHT).replace("{fill", "").replace("{stroke", "")


def test_tags_of_an_implementations_own_get_what_is_left() -> None:
    assert tag_class("kv_cache", []) == "m-kv_cache"
    assert tag_class("model", []) == tag_class("default", [])
    assert others(["b", "model", "weights", "a", "b"]) == ["a", "b"]
    assert [tag_class(t, ["a", "b", "c", "d"]) for t in "abcd"] == [f"m-other-{i}" for i in (0, 1, 2, 0)]
