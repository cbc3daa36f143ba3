"""Public reports as links: `miles#3100` is a number in a repository whose short name is known, or plain text.

Knows the short names that the catalogue uses. Does not fetch anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

REPOSITORIES: Mapping[str, str] = {
    "AReaL": "inclusionAI/AReaL",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "OpenRLHF": "OpenRLHF/OpenRLHF",
    "SkyRL": "NovaSky-AI/SkyRL",
    "TMS": "fzyzcjy/torch_memory_saver",
    "miles": "radixark/miles",
    "ms-swift": "modelscope/ms-swift",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "ray": "ray-project/ray",
    "sglang": "sgl-project/sglang",
    "slime": "THUDM/slime",
    "torch_memory_saver": "fzyzcjy/torch_memory_saver",
    "trl": "huggingface/trl",
    "verl": "verl-project/verl",
    "vllm": "vllm-project/vllm",
    "vllm-omni": "vllm-project/vllm-omni",
}
_REPORT = re.compile(r"^(?P<repository>[\w.-]+(?:/[\w.-]+)?)#(?P<number>\d+)\b")


class Report(NamedTuple):
    """A public report of a fault; `url` is empty where it is not known."""

    text: str
    url: str


def report(seen: str) -> Report:
    """The link of one entry of a rule's `seen`."""
    match = _REPORT.match(seen)
    if match is None:
        return Report(seen, "")
    named = match["repository"]
    repository = named if "/" in named else REPOSITORIES.get(named, "")
    return Report(seen, f"https://github.com/{repository}/issues/{match['number']}" if repository else "")
