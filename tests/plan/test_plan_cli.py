"""`colocert plan`: tables, sentences, the SVG, and one line with code 4 for what it cannot plan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from colocert.cli import main
from colocert.plan import plan, size
from colocert.plan_svg import HEIGHT, WIDTH, svg
from colocert.shapes import load, names

SVG = "{http://www.w3.org/2000/svg}"


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_prints_peaks_sentences_and_marked_inputs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", "kimi-k27-2x8-b300"]) == 0
    text = said(capsys)
    for part in (
        "gpu-peak: device of one GPU, host of one node",
        "cpu-peak: device of one GPU, host of one node",
        "260.0 GB remain (2.64 TB of 2.90 TB a node",
        "1.45 TB remain (1.45 TB of 2.90 TB a node and 1.19 TB of evictable file pages",
        "gpu-peak, device: does not fit: 46.0 GB too much",
        "facts.trainer_copy_per_node │ 1.34 TB │ measured",
        "trainer.base │ 148.8 GB │ computed",
    ):
        assert part in text
    for phase in ("start", "sync", "rollout", "rollout→train", "training", "train→rollout", "peak"):
        assert text.count(f"│ {phase} │") == 2


@pytest.mark.parametrize("name", names())
def test_draws_every_shape(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "plan.svg"
    assert main(["plan", name, "--svg", str(target)]) == 0
    assert f"wrote {target}" in capsys.readouterr().out.replace("\n", "")
    root = ElementTree.parse(target).getroot()
    assert root.tag == f"{SVG}svg"
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"gpu-peak", "cpu-peak", "trainer", "engine", "sync", "training"} <= set(texts)
    assert sum(str(t).startswith("GPU capacity") for t in texts) == 2
    assert sum(str(t).startswith("host capacity") for t in texts) == 2


def test_nothing_is_drawn_outside_the_picture() -> None:
    for name in names():
        root = ElementTree.fromstring(svg(plan(load(name))))
        for rect in root.iter(f"{SVG}rect"):
            x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
            width, height = float(rect.get("width", 0)), float(rect.get("height", 0))
            assert min(x, y, width, height) >= 0
            assert x + width <= WIDTH
            assert y + height <= HEIGHT


def test_a_capacity_that_does_not_suffice_is_said_in_the_picture() -> None:
    texts = {n: "".join(ElementTree.fromstring(svg(plan(load(n)))).itertext()) for n in ("tiny", "kimi-k27-2x8-b300")}
    assert "exceeded" not in texts["tiny"]
    assert texts["kimi-k27-2x8-b300"].count(", exceeded") == 1


def test_each_slice_has_its_bytes_as_a_tooltip() -> None:
    found = plan(load("tiny"))
    titles = {t.text for t in ElementTree.fromstring(svg(found)).iter(f"{SVG}title")}
    grads = found.shape.trainer.grads.nbytes
    assert f"start: trainer built; trainer gradient buffers {size(grads)}" in titles


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "SHAPE must be a path to a .toml or one of k3-gb300, "),
        ("name = ", "not a TOML file"),
        ('name = "x"\n', "missing required field `title`"),
    ],
)
def test_a_wrong_shape_is_one_line_and_code_4(
    text: str | None, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = "nothing"
    if text is not None:
        shape = str(tmp_path / "x.toml")
        Path(shape).write_text(text, encoding="utf-8")
    assert main(["plan", shape]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert part in captured.err
    assert captured.err.startswith("colocert: ")
    assert captured.err.count("\n") == 1


def test_a_picture_that_cannot_be_written_is_one_line_and_code_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "tiny", "--svg", str(tmp_path)]) == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_needs_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    code = (
        "import sys; from colocert.cli import main; "
        f"code = main(['plan', 'tiny', '--svg', {str(tmp_path / 'x.svg')!r}]); "
        "found = {'torch', 'matplotlib', 'jinja2', 'colocert_reference'} & set(sys.modules); "
        "sys.exit(str(found) if found else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
