"""Writes what the pages generate: the pictures of `docs/figures/` and the parts between marks of two pages.

    python tests/docs/generate.py

Knows which scenario a picture shows and what a table asks. Does not know how a hand-off goes: the reference does it, on
the rig, and what is shown is what was recorded.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / name) for name in ("conformance", "reference", "fixtures")]

from colocert.record.handoff import run_handoff  # noqa: E402
from colocert.record.scenarios import Scenario  # noqa: E402
from colocert.report.bytes_over_time import bytes_over_time  # noqa: E402
from colocert.report.links import report  # noqa: E402
from colocert.report.timeline_svg import timeline  # noqa: E402
from colocert.rig.contract import Claims  # noqa: E402
from colocert.rules.catalogue import catalogue  # noqa: E402
from colocert.trace import AnyEvent  # noqa: E402
from colocert.trace import events as ev  # noqa: E402
from colocert_reference.colocert_impl import implementation  # noqa: E402
from colocert_reference.engine import WEIGHTS, Engine, EngineSettings  # noqa: E402
from colocert_reference.sync import Adapter, PayloadSync  # noqa: E402

FIGURES = ROOT / "docs" / "figures"
WIDTH = 900


def handoff(
    peak: str, *, lora: bool = True, steps: tuple[str, ...] = ("run 1", "close"), **more: Any
) -> list[AnyEvent]:
    """What the suite records of the reference's loop in this configuration."""
    config = {"lora": lora, "peak_device": peak, "ranks": 1, **more}
    scenario = Scenario(f"{peak}-{'lora' if lora else 'full'}", config, steps, profile="handoff")
    events: list[AnyEvent] = []
    run_handoff(implementation, Claims.of(implementation.claims), scenario, events.append)
    return events


# ---- pictures


def windows(events: list[AnyEvent]) -> dict[str, tuple[int, int]]:
    """The first hand-off of each kind, as places in the trace: around the one step of training."""
    answered = _first(events, ev.RequestEnd, 0)
    begun = _first(events, ev.CallBegin, answered, method="train")
    ended = _first(events, ev.CallEnd, begun, method="train")
    return {"rollout-to-train": (answered, ended), "train-to-rollout": (begun, _first(events, ev.EngineAdmit, ended))}


def _first(events: list[AnyEvent], kind: type, since: int, **facts: str) -> int:
    """Its place, the first event being 1."""
    for at, event in enumerate(events, 1):
        if at > since and isinstance(event, kind) and all(getattr(event, k) == v for k, v in facts.items()):
            return at
    raise LookupError(f"{kind.__name__} {facts} must come after event {since} (got none)")


def figures() -> dict[str, str]:
    """Name to picture."""
    made = {}
    for peak in ("gpu", "cpu"):
        events = handoff(peak)
        series = bytes_over_time(events)
        for name, window in windows(events).items():
            title = f"{peak}-peak, {name.replace('-to-', ' → ')}"
            made[f"{peak}-{name}.svg"] = timeline(series, width=WIDTH, window=window, title=title, alone=True)
    return made


# ---- tables


def sent(events: Iterable[AnyEvent], base: str) -> list[str]:
    """What each sync sent, in order; `base` is what the base's parameters are called here."""
    syncs: list[list[str]] = []
    for event in events:
        if isinstance(event, ev.CallBegin) and event.method == "update_weights":
            syncs.append([])
        elif isinstance(event, ev.Send):
            syncs[-1].append(base if event.kind == "base" else event.kind)
    return [", then ".join(sync) for sync in syncs]


def by_mode() -> str:
    """What the syncs of a run send: by peak mode, by what a release of the engine's weights keeps, with LoRA or not."""
    lines = [
        "| peak device | trains | the engine's weights between rollouts | first sync | each later one |",
        "|---|---|---|---|---|",
    ]
    kept = {
        "stay on the device": {"engine_releases": frozenset({"kv_cache", "cuda_graph"})},
        "released, with a mirror": {"engine_mirror": True},
        "released, nothing kept": {"engine_mirror": False},
    }
    for peak, (lora, what), (how, config) in product(
        ("gpu", "cpu"), ((True, "adapter"), (False, "all parameters")), kept.items()
    ):
        events = handoff(peak, lora=lora, steps=("run 3", "close"), **config)
        first, *later = sent(events, "base" if lora else "all of it")
        assert later
        (rest,) = set(later)
        lines.append(f"| {peak} | {what} | {how} | {first} | {rest} |")
    return "\n".join(lines)


