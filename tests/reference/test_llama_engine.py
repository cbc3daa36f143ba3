"""The engine that computes, on the CPU: adapters are what base + B·A says, stay apart, and survive a cycle."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from colocert_reference.engine import EngineNotReady, UnknownAdapter

NEEDED = ("torch", "transformers", "peft", "safetensors")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"needs the extra `reference` (got no {', '.join(missing)})"),
]
if TYPE_CHECKING:
    import torch

    from colocert.device import Stage
    from colocert_reference.engine import Engine
    from colocert_reference.real.llama_engine import LlamaPorts

ALL = ("weights", "kv_cache", "cuda_graph")


@dataclass(eq=False)
class Ask:
    """A request; by identity, as a server's requests are."""

    prompt: str = "hello"
    adapter: str | None = "a"
    tokens: int = 6


class Lossy:
    """Stands where the saver is: a pause keeps a copy where there is a backup, and puts NaN in the tensors' place."""

    def __init__(self) -> None:
        self.backup: dict[str, bool] = {}
        self.find: dict[str, Callable[[], list[torch.Tensor]]] = {}
        self.kept: dict[str, list[torch.Tensor]] = {}

    @contextlib.contextmanager
    def region(self, tag: str, *, backup: bool) -> Iterator[None]:
        self.backup[tag] = backup
        yield

    def pause(self, tag: str) -> None:
        assert tag not in self.kept
        self.kept[tag] = [t.detach().clone() for t in self.find[tag]()]
        for tensor in self.find[tag]():
            tensor.detach().fill_(float("nan") if tensor.is_floating_point() else -1)

    def resume(self, tag: str) -> None:
        for tensor, kept in zip(self.find[tag](), self.kept.pop(tag), strict=True):
            if self.backup[tag]:
                tensor.detach().copy_(kept)


def under_the_saver(stage: Stage) -> dict[str, Any]:
    """The body of a child process: a cycle of the engine in memory that the real saver manages, over the stand-in."""
    from colocert_reference.real.host_memory import HostMemory
    from colocert_reference.real.llama_engine import LlamaPorts, llama_engine

    async def story() -> dict[str, Any]:
        memory = HostMemory()
        engine = llama_engine(memory)
        ports = engine.ports
        assert isinstance(ports, LlamaPorts)
        await engine.load_adapter("a", 1, adapter(ports, 1))
        placed = [t for slot in ports.slots for layer in slot.cache.layers for t in (layer.keys, layer.values)]
        facts: dict[str, Any] = {"weights": len(ports.parameters), "caches": len(placed)}
        facts["free"], facts["tokens"] = [stage.device.free_bytes()], [await engine.generate(Ask())]
        for call, tags in (("release", ["kv_cache"]), ("release", ALL), ("resume", ["weights"]), ("resume", ALL)):
            await getattr(engine, call)(tags)
            facts["free"].append(stage.device.free_bytes())
        facts["tokens"].append(await engine.generate(Ask()))
        facts["expected"] = greedy(merged(ports, adapter(ports, 1)), "hello", 6)
        return facts

    return asyncio.run(story())


def made(**settings: Any) -> tuple[Engine, LlamaPorts]:
    from colocert_reference.real.llama_engine import LlamaPorts, llama_engine

    memory = Lossy()
    engine = llama_engine(memory, **settings)
    ports = engine.ports
    assert isinstance(ports, LlamaPorts)
    memory.find["weights"] = lambda: [*ports.parameters.values(), *(b for b, _ in ports.buffers.values())]
    memory.find["kv_cache"] = lambda: [
        t for slot in ports.slots for layer in slot.cache.layers for t in (layer.keys, layer.values)
    ]
    return engine, ports


def adapter(ports: LlamaPorts, seed: int) -> dict[str, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) / 4 for name, shape in ports.places.items()}


def merged(ports: LlamaPorts, tensors: dict[str, torch.Tensor] | None) -> Any:
    """A Llama without peft: the base's parameters with alpha/r · B·A added to the weights that the adapter names."""
    from transformers import LlamaForCausalLM

    scale = ports.shape.lora_alpha / ports.shape.lora_rank
    state = {name: parameter.detach().clone() for name, parameter in ports.parameters.items()}
    for name, lora_a in (tensors or {}).items():
        if ".lora_A." in name:
            place = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            lora_b = (tensors or {})[name.replace(".lora_A.", ".lora_B.")]
            state[place] += scale * lora_b @ lora_a
    model = LlamaForCausalLM(ports.config).eval()
    model.load_state_dict(state)
    return model


