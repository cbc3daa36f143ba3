"""docs/certified.md is what the records and texts in docs/certified/ say, and a record is what a run found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from colocert.judge import Evidence, judge
from colocert.record.manifest import Options
from colocert.record.runner import record
from colocert.report import certified
from colocert.rules.catalogue import RUNNER_CODES, catalogue

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "certified"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the records."""
    return Path(shutil.copytree(FOLDER, tmp_path / "certified"))


def test_the_page_is_up_to_date() -> None:
    kept = (DOCS / "certified.md").read_text(encoding="utf-8")
    assert kept == certified.page(FOLDER), "run: python -m colocert.report.certified"


def test_it_says_in_its_first_line_that_it_is_generated() -> None:
    assert "generated" in certified.page(FOLDER).splitlines()[0]


def test_every_record_is_a_row_a_section_and_a_command() -> None:
    text = certified.page(FOLDER)
    for made in certified.records(FOLDER):
        assert text.count(f"[{made.title}](#") == 1
        assert f"\n## {made.title}\n" in text
        assert f"\n{made.command}\n```" in text
        assert made.date in text


def test_every_rule_of_a_profile_has_one_outcome_and_every_failed_one_its_codes() -> None:
    for made in certified.records(FOLDER):
        assert made.profiles, made.title
        for name, result in made.profiles.items():
            ids = [rule for kept in result.outcomes.values() for rule in kept]
            assert sorted(ids) == sorted(r.id for r in catalogue().values() if r.profile == name), made.title
            assert sorted(result.findings) == sorted(result.outcomes.get("fail", [])), made.title
            for rule, codes in result.findings.items():
                known = {code.name for code in catalogue()[rule].codes} | set(RUNNER_CODES)
                assert codes
                assert set(codes) <= known


def test_every_failed_rule_of_a_release_is_explained_by_hand() -> None:
    """Of each rule that fails in a published wheel, the text beside the record says where in the source."""
    for name in certified.order(FOLDER):
        if (FOLDER / f"{name}.json").is_file() and (made := certified.read(FOLDER / f"{name}.json")).source == "PyPI":
            text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
            for result in made.profiles.values():
                for rule, codes in result.findings.items():
                    assert rule in text, (made.title, rule)
                    assert [code for code in codes if f"`{code}`" not in text] == [], (made.title, rule)


def _unnamed(folder: Path) -> None:
    (folder / "stray.md").write_text("text\n")


def _unknown(folder: Path) -> None:
    (folder / "order.txt").write_text((folder / "order.txt").read_text() + "absent\n")


@pytest.mark.parametrize("change", [_unnamed, _unknown])
def test_the_order_names_what_is_there(folder: Path, change: Callable[[Path], None]) -> None:
    change(folder)
    with pytest.raises(ValueError, match=r"order.txt must name each record and text once \(check (stray|absent)\)"):
        certified.page(folder)


def test_a_record_with_an_unknown_field_is_refused(folder: Path) -> None:
    path = folder / "areal-1.0.4.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "stars": 5}))
    with pytest.raises(ValueError, match=r"areal-1.0.4.json must be a record .*stars"):
        certified.read(path)


def test_a_record_is_brought_up_to_what_a_run_found(folder: Path, tmp_path: Path) -> None:
    evidence, path = tmp_path / "evidence", folder / "miles-rl-0.0.2.json"
    record("reference", evidence, Options(profiles=("lifecycle",), depth=0, controls=False))
    with pytest.raises(ValueError, match=r"evidence must hold a run of miles 0.0.2 \(got "):
        certified.update(path, evidence, "2026-01-01")
    version = judge(Evidence(evidence)).record.version
    certified.write(path, msgspec.structs.replace(certified.read(path), of=version))
    certified.update(path, evidence, "2026-01-01")
    made = certified.read(path)
    assert (made.date, sorted(made.profiles)) == ("2026-01-01", ["lifecycle"])
    assert made.profiles["lifecycle"].findings == {}
    assert "LC-01" in made.profiles["lifecycle"].outcomes["pass"]