class World:
    """The reference's engine and weight sync, with no tensors behind them: who was given what. `breaks`: what fails."""

    def __init__(self, *, mirror: bool = True, valid: bool = True) -> None:
        self.sends, self.breaks = list[str](), ""
        ports = SimpleNamespace(
            pause=lambda tag: None, resume=lambda tag: None, write_base=self.write_base, copied=self.copied
        )
        settings = EngineSettings(tags=frozenset({WEIGHTS}), lora=True, mirror=mirror, base_requests=False)
        self.engine = Engine(ports, settings)  # type: ignore[arg-type]
        self.engine.base_valid = valid
        tensors = {"a": None, "b": None}
        source = SimpleNamespace(base=lambda: tensors, adapter=lambda name: None, outside=tuple)
        layout = SimpleNamespace(
            base=lambda base: iter(base.items()),
            merged=lambda base, adapter: iter(base.items()),
            adapter=lambda adapter: tensors,
        )
        self.sync = PayloadSync(source, self, layout)  # type: ignore[arg-type]

    async def write_base(self, source: Any) -> None:
        self.fail("base")

    async def copied(self, source: Any) -> Any:
        self.fail("adapter")
        return source

    def fail(self, what: str) -> None:
        if self.breaks == what:
            raise ConnectionError(f"the transport of the {what} broke")

    def base_valid(self) -> bool:
        return self.engine.base_valid

    def load_base(self, tensors: Iterable[tuple[str, Any]]) -> list[str]:
        names = [name for name, _ in tensors]
        self.sends.append("base")
        asyncio.run(self.engine.update_base(0, names))
        return names

    def load_adapter(self, name: str, tensors: dict[str, Any], adapter: Adapter, version: int) -> list[str]:
        self.sends.append("adapter")
        asyncio.run(self.engine.load_adapter(name, version, tensors))
        return list(tensors)

    def withdraw(self, name: str) -> None:
        self.engine.adapters.pop(name, None)

    def turn(self) -> None:
        """The engine's weights leave the device and come back."""
        asyncio.run(self.engine.release([WEIGHTS]))
        asyncio.run(self.engine.resume([WEIGHTS]))

    def calls(self) -> dict[str, Callable[[], None]]:
        """The three kinds of sync."""
        sync = self.sync
        return {
            "adapter-only": lambda: sync.sync_adapter("x"),
            "merged": lambda: sync.sync_merged("x"),
            "full": sync.sync_full,
        }

    def failed(self, kind: str, what: str) -> None:
        """A sync of this kind whose transport of `what` breaks."""
        self.breaks = what
        try:
            self.calls()[kind]()
        except ConnectionError:
            self.breaks = ""
            return
        raise AssertionError("the sync must raise what the engine raised")


def since_last() -> str:
    """What the next sync sends, by what happened since the one before."""
    happened: dict[str, tuple[dict[str, bool], Callable[[World], None]]] = {
        "nothing": ({}, lambda world: None),
        "the engine released its weights and kept a mirror": ({}, World.turn),
        "the engine released its weights and kept nothing": ({"mirror": False}, World.turn),
        "another engine took its place, or one was started for a sync to fill": ({"valid": False}, lambda world: None),
        "an update of the base broke off": ({}, lambda world: world.failed("full", "base")),
        "the load of an adapter broke off": ({}, lambda world: world.failed("adapter-only", "adapter")),
    }
    lines = ["| since the last sync | adapter-only | merged | full |", "|---|---|---|---|"]
    for what, (start, happen) in happened.items():
        cells = []
        for kind in ("adapter-only", "merged", "full"):
            world = World(**start)
            happen(world)
            world.sends.clear()
            world.calls()[kind]()
            cells.append(", then ".join(world.sends) if kind == "adapter-only" else "all of it")
            assert kind == "adapter-only" or world.sends == ["base"]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def reports(*ids: str) -> str:
    """The rules of a class, and the public reports of its faults."""
    rules = [catalogue()[ident] for ident in ids if ident in catalogue()]
    links = ", ".join(f"[{rule.id}](spec.md#{rule.id.lower()})" for rule in rules)
    seen = dict.fromkeys(text for rule in rules for text in rule.seen)
    told = [report(text) for text in seen]
    short = {r.url: r.text.split()[0].rpartition("/")[2] for r in told if r.url}
    public = sorted((f"[{text}]({url})" for url, text in short.items()), key=str.lower)
    return f"Rules: {links}.\n\nReported: {', '.join(public)}." if public else f"Rules: {links}."


TABLES = {"base-by-mode": by_mode, "base-since-last": since_last, "reports": reports}
MADE = re.compile(
    r"(?P<open><!-- generated by tests/docs/generate\.py: (?P<what>[^>]+) -->\n).*?(?P<end><!-- end -->)", re.S
)
PAGES = (ROOT / "docs" / "answers.md", ROOT / "docs" / "what-goes-wrong.md")


def with_tables(page: str) -> str:
    """The page with each generated part made anew."""

    def made(match: re.Match[str]) -> str:
        name, *arguments = match["what"].split()
        return f"{match['open']}\n{TABLES[name](*arguments)}\n\n{match['end']}"

    return MADE.sub(made, page)


def write() -> Iterator[Path]:
    """Writes everything; yields the files."""
    FIGURES.mkdir(exist_ok=True)
    for name, picture in figures().items():
        (FIGURES / name).write_text(picture, encoding="utf-8")
        yield FIGURES / name
    for path in PAGES:
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
        yield path


if __name__ == "__main__":
    for path in write():
        print(f"wrote {path.relative_to(ROOT)}")