def greedy(model: Any, prompt: str, tokens: int) -> list[int]:
    """Without any cache."""
    import torch

    ids = list(prompt.encode())
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[-tokens:]


def test_logits_are_those_of_base_plus_b_times_a() -> None:
    """Of the base and of two adapters, each in turn."""
    import torch

    async def story() -> None:
        engine, ports = made()
        given = {name: adapter(ports, seed) for name, seed in (("a", 1), ("b", 2))}
        for name, tensors in given.items():
            await engine.load_adapter(name, 1, tensors)
        ids = torch.tensor([[1, 2, 3, 4]])
        seen = {}
        for name in ("a", "b", None, "a"):
            loaded = engine.adapters[name].tensors if name else None
            with torch.no_grad():
                expected = merged(ports, given[name] if name else None)(input_ids=ids).logits[0]
            seen[name] = ports.logits([1, 2, 3, 4], loaded)
            torch.testing.assert_close(seen[name], expected, rtol=1e-4, atol=1e-5)
        assert all((seen[x] - seen[y]).abs().max() > 0.01 for x, y in (("a", "b"), ("a", None), ("b", None)))

    asyncio.run(story())


def test_tokens_from_the_static_cache_are_those_without_any_and_requests_under_way_stay_apart() -> None:
    async def story() -> None:
        engine, ports = made(base_requests=True)
        given = {name: adapter(ports, seed) for name, seed in (("a", 1), ("b", 2))}
        for name, tensors in given.items():
            await engine.load_adapter(name, 1, tensors)
        asked = [Ask(adapter="a"), Ask(adapter="b"), Ask(adapter=None), Ask("other", "a")]
        answers = await asyncio.gather(*(engine.generate(ask) for ask in asked))
        for ask, answer in zip(asked, answers, strict=True):
            model = merged(ports, given[ask.adapter] if ask.adapter else None)
            assert answer == greedy(model, ask.prompt, ask.tokens)
        assert len({tuple(answer) for answer in answers}) == 4

    asyncio.run(story())


def test_there_are_as_many_requests_under_way_as_there_are_caches() -> None:
    """One too many is refused; those that are over take up nothing, whoever still holds them."""

    async def story() -> None:
        engine, ports = made()
        await engine.load_adapter("a", 1, adapter(ports, 1))
        asked = [Ask(f"prompt {n}") for n in range(ports.shape.slots + 1)]
        first = await engine.generate(asked[0])
        answers = await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)
        assert [type(a).__name__ for a in answers if isinstance(a, Exception)] == ["TooManyRequests"]
        again = [await engine.generate(ask) for ask in asked]
        assert again[0] == first

    asyncio.run(story())


def test_a_cached_prefix_gives_the_same_tokens_without_computing_the_prompt_again() -> None:
    async def story() -> None:
        engine, ports = made()
        await engine.load_adapter("a", 1, adapter(ports, 1))
        computed: list[int] = []
        forward = ports.forward

        def counted(ids: Any, *rest: Any) -> Any:
            computed.append(ids.shape[1])
            return forward(ids, *rest)

        ports.forward = counted  # type: ignore[method-assign]
        first = await engine.generate(Ask())
        assert computed == [5, 1, 1, 1, 1, 1]
        computed.clear()
        assert await engine.generate(Ask()) == first
        assert computed == [1, 1, 1, 1, 1]
        for n in range(ports.shape.slots):  # the prefix's slot is used for something else
            await engine.generate(Ask(f"prompt {n}"))
        computed.clear()
        assert await engine.generate(Ask()) == first
        assert computed[0] == 5

    asyncio.run(story())


def test_a_cycle_gives_back_the_same_tokens_though_the_memory_held_nan() -> None:
    async def story() -> None:
        engine, ports = made()
        await engine.load_adapter("a", 1, adapter(ports, 1))
        before = await engine.generate(Ask())
        await engine.release(ALL)
        with pytest.raises(EngineNotReady):
            await engine.generate(Ask())
        await engine.resume(["weights"])
        await engine.load_adapter("b", 1, adapter(ports, 2))
        await engine.resume(ALL)
        assert await engine.generate(Ask()) == before
        assert await engine.generate(Ask(adapter="b")) != before

    asyncio.run(story())


