"""The catalogue as pages: the whole specification in Markdown, a rule or the list of rules in the terminal.

Knows layout. Does not know how a rule is judged.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from colocert.rules.catalogue import PROFILES, RUNNER_CODES, Rule, catalogue

GENERATED = (
    "<!-- generated from the catalogue by `colocert spec -o docs/spec.md`; edit the catalogue, not this page -->"
)
_TITLES = {
    "lifecycle": "the lifecycle of one trainer rank",
    "handoff": "hand-off between trainer and engine",
    "adapter-sync": "adapter-only weight sync, dispatch level",
    "sync-payload": "what the sync sends",
    "frozen-offload": "frozen-weight offload",
    "group": "groups of ranks",
    "engine": "the engine",
    "live": "live memory",
}


def spec() -> str:
    """The specification page."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield from (GENERATED, "", "# The rules", "")
    yield "What conforming means. A rule binds where its condition holds over the claims of an implementation; a code"
    yield "is one way to break it, and may have a condition of its own. A rule is judged by effects, never by a private"
    yield "attribute, a log line or a style of calling. A MUST binds always, a SHOULD with `--level=should`."
    yield from ("", "Any rule can also fail with one of these codes:", "")
    yield from (f"- `{code}`: {text}" for code, text in RUNNER_CODES.items())
    for profile in PROFILES:
        rules = [rule for rule in catalogue().values() if rule.profile == profile]
        if rules:
            yield from ("", f"## Profile `{profile}`: {_TITLES[profile]}")
        for rule in rules:
            yield from _section(rule)


def _section(rule: Rule) -> Iterator[str]:
    yield from ("", f"### {rule.id}", "", rule.sentence, "")
    yield f"- **Level:** {rule.level.upper()}"
    yield f"- **Binds:** {_binds(rule.binds)}"
    yield f"- **In a run:** {rule.breaks}"
    yield f"- **Fix:** {rule.fix}"
    yield f"- **Seen:** {', '.join(rule.seen)}"
    yield f"- **Scenarios:** {', '.join(f'`{s}`' for s in rule.scenarios)}{_explored(rule)}"
    yield from ("", "| code | what is wrong | binds |", "|---|---|---|")
    for code in rule.codes:
        yield f"| `{code.name}` | {code.text} | {_binds(code.binds or rule.binds)} |"


def _binds(condition: str) -> str:
    return f"when `{condition}`" if condition else "always"


def _explored(rule: Rule) -> str:
    return "; and every sequence of calls that exploration takes" if rule.explore else ""


# ---- the terminal


def show_rules(console: Console) -> None:
    """The list of rules."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("rule", "level", "binds when", "sentence"):
        table.add_column(column, no_wrap=column in ("rule", "level"))
    for rule in catalogue().values():
        table.add_row(rule.id, rule.level, rule.binds or "always", rule.sentence)
    console.print(table, markup=False)
    console.print(f"{len(catalogue())} rules; `colocert rules ID` shows one in full", markup=False, highlight=False)


def show_rule(console: Console, rule: Rule) -> None:
    """One rule in full: codes, scenarios, reports."""
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(no_wrap=True)
    facts.add_column()
    for label, text in (
        ("level", rule.level),
        ("binds", rule.binds or "always"),
        ("in a run", rule.breaks),
        ("fix", rule.fix),
        ("seen", ", ".join(rule.seen)),
        ("scenarios", ", ".join(rule.scenarios) + (", exploration" if rule.explore else "")),
    ):
        facts.add_row(label, Text(text))
    codes = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("code", "what is wrong", "binds"):
        codes.add_column(column, no_wrap=column == "code")
    for code in rule.codes:
        codes.add_row(code.name, Text(code.text), Text(code.binds or rule.binds or "always"))
    parts: list[RenderableType] = [Text(f"{rule.id}  {rule.profile}", style="bold"), Text(rule.sentence), Text("")]
    console.print(Group(*parts, facts, Text(""), codes))
