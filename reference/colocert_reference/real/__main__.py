"""One hand-off of the reference trainer, a line a lifecycle call: `python -m colocert_reference.real --device host`.

Knows the order of a gpu-peak iteration, from the trainer's side. Does not know an engine. The trainer runs in a
child of the kit's launcher, which puts the saver's preload library in place.
"""

from __future__ import annotations

import argparse
from typing import Any

CALLS = ("train", "offload_grad_buffer", "sleep", "update_weights", "wake_up", "train", "close")
MIB = 1 << 20


def lines(stage: Any) -> list[str]:
    """What the calls did to device and host bytes."""
    from colocert_reference.real.trainer import RealTrainer

    trainer = RealTrainer()
    managed = trainer.memory.managed

    def line(call: str) -> str:
        return f"{call:20} device free {managed.free_bytes() // MIB:6} MiB   host {managed.host_bytes() / MIB:8.2f} MiB"

    told = [line("(built)")]
    for call in CALLS:
        getattr(trainer, call)()
        told.append(line(call))
    return [*told, f"losses {' '.join(f'{loss:.4f}' for loss in trainer.work.losses)}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m colocert_reference.real", description=__doc__)
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    device = parser.parse_args().device
    from colocert_reference.real.host_memory import in_child

    print("\n".join(in_child("colocert_reference.real.__main__:lines", device)))


if __name__ == "__main__":
    main()