def test_lost_weights_are_served_again_once_they_were_sent_with_what_no_checkpoint_holds() -> None:
    """The rotary frequencies are a buffer in the same region."""

    async def story() -> None:
        engine, ports = made(mirror=False)
        await engine.load_adapter("a", 1, adapter(ports, 1))
        before = await engine.generate(Ask())
        sent = {name: parameter.detach().clone() for name, parameter in ports.parameters.items()}
        await engine.release(ALL)
        await engine.resume(ALL)
        with pytest.raises(EngineNotReady):
            await engine.generate(Ask())
        await engine.update_base(1, sent)
        assert await engine.generate(Ask()) == before

    asyncio.run(story())


def test_an_adapter_is_copied_out_before_the_acknowledgement_and_replaced_for_later_requests() -> None:
    async def story() -> None:
        engine, ports = made()
        one, two = adapter(ports, 1), adapter(ports, 2)
        expected = [greedy(merged(ports, tensors), "hello", 6) for tensors in (one, two)]
        await engine.load_adapter("a", 1, one)
        for tensor in one.values():
            tensor.fill_(float("nan"))
        under_way = asyncio.ensure_future(engine.generate(Ask()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.load_adapter("a", 2, two)
        assert await under_way == expected[0]
        assert await engine.generate(Ask()) == expected[1]
        assert set(ports.model.peft_config) == {"none", "adapter2"}

    asyncio.run(story())


def test_a_safetensors_file_is_an_adapter_too(tmp_path: Path) -> None:
    """What peft writes is what is read."""
    from safetensors.torch import save_file

    async def story() -> None:
        engine, ports = made()
        tensors = adapter(ports, 3)
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        await engine.load_adapter("a", 1, tmp_path / "adapter_model.safetensors")
        assert await engine.generate(Ask()) == greedy(merged(ports, tensors), "hello", 6)

    asyncio.run(story())


def test_a_source_with_other_tensors_is_refused_by_name_and_the_adapter_with_it() -> None:
    from colocert_reference.real.llama_engine import WrongTensors

    async def story() -> None:
        engine, ports = made()
        tensors = adapter(ports, 1)
        dropped = next(iter(tensors))
        for wrong, told in (
            ({k: v for k, v in tensors.items() if k != dropped}, "missing"),
            ({**tensors, "extra": tensors[dropped]}, "extra"),
            ({**tensors, dropped: tensors[dropped][:, :-1]}, "another shape"),
        ):
            with pytest.raises(WrongTensors, match=told):
                await engine.load_adapter("a", 1, wrong)
        with pytest.raises(EngineNotReady):
            await engine.generate(Ask())
        with pytest.raises(UnknownAdapter):
            await engine.generate(Ask(adapter="b"))
        await engine.load_adapter("a", 2, tensors)
        assert len(await engine.generate(Ask())) == 6

    asyncio.run(story())


@pytest.mark.skipif(importlib.util.find_spec("torch_memory_saver") is None, reason="needs torch_memory_saver")
def test_under_the_real_saver_bytes_go_and_come_by_tag_and_the_tokens_are_the_same() -> None:
    """On the stand-in device, where each tensor takes granules of its own."""
    import colocert
    import colocert_reference
    from colocert.device import Machine, start
    from colocert.device.hook import GRANULE

    sources = os.pathsep.join(str(Path(p.__file__ or "").parents[1]) for p in (colocert, colocert_reference))
    env = {"PYTHONPATH": sources, "PYTHONWARNINGS": "ignore"}
    child = start(f"{__file__}:under_the_saver", machine=Machine(), env=env, deadline=240)
    facts = child.wait().expect("ok")
    awake, no_cache, nothing, weights, again = facts["free"]
    assert facts["tokens"] == [facts["expected"]] * 2
    assert (no_cache - awake) // GRANULE >= facts["caches"]
    assert (nothing - no_cache) // GRANULE >= facts["weights"]
    assert (weights, again) == (no_cache, awake)
