"""FO-01 … FO-12: frozen weights that go to files or to host memory, and come back.

Knows the sentences of these rules as folds over a whole run. Does not know which implementation or scenario produced a
trace. Nothing that an implementation leaves on the device exercises a rule, except those that say it has to go.
"""

from __future__ import annotations

from colocert.rules.frozen_state import LARGE, LAYOUT, SLACK, Folder, FrozenFold, Process, shown
from colocert.rules.run import RunView
from colocert.trace.events import AnyEvent, Change, FolderSeen, ModuleSeen, ProcessEnded, TensorsSeen

UNCOUNTED = 4096
"""Bytes written that are no copy of a tensor: a log line, a note of what was written."""

INCIDENTAL = 64 << 10
"""Bytes on file, in shared memory or in private pages that are no copies of tensors: a log, semaphores, headers."""

FEW_FILES, MANY_TENSORS = 64, 200


class GoesToFilesOnce(FrozenFold):
    """FO-01: frozen tensors go to files, written at most once per rank while unchanged; a repeat copies nothing."""

    rule = "FO-01"

    def offloaded(self, process: Process, event: TensorsSeen) -> None:
        frozen = process.of("frozen")
        if not self.file_backed or process.raised or process.disk or not frozen:
            return
        self.met("left-on-device")
        if not process.off:
            self.found(event, "left-on-device", "frozen tensors leave the device", f"{shown(frozen)} stay on it")
            return
        self.met("not-on-file")
        assert process.memory is not None
        off = [name for name in frozen if name in process.off]
        elsewhere = [name for name in off if process.at(name) == "host"]
        due = process.distinct_bytes(off)
        if elsewhere:
            self.found(event, "not-on-file", "frozen tensors go to files", f"{shown(elsewhere)} in host memory")
        elif process.memory.file_bytes + process.memory.shared < due:
            told = f"{process.memory.file_bytes} bytes on file"
            self.found(event, "not-on-file", f"{due} bytes of frozen tensors are on file", told)
        if process.filed:
            self.met("written-again")
            if process.memory.written > UNCOUNTED:
                told = f"{process.memory.written} bytes written"
                self.found(event, "written-again", "a repeated offload of the same base writes nothing", told)


class ComesBackAsItWas(FrozenFold):
    """FO-02: what comes back is bit-identical whatever lies in the folder beforehand.

    A killed process's leavings are FO-06's, a base that was changed FO-08's, a disk that fails FO-05's.
    """

    rule = "FO-02"

    def backloaded(self, process: Process, event: TensorsSeen) -> None:
        if process.raised or process.disk or process.changed or "killed" in process.found:
            return
        names = [name for name in process.of("frozen") if name in process.moved]
        code = "trusted-file" if process.found or len(self.processes) > 1 else "bits-changed"
        if names:
            self.met(code)
            if wrong := process.wrong(names):
                self.found(event, code, "what comes back is what was there", f"{shown(wrong)} hold other bits")


class AdaptersStay(FrozenFold):
    """FO-03: adapters stay resident, and which tensors are adapters is not guessed from their names."""

    rule = "FO-03"

    def offloaded(self, process: Process, event: TensorsSeen) -> None:
        if not self.lora or process.raised or not process.off:
            return
        adapters = process.of("adapter")
        self.met("adapter-offloaded")
        gone = [name for name in adapters if process.at(name) != "device"]
        if gone:
            self.found(event, "adapter-offloaded", "adapters stay on the device", f"{shown(gone)} are off it")
        alike = [name for name in process.of("frozen") if "adapter" in name or "lora" in name]
        if alike:
            self.met("frozen-kept")
            if kept := process.on_device(alike):
                self.found(event, "frozen-kept", "a frozen tensor goes, whatever its name", f"{shown(kept)} stay")


class SwitchedOffUsesHostMemory(FrozenFold):
    """FO-04: switched off, the offload uses host memory with the same values."""

    rule = "FO-04"

    def offloaded(self, process: Process, event: TensorsSeen) -> None:
        frozen = process.of("frozen")
        if self.file_backed or process.raised or not frozen:
            return
        self.met("not-in-host-memory")
        assert process.memory is not None
        elsewhere = [name for name in frozen if process.at(name) in ("device", "file", "shared")]
        told = f"{shown(elsewhere)}: {process.at(elsewhere[0])}" if elsewhere else "files in the folder"
        if elsewhere or process.memory.file_bytes > INCIDENTAL:
            self.found(event, "not-in-host-memory", "frozen tensors go to host memory, and to no file", told)

    def backloaded(self, process: Process, event: TensorsSeen) -> None:
        names = [name for name in process.of("frozen") if name in process.moved]
        if self.file_backed or process.raised or process.changed or not names:
            return
        self.met("values-differ")
        if wrong := process.not_back(names):
            self.found(event, "values-differ", "the same values come back", f"{shown(wrong)} differ")


