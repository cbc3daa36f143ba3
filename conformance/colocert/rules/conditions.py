"""The catalogue's notation for "binds when": conditions over claims.

Knows the notation. Does not know which claims exist; claims come as plain facts (name to value).

    ""            always            lora               the claim is true
    name=False    equals            name≠value         differs
    name∋member   the set holds it  a; b               both
    name∩a,b      the set holds one of them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SIGNS = ("∋", "∩", "≠", "=")


def holds(condition: str, claims: Mapping[str, Any]) -> bool:
    """Whether the condition holds over these claims. Raises `KeyError` for a claim that is not among them."""
    return all(_holds(part, claims) for part in _parts(condition))


def claims_named(condition: str) -> tuple[str, ...]:
    """The claims that a condition asks for."""
    return tuple(_split(part)[0] for part in _parts(condition))


def _parts(condition: str) -> list[str]:
    return [p.strip() for p in condition.split(";") if p.strip()]


def _split(part: str) -> tuple[str, str, str]:
    for sign in _SIGNS:
        name, found, value = part.partition(sign)
        if found:
            return name, sign, value
    return part, "", ""


def _holds(part: str, claims: Mapping[str, Any]) -> bool:
    name, sign, value = _split(part)
    stated = claims[name]
    if sign == "∋":
        return value in stated
    if sign == "∩":
        return any(member.strip() in stated for member in value.split(","))
    if sign:
        return (str(stated) == value) is (sign == "=")
    return bool(stated)
