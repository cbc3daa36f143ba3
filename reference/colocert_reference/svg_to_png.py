"""PNG beside SVG, by what the machine has: `python -m colocert_reference.svg_to_png FILE.svg ...`.

Knows how `rsvg-convert` and a headless Chromium are asked. Does not know the pictures. Where neither is there it says
so in a line and ends with 0: the SVG is the picture.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
SECONDS = 60


def commands(svg: Path, png: Path, folder: str) -> list[list[str]]:
    """How each converter of this machine would be called, the better first."""
    found = []
    if rsvg := shutil.which("rsvg-convert"):
        found.append([rsvg, "-o", str(png), str(svg)])
    root = ElementTree.parse(svg).getroot()
    size = f"{root.get('width', '1080')},{root.get('height', '600')}"
    for browser in filter(None, map(shutil.which, BROWSERS)):
        own = [f"--user-data-dir={folder}", f"--window-size={size}", f"--screenshot={png}"]
        found.append([browser, *QUIET, *own, svg.resolve().as_uri()])
    return found


def convert(svg: Path) -> Path | None:
    """The PNG, or None where no converter of this machine makes one."""
    png = svg.with_suffix(".png").resolve()
    png.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="colocert-png-", ignore_cleanup_errors=True) as folder:
        for command in commands(svg, png, folder):
            try:
                subprocess.run(command, capture_output=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL)
            except (subprocess.TimeoutExpired, OSError):
                continue
            if png.exists() and png.stat().st_size:
                return svg.with_suffix(".png")
    return None


def main(argv: Sequence[str] | None = None) -> int:
    given = [Path(name) for name in (sys.argv[1:] if argv is None else argv)]
    made = [convert(svg) for svg in given]
    for png in filter(None, made):
        print(f"wrote {png}")
    if given and not any(made):
        print(f"no PNG: needs rsvg-convert or Chromium on PATH (got neither, or none that works): see {given[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
