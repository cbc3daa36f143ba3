"""The rules of the engine profile judge the engine that computes, and find what is wrong with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .children import needs

ROOT = Path(__file__).parents[2]
pytestmark = needs("torch", "transformers", "peft", "safetensors")

ALIASES = """
from colocert_reference.real import llama_impl

class Aliases(llama_impl.LlamaOnRig):
    '''Reads an adapter where it arrived, not where it was copied to.'''

    async def copied(self, source):
        loaded = await super().copied(source)
        is_file = hasattr(source, 'read_bytes')
        loaded.arrived = llama_impl.from_file(source) if is_file else {n: source[n] for n in source}
        return loaded

    async def compute(self, request, adapter, cached):
        for name in adapter or ():
            adapter[name].copy_(llama_impl._floats(adapter.arrived[name]).reshape(adapter[name].shape))
        return await super().compute(request, adapter, cached)
"""
UNKEYED = """
from colocert_reference.real import llama_impl

class Unkeyed(llama_impl.LlamaOnRig):
    '''Cached prefixes outlive the memory that they lie in.'''

    def resume(self, tag):
        serials = [slot.serial for slot in self.llama.slots]
        super().resume(tag)
        for slot, serial in zip(self.llama.slots, serials):
            slot.serial = serial
"""
WRAPPED = """
class Under(llama_impl.LlamaUnderTest):
    async def engine(self, rig):
        engine = llama_impl.Engine({ports}(rig), llama_impl.settings_of(rig))
        {more}
        return engine

implementation = Under()
"""


def judged(impl: str, folder: Path) -> tuple[int, dict[str, tuple[str, str]], str]:
    """The exit code, each rule's outcome and code, and what was printed."""
    certificate = folder / "certificate.json"
    command = [sys.executable, "-m", "pytest", "conformance", f"--impl={impl}", "--profile=engine", "-q", "-n", "0"]
    command += [f"--certificate={certificate}", f"--evidence={folder / 'evidence'}", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=400)
    assert certificate.exists(), done.stdout + done.stderr
    rules = json.loads(certificate.read_text())["rules"]
    outcomes = {r["id"]: (r["outcome"], r.get("code") or "") for r in rules if r["id"].startswith("EN-")}
    return done.returncode, outcomes, done.stdout


def test_the_engine_that_computes_is_conformant(tmp_path: Path) -> None:
    code, outcomes, said = judged("colocert_reference.real.llama_impl", tmp_path)
    assert (code, set(outcomes.values())) == (0, {("pass", "")}), said
    assert sorted(outcomes) == ["EN-01", "EN-02", "EN-03", "EN-04"]
    assert "conformant (engine)" in said


@pytest.mark.parametrize(
    ("ports", "source", "more", "rule"),
    [
        ("Aliases", ALIASES, "", "EN-04"),
        ("Unkeyed", UNKEYED, "engine.prefixes.flush = lambda: None", "EN-03"),
    ],
)
def test_one_with_a_defect_is_not(ports: str, source: str, more: str, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "impl.py"
    path.write_text(source + WRAPPED.format(ports=ports, more=more))
    code, outcomes, said = judged(str(path), tmp_path)
    assert code == 1, said
    assert outcomes[rule][0] == "fail", outcomes
