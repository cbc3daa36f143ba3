"""The list of expected failures as text: what a run found goes in, what was written by hand stays.

Knows the file's lines. Does not know how anything was judged.

A file is a head and blocks; a block is one `[[expected]]` table with the comment lines right above it. Kept blocks are
kept letter by letter, so reasons, comments and spacing survive; blocks are sorted by rule and code, those whose failure
is gone are left out, new ones are appended in their place. That takes a split at the table headers and no TOML writer:
one that keeps comments attaches those above a header to the table before it, which sorting would then tear apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from colocert.expected import Expected, ExpectedError, parse
from colocert.rules.catalogue import catalogue

HEADER = "[[expected]]"
HEAD = """\
# Failures that are known here, and accepted until their day. `colocert baseline IMPL` keeps this list sorted and takes
# out what no longer fails; reasons, issues, dates and comments are yours.
"""
Key = tuple[str, str]
"""A rule and a code."""


class Block(NamedTuple):
    """One table with the comment above it, as written."""

    entry: Expected
    text: str

    @property
    def key(self) -> Key:
        return self.entry.rule, self.entry.code


class Update(NamedTuple):
    """The new text, and what became of the entries."""

    text: str
    kept: tuple[Expected, ...]
    added: tuple[Expected, ...]
    removed: tuple[Expected, ...]


def update(text: str, found: Iterable[Key], new: Mapping[Key, Expected], within: Iterable[str]) -> Update:
    """The list after a run that found these failures.

    `new` has an entry for each failure, taken where the list has none. `within` are the rules that the run could speak
    of: entries of other rules stay. Raises `ExpectedError` for a text that is no such list.
    """
    head, blocks = split(text)
    failing, spoken = set(found), set(within)
    kept = [b for b in blocks if b.key in failing or b.entry.rule not in spoken]
    removed = [b for b in blocks if b not in kept]
    added = [Block(new[key], block_text(new[key])) for key in failing - {b.key for b in blocks}]
    order = {rule: i for i, rule in enumerate(catalogue())}
    whole = sorted([*kept, *added], key=lambda b: (order.get(b.entry.rule, len(order)), b.key))
    parts = [
        part for part in ((head if blocks or head else HEAD).strip("\n"), *(b.text.strip("\n") for b in whole)) if part
    ]
    return Update(
        "\n\n".join(parts) + "\n",
        tuple(b.entry for b in kept),
        tuple(b.entry for b in sorted(added, key=lambda b: b.key)),
        tuple(b.entry for b in removed),
    )


def split(text: str) -> tuple[str, list[Block]]:
    """The head and the blocks of a list. Raises `ExpectedError` if a table is not a block of lines of its own."""
    lines = text.splitlines(keepends=True)
    starts = [_with_comment(lines, i) for i, line in enumerate(lines) if line.split("#")[0].strip() == HEADER]
    texts = ["".join(lines[start:end]) for start, end in zip(starts, [*starts[1:], len(lines)], strict=False)]
    try:
        whole = parse(text)
        entries = [parse(block) for block in texts]
    except ValueError as error:
        raise ExpectedError(f"the list must hold {HEADER} tables (got {' '.join(str(error).split())})") from error
    if tuple(entry for found in entries for entry in found) != whole or any(len(found) != 1 for found in entries):
        raise ExpectedError(f"each entry must be a table below a line {HEADER} of its own: the list is left as it is")
    return "".join(lines[: starts[0]] if starts else lines), [
        Block(found[0], block) for found, block in zip(entries, texts, strict=True)
    ]


def _with_comment(lines: Sequence[str], at: int) -> int:
    while at and lines[at - 1].lstrip().startswith("#"):
        at -= 1
    return at


def block_text(entry: Expected) -> str:
    """A new block."""
    texts = "".join(
        f"{name} = {json.dumps(getattr(entry, name), ensure_ascii=False)}\n"
        for name in ("rule", "code", "reason", "issue")
    )
    return f"{HEADER}\n{texts}expiry = {entry.expiry.isoformat()}\n"
