"""The catalogue's "binds when" notation."""

from __future__ import annotations

import pytest

from colocert.rules.catalogue import catalogue
from colocert.rules.conditions import claims_named, holds
from colocert_reference.colocert_impl import CLAIMS

FACTS = {"lora": True, "multi_lora": False, "peak_device": ["cpu"], "adapter_source": "host"}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("", True),
        ("lora", True),
        ("multi_lora", False),
        ("multi_lora=False", True),
        ("lora=False", False),
        ("peak_device∋cpu", True),
        ("peak_device∋gpu", False),
        ("peak_device∩gpu,cpu", True),
        ("peak_device∩gpu, tpu", False),
        ("adapter_source≠reloaded", True),
        ("adapter_source≠host", False),
        ("lora; peak_device∋cpu", True),
        ("lora; multi_lora", False),
    ],
)
def test_a_condition_holds_or_not(condition: str, expected: bool) -> None:
    assert holds(condition, FACTS) is expected


def test_an_unknown_claim_is_an_error() -> None:
    with pytest.raises(KeyError):
        holds("sparkle", FACTS)


def test_every_condition_of_the_catalogue_names_claims_that_exist() -> None:
    for rule in catalogue().values():
        for condition in (rule.binds, *(code.binds for code in rule.codes)):
            assert set(claims_named(condition)) <= set(CLAIMS.facts()), (rule.id, condition)
