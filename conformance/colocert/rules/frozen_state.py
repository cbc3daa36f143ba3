"""What the rules of the frozen-offload profile look at: the processes of a scenario after each event.

Knows where each process's tensors are, what they held, and what else the folder has seen. Does not know any rule's
sentence.
"""

from __future__ import annotations

from colocert.rules.fold import RunFold
from colocert.rules.run import RunView
from colocert.trace.events import (
    AnyEvent,
    CallBegin,
    CallEnd,
    CallRaise,
    Change,
    Fault,
    FolderSeen,
    MemorySeen,
    ModuleSeen,
    ProcessEnded,
    TensorsSeen,
)

SEEN = (CallBegin, CallEnd, CallRaise, Change, Fault, FolderSeen, MemorySeen, ModuleSeen, ProcessEnded, TensorsSeen)
MIB = 1 << 20
SLACK = 4 * MIB
"""Bytes by which a measured use of memory may be more than allowed: what an interpreter takes for itself."""

LARGE = 16 * MIB
"""Frozen bytes from which on a use of memory is judged: what it is held against has to stand out."""

PLACE, CONTENT, LAYOUT = 0, 1, 2


class Process:
    """One process. `truth`: by name the content that is right now; `held`: where everything was last seen.

    `off`: what the last offload left off the device; `moved`: what any offload did. `changed`: the base is not that of
    the first offload. `filed`: an offload of this base has returned. `disk`: the disk fault, if it has one. `kept`:
    bytes of anonymous memory that its calls have taken and not given back.
    """

    def __init__(self, event: ModuleSeen) -> None:
        self.kinds: dict[str, str] = {name: facts[0] for name, facts in event.tensors.items()}
        self.layouts: dict[str, str] = {name: facts[1] for name, facts in event.tensors.items()}
        self.nbytes: dict[str, int] = {name: facts[2] for name, facts in event.tensors.items()}
        self.first: dict[str, str] = {name: facts[3] for name, facts in event.tensors.items()}
        self.storage_bytes = event.storage_bytes
        self.found = set(event.found)
        self.truth: dict[str, str] = {}
        self.held: dict[str, list[str]] = {}
        self.memory: MemorySeen | None = None
        self.raised = False
        self.off: set[str] = set()
        self.moved: set[str] = set()
        self.kept = 0
        self.filed = False
        self.changed = False
        self.disk = ""
        self.ended = ""

    def of(self, *kinds: str) -> list[str]:
        """Names of tensors of these kinds that have bytes."""
        return [name for name, kind in self.kinds.items() if kind in kinds and self.nbytes[name]]

    def at(self, name: str) -> str:
        """The tensor's place."""
        return self.held[name][PLACE]

    def on_device(self, names: list[str] | set[str]) -> list[str]:
        return sorted(name for name in names if self.at(name) == "device")

    def wrong(self, names: list[str] | set[str]) -> list[str]:
        """Those that can be read and hold something else than they are to."""
        return sorted(n for n in names if self.held[n][CONTENT] and self.held[n][CONTENT] != self.truth[n])

    def not_back(self, names: list[str] | set[str]) -> list[str]:
        """Those that are not on the device, or hold something else than they are to."""
        return sorted(n for n in names if self.at(n) != "device" or self.held[n][CONTENT] != self.truth[n])

    def distinct_bytes(self, names: list[str] | set[str]) -> int:
        """Bytes of these tensors, tied ones once."""
        return sum(self.nbytes[name] for name in {self.first[name] for name in names})


def shown(names: list[str]) -> str:
    """Tensors for a message."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


class FrozenFold(RunFold):
    """A fold over the state of the processes. A base: it has no rule of its own.

    `offloaded` and `backloaded` are called once a call's outcome is known in whole.
    """

    sees = SEEN

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.processes: dict[int, Process] = {}

    @property
    def lora(self) -> bool:
        return bool(self.view.config.get("lora"))

    @property
    def file_backed(self) -> bool:
        return bool(self.view.config.get("file_backed"))

    @property
    def chunk(self) -> int:
        return int(self.view.config["chunk"])

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, ModuleSeen):
            self.processes[event.rank] = Process(event)
        process = self.processes.get(event.rank)
        if process is not None and not isinstance(event, FolderSeen):
            self._apply(process, event)
        self.happened(event)

    def _apply(self, process: Process, event: AnyEvent) -> None:
        if isinstance(event, (CallEnd, CallRaise)):
            process.raised = isinstance(event, CallRaise)
        elif isinstance(event, MemorySeen):
            process.memory = event
            process.kept += event.extra
        elif isinstance(event, Fault) and event.point == "disk":
            process.disk = event.when
        elif isinstance(event, ProcessEnded):
            process.ended = event.how
        elif isinstance(event, Change) and event.what.startswith("base."):
            process.changed = bool(process.moved)
            process.filed = False
        elif isinstance(event, TensorsSeen):
            self._tensors(process, event)

    def _tensors(self, process: Process, event: TensorsSeen) -> None:
        process.held = event.held
        if event.when in ("built", "changed"):
            process.truth = {name: held[CONTENT] for name, held in event.held.items()}
        elif event.when == "offload":
            mine = process.of("frozen", "fused", "trained")
            process.off = {name for name in mine if process.at(name) != "device"}
            process.moved |= process.off
            self.offloaded(process, event)
            process.filed |= bool(process.off) and not process.raised
        elif event.when == "backload":
            self.backloaded(process, event)

    def offloaded(self, process: Process, event: TensorsSeen) -> None:
        """An offload returned or raised (`process.raised`)."""

    def backloaded(self, process: Process, event: TensorsSeen) -> None:
        """A backload returned or raised."""

    def happened(self, event: AnyEvent) -> None:
        """Any event, after the state has moved past it."""


class Folder:
    """The named files of the folder: what they hold, and whose they are. `apply` moves it past an event.

    An owner is a process, "foreign", or "suite" for copies of files that an earlier process had left. `touched`: what
    the last event took away or changed of the files of others that still want them.
    """

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.owners: dict[str, str] = {}
        self.touched: list[str] = []
        self._brought = "suite"

    def apply(self, event: FolderSeen | Change, living: set[str]) -> None:
        """`living`: the processes that have not ended."""
        self.touched = []
        if isinstance(event, Change):
            self._brought = "foreign" if event.what == "files.foreign" else "suite"
            return
        differing = [name for name in {*self.files, *event.files} if self.files.get(name) != event.files.get(name)]
        for name in sorted(differing):
            owner = self.owners.get(name, "")
            if event.by != "suite" and (owner == "foreign" or (owner in living and event.by not in (owner, "all"))):
                self.touched.append(name)
            if name not in event.files:
                self.owners.pop(name)
            elif event.by != "suite" and owner != "foreign":
                self.owners[name] = event.by
            elif event.by == "suite" and not owner:
                self.owners[name] = self._brought
        self.files = event.files

    def of(self, owner: str) -> list[str]:
        return sorted(name for name, whose in self.owners.items() if whose == owner)
