"""A certificate as one Markdown page, for the summary of a CI run or a release.

Knows the certificate and the catalogue. Does not know pytest or how a verdict is reached. Texts that come from the
implementation are escaped: a page never gets markup from one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from colocert.judge import EXPECTED, FAIL, NOT_APPLICABLE, NOT_CLAIMED, NOT_EXERCISED, NOT_RUN, PASS
from colocert.report.terminal import code_text
from colocert.rules.catalogue import Rule, catalogue

_ORDER = (PASS, FAIL, EXPECTED, NOT_EXERCISED, NOT_RUN, NOT_APPLICABLE, NOT_CLAIMED)
_MARKUP = re.compile(r"([\\`*_\[\]<>|#])")


def page(made: Mapping[str, Any]) -> str:
    """The page of a certificate."""
    return "\n".join(_page(made)) + "\n"


def problem_page(verdict: str, message: str) -> str:
    """The page of a run that has no certificate."""
    return f"# colocert: {verdict}\n\n{text(message)}\n"


def text(given: object) -> str:
    """A text as it is, on one line, whatever it holds."""
    return _MARKUP.sub(r"\\\1", " ".join(str(given).split()))


def _page(made: Mapping[str, Any]) -> Iterator[str]:
    about = made["implementation"]
    yield from (f"# colocert: {made['verdict']}", "")
    named = text(f"{about['name']} {about['version']}") if about["name"] else "the implementation"
    profiles = ", ".join(f"{name}: {facts['verdict']}" for name, facts in made["profiles"].items())
    rows = [row for row in made["rules"] if catalogue()[row["id"]].profile in made["profiles"]]
    counts = Counter(row["outcome"] for row in rows)
    yield f"**{named}**; {profiles or 'no profile was judged'}."
    if rows:
        yield f"{len(rows)} rules: " + ", ".join(f"{counts[o]} {o}" for o in _ORDER if counts[o]) + "."
    yield from _bullets(made["selection"]["reasons"], "Because")
    for row in (row for row in rows if row["outcome"] in (FAIL, EXPECTED)):
        yield from _broken(row, made)
    if rows:
        yield from _table(rows)
    yield from _coverage(made)
    yield from _elsewhere(made)


def _bullets(lines: list[str], title: str) -> Iterator[str]:
    if lines:
        yield from ("", f"{title}:", "", *(f"- {text(line)}" for line in lines))


def _broken(row: Mapping[str, Any], made: Mapping[str, Any]) -> Iterator[str]:
    rule = catalogue()[row["id"]]
    optional = ", a SHOULD rule" if rule.level == "should" else ""
    yield from ("", f"## {rule.id} {row['outcome']}: {text(row['code'])}{optional}", "")
    said = code_text(rule, row["code"])
    yield f"{said[:1].upper()}{said[1:]}. The rule: {rule.sentence}"
    yield from ("", f"- In a run: {rule.breaks}", f"- Fix: {rule.fix}")
    if row["scenario"]:
        yield f"- First shown by `{row['scenario']}`; its condition occurred {row['exercised']} times"
    yield from _known(rule, made)
    yield f"- Seen: {', '.join(rule.seen)}"


def _known(rule: Rule, made: Mapping[str, Any]) -> Iterator[str]:
    for entry in made["selection"]["expected"]:
        if entry["rule"] == rule.id:
            until = f"until {entry['expiry']}, {text(entry['issue'])}"
            yield f"- Expected: {text(entry['code'])}, {until}: {text(entry['reason'])}"


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from ("", "## Every rule", "", "| rule | level | outcome | exercised | scenario | code |")
    yield "|---|---|---|---:|---|---|"
    for row in rows:
        times = row["exercised"] or ""
        cells = (row["id"], row["level"], row["outcome"], times, row["scenario"], row["code"])
        yield "| " + " | ".join(text(cell) for cell in cells) + " |"


def _coverage(made: Mapping[str, Any]) -> Iterator[str]:
    if read := made["run"].get("read"):
        yield from (
            "",
            "## What was read",
            "",
            f"- {text(read)}",
            *(f"- {text(note)}" for note in made["run"]["notes"]),
        )
        return
    yield from ("", "## What ran", "")
    for name, facts in made["profiles"].items():
        lost = [text(f"{scenario} {status}") for scenario, status in facts["scenarios"].items() if status != "complete"]
        yield f"- {name}: {len(facts['scenarios'])} scenarios" + (f", of which {', '.join(lost)}" if lost else "")
        for explored in facts["explorations"]:
            yield (
                f"- {name}, {text(explored['id'])}: {explored['sequences']} sequences of up to {explored['depth']} "
                f"calls, {explored['faulted']} with a fault, of up to {explored['fault_depth']}"
            )
    controls = Counter(control["outcome"] for control in made["controls"])
    if controls:
        yield "- controls: " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(controls.items()))
    unclaimed = dict.fromkeys(catalogue()[row["id"]].profile for row in made["rules"] if row["outcome"] == NOT_CLAIMED)
    if unclaimed:
        yield f"- no factory for {', '.join(unclaimed)}"


def _elsewhere(made: Mapping[str, Any]) -> Iterator[str]:
    facts = made["environment"]
    yield from ("", f"colocert {facts['colocert']}, Python {facts['python']}, {text(facts['platform'])}; catalogue")
    yield f"`{facts['catalogue'][:19]}`, suite `{facts['suite'][:19]}`."
