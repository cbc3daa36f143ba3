"""What a recording of a real run must see for a code of a rule to be judged on it.

Knows, code by code, the senses that its sentence needs. Does not know how a recording comes to have them.

A recording has saver, trainer, engine, requests, send, issues, driver, sizes and from-start, as far as it was told, and
of a weight sync or a group its calls and what they move. Who writes events of an engine's inside, of requests' adapters
or of a frozen offload says so in a `watch` event, by the same names. Contents, touches, frees, single allocations,
addresses, process groups and injected faults are the doubles' alone: a code that needs one of these is never judged on
a real run. Neither is a rule without an entry here: what the tensors of a sync come to is compared by the suite's rig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colocert.rules.catalogue import Rule

WORDS: Mapping[str, str] = {
    "saver": "a saver",
    "trainer": "a trainer's calls",
    "engine": "an engine's calls",
    "requests": "an engine's generate calls",
    "send": "an engine's update calls",
    "issues": "a driver's handles",
    "driver": "the driver's calls",
    "sizes": "the sizes of regions (nbytes=)",
    "engine-sizes": "a config with engine_sizes and engine_mirror",
    "from-start": "the run from its start (from_start=True)",
    "syncs": "a weight sync's calls",
    "moves": "what the workers of each role move",
    "served": "what an engine's updates made it serve",
    "beliefs": "what is believed of each role",
    "group": "a group's calls",
    "told": "the ranks that a group's error tells of",
    "asked": "what each call asks of an engine",
    "tokens": "the tokens that an engine computes",
    "tensors": "where a frozen module's tensors are and what they hold",
    "memory": "what an offload costs its process",
    "contents": "contents of memory",
    "versions": "the version that a request saw",
    "touches": "reads of released memory",
    "frees": "frees",
    "allocations": "single allocations",
    "groups": "process groups",
    "faults": "injected faults",
    "doubles": "what the suite's doubles see",
    "claims": "claims",
    "lora": "a config with lora",
    "mode": "a config with lora and peak_device",
    "sync-mode": "a config with lora, colocated, strategy and merge_lora",
    "offload": "a config with lora, file_backed and chunk",
    "single-step": "a config without accumulate over 1 and without multi_lora, or contents of memory",
}
"""What is missing, in words."""

_NEEDS: Mapping[str, Mapping[str, str]] = {
    "LC-01": {
        "grads-kept": "saver trainer single-step",
        "default-kept": "saver trainer",
        "grads-after-default": "saver trainer",
        "released-twice": "saver trainer",
    },
    "LC-02": {
        "default-not-resumed": "saver trainer",
        "grads-not-resumed": "saver trainer single-step",
        "grads-before-default": "saver trainer",
        "resumed-twice": "saver trainer",
    },
    "LC-03": {"released-again": "saver trainer single-step", "never-released": "saver trainer single-step"},
    "LC-04": {"saver-call": "saver trainer", "raised": "faults"},
    "LC-05": {"double-release": "saver", "double-resume": "saver", "tagless-after-partial": "saver"},
    "LC-06": {"drift": "contents"},
    "LC-07": {"resumed-while-resident": "saver trainer", "groups-unusable": "groups"},
    "LC-08": {
        "early-release-left": "saver trainer",
        "trained-released": "saver trainer",
        "computed-on-released": "touches",
    },
    "LC-09": {
        "kept": "saver trainer single-step",
        "not-resumed": "saver trainer",
        "lora-step-released": "saver trainer",
    },
    "LC-10": {"no-raise": "saver trainer", "effect-before-raise": "groups"},
    "LC-11": {"gradients-lost": "contents"},
    "LC-12": {"stale-read": "contents", "grads-backed-up": "saver single-step"},
    "LC-13": {"belief-differs": "faults", "still-due": "faults", "moved-twice": "faults"},
    "LC-14": {"stuck": "faults", "moved-twice": "faults"},
    "LC-15": {"free-in-released": "frees", "alloc-in-released": "allocations", "read-in-released": "touches"},
    "LC-16": {"rebuilt-differently": "groups", "not-rebuilt": "groups", "raised-without-group": "groups"},
    "LC-17": {"content-changed": "contents", "address-changed": "allocations"},
    "LC-19": {"params-released-early": "contents", "params-kept": "contents", "unreachable": "faults"},
    "LC-20": {"unknown-tag": "saver from-start"},
    "LC-21": {"no-raise": "saver trainer", "effect-before-raise": "groups"},
    "LC-22": {"released-without-copy": "contents"},
    "HO-01": {
        "weights-before-grads": "saver engine",
        "trainer-before-weights": "saver engine",
        "sync-before-weights": "engine send",
        "caches-before-sync": "trainer engine send",
        "caches-before-trainer": "saver engine",
    },
    "HO-02": {
        "trainer-before-caches": "saver engine",
        "weights-before-trainer": "saver engine",
        "computed-before-weights": "contents",
    },
    "HO-03": {"copies-coexist": "saver engine sizes engine-sizes"},
    "HO-04": {"resident-together": "saver trainer engine send", "more-than-the-sync-reads": "contents"},
    "HO-05": {"weights-out-at-start": "saver engine from-start", "weights-in-at-start": "saver engine from-start"},
    "HO-06": {"before-sync": "trainer engine send", "before-release": "saver engine"},
    "HO-07": {"started-early": "issues"},
    "HO-08": {"not-refused": "saver engine driver", "effect-before-refusal": "allocations", "lora-refused": "faults"},
    "HO-09": {
        "stale-version": "versions",
        "sync-owed": "trainer send driver",
        "half-released": "saver engine driver",
    },
    "HO-10": {"not-recovered": "faults", "left-half-released": "faults", "death-swallowed": "saver driver"},
    "HO-11": {"trainer-resident": "saver requests"},
    "HO-12": {"released-in-flight": "engine requests", "admitted-early": "engine requests"},
    "HO-13": {"transport-kept": "allocations"},
    "HO-15": {"redundant-resume": "engine"},
    "AS-01": {"base-backloaded": "syncs moves send"},
    "AS-02": {"others-resident": "syncs moves send served", "optimizer-resident": "syncs moves send served"},
    "AS-03": {"emptied-storage": "touches", "stale-copy": "contents"},
    "AS-04": {"moved": "syncs moves send"},
    "AS-05": {"first-sync-backloads": "syncs moves send from-start"},
    "AS-06": {"copied-at-finish": "syncs moves send", "belief-differs": "syncs moves beliefs"},
    "AS-09": {
        "not-changed": "contents",
        "changed-twice": "syncs send served",
        "changed-on-failure": "syncs send served",
    },
    "AS-10": {"stale-prefix": "contents"},
    "AS-12": {
        "belief-differs": "syncs moves beliefs",
        "left-on-device": "syncs moves",
        "not-delivered": "faults",
    },
    "AS-16": {"wrong-adapter": "contents", "base-backloaded": "syncs moves send"},
    "AS-18": {"read-released": "touches"},
    "GR-01": {
        "rank-left-out": "group trainer saver from-start",
        "returned-early": "group trainer saver from-start",
        "error-hidden": "group trainer saver told",
        "overdue": "faults",
        "left-behind": "doubles",
    },
    "GR-02": {"ranks-disagree": "group trainer saver"},
    "GR-03": {"joins-in-another-state": "doubles", "base-trusted": "doubles", "old-connection-used": "doubles"},
    "EN-01": {
        "wrong-set": "asked",
        "released-again": "asked",
        "resumed-resident": "asked",
        "untyped-error": "asked",
        "ready-while-released": "doubles",
        "refused-while-ready": "asked from-start",
    },
    "EN-02": {
        "computed-released": "asked tokens",
        "computed-invalid": "asked tokens",
        "computed-after-failure": "faults",
        "untyped-refusal": "asked from-start",
        "neither-refused-nor-held": "asked tokens from-start",
        "hangs": "doubles",
    },
    "EN-03": {"hit-after-flush": "asked tokens", "hit-after-late-flush": "asked tokens"},
    "EN-04": {
        "torn-adapter": "asked tokens",
        "mixed-versions": "asked tokens",
        "not-the-acknowledged": "asked tokens from-start",
        "missing-in-between": "asked from-start",
        "unknown-served": "asked from-start",
        "base-request-served": "asked",
    },
    "FO-01": {
        "left-on-device": "tensors",
        "not-on-file": "tensors memory",
        "written-again": "tensors memory",
    },
    "FO-02": {"trusted-file": "tensors", "bits-changed": "tensors"},
    "FO-03": {"adapter-offloaded": "tensors", "frozen-kept": "tensors"},
    "FO-04": {"not-in-host-memory": "tensors memory", "values-differ": "tensors"},
    "FO-05": {"crashed": "faults", "lost": "faults", "half-written-mapped": "faults"},
    "FO-06": {"leftover-read": "faults", "foreign-touched": "faults"},
    "FO-07": {"files-open": "tensors memory", "file-left": "doubles"},
    "FO-08": {"stale-copy": "tensors"},
    "FO-09": {"beyond-two-chunks": "tensors memory", "second-copy": "tensors memory"},
    "FO-10": {"not-covered": "tensors", "layout-changed": "tensors", "buffer-changed": "tensors"},
    "FO-11": {"bytes-kept": "tensors", "bytes-lost": "tensors"},
    "FO-12": {"anonymous": "tensors memory", "locked": "tensors memory"},
}
"""By rule and code. LC-06 compares calls from equal states, of which live contents are a part."""

RECORDABLE = frozenset(
    {
        "saver",
        "trainer",
        "engine",
        "requests",
        "send",
        "issues",
        "driver",
        "sizes",
        "engine-sizes",
        "from-start",
        "single-step",
        "syncs",
        "moves",
        "served",
        "beliefs",
        "group",
        "told",
        "asked",
        "tokens",
        "tensors",
        "memory",
    }
)
"""What recordings of real runs can have."""

_CONFIG: Mapping[str, tuple[str, ...]] = {
    "lora": ("lora",),
    "mode": ("lora", "peak_device"),
    "sync-mode": ("lora", "colocated", "strategy", "merge_lora"),
    "offload": ("lora", "file_backed", "chunk"),
}
"""What a config has to say."""

_OF_A_PROFILE: Mapping[str, str] = {
    "lifecycle": "lora",
    "handoff": "mode",
    "adapter-sync": "sync-mode",
    "engine": "lora",
    "frozen-offload": "offload",
}

UNCONDITIONAL = frozenset({"LC-05", "LC-20"})
"""Rules that read neither claims nor configuration."""


def lacking(rule: Rule, code: str, seen: frozenset[str], config: Mapping[str, Any], claims: bool) -> tuple[str, ...]:
    """What the recording does not have that this code needs, as words of `WORDS`; none if it can be judged."""
    needs = _NEEDS.get(rule.id, {}).get(code, "doubles").split()
    has = set(seen)
    if rule.id not in UNCONDITIONAL:
        needs.append("claims")
        needs += [kept for kept in (_OF_A_PROFILE.get(rule.profile),) if kept]
    if claims:
        has.add("claims")
    has |= {name for name, facts in _CONFIG.items() if set(facts) <= set(config)}
    if config.get("accumulate", 1) == 1 and not config.get("multi_lora"):
        has.add("single-step")
    return tuple(need for need in needs if need not in has)


def ever_judged(rule: Rule) -> bool:
    """Whether some code of the rule can be judged on some recording of a real run."""
    return any(set(needs.split()) <= RECORDABLE for needs in _NEEDS.get(rule.id, {}).values())
