"""A verdict as GitHub workflow commands: one line a broken rule, shown beside the change that broke it.

Knows GitHub's escapes. Does not know when to print.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from colocert.judge import EXPECTED, FAIL, INCOMPLETE, Judged, RuleOutcome
from colocert.report.terminal import code_text
from colocert.rules.catalogue import catalogue


def wanted() -> bool:
    """Whether this is a step of a GitHub workflow."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def commands(judged: Judged) -> Iterator[str]:
    """An error for each rule that fails and binds and each stale entry; a warning for what is known or left out."""
    for row in judged.rules:
        if row.outcome == FAIL and row.level in ("must", judged.selection.level):
            yield command("error", _title(row), f"{_said(row)}. {catalogue()[row.id].sentence}")
        elif row.outcome == EXPECTED:
            yield command("warning", f"{_title(row)}, expected", f"{_said(row)}; known: {row.reason}")
    stale = [entry.text for entry in judged.stale]
    for line in stale:
        yield command("error", "colocert-expected.toml", line)
    if INCOMPLETE in (judged.verdict, judged.aside):
        for reason in judged.reasons:
            if reason not in stale:
                yield command("warning", f"colocert {INCOMPLETE}", reason)


def command(kind: str, title: str, message: str) -> str:
    """One workflow command."""
    return f"::{kind} title={_property(title)}::{_data(message)}"


def _title(row: RuleOutcome) -> str:
    return f"{row.id} {row.code}"


def _said(row: RuleOutcome) -> str:
    text = code_text(catalogue()[row.id], row.code)
    return f"{text} ({row.scenario})" if row.scenario else row.reason or text


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
