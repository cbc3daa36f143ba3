"""What starting costs: importing the kit and running its commands, beside importing what frameworks' own tests import.

Whole processes, alternating; medians of the rounds, after one that compiles what is not compiled yet, as installing a
package does. What is not installed is left out, by name.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial

from _rows import Bench, alternate

ROUNDS = 5
REFERENCE = "colocert_reference.colocert_impl"
EMPTY = tempfile.mkdtemp(prefix="colocert-bench-")
atexit.register(shutil.rmtree, EMPTY, ignore_errors=True)
EVIDENCE = f"{EMPTY}/evidence"
PYTHON = (sys.executable, "-X", "frozen_modules=on")
CERTIFY = (*PYTHON, "-m", "colocert.cli", "certify")
LIFECYCLE = ("--profile=lifecycle", "--depth=1", "--faults=none")
SMALL = ("--depth", "1", "--faults", "none")
COMPILED = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
COMMANDS = {
    "python alone": (*PYTHON, "-c", "pass"),
    "import pytest": (*PYTHON, "-c", "import pytest"),
    "import colocert": (*PYTHON, "-c", "import colocert"),
    "colocert rules": (*PYTHON, "-m", "colocert.cli", "rules"),
    "pytest --impl, recorded, nothing collected": (
        *PYTHON,
        "-m",
        "pytest",
        "-q",
        "--impl",
        REFERENCE,
        *LIFECYCLE,
        EMPTY,
    ),
    "certify, lifecycle, depth 1": (*CERTIFY, REFERENCE, "--profile", "lifecycle", *SMALL, "--evidence", EVIDENCE),
    "certify, hand-off": (*CERTIFY, REFERENCE, "--profile", "handoff", *SMALL),
    "certify, sync-payload, with torch": (*CERTIFY, REFERENCE, "--profile", "sync-payload", *SMALL),
    "import torch": (*PYTHON, "-c", "import torch"),
    "import ray": (*PYTHON, "-c", "import ray"),
    "import transformers": (*PYTHON, "-c", "import transformers"),
    "import megatron.core": (*PYTHON, "-c", "import megatron.core"),
}
EXPECTED = {
    "pytest --impl, recorded, nothing collected": 10,
    "certify, lifecycle, depth 1": 10,
    "certify, hand-off": 10,
    "certify, sync-payload, with torch": 10,
}
"""Exit codes other than 0: a narrowed run is incomplete."""

TARGETS = {
    "colocert rules": 1.0,
    "certify, lifecycle, depth 1": 1.0,
    "certify, sync-payload, with torch": 3.0,
}
CHECKS = "certify, recorded traces of a lifecycle"
"""What presents the recorded traces, check by check, and records nothing but its controls."""

NEEDS = {"certify, sync-payload, with torch": "torch"}


def ended(name: str, command: tuple[str, ...], code: int) -> tuple[float, str]:
    """The seconds that a command took, and what it said."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=COMPILED)
    took = time.perf_counter() - start
    assert done.returncode == code, (name, done.stdout[-500:], done.stderr[-500:])
    return took, done.stdout


def seconds(name: str) -> float:
    return ended(name, COMMANDS[name], EXPECTED.get(name, 0))[0]


def main() -> None:
    bench = Bench.started(__file__, __doc__)
    names = []
    for name in COMMANDS:
        module = NEEDS.get(name) or name.removeprefix("import ").partition(".")[0]
        if (name in NEEDS or name.startswith("import ")) and importlib.util.find_spec(module) is None:
            print(f"without {name}: {module} is not installed")
        elif not (bench.quick and name.startswith("import ")):
            names.append(name)
    for name in names:
        seconds(name)
    found = alternate({name: partial(seconds, name) for name in names}, bench.rounds(ROUNDS))
    for name in names:
        bench.alone(name, "s", found[name], at_most=TARGETS.get(name))
    each = []
    for _ in range(bench.rounds(ROUNDS)):
        took, said = ended(CHECKS, (*CERTIFY, f"trace:{EVIDENCE}", "--profile", "lifecycle"), 10)
        each.append(took * 1e3 / int(re.search(r"(\d+) passed", said)[1]))  # type: ignore[index]
    bench.alone("a check of a recorded trace, with the start", "ms", each, at_most=5)
    bench.finish()


if __name__ == "__main__":
    main()
