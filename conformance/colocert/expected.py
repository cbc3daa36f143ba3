"""Known failures: the list that an implementer keeps in `colocert-expected.toml`, and what a run says about it.

Knows the file's shape and when an entry is wrong by itself. Does not know what was recorded: the judge compares.

    [[expected]]
    rule = "LC-03"
    code = "released-again"
    reason = "the early release forgets what it released"
    issue = "https://example.org/issues/12"
    expiry = 2027-03-31

An entry excuses one code of one rule until the end of its day. There is no other way to leave a rule out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from colocert.rules.catalogue import RUNNER_CODES, catalogue

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "colocert-expected.toml"
_KEYS = "rule, code, reason, issue, expiry"


class ExpectedError(ValueError):
    """The list is wrong by itself: the file, the entry, what must hold and what was found."""


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One known failure. `expiry` is the last day on which it is accepted."""

    rule: str
    code: str
    reason: str
    issue: str
    expiry: date


def read_expected(path: Path, today: date | None = None) -> tuple[Expected, ...]:
    """The entries of a list. Raises `ExpectedError` with one line.

    An unknown rule, a code that the rule does not have, an empty text, a date that has passed, a rule and code listed
    twice, and any other key are errors.
    """
    try:
        entries = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExpectedError(f"{path} must be a readable list of known failures (got {error.strerror})") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ExpectedError(f"{path} must be TOML ({' '.join(str(error).split())})") from error
    except msgspec.ValidationError as error:
        raise ExpectedError(f"{path} must hold [[expected]] tables of {_KEYS} (got {error})") from error
    for number, entry in enumerate(entries, 1):
        wrong = _wrong(entry, today or date.today())
        if wrong:
            raise ExpectedError(f"{path}, entry {number} ({entry.rule} {entry.code}): {wrong}")
    twice = [f"{rule} {code}" for (rule, code), n in Counter((e.rule, e.code) for e in entries).items() if n > 1]
    if twice:
        raise ExpectedError(f"{path} must name each rule and code once (got {', '.join(twice)} twice)")
    return entries


def parse(text: str) -> tuple[Expected, ...]:
    """The entries of a text, whatever they say.

    Raises `tomllib.TOMLDecodeError` or `msgspec.ValidationError` for another shape.
    """

    class Listed(msgspec.Struct, forbid_unknown_fields=True):
        expected: tuple[Expected, ...] = ()

    return msgspec.convert(tomllib.loads(text), Listed).expected


def _wrong(entry: Expected, today: date) -> str:
    rule = catalogue().get(entry.rule)
    if rule is None:
        return "rule must be one of the catalogue (`colocert rules` lists them)"
    codes = [*(code.name for code in rule.codes), *RUNNER_CODES]
    if entry.code not in codes:
        return f"code must be one of {', '.join(codes)}"
    empty = [name for name in ("reason", "issue") if not getattr(entry, name).strip()]
    if empty:
        return f"{empty[0]} must say something"
    if entry.expiry < today:
        return f"expiry must not have passed (got {entry.expiry}, today is {today}): mend it, or agree on another date"
    return ""


def listed(entries: Iterable[Expected], rule: str) -> frozenset[str]:
    """The codes with which this rule is expected to fail."""
    return frozenset(entry.code for entry in entries if entry.rule == rule)


def facts(entries: Iterable[Expected]) -> list[dict[str, Any]]:
    """The entries as plain data, for a certificate."""
    made: list[dict[str, Any]] = msgspec.to_builtins(list(entries))
    return made
