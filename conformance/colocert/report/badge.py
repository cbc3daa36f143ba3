"""The badge of a certificate: as SVG, and as the JSON that a shields endpoint reads.

Knows colours and widths. Does not know how a verdict is reached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from colocert.judge import CONFORMANT, EXPECTED, INCOMPLETE, NOT_CONFORMANT, PARTIAL

LABEL = "colocert"
_GREY = ("lightgrey", "#5f6368")
_COLOURS: Mapping[str, tuple[str, str]] = {
    CONFORMANT: ("brightgreen", "#1f7a33"),
    PARTIAL: ("green", "#4b6b12"),
    INCOMPLETE: ("yellow", "#8a5a00"),
    NOT_CONFORMANT: ("red", "#b3261e"),
}
"""By verdict: the endpoint's name of a colour, and one that white text can be read on."""

_CHARACTER, _PADDING, _HEIGHT = 6.6, 6, 20


def message(made: Mapping[str, Any]) -> str:
    """What the badge says: the verdict and the profiles that it is about."""
    expected = sum(row["outcome"] == EXPECTED for row in made["rules"])
    told = f"{made['verdict']}, {expected} expected" if expected else str(made["verdict"])
    return f"{told}: {', '.join(made['profiles'])}" if made["profiles"] else told


def endpoint(made: Mapping[str, Any]) -> str:
    """The JSON of a shields endpoint."""
    colour = _COLOURS.get(made["verdict"], _GREY)[0]
    facts = {"schemaVersion": 1, "label": LABEL, "message": message(made), "color": colour}
    return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"


def svg(made: Mapping[str, Any]) -> str:
    """The badge as a picture that needs nothing else. Texts are stretched to the width that was set aside for them."""
    said, fill = message(made), _COLOURS.get(made["verdict"], _GREY)[1]
    left, right = _width(LABEL), _width(said)
    about = escape(f"{LABEL}: {said}", {'"': "&quot;"})
    size = f'width="{left + right}" height="{_HEIGHT}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{about}">',
            f"<title>{about}</title>",
            f'<rect {size} rx="3" fill="{fill}"/>',
            f'<path d="M3 0h{left - 3}v20h-{left - 3}a3 3 0 0 1-3-3v-14a3 3 0 0 1 3-3z" fill="#333"/>',
            '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">',
            _text(LABEL, _PADDING, left),
            _text(said, left + _PADDING, right),
            "</g>",
            "</svg>",
            "",
        ]
    )


def badge_paths(certificate: Path) -> tuple[Path, Path]:
    """Where the picture and the endpoint's JSON of a certificate lie: beside it."""
    name = f"{certificate.stem}.badge"
    return certificate.with_name(f"{name}.svg"), certificate.with_name(f"{name}.json")


def _width(text: str) -> int:
    return round(len(text) * _CHARACTER) + 2 * _PADDING


def _text(text: str, at: int, width: int) -> str:
    return f'<text x="{at}" y="14" textLength="{width - 2 * _PADDING}">{escape(text)}</text>'
