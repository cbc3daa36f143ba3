"""What is found does not depend on workers, on the folder, or on how the suite is named."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Pytest = Callable[..., Any]
REPOSITORY = Path(__file__).parents[2]

NARROW = ("--impl=reference", "--profile=lifecycle", "--depth=1")


def lasting(ended: Any) -> str:
    assert ended.certificate is not None, ended.err
    facts: dict[str, Any] = {k: v for k, v in ended.certificate.items() if k != "run"}
    return json.dumps(facts, indent=1)


@pytest.mark.slow
def test_certificates_are_the_same_with_any_number_of_workers_and_in_a_checkout(run: Pytest) -> None:
    alone = run(*NARROW)
    assert lasting(run(*NARROW, "-n", "0")) == lasting(alone)
    assert lasting(run(*NARROW, "-n", "1")) == lasting(alone)
    assert lasting(run(*NARROW, "-n", "2")) == lasting(alone)
    checkout = run(*NARROW, "conformance", "-c", "pyproject.toml", suite=False, cwd=REPOSITORY)
    assert lasting(checkout) == lasting(alone)


def test_evidence_is_judged_again_without_the_implementation(run: Pytest, tmp_path: Path) -> None:
    recorded = run(*NARROW)
    (tmp_path / "evidence").rename(tmp_path / "kept")
    again = run("--impl=trace:kept")
    assert lasting(again) == lasting(recorded)
    assert not (tmp_path / "evidence").exists()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_junit_has_the_facts_of_every_case(
    run: Pytest, impl: Callable[[str], str], tmp_path: Path, workers: str
) -> None:
    report = tmp_path / "junit.xml"
    run(impl("releases_again"), "--profile=lifecycle", "--depth=0", "-n", workers, f"--junit-xml={report}")
    found = {}
    for case in ET.parse(report).iter("testcase"):
        facts = {p.get("name"): p.get("value") for p in case.iter("property")}
        found[case.get("name")] = facts
        assert set(facts) >= {"rule", "code", "outcome", "exercised", "scenario"}, case.get("name")
    assert found["LC-03[lora-early-release]"]["code"] == "released-again"
    assert found["LC-05[lora-cycle]"] == {
        "rule": "LC-05",
        "code": "",
        "outcome": "pass",
        "exercised": found["LC-05[lora-cycle]"]["exercised"],
        "scenario": "lora-cycle",
    }
