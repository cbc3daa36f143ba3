"""Driving a frozen-weight offload: processes that offload and backload, and what the suite does between the calls.

Knows how a step is taken. Does not know rules. A step is for the process that was started last, or for process N
with `N: ` before it.

    start [rank=N] [values=N] [disk=full:BYTES|read-only|limit:BYTES] [files=few]    a new process, with a module
    offload, backload            a call of the implementation's object
    all offload                  the same in every living process at the same time
    load N, swap N, train N      another checkpoint in place or in new memory; a training step
    kill                         SIGKILL between two calls
    kill offload                 SIGKILL while `offload` is writing
    end                          the process ends by itself
    foreign                      files of somebody else appear in the folder
    keep files, plant files      what lies in the folder now is put there again later, after its process is gone
    alter files                  other content in the files that were left, with the same names, sizes and times
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from colocert.extras import has_torch
from colocert.record.drive import NotRun, ProcessGone
from colocert.record.frozen_disk import DiskNotHad
from colocert.record.frozen_folder import Folder
from colocert.record.frozen_process import ACTOR, FactoryRaised, Rank, RankProcess
from colocert.record.scenarios import Scenario
from colocert.rig.contract import Claims
from colocert.rig.frozen_rig import FrozenConfig
from colocert.trace.events import (
    AnyEvent,
    CallRaise,
    Change,
    ClaimsStated,
    Config,
    Event,
    Fault,
    ProcessEnded,
)

SLICE = 0.0003
"""Seconds that a process runs between two looks at what it has written, while the suite waits to kill it."""

BEGUN = 1 << 20
"""Bytes on file from which on a process counts as writing: more than a note about the file, less than a tensor."""


def frozen_config(scenario: Scenario) -> FrozenConfig:
    """The configuration that the implementation sees."""
    return FrozenConfig(**{"regions": {}, **scenario.config})


class Stage:
    """The processes of one scenario, by number, and their folder."""

    def __init__(
        self, implementation: Any, claims: Claims, scenario: Scenario, sink: Callable[[AnyEvent], None]
    ) -> None:
        self._implementation, self._claims, self._config = implementation, claims, frozen_config(scenario)
        self._sink, self._seq = sink, 0
        self._temp = tempfile.TemporaryDirectory(prefix="colocert-frozen-")
        root = Path(self._temp.name)
        (root / "frozen").mkdir()
        self.folder = Folder(root / "frozen", root / "kept", self._emit)
        self.processes: list[RankProcess] = []
        self._told: set[int] = set()
        self._faulted: set[int] = set()
        self._found: list[str] = []
        self._emit(Config(self._config.facts()))
        self._emit(ClaimsStated(claims.facts()))

    def _emit(self, event: Event, number: int = 0) -> None:
        self._seq += 1
        event.seq, event.rank = self._seq, number
        self._sink(event)  # type: ignore[arg-type]

    def lacks(self, what: str) -> NoReturn:
        """Ends the scenario: this machine has not what it needs. Raises `NotRun`."""
        self._emit(Change("not-run", {"reason": what}))
        raise NotRun(what)

    # ---- steps

    def take(self, step: str) -> None:
        """One step. Raises what `RankProcess` raises, and `ProcessGone` for a death that nothing explains."""
        number, colon, rest = step.partition(": ")
        at = int(number) if colon else len(self.processes) - 1
        word, *more = (rest if colon else step).split()
        if word == "start":
            self._start(dict(part.split("=") for part in more))
        elif word in ("foreign", "keep", "plant", "alter"):
            self._change(word)
        elif word == "all":
            living = [n for n, p in enumerate(self.processes) if not p.ended]
            for n in living:
                self.processes[n].send(more[0])
            for n in living:
                self.processes[n].wait(more[0])
            self.folder.look("all")
            for n in living:
                self._after(n)
        elif not self.processes[at].ended:
            if word == "kill":
                self._kill(at, writing=bool(more))
            else:
                self.processes[at].send(" ".join([word, *more]))
                self._wait(at, word)

    def _start(self, facts: dict[str, str]) -> None:
        number = len(self.processes)
        alive = any(not p.ended for p in self.processes)
        told = {
            "rank": int(facts.get("rank", "0")),
            "values": int(facts.get("values", "1")),
            "disk": facts.get("disk", ""),
            "files": facts.get("files", ""),
            "found": sorted({*self._found, *(["alive"] if alive else [])}),
        }

        def build(out: int) -> Rank:
            return Rank(self._implementation, self._claims, self._config, self.folder.path, told, out)

        if told["disk"]:
            self._faulted.add(number)
        process = RankProcess(lambda event: self._emit(event, number))
        self.processes.append(process)
        try:
            process.start(build)
        except DiskNotHad as error:
            self._told.add(number)
            self.lacks(str(error))
        except FactoryRaised as error:
            if number not in self._faulted:
                raise
            self._emit(CallRaise(ACTOR, "build", 0, "FactoryRaised", str(error)[:300]), number)
        self._after(number)

    def _wait(self, number: int, word: str) -> None:
        self.processes[number].wait(word)
        self._after(number)

    def _kill(self, number: int, *, writing: bool) -> None:
        process = self.processes[number]
        if writing:
            process.send("offload")
            self._until_it_writes(process)
        process.kill()
        during = process.in_call
        self._emit(Fault(point="process", when="killed"), number)
        self._told.add(number)
        self._found.append("killed")
        self._emit(ProcessEnded("killed", during), number)
        self.folder.look(str(number))

    def _until_it_writes(self, process: RankProcess) -> None:
        """Lets the process run in slices until files of its have grown, or it has answered."""
        end = time.monotonic() + 10
        while time.monotonic() < end and not process.readable_answer() and process.stop():
            if _written(process.pid, self.folder.path) >= BEGUN:
                return
            process.go()
            time.sleep(SLICE)

    def _after(self, number: int) -> None:
        """What is to be seen once a process has answered or ended."""
        process = self.processes[number]
        if process.ended and number not in self._told:
            self._told.add(number)
            self._emit(ProcessEnded(process.ended, process.in_call), number)
            if process.ended == "normal":
                self._found.append("ended")
            elif number not in self._faulted:
                raise ProcessGone(f"process {number} ended with {process.ended} in {process.in_call or 'nothing'}")
        self.folder.look(str(number))

    def _change(self, word: str) -> None:
        getattr(self.folder, word)()
        if word != "keep":
            self._found.append({"plant": "planted", "alter": "altered"}.get(word, word))
            self._emit(Change(f"files.{self._found[-1]}"))
            self.folder.look("suite")

    def close(self) -> None:
        """Ends what still lives and removes the folder."""
        for process in self.processes:
            process.kill()
        self._temp.cleanup()


def run_frozen_offload(
    implementation: Any, claims: Claims, scenario: Scenario, sink: Callable[[AnyEvent], None]
) -> None:
    """Takes every step of the scenario; events go to `sink` as processes answer.

    Raises `NotRun` without torch, or without a mount namespace where a step asks for a disk of its own.
    """
    if not hasattr(implementation, "frozen_offload"):
        return
    stage = Stage(implementation, claims, scenario, sink)
    try:
        if not has_torch():
            stage.lacks("torch is not installed")
        import torch  # noqa: F401  (the processes are forked with it)

        for step in scenario.steps:
            stage.take(step)
    finally:
        stage.close()


def _written(pid: int, folder: Path) -> int:
    """Bytes of the files in the folder, and of those without a name that the process has open."""
    total = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    for name in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(name.readlink()).startswith(str(folder)):
                total += name.stat().st_blocks * 512
        except OSError:
            continue
    return total
