"""The reference's pair in the live profile. All of it is what `make certify` runs; here, the parts that are its own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("peft")

from colocert.judge import judge_events
from colocert.record.drive import ProcessGone
from colocert.record.registry import BY_ID
from colocert.record.registry import run as run_scenario
from colocert.rig.live_device import lacking
from colocert.rules.catalogue import catalogue
from colocert.trace import AnyEvent
from colocert_fixtures.judging import rules, run
from colocert_fixtures.live_defects import DEFECTS, with_defect
from colocert_reference.colocert_impl import implementation

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize(
    ("scenario", "rule", "codes"),
    [
        (
            "live-adapters",
            "ML-01",
            {"weights-touched", "moments-touched", "gradients-touched", "slot-not-pristine"},
        ),
        (
            "live-memory",
            "LV-01",
            {"tag-empty", "not-released", "other-bytes", "kept-at-hand-off", "does-not-fit"},
        ),
    ],
)
def test_slots_and_tags_hold_what_they_say(scenario: str, rule: str, codes: set[str]) -> None:
    """Two adapters take turns in one model; each tensor of a tag is one allocation."""
    if why := lacking("host"):
        pytest.skip(why)
    judged = judge_events(run(implementation, BY_ID[scenario]), rules("live"))
    assert judged.findings == ()
    assert set(judged.exercised[rule]) == codes


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_turns_the_profile_red_and_is_named(name: str) -> None:
    """By a rule's code, or where the engine verifies its own memory, by the error that ends the scenario."""
    if why := lacking("host"):
        pytest.skip(why)
    seen = DEFECTS[name]
    events: list[AnyEvent] = []
    defective: Any = with_defect(name)
    died = ""
    try:
        run_scenario(defective, defective.claims, BY_ID[seen.scenario], events.append)
    except ProcessGone as gone:
        died = str(gone)
    found = {finding.code for finding in judge_events(events, [catalogue()[seen.rule]]).findings}
    assert seen.code in ({"died"} if died else found)
    assert seen.died in died
