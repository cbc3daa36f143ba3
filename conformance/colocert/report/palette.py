"""The colours of reports and figures, for a light and a dark ground.

Knows names, values and the style sheet made of them. Does not know pages. A colour only repeats what a word, a sign or
a pattern beside it says: engine memory is hatched, a finding has a flag, an outcome is a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LIGHT: Mapping[str, str] = {
    "bg": "#ffffff",
    "panel": "#f4f6f8",
    "ink": "#1b2430",
    "muted": "#55606d",
    "line": "#cfd6de",
    "link": "#0b5cad",
    "pass": "#176a3a",
    "fail": "#b3001b",
    "warn": "#805300",
    "pass-soft": "#e7f4ec",
    "fail-soft": "#fdecee",
    "warn-soft": "#fcf3df",
    "default": "#3d6098",
    "param_buffer": "#2b7a69",
    "grad_buffer": "#8d4a9e",
    "weights": "#b3591b",
    "kv_cache": "#937316",
    "cuda_graph": "#7c5f4b",
    "other-0": "#5c6875",
    "other-1": "#4a7a2e",
    "other-2": "#356f8c",
}

DARK: Mapping[str, str] = {
    "bg": "#12171d",
    "panel": "#1a2129",
    "ink": "#e6ebf0",
    "muted": "#a5b1be",
    "line": "#39444f",
    "link": "#85bdf7",
    "pass": "#72d097",
    "fail": "#ff8f98",
    "warn": "#ebbd63",
    "pass-soft": "#15301f",
    "fail-soft": "#3d1a1f",
    "warn-soft": "#372b10",
    "default": "#6e9ad6",
    "param_buffer": "#57b39c",
    "grad_buffer": "#c58bd8",
    "weights": "#e08d52",
    "kv_cache": "#d2b04a",
    "cuda_graph": "#b6957d",
    "other-0": "#96a2af",
    "other-1": "#8cbd6d",
    "other-2": "#6fb1d0",
}

TAGS = ("default", "param_buffer", "grad_buffer", "weights", "kv_cache", "cuda_graph")
_KINDS = {"model": "default", "adapters": "param_buffer", "grads": "grad_buffer"}
"""What a role's workers hold, by the colour of the tag under which a trainer would hold it."""

OTHERS = ("other-0", "other-1", "other-2")

_FIGURE: Mapping[str, str] = {
    "g-bg": "fill:{bg}",
    "g-panel": "fill:{panel}",
    "g-ink": "fill:{ink}",
    "g-muted": "fill:{muted}",
    "g-line": "stroke:{line}",
    "g-edge": "stroke:{panel};stroke-width:1",
    "g-dots": "fill:{panel};fill-opacity:.75",
    "g-hatch": "stroke:{panel};stroke-width:2.4;stroke-opacity:.55",
    "g-halo": "fill:{ink};stroke:{panel};stroke-width:3.5px;stroke-linejoin:round;paint-order:stroke",
    "g-call": "fill:{line}",
    "g-failed": "fill:{fail-soft};stroke:{fail};stroke-width:1",
    "g-mark": "stroke:{fail}",
    "g-flag": "fill:{fail}",
    "g-onflag": "fill:{bg}",
    "g-said": "fill:{fail}",
}


def variables(colours: Mapping[str, str]) -> str:
    """The colours as custom properties of a style sheet."""
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def figure_css(colours: Mapping[str, str] | None = None) -> str:
    """The classes of figures: with the colours themselves, or with a page's custom properties."""
    values = colours or {name: f"var(--{name})" for name in LIGHT}
    rules = [f".{name}{{{_filled(style, values)}}}" for name, style in _FIGURE.items()]
    rules += [f".m-{name}{{fill:{values[name]}}}" for name in (*TAGS, *OTHERS)]
    return "".join(rules)


def _filled(style: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        style = style.replace("{" + name + "}", value)
    return style


def others(tags: Iterable[str]) -> list[str]:
    """The tags among these that have no colour of their own, in order."""
    return sorted(set(tags) - set(TAGS) - set(_KINDS))


def tag_class(tag: str, others: list[str]) -> str:
    """The class of a tag's memory; tags of an implementation's own take what is left, in the order of `others`."""
    if tag in TAGS or tag in _KINDS:
        return f"m-{_KINDS.get(tag, tag)}"
    return f"m-{OTHERS[others.index(tag) % len(OTHERS)]}"