class SurvivesTheDisk(FrozenFold):
    """FO-05: on an I/O error or a full disk the offload raises, or completes in host memory; nothing is lost."""

    rule = "FO-05"

    def offloaded(self, process: Process, event: TensorsSeen) -> None:
        if not process.disk or not (process.raised or process.off):
            return
        for code in ("crashed", "half-written-mapped", "lost"):
            self.met(code)
        for name in process.wrong(process.of("frozen")):
            code = "half-written-mapped" if process.at(name) in ("file", "shared") else "lost"
            self.found(event, code, f"{name} holds what it held", f"other bits, {process.at(name)}")

    def backloaded(self, process: Process, event: TensorsSeen) -> None:
        if process.disk and (wrong := process.not_back(process.of("frozen"))):
            self.found(event, "lost", "after a failed offload everything can be had back", f"{shown(wrong)} cannot")

    def happened(self, event: AnyEvent) -> None:
        process = self.processes.get(event.rank)
        if not isinstance(event, ProcessEnded) or process is None or not process.disk:
            return
        if event.how not in ("normal", "killed"):
            code = "half-written-mapped" if event.during == "look" else "crashed"
            told = f"{event.how} in {event.during or 'no call'}"
            self.found(event, code, "the offload raises, or completes in host memory", told)


class SurvivesAKill(FrozenFold):
    """FO-06: a killed process leaves nothing that is read as data; cleaning up touches nobody else's files.

    A living process's file counts as touched when it is gone or differs after another process's call.
    """

    rule = "FO-06"

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.folder = Folder()

    def _living(self) -> set[str]:
        return {str(n) for n, process in self.processes.items() if not process.ended}

    def offloaded(self, process: Process, event: TensorsSeen) -> None:
        if process.off and self.file_backed and (self.folder.of("foreign") or len(self._living()) > 1):
            self.met("foreign-touched")

    def backloaded(self, process: Process, event: TensorsSeen) -> None:
        names = [name for name in process.of("frozen") if name in process.moved]
        if process.raised or process.disk or process.changed or "killed" not in process.found or not names:
            return
        self.met("leftover-read")
        if wrong := process.wrong(names):
            told = f"{shown(wrong)} hold other bits"
            self.found(event, "leftover-read", "nothing of a killed process is read as data", told)

    def happened(self, event: AnyEvent) -> None:
        if isinstance(event, (FolderSeen, Change)):
            self.folder.apply(event, self._living())
            if self.folder.touched:
                expected = "the files of others stay as they are"
                self.found(event, "foreign-touched", expected, f"{shown(self.folder.touched)} changed or gone")


class LeavesNothingOpen(FrozenFold):
    """FO-07: open files stay bounded; after a normal end no file is left that a later run could read unverified.

    A file that is left is judged by what a later process makes of it once its content was altered.
    """

    rule = "FO-07"

    def __init__(self, view: RunView) -> None:
        super().__init__(view)
        self.folder = Folder()
        self.ended = ""
        self.left: list[str] = []

    def offloaded(self, process: Process, event: TensorsSeen) -> None:
        if not self.file_backed or len(process.of("frozen")) < MANY_TENSORS or not (process.off or process.raised):
            return
        self.met("files-open")
        assert process.memory is not None
        opened = process.memory.open_files
        if process.raised or opened > FEW_FILES:
            told = "the offload raised where few may be open" if process.raised else f"{opened} more are open"
            self.found(event, "files-open", "open files do not grow with the number of tensors", told)

    def backloaded(self, process: Process, event: TensorsSeen) -> None:
        self._settle()
        if not self.left or process.raised or not process.moved or "altered" not in process.found:
            return
        self.met("file-left")
        if wrong := process.wrong(process.of("frozen")):
            told = f"{shown(self.left)} was left, and {shown(wrong)} came back from it"
            self.found(event, "file-left", "no file is left that a later run reads unverified", told)

    def happened(self, event: AnyEvent) -> None:
        if isinstance(event, (FolderSeen, Change)):
            if isinstance(event, Change) or event.by == "suite":
                self._settle()
            living = {str(n) for n, process in self.processes.items() if not process.ended}
            self.folder.apply(event, living)
        elif isinstance(event, ModuleSeen):
            self._settle()
        elif isinstance(event, ProcessEnded) and event.how == "normal":
            process = self.processes.get(event.rank)
            if process is not None and self.lora and process.moved and self.file_backed and not process.disk:
                self.ended = str(event.rank)

    def _settle(self) -> None:
        """The folder is as the process that ended has left it."""
        if self.ended:
            self.left += self.folder.of(self.ended)
            if not self.left:
                self.met("file-left")
            self.ended = ""

    def end(self) -> None:
        self._settle()


