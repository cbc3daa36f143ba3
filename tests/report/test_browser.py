"""The page in a real browser: nothing runs over the edge of a phone, the dark is dark, and print shows the failures.

Needs a Chromium; without one these tests are skipped. Each starts it with a fresh profile and without a network.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colocert.judge import Evidence, judge
from colocert.report.html import report
from colocert.report.palette import DARK, LIGHT
from colocert.report.peaks import highest_peaks
from colocert_fixtures.mutants.handoff import resumes_weights_beside_gradients
from colocert_reference.colocert_impl import Reference
from colocert_reference.svg_to_png import BROWSERS, QUIET

BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), "")
FLAGS = (*QUIET, "--host-resolver-rules=MAP * ~NOTFOUND")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason=f"needs a Chromium on PATH ({', '.join(BROWSERS)})"),
]

MEASURE = """
const d = document.getElementById('page').contentDocument, root = d.documentElement;
const seen = e => e && e.getClientRects().length > 0;
const reach = [...d.querySelectorAll('a[href], summary, [tabindex]')].filter(seen);
const past = [...d.querySelectorAll('main *, header *')].filter(
  e => seen(e) && !e.closest('.wrap, pre, nav, svg, details:not([open]) > :not(summary)')
       && e.getBoundingClientRect().right > root.clientWidth + 1).map(e => e.tagName + '.' + e.className);
const skip = d.querySelector('.skip'); skip.focus();
const bad = d.querySelector('.seq li.bad');
const scrolls = [...d.querySelectorAll('main *')].filter(
  e => seen(e) && e.scrollWidth > e.clientWidth + 1 && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX));
document.getElementById('found').textContent = JSON.stringify({
  width: root.clientWidth, scroll: root.scrollWidth, past: past,
  wide: seen(d.querySelector('figure .wide')), narrow: seen(d.querySelector('figure .narrow')),
  ground: getComputedStyle(d.body).backgroundColor, ink: getComputedStyle(d.body).color,
  layer: getComputedStyle(d.querySelector('.m-default')).fill,
  arrow: bad ? d.querySelectorAll('.seq svg line').length : 0,
  bad: bad ? [getComputedStyle(bad).outlineStyle, bad.getBoundingClientRect().height] : null,
  reach: reach.length, unreachable: scrolls.filter(e => e.tabIndex < 0 && e.tagName !== 'NAV').map(e => e.className),
  skip: skip.getBoundingClientRect().left,
});
"""


def chromium(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module", params=["red", "green"])
def page(request: pytest.FixtureRequest, record_into: Callable[..., Evidence], tmp_path_factory: Any) -> str:
    made = resumes_weights_beside_gradients.implementation if request.param == "red" else Reference()
    names = ("gpu-lora-one", "cpu-full-three") if request.param == "red" else ("lora-cycle", "gpu-lora-one")
    evidence = record_into(tmp_path_factory.mktemp("browser"), made, "mypkg", *names)
    return report(judge(evidence), evidence, highest_peaks(evidence))


@pytest.fixture
def measured(page: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What a browser makes of the page in a window of some width; its policy, which forbids scripts, is left out."""

    def measure(width: int, *words: str) -> dict[str, Any]:
        bare, times = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
        assert times == 1
        frame = (
            f'<iframe id="page" style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(bare)}"></iframe>'
        )
        outer = tmp_path / "outer.html"
        script = f"<script>document.getElementById('page').onload = () => {{{MEASURE}}}</script>"
        outer.write_text(f'<!DOCTYPE html><body><pre id="found"></pre>{frame}{script}</body>', encoding="utf-8")
        done = chromium(tmp_path, "--window-size=1400,1000", *words, "--dump-dom", outer.as_uri())
        told = re.search(r'<pre id="found">(\{.*?\})</pre>', done.stdout)
        assert told, done.stderr
        found: dict[str, Any] = json.loads(html.unescape(told[1]))
        return found

    return measure


def rgb(colour: str) -> str:
    return "rgb({}, {}, {})".format(*(int(colour[i : i + 2], 16) for i in (1, 3, 5)))


@pytest.mark.parametrize("width", [390, 820, 1280])
def test_nothing_runs_over_the_edge(measured: Callable[..., dict[str, Any]], width: int) -> None:
    found = measured(width)
    assert found["past"] == []
    assert (found["width"], found["scroll"]) == (width, width)
    assert (found["wide"], found["narrow"]) == (width > 720, width <= 720)
    assert found["unreachable"] == []
    assert found["reach"] > 10
    assert found["skip"] >= 0
    assert (found["ground"], found["ink"], found["layer"]) == tuple(rgb(LIGHT[c]) for c in ("bg", "ink", "default"))
    if found["bad"]:
        assert found["bad"][0] == "solid"
        assert found["bad"][1] > 30
        assert found["arrow"] > 5


def test_the_dark_is_dark(measured: Callable[..., dict[str, Any]]) -> None:
    found = measured(1280, "--force-dark-mode")
    assert (found["ground"], found["ink"], found["layer"]) == tuple(rgb(DARK[c]) for c in ("bg", "ink", "default"))


def test_it_prints_with_its_failures(page: str, tmp_path: Path) -> None:
    source, target = tmp_path / "page.html", tmp_path / "page.pdf"
    source.write_text(page, encoding="utf-8")
    done = chromium(tmp_path, f"--print-to-pdf={target}", source.as_uri())
    assert target.exists(), done.stderr
    assert target.read_bytes().startswith(b"%PDF-")
    if shutil.which("pdftotext"):
        text = subprocess.run(["pdftotext", "-layout", str(target), "-"], capture_output=True, text=True).stdout
        wanted = ["conformant", "HO-01"]
        wanted += ["weights-before-grads", "miles/issues/3100"] if "fail-HO-01" in page else []
        assert [w for w in wanted if w not in text] == []


def test_a_page_opened_as_it_is_asks_for_nothing(page: str, tmp_path: Path) -> None:
    source, log = tmp_path / "page.html", tmp_path / "net.json"
    source.write_text(page, encoding="utf-8")
    done = chromium(tmp_path, f"--log-net-log={log}", "--virtual-time-budget=2000", "--dump-dom", source.as_uri())
    assert "</html>" in done.stdout
    asked = {url for url in re.findall(r'"url":"([^"]+)"', log.read_text(errors="replace")) if url.startswith("http")}
    own = re.compile(r"https?://[\w.-]*(google|gstatic|googleapis|chrome)[\w.-]*/")  # the browser's, whatever it shows
    assert {url for url in asked if not own.match(url)} == set()
    assert "Refused to" not in done.stderr
