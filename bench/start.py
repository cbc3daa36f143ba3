"""What starting costs: importing the kit and running its commands, beside importing what frameworks' own tests import.

Whole processes, alternating; medians of the rounds. What is not installed is left out, by name.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import time

ROUNDS = 5
PYTHON = (sys.executable, "-X", "frozen_modules=on")
COMMANDS = {
    "python alone": (*PYTHON, "-c", "pass"),
    "import pytest": (*PYTHON, "-c", "import pytest"),
    "import colocert": (*PYTHON, "-c", "import colocert"),
    "colocert rules": (*PYTHON, "-m", "colocert.cli", "rules"),
    "certify, lifecycle, depth 1": (
        *(*PYTHON, "-m", "colocert.cli", "certify", "colocert_reference.colocert_impl"),
        *("--profile", "lifecycle", "--depth", "1", "--faults", "none"),
    ),
    "import torch": (*PYTHON, "-c", "import torch"),
    "import ray": (*PYTHON, "-c", "import ray"),
    "import transformers": (*PYTHON, "-c", "import transformers"),
    "import megatron.core": (*PYTHON, "-c", "import megatron.core"),
}
EXPECTED = {"certify, lifecycle, depth 1": 10}
"""Exit codes other than 0: a narrowed run is incomplete."""


def seconds(name: str) -> float:
    start = time.perf_counter()
    done = subprocess.run(COMMANDS[name], capture_output=True, check=False)
    took = time.perf_counter() - start
    assert done.returncode == EXPECTED.get(name, 0), (name, done.stdout[-500:], done.stderr[-500:])
    return took


def main() -> None:
    names = []
    for name in COMMANDS:
        module = name.removeprefix("import ").partition(".")[0]
        if name.startswith("import ") and importlib.util.find_spec(module) is None:
            print(f"{name}: not installed")
        else:
            names.append(name)
    rounds = [{name: seconds(name) for name in names} for _ in range(ROUNDS)]
    print(f"{'command':<30}{'s':>8}{'spread':>16}")
    for name in names:
        times = [r[name] for r in rounds]
        print(f"{name:<30}{statistics.median(times):>8.2f}{f'{min(times):.2f} … {max(times):.2f}':>16}")


if __name__ == "__main__":
    main()
