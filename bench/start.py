"""What starting costs: importing the kit and running its commands, beside importing what frameworks' own tests import.

Whole processes, alternating; medians of the rounds. What is not installed is left out, by name.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import time
from functools import partial

from _rows import Bench, alternate

ROUNDS = 5
REFERENCE = "colocert_reference.colocert_impl"
EMPTY = tempfile.mkdtemp(prefix="colocert-bench-")
PYTHON = (sys.executable, "-X", "frozen_modules=on")
CERTIFY = (*PYTHON, "-m", "colocert.cli", "certify")
LIFECYCLE = ("--profile=lifecycle", "--depth=1", "--faults=none")
SMALL = ("--depth", "1", "--faults", "none")
COMMANDS = {
    "python alone": (*PYTHON, "-c", "pass"),
    "import pytest": (*PYTHON, "-c", "import pytest"),
    "import colocert": (*PYTHON, "-c", "import colocert"),
    "colocert rules": (*PYTHON, "-m", "colocert.cli", "rules"),
    "pytest --impl, nothing collected": (*PYTHON, "-m", "pytest", "-q", "--impl", REFERENCE, *LIFECYCLE, EMPTY),
    "certify, lifecycle, depth 1": (*CERTIFY, REFERENCE, "--profile", "lifecycle", *SMALL),
    "certify, hand-off": (*CERTIFY, REFERENCE, "--profile", "handoff", *SMALL),
    "certify, sync-payload, with torch": (*CERTIFY, REFERENCE, "--profile", "sync-payload", *SMALL),
    "import torch": (*PYTHON, "-c", "import torch"),
    "import ray": (*PYTHON, "-c", "import ray"),
    "import transformers": (*PYTHON, "-c", "import transformers"),
    "import megatron.core": (*PYTHON, "-c", "import megatron.core"),
}
EXPECTED = {
    "pytest --impl, nothing collected": 10,
    "certify, lifecycle, depth 1": 10,
    "certify, hand-off": 10,
    "certify, sync-payload, with torch": 10,
}
"""Exit codes other than 0: a narrowed run is incomplete."""

TARGETS = {
    "pytest --impl, nothing collected": 1.0,
    "colocert rules": 1.0,
    "certify, lifecycle, depth 1": 1.0,
    "certify, sync-payload, with torch": 3.0,
}
NEEDS = {"certify, sync-payload, with torch": "torch"}


def seconds(name: str) -> float:
    start = time.perf_counter()
    done = subprocess.run(COMMANDS[name], capture_output=True, check=False)
    took = time.perf_counter() - start
    assert done.returncode == EXPECTED.get(name, 0), (name, done.stdout[-500:], done.stderr[-500:])
    return took


def main() -> None:
    bench = Bench.started(__file__, __doc__)
    names = []
    for name in COMMANDS:
        module = NEEDS.get(name) or name.removeprefix("import ").partition(".")[0]
        if (name in NEEDS or name.startswith("import ")) and importlib.util.find_spec(module) is None:
            print(f"without {name}: {module} is not installed")
        elif not (bench.quick and name.startswith("import ")):
            names.append(name)
    found = alternate({name: partial(seconds, name) for name in names}, bench.rounds(ROUNDS))
    for name in names:
        bench.alone(name, "s", found[name], at_most=TARGETS.get(name))
    bench.finish()


if __name__ == "__main__":
    main()
