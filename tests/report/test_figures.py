"""A figure of a large trace, which is streamed, shows what that of the same trace read whole does."""

from __future__ import annotations

import pytest

from colocert.judge import Evidence
from colocert.report import figures
from colocert.report.figures import trace_of


def test_a_streamed_trace_has_the_same_timeline_and_diagram(broken: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    case = broken.case("LC-03", "lora-early-release")
    whole = trace_of(broken, case.trace)
    monkeypatch.setattr(figures, "LARGE", 0)
    streamed = trace_of(broken, case.trace)
    assert (whole.large, streamed.large) == (False, True)
    assert streamed.events == streamed.lines == []
    assert streamed.series == whole.series
    assert streamed.figure("t", case.findings) == whole.figure("t", case.findings)
    expected = whole.sequence(case.findings)
    found = streamed.sequence(case.findings)
    assert expected is not None
    assert found is not None
    assert found.rows == expected.rows
    assert found[2:] == expected[2:]


@pytest.mark.parametrize("excerpt", [8, 40])
def test_an_excerpt_ends_shortly_after_the_finding(
    broken: Evidence, monkeypatch: pytest.MonkeyPatch, excerpt: int
) -> None:
    monkeypatch.setattr(figures, "LARGE", 0)
    monkeypatch.setattr(figures, "EXCERPT", excerpt)
    case = broken.case("LC-03", "lora-early-release")
    found = trace_of(broken, case.trace).sequence(case.findings)
    assert found is not None
    assert len(found.rows) <= excerpt
    marked = [row.at for row in found.rows if row.findings]
    assert marked
    assert found.last - marked[0] <= excerpt // 4


def test_without_a_finding_it_is_the_end(conforming: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "LARGE", 0)
    monkeypatch.setattr(figures, "EXCERPT", 10)
    trace = trace_of(conforming, conforming.record.scenarios[0].trace)
    found = trace.sequence(())
    assert found is not None
    assert found.last == found.total == trace.series.events
