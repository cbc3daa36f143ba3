"""The page says everything, is well-formed, escapes what others wrote, and refers to nothing outside itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from colocert.judge import HARNESS_ERROR, Case, Evidence, Judged, Selection, judge
from colocert.record.manifest import ControlRecord, Options, Problem, Record, write_record
from colocert.report.html import report
from colocert.report.links import REPOSITORIES
from colocert.report.links import report as link
from colocert.report.pages import SIGNS, check_extra
from colocert.report.peaks import highest_peaks
from colocert.rules.catalogue import RUNNER_CODES, catalogue
from colocert_fixtures.mutants.handoff import resumes_weights_beside_gradients
from colocert_reference.colocert_impl import Reference

VOID = {"meta", "link", "br", "hr", "img", "input", "line", "path", "use", "rect", "circle"}
SHAPES = {"line", "path", "use", "rect", "circle"}


class Page(HTMLParser):
    """Checks nesting while reading, and keeps elements, their text by id, and headings."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, str]] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, str] = {}
        self.headings: list[int] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {k: v or "" for k, v in attrs}
        self.elements.append((tag, found))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID - SHAPES:
            self.open.append((tag, found.get("id", "")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        opened, _ = self.open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"

    def handle_data(self, data: str) -> None:
        self.text += data
        for _, name in self.open:
            if name:
                self.texts[name] = self.texts.get(name, "") + data

    def all(self, attribute: str) -> list[str]:
        return [found[attribute] for _, found in self.elements if attribute in found]


def page_of(evidence: Evidence, selection: Selection | None = None) -> str:
    return report(judge(evidence, selection), evidence, highest_peaks(evidence), {"started": "2026-01-01"})


@pytest.fixture
def handoff(record_into: Callable[..., Evidence], tmp_path: Path) -> Evidence:
    """A hand-off whose order is wrong."""
    made = resumes_weights_beside_gradients.implementation
    return record_into(tmp_path / "handoff", made, "mutant", "gpu-lora-one", "cpu-lora-one")


@pytest.fixture(params=["conforming", "broken", "hung", "handoff", "problem"])
def page(request: pytest.FixtureRequest) -> str:
    if request.param == "problem":
        record = Record(impl="x", options=Options(), problem=Problem("import", "x must import", 11))
        return report(Judged(record, HARNESS_ERROR, {}, (), Selection(), ("x must import",)))
    return page_of(request.getfixturevalue(request.param))


def test_it_is_well_formed(page: str) -> None:
    read = Page(page)
    ids = read.all("id")
    assert [i for i in ids if ids.count(i) > 1] == []
    inside = [h[1:] for h in read.all("href") if h.startswith("#")]
    assert [h for h in inside if h not in ids] == []
    assert read.headings[0] == 1
    assert [b for a, b in zip(read.headings, read.headings[1:], strict=False) if b > a + 1] == []


def test_it_loads_nothing(page: str) -> None:
    read = Page(page)
    assert {tag for tag, _ in read.elements} & {"script", "iframe", "object", "embed", "img", "audio", "video"} == set()
    assert read.all("src") == []
    assert [found["href"] for tag, found in read.elements if tag == "link"] == ["data:,"]
    for tag, found in read.elements:
        if "href" in found and tag != "link":
            assert tag == "a" or found["href"].startswith("#")
    assert re.findall(r"url\((?!#)[^)]*\)|@import", page) == []
    policy = next(found for _, found in read.elements if found.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"].startswith("default-src 'none'")
    assert [k for k in {k for _, found in read.elements for k in found} if k.startswith("on")] == []


def test_every_rule_of_the_catalogue_is_there_with_its_sentence_and_outcome(page: str) -> None:
    read = Page(page)
    for rule in catalogue().values():
        row = read.texts[f"rule-{rule.id}"]
        assert rule.sentence.replace("`", "").replace("*", "") in row
        assert any(outcome in row for outcome in SIGNS)


def test_a_verdict_and_what_it_is_out_of_come_first(conforming: Evidence) -> None:
    red = ControlRecord("releases_again", "LC-03", "released-again", "red", "found out on lora-early-release")
    write_record(conforming.folder, msgspec.structs.replace(conforming.record, controls=(red,)))
    evidence = Evidence(conforming.folder)
    selection = Selection(("lifecycle",), left_out=("LC-01[lora-cycle]",), narrowed=("-k",))
    judged = judge(evidence, selection)
    top = " ".join(Page(page_of(evidence, selection)).text.partition("Rules")[0].split())
    assert judged.verdict == "incomplete"
    assert judged.verdict in top
    assert f"{len([r for r in judged.rules if r.profile == 'lifecycle'])} rules" in top
    assert f"{len(evidence.cases) - 1} cases" in top
    assert "2 scenarios2 complete" in top
    assert "1 control1 red" in top
    assert judged.reasons
    assert all(f"because: {reason}" in top for reason in judged.reasons)


def test_how_often_a_rule_was_exercised(conforming: Evidence) -> None:
    read = Page(page_of(conforming))
    for row in judge(conforming).rules:
        if row.profile == "lifecycle":
            assert f"{row.exercised:,}" in read.texts[f"rule-{row.id}"]


def test_a_failure_has_all_that_a_person_needs(broken: Evidence) -> None:
    text = page_of(broken)
    read = Page(text)
    said = " ".join(read.texts["fail-LC-03"].split())
    rule = catalogue()["LC-03"]
    for words in (rule.breaks, rule.fix, rule.seen[0], "released-again", "-k 'LC-03[lora-early-release]'"):
        assert words.replace("`", "") in said
    finding = broken.case("LC-03", "lora-early-release").findings[0]
    assert f"expected: {finding.expected}; observed: {finding.observed}" in said
    assert "https://github.com/radixark/miles/issues/3100" in read.all("href")
    assert 'class="bad"' in text
    assert text.index('id="fail-LC-03"') < text.index('id="rules"')


def test_a_failing_hand_off_is_marked_in_diagram_and_timeline(handoff: Evidence) -> None:
    text = page_of(handoff)
    said = Page(text).texts["fail-HO-01"]
    assert "driver → engine 0" in said
    assert "weights-before-grads" in said
    assert re.search(r"1  event \d+: HO-01 weights-before-grads", said)
    assert "grad_buffer 4 MiB" in said
    assert "Peaks of the hand-offs" in text


def test_a_hang_shows_the_end_of_its_transcript(hung: Evidence) -> None:
    said = " ".join(Page(page_of(hung)).texts["fail-LC-03"].split())
    assert RUNNER_CODES["hang"] in said
    assert "no answer within 30 s" in said


def test_a_claim_that_nobody_exercised_is_a_failure_without_a_scenario(conforming: Evidence) -> None:
    judged = judge(conforming)
    untestable = [r for r in judged.rules if r.code == "untestable"]
    assert untestable
    said = Page(page_of(conforming)).texts[f"fail-{untestable[0].id}"]
    assert untestable[0].reason in " ".join(said.split())


def test_a_should_rule_that_does_not_bind_says_so(broken: Evidence) -> None:
    judged = judge(broken)
    rows = tuple(
        msgspec.structs.replace(
            r, outcome="fail", code="no-raise", cases=(Case("LC-21", "lora-cycle", "fail", code="no-raise"),)
        )
        if r.id == "LC-21"
        else r
        for r in judged.rules
    )
    read = Page(report(msgspec.structs.replace(judged, rules=rows), broken))
    assert "does not bind in this run" in read.texts["fail-LC-21"]
    assert list(read.texts).index("fail-LC-03") < list(read.texts).index("fail-LC-21")


def test_what_others_wrote_is_escaped(broken: Evidence) -> None:
    evil = "</title><script>alert('x')</script>&\"<b>"
    record = msgspec.structs.replace(broken.record, name=evil, impl=evil, claims={**broken.record.claims, evil: evil})
    write_record(broken.folder, record)
    trace = broken.folder / broken.record.scenarios[1].trace
    trace.write_text(trace.read_text().replace('"base"', '"<script>b</script>"'))
    text = page_of(Evidence(broken.folder))
    read = Page(text)
    assert "script" not in {tag for tag, _ in read.elements}
    assert "alert('x')" in read.text
    assert "<script>b</script>" in read.text


def test_everything_that_scrolls_or_opens_is_reached_by_keyboard(page: str) -> None:
    read = Page(page)
    for tag, found in read.elements:
        classes = found.get("class", "").split()
        if "wrap" in classes or "diff" in classes:
            assert found["tabindex"] == "0"
            assert found["role"] == "region"
            assert found["aria-label"]
        if tag == "pre":
            assert found["tabindex"] == "0"
        assert found.get("tabindex", "0") == "0"
    assert next(found for tag, found in read.elements if tag == "a")["href"] == "#main"
    assert ":focus-visible" in page


def test_no_outcome_is_a_colour_alone(page: str) -> None:
    shown = re.findall(r'<span class="o ([\w-]+)"><span aria-hidden="true">[^<]*</span> ([\w-]+)</span>', page)
    assert len(shown) == page.count('<span class="o ') > 0
    assert [pair for pair in shown if pair[0] != pair[1]] == []
    read = Page(page)
    assert [
        found for tag, found in read.elements if tag == "svg" and not ({"aria-hidden", "aria-label"} & set(found))
    ] == []


def test_light_dark_phone_and_print_have_styles(page: str) -> None:
    for query in ("(prefers-color-scheme: dark)", "(max-width: 720px)", "@media print"):
        assert query in page
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in page


def test_the_same_evidence_gives_the_same_page(broken: Evidence) -> None:
    assert page_of(broken) == page_of(Evidence(broken.folder))


def test_reports_are_links_where_their_repository_is_known() -> None:
    assert link("miles#3100 (review)").url == "https://github.com/radixark/miles/issues/3100"
    assert link("fzyzcjy/torch_memory_saver#23").url == "https://github.com/fzyzcjy/torch_memory_saver/issues/23"
    assert link("miles test suite").url == ""
    assert link("unheard-of#7") == ("unheard-of#7", "")
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name in REPOSITORIES.values())


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Exception, match=r"--report needs jinja2: pip install 'colocert\[report\]'"):
        check_extra("--report")


def test_an_all_green_reference_shows_memory_of_each_kind(record_into: Callable[..., Evidence], tmp_path: Path) -> None:
    names = ("lora-cycle", "full-cycle", "gpu-lora-one", "cpu-full-one")
    evidence = record_into(tmp_path, Reference(), "reference", *names)
    text = page_of(evidence)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    for caption in ("handoff, gpu-lora-one: gpu-peak, lora", "handoff, cpu-full-one: cpu-peak, full"):
        assert caption in captions
    assert {"lifecycle, lora-cycle", "lifecycle, full-cycle"} <= set(captions)