class NoticesAnotherBase(FrozenFold):
    """FO-08: changing the base after the first offload invalidates its copy, or is refused."""

    rule = "FO-08"

    def offloaded(self, process: Process, event: TensorsSeen) -> None:
        if process.changed and process.raised and not process.disk:
            self._check(process, event)

    def backloaded(self, process: Process, event: TensorsSeen) -> None:
        if process.changed and not process.raised and not process.disk:
            self._check(process, event)

    def _check(self, process: Process, event: TensorsSeen) -> None:
        self.met("stale-copy")
        if wrong := process.wrong([name for name in process.of("frozen") if name in process.moved]):
            told = f"{shown(wrong)} hold the base of before"
            self.found(event, "stale-copy", "what comes back is the base that was loaded last", told)


class KeepsOneCopy(FrozenFold):
    """FO-09: at most one host copy of each frozen tensor, and no more than two chunks beside it.

    Where the offload goes to host memory, the copies themselves are taken off.
    """

    rule = "FO-09"

    def offloaded(self, process: Process, event: TensorsSeen) -> None:
        if process.raised or process.disk or process.storage_bytes < LARGE or not process.off:
            return
        assert process.memory is not None
        memory, beside = process.memory, 2 * self.chunk + SLACK
        copies = 0 if self.file_backed else process.storage_bytes
        self.met("beyond-two-chunks")
        if memory.peak > copies + beside:
            told = f"{memory.peak - copies} bytes"
            self.found(event, "beyond-two-chunks", f"no more than {beside} bytes beside the copies", told)
        if process.found:
            return  # what others left in the folder cannot be told from this process's files
        self.met("second-copy")
        total = max(process.kept, 0) + memory.file_bytes + memory.shared
        if total > process.storage_bytes + beside:
            told = f"{process.kept} bytes in memory, {memory.file_bytes + memory.shared} on file"
            self.found(event, "second-copy", f"one copy of {process.storage_bytes} bytes", told)


class CoversEveryTensor(FrozenFold):
    """FO-10: every frozen parameter is covered, and buffers stay or move, bit-identical."""

    rule = "FO-10"

    def offloaded(self, process: Process, event: TensorsSeen) -> None:
        frozen = process.of("frozen")
        if process.raised or process.disk or not any(name in process.off for name in frozen):
            return
        self.met("not-covered")
        if kept := process.on_device(frozen):
            self.found(event, "not-covered", "every frozen tensor leaves the device", f"{shown(kept)} stay")

    def backloaded(self, process: Process, event: TensorsSeen) -> None:
        if process.raised or process.disk or not process.moved:
            return
        frozen = [name for name in process.of("frozen") if name in process.moved]
        if frozen:
            self.met("not-covered")
            if left := sorted(set(frozen) - set(process.on_device(frozen))):
                self.found(event, "not-covered", "every frozen tensor comes back", f"{shown(left)} are off the device")
            self.met("layout-changed")
            every = [name for name, kind in process.kinds.items() if kind == "frozen"]
            if other := [name for name in every if process.held[name][LAYOUT] != process.layouts[name]]:
                told = f"{other[0]} is {process.held[other[0]][LAYOUT]}"
                self.found(event, "layout-changed", f"{other[0]} is {process.layouts[other[0]]}", told)
        buffers = process.of("buffer")
        self.met("buffer-changed")
        if wrong := process.not_back(buffers):
            self.found(event, "buffer-changed", "buffers are on the device as they were", f"{shown(wrong)} are not")


class MovesFusedBuffers(FrozenFold):
    """FO-11: without LoRA all bytes of the fused buffers offload and backload."""

    rule = "FO-11"

    def offloaded(self, process: Process, event: TensorsSeen) -> None:
        if self.lora or process.raised:
            return
        self.met("bytes-kept")
        if kept := process.on_device(process.of("fused", "trained")):
            self.found(event, "bytes-kept", "all bytes of the fused buffers leave the device", f"{shown(kept)} stay")

    def backloaded(self, process: Process, event: TensorsSeen) -> None:
        if self.lora or process.raised or not process.moved:
            return
        self.met("bytes-lost")
        if wrong := process.not_back(process.of("fused", "trained")):
            self.found(event, "bytes-lost", "fused buffers and their parameters come back", f"{shown(wrong)} do not")


class CopiesCanBeEvicted(FrozenFold):
    """FO-12: file-backed copies are not anonymous or locked memory."""

    rule = "FO-12"

    def offloaded(self, process: Process, event: TensorsSeen) -> None:
        memory = process.memory
        if not self.file_backed or process.raised or process.disk or not process.off or memory is None:
            return
        if not (memory.file_bytes or memory.shared):
            return
        self.met("anonymous")
        self.met("locked")
        shared = [name for name in process.of("frozen") if process.at(name) == "shared"]
        if shared or memory.shared > INCIDENTAL or memory.anonymous > INCIDENTAL:
            told = f"{memory.anonymous} bytes of them anonymous, {memory.shared} in shared memory"
            self.found(event, "anonymous", "copies can be written back and dropped", told)
        if memory.locked:
            self.found(event, "locked", "copies can be dropped from memory", f"{memory.locked} bytes are locked")
