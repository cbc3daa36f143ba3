"""What a run shows as it goes, and the PNG beside a picture."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from colocert_reference import svg_to_png
from colocert_reference.real.loop import Iteration
from colocert_reference.real.pair import MIB, Sample
from colocert_reference.real.progress import COLUMNS, LiveProgress, Progress, progress

DONE = Iteration(7, 0.25, 0.1, 64, -0.125, 1.0, 2e-6, 8, "ab·cd")


def sample(phase: str, seconds: float, trainer: int, engine: int, host: int) -> Sample:
    held = {"trainer": trainer * MIB, "engine": engine * MIB}
    return Sample(phase, f"engine.{phase}", seconds, held, {"trainer": host * MIB, "engine": 0}, 0)


def shown(view: Progress) -> Progress:
    with view:
        view.step(sample("rollout", 1.5, 0, 40, 20))
        view.step(sample("to training", 0.25, 60, 40, 0))
        view.step(sample("to training", 0.5, 60, 0, 5))
        view.step(sample("training", 2.0, 70, 0, 5))
        view.iteration(DONE)
    return view


def test_a_line_an_iteration_has_its_peaks_and_the_seconds_of_each_phase() -> None:
    said: list[str] = []
    view = shown(Progress("a run", 120 * MIB, said.append))
    assert said[0] == "a run"
    cells = ("7", "0.250", "-0.1250", "2.0e-06", "v8", "100.0", "20.0", "1.50", "0.75", "2.00", "0.00", "ab·cd")
    assert tuple(said[2].split()) == cells
    assert len(cells) == len(COLUMNS)
    assert view.transcript() == said


def test_the_seconds_and_peaks_of_an_iteration_are_its_own() -> None:
    view = shown(Progress("a run", 120 * MIB, lambda line: None))
    view.step(sample("rollout", 0.5, 0, 30, 1))
    assert view.row(DONE)[5:9] == ("30.0", "1.0", "0.50", "0.00")


def test_a_terminal_shows_the_table_and_what_both_sides_hold() -> None:
    from rich.console import Console

    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=160)
    view = LiveProgress("a run", 120 * MIB, console)
    shown(view)
    console.print(view.drawn())
    text = drawn.getvalue()
    assert "0.250" in text
    assert "trainer 70, engine 0 of 120 MiB; host 5 MiB" in text
    assert "training: engine.training" in text


def test_where_there_is_no_terminal_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert type(progress("a run", 0)) is Progress


SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="64" height="32"></svg>'
CONVERTER = """#!/bin/sh
for word in "$@"; do case "$word" in --screenshot=*) printf png > "${word#--screenshot=}";; esac; done
"""


def converted(folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "colocert_reference.svg_to_png", str(folder / "a.svg")]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)


@pytest.mark.parametrize("script", [None, "#!/bin/sh\nexit 1\n", CONVERTER], ids=["none", "broken", "works"])
def test_a_png_is_made_where_a_converter_works_and_missed_in_a_line_where_none_does(
    tmp_path: Path, script: str | None
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tmp_path / "a.svg").write_text(SVG)
    if script is not None:
        (tools / "chromium").write_text(script)
        (tools / "chromium").chmod(0o755)
    done = converted(tmp_path, str(tools))
    assert (done.returncode, done.stderr) == (0, "")
    [line] = done.stdout.splitlines()
    works = script == CONVERTER
    assert line.startswith(f"wrote {tmp_path / 'a.png'}" if works else "no PNG: needs rsvg-convert or Chromium on PATH")
    assert (tmp_path / "a.png").exists() is works


def test_a_browser_is_asked_for_the_size_of_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.svg").write_text(SVG)
    monkeypatch.setattr(svg_to_png.shutil, "which", lambda name: f"/bin/{name}" if name == "chromium" else None)
    [command] = svg_to_png.commands(tmp_path / "a.svg", tmp_path / "a.png", "folder")
    assert "--window-size=64,32" in command
    assert command[-1] == (tmp_path / "a.svg").as_uri()
