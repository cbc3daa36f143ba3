"""The engine that computes, in a process on the stand-in device: what it serves, what it refuses, what it holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from colocert_reference.driver import GRAPH, KV, WEIGHTS
from colocert_reference.real import adapter_wire
from colocert_reference.real.pair import GRANULE, MIB, granules
from colocert_reference.real.processes import CallFailed, SharedDevice, Side

from .children import needs

pytestmark = needs("torch", "transformers", "peft", "safetensors", "torch_memory_saver")

BODY = "colocert_reference.real.engine_process:main"
SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "lora_rank": 4, "lora_alpha": 8.0}
SERVED = {"slots": 2, "length": 32, "samples": 4}
CAPACITY = 256 * MIB
ALL = (WEIGHTS, KV, GRAPH)


class Served:
    """An engine process, what sends to it, and the same model without a cache, a saver or peft beside it."""

    def __init__(self, *, mirror: bool) -> None:
        import torch
        from transformers import LlamaForCausalLM

        from colocert_reference.real.llama_engine import LlamaShape

        self.wire = f"colocert-test-engine-{os.getpid()}-{mirror}"
        self.shape = LlamaShape(**SHAPE)
        torch.manual_seed(7)
        self.base = {n: p.detach().clone() for n, p in LlamaForCausalLM(self.shape.config()).named_parameters()}
        self.device = SharedDevice("host", CAPACITY)
        self.side: Side = self.device.start(
            "engine",
            BODY,
            shape={**SHAPE, **SERVED},
            mirror=mirror,
            graphs=6 * MIB,
            seed=0,
            wire=self.wire,
            timeout=30.0,
        )

    def send(self, kind: str, tensors: dict[str, Any], **said: Any) -> dict[str, Any]:
        raw = {name: memoryview(t.contiguous().numpy()) for name, t in tensors.items()}
        told = adapter_wire.send(self.wire, raw, 30.0, lambda: self.side.begin("receive"), kind=kind, **said)
        answer: dict[str, Any] = self.side.answer("receive")
        assert (told["kind"], told["version"]) == (answer["kind"], answer["version"])
        return answer

    def adapter(self, seed: int) -> dict[str, Any]:
        import torch
        from peft import get_peft_model, get_peft_model_state_dict
        from transformers import LlamaForCausalLM

        model = get_peft_model(LlamaForCausalLM(self.shape.config()), self.shape.lora())
        generator = torch.Generator().manual_seed(seed)
        state = get_peft_model_state_dict(model)
        return {name: torch.randn(t.shape, generator=generator) / 4 for name, t in state.items()}

    def logits(self, ids: list[int], adapter: dict[str, Any]) -> Any:
        """By a Llama whose weights have alpha/r · B·A added."""
        import torch
        from transformers import LlamaForCausalLM

        state = {name: tensor.clone() for name, tensor in self.base.items()}
        for name, lora_a in adapter.items():
            if ".lora_A." in name:
                place = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
                scale = self.shape.lora_alpha / self.shape.lora_rank
                state[place] += scale * adapter[name.replace(".lora_A.", ".lora_B.")] @ lora_a
        model = LlamaForCausalLM(self.shape.config()).eval()
        model.load_state_dict(state)
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    def ask(self, **how: Any) -> list[dict[str, Any]]:
        asked = {"prompts": ["ab", "cde", "f"], "tokens": 6, "samples": 4, "seed": 1, "temperature": 1.0, **how}
        answers: list[dict[str, Any]] = self.side.call("generate", **asked)
        return answers

    def end(self) -> None:
        self.side.end()
        self.device.close()


@pytest.fixture(params=[True, False], ids=["mirror", "no-mirror"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    made = Served(mirror=request.param)
    try:
        yield made
    finally:
        made.end()


def test_an_engine_s_life(served: Served, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """One process, since its start takes seconds: base, adapter, tokens, memory by tag, a cycle, a new adapter."""
    import torch

    mirror = "no-mirror" not in request.node.name
    side = served.side
    with pytest.raises(CallFailed, match="EngineNotReady: an engine is started before"):
        served.ask()
    sizes = side.call("start")
    assert sizes[GRAPH] == granules(6 * MIB)
    assert sum(sizes.values()) == served.device.held_by(side)["engine"] == side.held["device"]
    assert sizes[WEIGHTS] >= GRANULE * len(served.base)
    assert sizes[KV] >= GRANULE * 2 * 2 * SERVED["slots"]  # keys and values of both layers

    # Nothing is served before a base has come, nor is there an adapter that nobody sent.
    with pytest.raises(CallFailed, match="EngineNotReady"):
        served.ask()
    with pytest.raises(CallFailed, match="EngineNotReady"):
        side.call("admit")
    served.send("base", served.base, version=1)
    with pytest.raises(CallFailed, match="UnknownAdapter"):
        served.ask()
    first = served.adapter(1)
    served.send("adapter", first, version=1, adapter="policy")

    # The tokens are those of base + B·A, though the transport's memory is wiped after the acknowledgement.
    for answer in served.ask():
        for tokens, logprobs in zip(answer["tokens"], answer["logprobs"], strict=True):
            ids = [*answer["prompt"].encode(), *tokens]
            expected = torch.log_softmax(served.logits(ids[:-1], first)[-len(tokens) :], -1)
            chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs), chosen, rtol=1e-4, atol=1e-4)
    greedy = served.ask(temperature=0)
    for answer in greedy:
        ids = list(answer["prompt"].encode())
        for _ in range(6):
            ids.append(int(served.logits(ids, first)[-1].argmax()))
        assert answer["tokens"] == [ids[-6:]] * 4

    # A seed says which tokens; the prompts beside it do not.
    once = served.ask()
    assert served.ask() == once
    assert served.ask(prompts=["ab"])[0] == once[0]
    assert served.ask(seed=2) != once
    assert {answer["version"] for answer in once} == {1}

    # By tag the memory goes, and comes back; what is released or drained serves nobody.
    for tag in (KV, GRAPH, WEIGHTS):
        side.call("release", tags=[tag])
        assert tag not in side.held["tags"]
        assert sum(side.held["tags"].values()) == served.device.held_by(side)["engine"] == side.held["device"]
        with pytest.raises(CallFailed, match="EngineNotReady"):
            served.ask()
    assert served.device.free() == CAPACITY
    assert (side.held["host"] > 0) is mirror
    with pytest.raises(adapter_wire.BadTransfer):
        served.send("adapter", first, version=2, adapter="policy")
    with pytest.raises(CallFailed, match="EngineNotReady: weights must be resident"):
        side.answer("receive")
    side.call("resume", tags=[WEIGHTS])
    if not mirror:
        side.call("resume", tags=[KV, GRAPH])
        with pytest.raises(CallFailed, match="EngineNotReady"):
            served.ask()
        from colocert_reference.real.engine_process import base_file

        side.call("load_base", path=str(base_file(tmp_path / "base.safetensors", served.base)))
    second = served.adapter(2)
    served.send("adapter", second, version=2, adapter="policy")
    served.send("adapter", first, version=1, adapter="other")
    side.call("flush")
    side.call("resume", tags=list(ALL))
    side.call("drain")
    with pytest.raises(CallFailed, match="EngineNotReady: a drained engine"):
        served.ask()
    side.call("admit")
    assert side.held["host"] == 0
    again = [{**answer, "version": 1} for answer in served.ask(adapter="other")]
    assert again == once
    new = served.ask()
    assert {answer["version"] for answer in new} == {2}
    assert [a["tokens"] for a in new] != [a["tokens"] for a in once]
    facts = side.call("facts")
    assert (facts["released"], facts["base_valid"], facts["adapters"]) == ([], True, {"policy": 2, "other": 1})


def test_sampled_tokens_come_as_often_as_the_model_says() -> None:
    """Of 960 first tokens, the likeliest five lie within five standard errors of their probability."""
    import torch

    served = Served(mirror=True)
    try:
        served.side.call("start")
        served.send("base", served.base, version=1)
        adapter = served.adapter(3)
        served.send("adapter", adapter, version=1, adapter="policy")
        drawn: list[int] = []
        for seed in range(60):
            for answer in served.ask(prompts=["zz"] * 4, tokens=1, seed=seed, temperature=0.5):
                drawn += [row[0] for row in answer["tokens"]]
        expected = torch.softmax(served.logits(list(b"zz"), adapter)[-1] / 0.5, -1)
        for token in expected.topk(5).indices.tolist():
            share, p = drawn.count(token) / len(drawn), float(expected[token])
            assert abs(share - p) < 5 * (p * (1 - p) / len(drawn)) ** 0.5, (token, share, p)
    finally:
        served.end()
