"""The summary names every rule once, and the verdict line counts without percentages."""

from __future__ import annotations

import re
from typing import Any

from colocert.judge import Evidence, judge
from colocert.report.terminal import summary, verdict_line


def test_the_summary_of_a_broken_implementation(broken: Evidence, snapshot: Any) -> None:
    judged = judge(broken)
    text = "\n".join(line.text for line in (*summary(judged), verdict_line(judged)))
    assert re.sub(r" +\d+  ", "         N  ", text) == snapshot  # how often a condition occurs is the rules' own matter


def test_colour_only_repeats_the_word(broken: Evidence) -> None:
    for line in summary(judge(broken)):
        assert (line.style == "red") == (" fail " in line.text)
        assert (line.style == "green") == (" pass " in line.text)
