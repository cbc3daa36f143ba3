"""HTML pages: templates, the style sheet, the signs beside words, and writing a page whole.

Knows how a page looks. Does not know what it says. Needs jinja2, the extra `report`; without it `MissingExtra` says so
in one line.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from colocert.judge import EXPECTED, FAIL, NOT_APPLICABLE, NOT_CLAIMED, NOT_EXERCISED, NOT_RUN, PASS
from colocert.record.manifest import COMPLETE
from colocert.report import palette
from colocert.report.terminal import code_text
from colocert.report.timeline_svg import PATTERNS

SIGNS: Mapping[str, str] = {
    PASS: "✓",
    FAIL: "✗",
    EXPECTED: "✗",
    NOT_EXERCISED: "○",
    NOT_RUN: "○",
    NOT_APPLICABLE: "–",
    NOT_CLAIMED: "–",
    "conformant": "✓",
    "partial": "✓",
    "incomplete": "○",
    "not-conformant": "✗",
    "harness-error": "!",
    "usage-error": "!",
    "red": "✓",
    "green": "✗",
    COMPLETE: "✓",
}
"""A sign beside each word. A control that is red is as it must be."""


class MissingExtra(Exception):
    """jinja2 is not installed."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} needs jinja2: pip install 'colocert[report]'")


def check_extra(what: str) -> None:
    """Raises `MissingExtra` if pages cannot be made here."""
    if importlib.util.find_spec("jinja2") is None:
        raise MissingExtra(what)


def write_page(path: Path, text: str) -> None:
    """Writes a page, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def render(template: str, **values: Any) -> str:
    """One template, with the style sheet and the signs."""
    check_extra("a page")
    return str(_templates().get_template(template).render(signs=SIGNS, **values))


@functools.cache
def _templates() -> Any:
    import jinja2

    folder = resources.files("colocert.report") / "templates"
    found = {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir() if entry.is_file()}
    made = jinja2.Environment(
        loader=jinja2.DictLoader(found),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.globals.update(
        light=palette.variables(palette.LIGHT),
        dark=palette.variables(palette.DARK),
        figures=palette.figure_css(),
        patterns=PATTERNS,
        code_text=code_text,
    )
    made.filters["number"] = lambda n: f"{n:,}"
    made.filters["prose"] = _prose
    return made


def _prose(text: str) -> Any:
    """The catalogue's sentences with their code and emphasis marked up, all else escaped."""
    import markupsafe

    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(text)))
    return markupsafe.Markup(re.sub(r"\*([^*<>]+)\*", r"<em>\1</em>", marked))
