"""The fenced blocks of the pages, and what a comment before a block says of it.

Knows Markdown fences and the marks. Does not know how a block is run.

A mark is a comment on the line before the fence, which no renderer shows:

    <!-- test: gpu -->           needs a GPU; also: network
    <!-- test: exit 1 -->        the last command ends with this code
    <!-- test: file NAME -->     the block is a file: it is written under that name
    <!-- test: shown WHY -->     nothing to run, and why

Console blocks come in two kinds. Where a line starts with `$ `, those lines are the commands and the others are what
they print; a line `...` stands for any lines, and `…` for anything within a line. Elsewhere every line is a command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+|~~~+) *(?P<language>[\w+-]*)(?P<rest>.*)$")
MARK = re.compile(r"^ *<!-- test: (?P<word>\S+) ?(?P<value>.*?) *-->$")
MARKS = ("gpu", "network", "exit", "file", "shown")
SHELL = ("console", "sh", "bash", "shell")
COMMAND = re.compile(r"^(\$ |(\w+=\S+ )*(make|colocert|pytest|python3?|pip|tox|bash|git) )")
"""How a command starts, in a block whose fence names no language."""


@dataclass(frozen=True)
class Block:
    """One fenced block. `mark` and `value` are of the comment before it, both empty without one."""

    page: str
    line: int
    language: str
    text: str
    mark: str = ""
    value: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def includes(self) -> bool:
        """Whether it shows files of the repository, which are tested where they lie."""
        return "--8<--" in self.text


@dataclass(frozen=True)
class Command:
    """One command, and the lines it prints: None where the page does not show them."""

    text: str
    shown: tuple[str, ...] | None = None


def pages() -> list[Path]:
    """Every page that a user reads."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: Path) -> list[Block]:
    """The blocks of a page, from the top. Raises `ValueError` for a mark that does not exist or a fence left open."""
    return list(_blocks(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8").splitlines()))


def _blocks(page: str, lines: list[str]) -> Iterator[Block]:
    at = 0
    while at < len(lines):
        opened = FENCE.match(lines[at])
        if not opened:
            at += 1
            continue
        ticks, indent = opened["ticks"], len(opened["indent"])
        end = next((n for n in range(at + 1, len(lines)) if lines[n].strip() == ticks), None)
        if end is None:
            raise ValueError(f"{page}:{at + 1}: a fence must be closed by a line {ticks} of its own (got none)")
        body = "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines[at + 1 : end])
        marked = MARK.match(lines[at - 1]) if at else None
        if marked and marked["word"] not in MARKS:
            raise ValueError(f"{page}:{at}: a mark must be one of {', '.join(MARKS)} (got {marked['word']})")
        language = opened["language"] or ("console" if COMMAND.match(body) else "")
        yield Block(page, at + 1, language, body + "\n", *(marked["word"], marked["value"]) if marked else ())
        at = end + 1


def commands(text: str) -> list[Command]:
    """The commands of a console block; a backslash joins lines, and a comment of its own is none."""
    lines = text.splitlines()
    prompted = any(line.startswith("$ ") for line in lines)
    found: list[tuple[str, list[str]]] = []
    going_on = False
    for line in lines:
        if going_on:
            found[-1] = (f"{found[-1][0]}\n{line.removeprefix('> ')}", found[-1][1])
            going_on = line.endswith("\\")
        elif not prompted and (not line.strip() or line.lstrip().startswith("#")):
            continue
        elif not prompted or line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
            going_on = line.endswith("\\")
        elif found:
            found[-1][1].append(line)
    return [Command(command, tuple(shown) if prompted and shown else None) for command, shown in found]


def agrees(shown: tuple[str, ...], printed: str) -> bool:
    """Whether the printed lines are those shown; the space at the ends of lines does not count."""
    pattern = ""
    for line in "\n".join(shown).strip("\n").splitlines():
        if line.strip() == "...":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += ".*".join(re.escape(part) for part in line.rstrip().split("…")) + r"\n"
    told = "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())
    return re.fullmatch(pattern, told) is not None
