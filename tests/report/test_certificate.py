"""A certificate accounts for every rule, fits its published schema, and keeps volatile facts apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from colocert.judge import HARNESS_ERROR, Evidence, Judged, Selection, judge
from colocert.record.manifest import ControlRecord, Options, Problem, Record
from colocert.report.certificate import certificate, encode, schema, write_certificate
from colocert.rules.catalogue import catalogue

KEYS = "schema verdict implementation environment claims profiles rules controls selection run"


@pytest.fixture
def validator() -> Any:
    published = schema()
    jsonschema.Draft202012Validator.check_schema(published)
    return jsonschema.Draft202012Validator(published)


def controlled(evidence: Evidence, *controls: ControlRecord) -> Evidence:
    evidence.record = msgspec.structs.replace(evidence.record, controls=controls)
    return evidence


def test_its_keys_are_those_of_the_design(conforming: Evidence) -> None:
    assert " ".join(certificate(judge(conforming))) == KEYS


def test_it_fits_the_schema(conforming: Evidence, validator: Any) -> None:
    red = ControlRecord("releases_again", "LC-03", "released-again", "red", "found out on lora-early-release")
    validator.validate(certificate(judge(controlled(conforming, red)), {"workers": 2}))


def test_a_broken_one_fits_it_too(broken: Evidence, validator: Any) -> None:
    made = certificate(judge(broken, Selection(("lifecycle",), left_out=("LC-01[lora-cycle]",), narrowed=("-k",))))
    validator.validate(made)
    assert made["verdict"] == "not-conformant"
    assert made["selection"]["left_out"] == ["LC-01[lora-cycle]"]


def test_a_problem_is_certified_with_every_rule_not_run(validator: Any) -> None:
    record = Record(impl="x", options=Options(), problem=Problem("import", "x must import", 11))
    made = certificate(Judged(record, HARNESS_ERROR, {}, (), Selection(), ("x must import",)))
    validator.validate(made)
    assert made["implementation"]["problem"] == {"stage": "import", "message": "x must import"}
    assert {row["outcome"] for row in made["rules"]} == {"not-run"}


def test_every_rule_is_accounted_for_in_the_order_of_the_catalogue(broken: Evidence) -> None:
    assert [row["id"] for row in certificate(judge(broken))["rules"]] == list(catalogue())


def test_a_green_control_makes_it_a_harness_error(conforming: Evidence, validator: Any) -> None:
    green = ControlRecord("inert", "", "", "green", "passes LC-04 by doing nothing")
    made = certificate(judge(controlled(conforming, green)))
    validator.validate(made)
    assert made["verdict"] == "harness-error"
    assert "passes LC-04 by doing nothing" in made["selection"]["reasons"][0] + made["selection"]["reasons"][-1]


def test_only_run_differs_between_two_certificates(conforming: Evidence, tmp_path: Path) -> None:
    made = [certificate(judge(Evidence(conforming.folder)), {"workers": n, "evidence": f"/{n}"}) for n in (1, 2)]
    texts = [encode({k: v for k, v in one.items() if k != "run"}) for one in made]
    assert texts[0] == texts[1]
    assert str(tmp_path) not in texts[0]


def test_it_is_written_sorted_and_whole(conforming: Evidence, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "certificate.json"
    write_certificate(path, certificate(judge(conforming)))
    read = json.loads(path.read_text())
    assert list(read) == sorted(read)
    assert [p.name for p in path.parent.iterdir()] == ["certificate.json"]
