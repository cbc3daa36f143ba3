"""`colocert diff` and `colocert timeline`: what they print, write and return."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

import colocert_fixtures
from colocert.cli import main
from colocert.record.manifest import COMPLETE, Options, Record, ScenarioRecord, write_record

TRACES = Path(colocert_fixtures.__file__).parent / "traces"
VALID, INVALID = (TRACES / "LC-12" / f"{kind}-stale-read.jsonl" for kind in ("valid", "invalid"))


def evidence(folder: Path, trace: Path) -> str:
    path = folder / "traces" / "lifecycle" / "stale-read.jsonl"
    path.parent.mkdir(parents=True)
    shutil.copy(trace, path)
    kept = ScenarioRecord("stale-read", "lifecycle", COMPLETE, str(path.relative_to(folder)))
    record = Record(impl="x", options=Options(), name=folder.name, claimed=("lifecycle",), scenarios=(kept,))
    write_record(folder, record)
    return str(folder)


def test_diff_of_equal_recordings_is_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = evidence(tmp_path / "a", VALID), evidence(tmp_path / "b", VALID)
    assert main(["diff", a, b]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "colocert: 1 scenarios: 1 equal"


def test_diff_of_different_ones_is_1_and_signs_say_which_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = evidence(tmp_path / "a", VALID), evidence(tmp_path / "b", INVALID)
    assert main(["diff", a, b, "--html", str(tmp_path / "new" / "d.html")]) == 1
    out = capsys.readouterr().out
    assert "lifecycle/stale-read: different" in out
    assert re.search(r"^  [-+] ", out, re.M)
    assert "colocert: 1 scenarios: 1 different" in out
    assert (tmp_path / "new" / "d.html").read_text().startswith("<!DOCTYPE html>")
    assert main(["diff", a, b, "--stat"]) == 1
    assert not re.search(r"^  [-+@ ]", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    "words",
    [["nowhere", "."], [".", "."], ["--profile", "sleeping", ".", "."]],
    ids=["missing", "no-index", "profile"],
)
def test_a_wrong_diff_is_one_line_and_4(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diff", *words]) == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_a_page_without_jinja2_is_one_line_and_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    a = evidence(tmp_path / "a", VALID)
    assert main(["diff", a, a, "--html", str(tmp_path / "d.html")]) == 4
    assert "pip install 'colocert[report]'" in capsys.readouterr().err
    assert main(["diff", a, a]) == 0


def test_timeline_draws_a_trace_with_its_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "t.svg"
    assert main(["timeline", str(INVALID), "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    text = path.read_text()
    ElementTree.fromstring(text)
    assert re.search(r"event \d+: LC-12 stale-read", text)
    assert main(["timeline", str(VALID)]) == 0
    conforming = capsys.readouterr().out
    assert conforming.startswith("<svg ")
    assert "LC-12" not in conforming


def test_timeline_leaves_out_a_torn_last_line_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(VALID.read_bytes()[:-9])
    assert main(["timeline", str(torn), "-o", str(tmp_path / "t.svg")]) == 0
    assert "the last line is incomplete and was left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "must be readable"),
        ("", "empty file"),
        ("nonsense\n", "one JSON object"),
        ('{"ev":"trace","schema":99,"scenario":"s","profile":"lifecycle"}\n', "schema must be"),
        ('{"ev":"trace","schema":1,"scenario":"s","profile":"lifecycle"}\n', "needs allocations"),
    ],
    ids=["missing", "empty", "damaged", "schema", "nothing"],
)
def test_a_wrong_trace_is_one_line_and_4(
    text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    if text is not None:
        path.write_text(text)
    assert main(["timeline", str(path)]) == 4
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_timeline_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(VALID), "--rank", "0"]) == 0
    assert "rank 0" in capsys.readouterr().out
    assert main(["timeline", str(VALID), "--rank", "5"]) == 4
    assert "none of rank 5" in capsys.readouterr().err
