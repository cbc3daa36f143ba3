"""Doing what a page says: its commands in a shell, its files written, its workflow steps run.

Knows the kinds of blocks and which commands are left out, each with the reason. Does not know what they are about.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from .blocks import SHELL, Block, Command, agrees, commands
from .shell import Shell


@dataclass(frozen=True)
class Exempt:
    """Commands that are not run, by how they start."""

    pattern: str
    reason: str
    optional: bool = False  # pages that come and go may use it


EXEMPT = (
    Exempt(
        r"make (setup|test|gpu-tests|gpu-mutants|lint|typing|docs|certify|demo|clean)\b",
        "a stage of .ci/run, which this test runs inside of",
    ),
    Exempt(r"(bash )?\.ci/run", "runs this test", optional=True),
    Exempt(r"make fetch-", "the first step of `make certify IMPL=…`, a stage of .ci/run", optional=True),
    Exempt(r"make bench\b", "takes ten minutes; its scripts are Python and are linted with the rest", optional=True),
    Exempt(r"COLOCERT_(MILES|SKYRL|VERL|AREAL)_PATH=", "needs a fetched wheel; tests/adapters run the same adapters"),
    Exempt(r"(python -m )?pip install|\.venv/bin/pre-commit", "needs a package index; tests/newcomer installs"),
    Exempt(r"tox\b", "makes environments of its own; tests/packaging/test_tox.py reads the matrix", optional=True),
    Exempt(r"colocert selftest$", "minutes; the kill matrices are tests/mutants, and the line below it is run"),
    Exempt(r"git clone\b", "needs a network; the tests are in a clone", optional=True),
)
"""Beside these, what is marked `gpu` or `network` is not run."""

STANDS_FOR = (
    (r"\b20\d\d-\d\d-\d\d$", (date.today() + timedelta(days=60)).isoformat()),
    (r"\bOWNER/colocert@REF\b", "./colocert"),
)
"""What a reader replaces, and by what it is replaced here: a last day has to lie ahead."""


class NotAsThePageSays(AssertionError):
    """A command ended otherwise, or printed something else; the block, the command and what came are in the text."""


def exempt(command: str) -> str:
    """Why a command is not run; empty if it is."""
    return next((e.reason for e in EXEMPT if re.match(e.pattern, bare(command))), "")


def bare(command: str) -> str:
    """The command without a comment after it."""
    return re.sub(r"\s+#\s.*$", "", command).strip()


def replaced(command: str) -> str:
    """The command with what a reader has to replace."""
    for pattern, value in STANDS_FOR:
        command = re.sub(pattern, value, command)
    return command


def executed(block: Block) -> bool:
    """Whether a block has commands that are run."""
    kind = block.language in (*SHELL, "yaml", "python")
    return kind and block.mark in ("", "exit") and not block.includes


def to_do(block: Block) -> bool:
    """Whether something of a block is run."""
    return executed(block) and (block.language == "python" or not all(exempt(c.text) for c in commands_of(block)))


def commands_of(block: Block) -> list[Command]:
    """Of a console block its lines, of a workflow the `run:` of each step."""
    if block.language != "yaml":
        return commands(block.text)
    import yaml

    return [Command(step["run"].strip()) for step in steps(yaml.safe_load(block.text)) if "run" in step]


def steps(loaded: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a workflow, or of a part of one."""
    if isinstance(loaded, list):
        yield from (step for step in loaded if isinstance(step, dict) and ("run" in step or "uses" in step))
    elif isinstance(loaded, dict):
        for job in (loaded.get("jobs") or {}).values():
            yield from job["steps"]


def follow(
    shell: Shell, given: Iterable[Block], without: Iterable[str] = (), around: tuple[str, str] = ("", "")
) -> Iterator[str]:
    """Does what the blocks say, from the top; yields each command that was run.

    Commands that match a pattern of `without` cannot run here and are left out. Python blocks that follow one another
    are one program, with what is in `around` before and after it.
    """
    program: list[str] = []
    for block in given:
        if program and block.language != "python":
            yield _run_program(shell, around[0] + "\n".join(program) + around[1])
            program = []
        if block.mark == "file":
            target = shell.folder / block.value
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(replaced(block.text), encoding="utf-8")
        elif executed(block) and block.language == "python":
            program.append(block.text)
        elif executed(block):
            yield from _run_commands(shell, block, tuple(without))
    if program:
        yield _run_program(shell, around[0] + "\n".join(program) + around[1])


def _run_commands(shell: Shell, block: Block, without: tuple[str, ...]) -> Iterator[str]:
    wanted = {0, int(block.value)} if block.mark == "exit" else {0}
    came = set[int]()
    for command in commands_of(block):
        if exempt(command.text) or any(re.search(pattern, command.text) for pattern in without):
            continue
        came.add(_run(shell, block, command, wanted))
        yield bare(command.text)
    if block.mark == "exit" and came and int(block.value) not in came:
        raise NotAsThePageSays(f"{block}: a command must end with {block.value} (got {sorted(came)}): {block.text}")


def _run_program(shell: Shell, program: str) -> str:
    (shell.folder / "program_of_the_page.py").write_text(program, encoding="utf-8")
    done = shell.run("python program_of_the_page.py")
    if done.returncode:
        raise NotAsThePageSays(f"the Python blocks must run through: {done.stderr}\n--- the program\n{program}")
    return "python"


def _run(shell: Shell, block: Block, command: Command, wanted: set[int]) -> int:
    done = shell.run(replaced(command.text))
    printed = f"--- standard output\n{done.stdout[-6000:]}\n--- standard error\n{done.stderr[-3000:]}"
    told = f"{block}: {command.text}\n{printed}"
    if done.returncode not in wanted:
        raise NotAsThePageSays(f"must end with {' or '.join(map(str, sorted(wanted)))} (got {done.returncode}): {told}")
    if command.shown is not None and not agrees(command.shown, done.stdout):
        shown = "\n".join(command.shown)
        raise NotAsThePageSays(f"must print what the page shows: {told}\n--- the page\n{shown}")
    return done.returncode
