"""What turns a row red whatever it measures, and what a check is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from colocert.device.link import LinkClosed
from gpu_tests.harness.checks import Check, RowRed, at_most, bytes_moved, bytes_taken, check
from gpu_tests.harness.child import measured
from gpu_tests.harness.port import agreed
from gpu_tests.harness.row import ALONE, Row
from gpu_tests.scenarios import endings, g09


@pytest.mark.parametrize(
    ("one", "green"),
    [
        (check("n", 10, 12, 2), True),
        (check("n", 10, 13, 2), False),
        (check("n", 10, 12), False),
        (check("n", True, 1, 2), True),
        (check("n", 10, "nothing", 2), False),
        (check("n", 10, None, 20), False),
        (at_most("n", 10, 10), True),
        (at_most("n", 10, 11), False),
        (bytes_moved("n", 4, {"bytes": 5, "tolerance": 1}), True),
        (bytes_moved("n", 4, {"bytes": 6, "tolerance": 1}), False),
        (bytes_moved("n", 4, {"bytes": None, "free": 4, "own": 9, "ledger": 0, "tolerance": 1}), False),
        (bytes_moved("n", None, None), False),
        (bytes_taken("n", 4, {"bytes": -4, "tolerance": 0}), True),
        (bytes_taken("n", 4, {"bytes": 4, "tolerance": 0}), False),
    ],
)
def test_a_check_is_green_within_its_tolerance_and_red_where_nothing_was_measured(one: Check, green: bool) -> None:
    assert one.green is green


@pytest.mark.parametrize(
    ("free", "own", "ledger", "found"),
    [(8, 8, 8, 8), (8, 8, 0, 8), (8, None, 8, 8), (8, 0, 8, 8), (0, 8, 8, 8), (8, None, 0, None), (8, 4, 0, None)],
)
def test_two_of_three_instruments_decide(free: int, own: int | None, ledger: int, found: int | None) -> None:
    assert agreed(free, own, ledger, tolerance=1) == found


@pytest.mark.usefixtures("needs_the_saver")
class TestChildren:
    """Live children on the stand-in."""

    def test_somebody_else_on_the_device_makes_a_row_red(self, tmp_path: Path) -> None:
        with Row("G02", "host", tmp_path) as stranger, Row("G02", "host", tmp_path) as row:
            row.patience = 0.2
            holds = stranger.start(endings.holds)
            holds.listen()
            with pytest.raises(RowRed) as caught:
                row.judge(check("fine", 1, 1))
        assert caught.value.names == {ALONE}
        assert f"process {holds.pid} holds" in str(caught.value)

    def test_a_row_does_not_start_beside_somebody_else(self, tmp_path: Path) -> None:
        with Row("G02", "host", tmp_path) as stranger:
            stranger.start(endings.holds).listen()
            row = Row("G02", "host", tmp_path)
        with pytest.raises(RowRed) as caught:
            row.judge()
        assert caught.value.names == {ALONE}

    @pytest.mark.parametrize(
        ("body", "how"),
        [
            (endings.returns, "ok"),
            (endings.raises, "failed"),
            (endings.exits_as_the_saver_does, "hook abort"),
            (endings.leaves_quietly, "vanished"),
            (endings.kills_itself, "SIGKILL"),
            (endings.sleeps_on, "hang"),
        ],
    )
    def test_an_ending_has_a_name(self, body: Callable[..., Any], how: str, tmp_path: Path) -> None:
        with Row("G02", "host", tmp_path) as row:
            ended, seen = measured(row.start(body, deadline=2 if how == "hang" else 60))
            assert ended == how
            assert seen["value"] == (7 if how == "ok" else None)
            row.judge()

    def test_a_red_row_shows_the_last_words_of_a_child_that_the_saver_ended(self, tmp_path: Path) -> None:
        with Row("G09", "host", tmp_path) as row:
            how, _ = row.end(g09.case, name="pause_twice")
            with pytest.raises(RowRed, match=r"(?s)ended with hook abort: .*Cannot pause allocation"):
                row.judge(check("pause_twice", "ok", how))

    @pytest.mark.parametrize(("body", "said"), [(endings.raises, "KeyError: 'not there'"), (None, "LD_PRELOAD")])
    def test_a_test_that_ends_before_its_verdict_shows_why_a_child_ended(
        self, body: Callable[..., Any] | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def talks_to_a_child_that_is_gone() -> None:
            with Row("G02", "host", tmp_path) as row:
                machine = row.machine if body else replace(row.machine, preload="none")
                row.start(body or endings.returns, machine=machine).listen()

        with pytest.raises(LinkClosed):
            talks_to_a_child_that_is_gone()
        assert said in capsys.readouterr().err

    def test_no_child_outlives_its_row(self, tmp_path: Path) -> None:
        with Row("G02", "host", tmp_path) as row:
            child = row.start(endings.sleeps_on)
        assert child.wait().signal == "SIGKILL"
