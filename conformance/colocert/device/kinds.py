"""The kinds of GPU that rows are judged on, by what tells them apart.

Knows names, capabilities, host architectures and memory as torch reports it. No single one of them is enough: H200,
H100 and GH200 share a capability, B300 and GB300 do too. Bands come from published figures and captures; this project
has seen none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
HOST, ANY = "host", "any"


@dataclass(frozen=True)
class Kind:
    """One kind. `memory` is the band, in GiB, of torch's `total_memory` of a whole card."""

    name: str
    capability: tuple[int, int]
    pattern: str
    arch: str
    memory: tuple[float, float]

    def holds(self, nbytes: int) -> bool:
        """Whether a card of that many bytes is a whole one of this kind."""
        low, high = self.memory
        return low * GIB <= nbytes <= high * GIB


KINDS = {
    kind.name: kind
    for kind in (
        Kind("b300", (10, 3), r"NVIDIA B300\b.*", "x86_64", (267, 269)),
        Kind("gb300", (10, 3), r"NVIDIA GB300", "aarch64", (276, 278)),
        Kind("b200", (10, 0), r"NVIDIA B200", "x86_64", (177.5, 179.5)),
        Kind("h200", (9, 0), r"NVIDIA H200", "x86_64", (139, 141)),
    )
}
"""The kinds by name; the pattern matches the whole name of the device."""

NAMES = (*KINDS, ANY, HOST)
"""What `--kind` takes: a kind, any GPU, or the stand-in."""
