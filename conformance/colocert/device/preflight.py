"""Is this machine what the rows need? One pure function a check, over facts; the answer names what must hold.

    inspect(kind, world)     gathers and judges
    judge(facts, kind, world)   judges facts from anywhere: what the tests do for machines that are not here

A check that cannot tell fails: a row on a machine that nobody looked at would prove nothing. The kind `host` is the
stand-in and needs no GPU; `any` takes every kind and asks for no name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colocert.device import gather
from colocert.device.facts import Card, Facts
from colocert.device.kinds import ANY, GIB, HOST, KINDS

DRIVER = 580
NOT_READY = 802
SAVER_VERSION = "0.0.10"
VARIANT = "cu13"
CUDA_MAJOR = "13"
QUIET = 1 * GIB
PROBE = 64 << 20


@dataclass(frozen=True)
class Check:
    """One answer. `got` says what was seen, also where it holds."""

    name: str
    ok: bool
    must: str
    got: str
    fix: str = ""

    @property
    def line(self) -> str:
        """The check in one line."""
        return f"{self.name}: {self.must}; got {self.got}" + ("" if self.ok or not self.fix else f". {self.fix}")


@dataclass(frozen=True)
class Report:
    """All answers about one machine."""

    kind: str
    world: int
    facts: Facts
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.ok)

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def line(self) -> str:
        """The verdict in one line: the first check that failed, and the names of the others."""
        wanted = "the stand-in" if self.kind == HOST else f"{self.world} x {'a GPU' if self.kind == ANY else self.kind}"
        if self.ok:
            return f"{wanted}: all {len(self.checks)} checks hold"
        first, *rest = self.failed
        others = f" (also failed: {', '.join(check.name for check in rest)})" if rest else ""
        return " ".join(f"{wanted} must be here: {first.line}{others}".split())

    def to_json(self) -> dict[str, Any]:
        """What goes into a result file."""
        return {
            "kind": self.kind,
            "world": self.world,
            "ok": self.ok,
            "line": self.line,
            "checks": [{**dataclasses.asdict(check), "line": check.line} for check in self.checks],
            "facts": dataclasses.asdict(self.facts),
        }


def inspect(kind: str, world: int) -> Report:
    """Looks at this machine. On a GPU that takes some ten seconds, and up to two minutes for one that is starting."""
    return judge(gather.host() if kind == HOST else gather.cuda(world), kind, world)


def judge(facts: Facts, kind: str, world: int) -> Report:
    """Every check of that kind."""
    checks = ON_HOST if kind == HOST else ON_GPU
    return Report(kind, world, facts, tuple(check(facts, kind, world) for check in checks))


def driver(facts: Facts, kind: str, world: int) -> Check:
    must = f"the NVIDIA driver must answer, and be {DRIVER} or newer"
    seen = facts.driver
    if seen is None or seen.status is None:
        said = seen.said if seen else "nobody asked"
        return Check("driver", False, must, said, "Is this a machine with a GPU?")
    if seen.status:
        fix = "The fabric manager is not up." if seen.status == NOT_READY else ""
        return Check("driver", False, must, f"cuInit = {seen.status} {seen.said} after {seen.waited:.0f} s", fix)
    major = re.match(r"\d+", seen.version)
    ok = major is not None and int(major[0]) >= DRIVER
    got = f"driver {seen.version}" if major else f"no version, from NVML ({facts.nvml}) or /proc/driver/nvidia/version"
    return Check("driver", ok, must, got, "Update the driver.")


def count(facts: Facts, kind: str, world: int) -> Check:
    names = sorted({card.name for card in facts.cards})
    ok = len(facts.cards) >= world and len(names) == 1
    got = f"{len(facts.cards)} ({', '.join(names) or facts.torch_said or 'none'})"
    must = f"{world} or more devices must be visible, all of one name"
    return Check("count", ok, must, got, "Look at CUDA_VISIBLE_DEVICES.")


def the_kind(facts: Facts, kind: str, world: int) -> Check:
    if kind == ANY:
        got = ", ".join(sorted({card.name for card in facts.cards})) or "none"
        return Check("kind", bool(facts.cards), "any GPU will do", got)
    wanted = KINDS[kind]
    low, high = wanted.memory
    must = (
        f"every device must be named {wanted.pattern}, have capability {wanted.capability}, {low} to {high} GiB and a "
        f"host of {wanted.arch}"
    )
    wrong = [
        card
        for card in facts.cards
        if not (
            re.fullmatch(wanted.pattern, card.name)
            and card.capability == wanted.capability
            and wanted.holds(card.memory)
        )
    ]
    shown = wrong[0] if wrong else facts.cards[0] if facts.cards else None
    got = f"{_card(shown)}, host {facts.host.arch}" if shown else "none"
    ok = bool(facts.cards) and not wrong and facts.host.arch == wanted.arch
    return Check("kind", ok, must, got, "The runner is labelled for another kind.")


def whole(facts: Facts, kind: str, world: int) -> Check:
    cards = facts.cards[:world]
    ok = bool(cards) and all(card.mig is False and " MIG " not in card.name for card in cards)
    states = {True: "MIG on", False: "MIG off", None: "unknown"}
    got = ", ".join(sorted({states[card.mig] for card in cards})) or "no device"
    return Check("whole", ok, "MIG must be off on every device", _nvml(got, facts), "Rows count the bytes of a card.")


def quiet(facts: Facts, kind: str, world: int) -> Check:
    must = f"less than {QUIET >> 20} MiB may be in use on a device, and by no other process"
    cards = facts.cards[:world]
    ok = bool(cards) and all(card.used is not None and card.used < QUIET and not card.foreign for card in cards)
    used = ", ".join("unknown" if card.used is None else f"{card.used >> 20} MiB" for card in cards) or "no device"
    others = sum(card.foreign or 0 for card in cards)
    hidden = any(card.foreign is None for card in cards)
    got = f"{used} in use, {'processes hidden' if hidden else f'{others} other processes'}"
    return Check("quiet", ok, must, _nvml(got, facts), "End what else runs there; one job a GPU.")


def torch(facts: Facts, kind: str, world: int) -> Check:
    must = f"torch must be built for CUDA {CUDA_MAJOR}, hold code that runs here, and multiply integers exactly"
    fix = "Install the wheel of tox.ini for this kind (cu130)."
    seen = facts.torch
    if seen is None:
        return Check("torch", False, must, facts.torch_said or "no torch", fix)
    lacking = sorted({f"sm_{a}{b}" for a, b in (c.capability for c in facts.cards) if not runs(seen.archs, (a, b))})
    got = f"torch {seen.version} for CUDA {seen.cuda or 'none'}, code for {' '.join(seen.archs) or 'nothing'}"
    got += f", none that runs on {' '.join(lacking)}" if lacking else ""
    got += f", product: {seen.matmul}" if seen.matmul else ""
    ok = seen.cuda.split(".")[0] == CUDA_MAJOR and not lacking and not seen.matmul and bool(facts.cards)
    return Check("torch", ok, must, got, fix)


def allocator(facts: Facts, kind: str, world: int) -> Check:
    """The saver looks for one spelling in one of the two variables, and frees nothing with any other."""
    bad = {name: value for name, value in facts.host.allocator.items() if "expandable_segments" in value.lower()}
    got = ", ".join(f"{name}={value!r}" for name, value in (bad or facts.host.allocator).items()) or "neither is set"
    must = "no allocator variable may mention expandable_segments"
    return Check("allocator", not bad, must, got, f"Unset {' and '.join(bad)}." if bad else "")


def saver(facts: Facts, kind: str, world: int) -> Check:
    must = (
        f"torch_memory_saver {SAVER_VERSION} ({VARIANT}) must free 64 MiB, and no more than 66, when it pauses as many"
    )
    seen = facts.saver
    if seen is None or not seen.version:
        return Check("saver", False, must, "no torch_memory_saver", f"pip install torch_memory_saver=={SAVER_VERSION}")
    got = f"{seen.version} {seen.library}".strip()
    got += f", freed {', '.join(f'{n >> 20} MiB' for n in seen.freed)}" if seen.freed else ""
    got += f", {seen.said}" if seen.said else ""
    devices = 1 if kind == HOST else world
    ok = (
        seen.version == SAVER_VERSION
        and VARIANT in seen.library
        and not seen.said
        and len(seen.freed) == devices
        and all(PROBE <= n <= PROBE + (2 << 20) for n in seen.freed)
    )
    return Check("saver", ok, must, got, "See docs/gpu.md, the hook.")


def host(facts: Facts, kind: str, world: int) -> Check:
    """Page size and the coherent mode are recorded: tolerances of host rows follow from them.

    A driver need not count what it pins against the limit of the process; where a child pinned more, it does not.
    """
    seen, need = facts.host, gather.PINNED_NEED
    pinned = facts.saver.pinned if facts.saver else 0
    must = f"{need >> 20} MiB must be lockable, or the driver must pin past the limit"
    limit = "unlimited" if seen.memlock < 0 else f"{seen.memlock >> 10} KiB"
    got = f"memlock {limit}, pages of {seen.page_size >> 10} KiB"
    if seen.arch == "aarch64":
        got += f", coherent mode {seen.coherent or 'unknown'}, {seen.hbm_nodes} NUMA nodes of device memory"
    got += f", {pinned >> 20} MiB pinned" if pinned else ""
    ok = seen.memlock < 0 or seen.memlock >= need or pinned > seen.memlock
    return Check("host", ok, must, got, "Raise `ulimit -l`; for a container `--ulimit memlock=-1`.")


def standin_host(facts: Facts, kind: str, world: int) -> Check:
    """The stand-in pins what it may and takes no harm from less, so the limit is only recorded."""
    return dataclasses.replace(host(facts, kind, world), ok=True, must="recorded on the stand-in", fix="")


def runs(archs: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether one of torch's targets is machine code that runs on this capability.

    `sm_100` runs on 10.0 and on later minors of 10, `sm_100f` likewise, `sm_100a` on 10.0 alone. PTX (`compute_`) is
    not machine code: compiling it at first use needs a driver that knows the device.
    """
    major, minor = capability
    for arch in archs:
        named = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
        if named and int(named[1]) == major:
            built = int(named[2])
            if built == minor or (built < minor and named[3] != "a"):
                return True
    return False


def _card(card: Card) -> str:
    return f"{card.name}, capability {card.capability}, {card.memory / GIB:.2f} GiB"


def _nvml(got: str, facts: Facts) -> str:
    return f"{got} (NVML: {facts.nvml})" if facts.nvml else got


Rule = Callable[[Facts, str, int], Check]
ON_GPU: tuple[Rule, ...] = (driver, count, the_kind, whole, quiet, torch, allocator, saver, host)
ON_HOST: tuple[Rule, ...] = (allocator, saver, standin_host)
