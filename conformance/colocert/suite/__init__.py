"""The suite: one test module a profile, presenting what was recorded and judged.

`pytest conformance --impl=…` in a checkout, `pytest --pyargs colocert.suite --impl=…` from a wheel. The items never
import the implementation: they show cases of an evidence folder.
"""

from __future__ import annotations


class Profile:
    """Stands in a test module for the cases of one profile: the plugin puts its items in this place."""

    def __init__(self, name: str) -> None:
        self.name = name
