"""What the saver does with a call in the wrong state: the table of its exits, which a wrapper must not hide."""

from __future__ import annotations

import pytest

from gpu_tests.harness.checks import check
from gpu_tests.harness.child import ended, last_lines
from gpu_tests.harness.faults import seeded
from gpu_tests.harness.row import Row
from gpu_tests.scenarios import g09

MIB = 1 << 20


@pytest.mark.row("G09")
@seeded({"swallows": "pause_twice", "raises": "pause_twice"})
def test_a_call_in_the_wrong_state_ends_as_the_table_says(row: Row) -> None:
    """Double pauses, resumes of what is active and those that do not fit end the process; an unknown tag moves nothing.

    A saver that starts to raise is a new entry in the table of `scenarios/g09.py`, not a fault of the row.
    """
    row.shaped(capacity=96 * MIB, ledger=None)  # on the stand-in a device each, so that several can run at once
    ends, moved = {}, {}
    at_once = 3 if row.on_host else 1
    for first in range(0, len(g09.TABLE), at_once):
        bodies = [body for body, *_ in g09.TABLE[first : first + at_once]]
        for body, child in [(body, row.start(g09.case, name=body.__name__, env=_environment(body))) for body in bodies]:
            name = body.__name__
            ends[name], outcome = ended(child)
            moved[name] = outcome.value["moved"] if outcome and isinstance(outcome.value, dict) else None
            row.record(f"last words of {name}", last_lines(outcome, 1))
    row.judge(
        *(check(body.__name__, here if row.on_host else there, ends[body.__name__]) for body, here, there in g09.TABLE),
        check("bytes of an unknown tag", [0, 0], moved["unknown_tag"]),
        check("bytes of another thread's allocation", [0], moved["region_of_another_thread"]),
        check("bytes of a refused allocation", [0], moved["allocation_that_does_not_fit"]),
    )


def _environment(body: object) -> dict[str, str]:
    return g09.BAD_ENVIRONMENT if body is g09.bad_setting else {}
