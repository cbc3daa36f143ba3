"""The command line: certify, new, rules, spec; the other commands are modules of their own.

Knows arguments and exit codes. Does not know how anything is recorded or judged: `certify` is a pytest run of the
packaged suite, and starts without torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import colocert
from colocert import cli_baseline, cli_diff, cli_judge, cli_plan, cli_selftest, cli_timeline, cli_verify

USAGE = 4


class UsageError(Exception):
    """The command cannot be carried out as it was given; the text is one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    rest: list[str] = []
    if "--" in given:
        at = given.index("--")
        given, rest = given[:at], given[at + 1 :]
    arguments = _parser().parse_args(given)
    arguments.pytest_args = rest
    try:
        code: int = arguments.run(arguments)
    except UsageError as error:
        print(f"colocert: {error}", file=sys.stderr)
        return USAGE
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(USAGE, f"colocert: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="colocert", description="Certify an implementation of the colocated LoRA lifecycle.")
    parser.add_argument("--version", action="version", version=f"colocert {colocert.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    certify = commands.add_parser("certify", help="record and judge an implementation; arguments after -- go to pytest")
    certify.add_argument("impl", metavar="IMPL", help="entry point, module, .py file[:attr], or trace:FOLDER")
    for name, facts in _PASSED_ON.items():
        certify.add_argument(f"--{name}", **facts)
    certify.add_argument("--summary", type=Path, metavar="FILE", help="write a Markdown page for CI here")
    certify.add_argument("-n", dest="workers", default="0", metavar="N", help="runner children and pytest workers")
    certify.set_defaults(run=_certify)

    new = commands.add_parser("new", help="write an adapter that runs as it is and claims nothing")
    new.add_argument("package", metavar="PKG", help="a package's name, dots allowed; written below this folder")
    new.set_defaults(run=_new)

    rules = commands.add_parser("rules", help="list the rules, or show one in full")
    rules.add_argument("id", nargs="?", metavar="ID")
    rules.set_defaults(run=_rules)

    spec = commands.add_parser("spec", help="write the specification page from the catalogue")
    spec.add_argument("-o", dest="output", type=Path, metavar="FILE", help="default: standard output")
    spec.set_defaults(run=_spec)
    for module in (cli_judge, cli_verify, cli_baseline, cli_diff, cli_timeline, cli_selftest, cli_plan):
        module.register(commands)
    return parser


_PASSED_ON: dict[str, dict[str, Any]] = {
    "profile": {"metavar": "A,B", "help": "profiles to certify (default: all that IMPL has)"},
    "level": {"choices": ("must", "should"), "help": "whether SHOULD rules bind too"},
    "depth": {"metavar": "N", "type": int, "help": "explore every sequence of up to N calls"},
    "faults": {"choices": ("none", "single"), "help": "explore with every single fault too"},
    "fault-depth": {"metavar": "N", "type": int, "help": "length of sequences with a fault"},
    "certificate": {"metavar": "FILE", "help": "write the certificate here, and the badge beside it"},
    "report": {"metavar": "FILE", "help": "write the verdict as one HTML page here"},
    "evidence": {"metavar": "DIR", "help": "record into this folder"},
    "expect": {"metavar": "FILE", "help": "the list of expected failures (default: colocert-expected.toml here)"},
    "snapshot-dir": {"metavar": "DIR", "help": "compare transcripts with those in DIR"},
    "junit-xml": {"metavar": "FILE", "help": "write pytest's JUnit report here"},
}
"""Options of pytest and of the plugin that `certify` takes and hands over as they are."""

_PYTEST_ENVIRONMENT = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")


def _certify(arguments: argparse.Namespace) -> int:
    import pytest

    from colocert.suite.outputs import Outputs

    here = Path.cwd()
    config = Path(colocert.__file__).parent / "suite" / "certify.ini"
    words = ["-c", str(config), f"--rootdir={here}", "--noconftest", "-p", "no:cacheprovider", "-rN"]
    words += ["-n", arguments.workers]
    for plugin in ("xdist.plugin", "syrupy", "colocert.plugin"):
        words += ["-p", plugin]
    words += ["--pyargs", "colocert.suite", f"--impl={arguments.impl}"]
    for name in _PASSED_ON:
        value = getattr(arguments, name.replace("-", "_"))
        if value is not None:
            words.append(f"--{name}={value}")
    theirs = {name: os.environ.pop(name) for name in _PYTEST_ENVIRONMENT if name in os.environ}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    outputs = Outputs(here / arguments.summary if arguments.summary else None)
    try:
        return int(pytest.main([*words, "-q", *arguments.pytest_args], plugins=[outputs]))
    finally:
        del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
        os.environ.update(theirs)


def _new(arguments: argparse.Namespace) -> int:
    package = str(arguments.package)
    parts = package.split(".")
    if not all(part.isidentifier() for part in parts):
        raise UsageError(f"PKG must be a package's name, such as mypkg or mypkg.rl (got {package!r})")
    target = Path(*parts) / "colocert_impl.py"
    if target.exists():
        raise UsageError(f"{target} exists and is not overwritten: remove it, or name another package")
    target.parent.mkdir(parents=True, exist_ok=True)
    for i in range(len(parts)):
        init = Path(*parts[: i + 1]) / "__init__.py"
        if not init.exists():
            init.touch()
    template = (Path(colocert.__file__).parent / "new_impl.py.txt").read_text(encoding="utf-8")
    target.write_text(Template(template).substitute(package=package), encoding="utf-8")
    print(f"wrote {target}; next:")
    print(f"  colocert certify {package} --profile lifecycle")
    print(f"  pytest --pyargs colocert.suite --impl={package} --profile=lifecycle")
    return 0


def _rules(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from colocert.report.spec import show_rule, show_rules
    from colocert.rules.catalogue import catalogue

    console = Console(highlight=False)
    if arguments.id is None:
        show_rules(console)
        return 0
    rule = catalogue().get(arguments.id.upper())
    if rule is None:
        raise UsageError(f"ID must be a rule of the catalogue (got {arguments.id}): `colocert rules` lists them")
    show_rule(console, rule)
    return 0


def _spec(arguments: argparse.Namespace) -> int:
    from colocert.report.spec import spec

    if arguments.output is None:
        sys.stdout.write(spec())
    else:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(spec(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
