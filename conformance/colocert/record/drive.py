"""Driving one trainer through calls, and writing what happened around each call.

Knows how to make a call and what a call's outcome is. Does not know scenarios, files or rules.
"""

from __future__ import annotations

from typing import Any

from colocert.rig.contract import TRAINER_METHODS
from colocert.rig.rig import Rig
from colocert.rig.saver import SaverFatal
from colocert.trace.events import Believed, CallBegin, CallEnd, CallRaise

OPTIONAL_METHODS = ("offload_grad_buffer", "clear_memory")


class ProcessGone(BaseException):
    """The implementation asked for the end of the process (`sys.exit`, `KeyboardInterrupt`)."""


class NotRun(Exception):
    """This machine lacks what the scenario needs; the text says what."""


class TrainerShapeError(Exception):
    """The factory returned something that cannot be driven."""


class Session:
    """A built trainer on a rig. `call` never raises what the trainer raises: it is in the trace."""

    def __init__(self, rig: Rig, trainer: Any) -> None:
        self.rig, self.trainer = rig, trainer
        self._calls = 0

    @property
    def over(self) -> bool:
        """Whether the saver has ended the process; no call can follow."""
        return self.rig.saver.dead

    def has(self, method: str) -> bool:
        return callable(getattr(self.trainer, method, None))

    def call(self, method: str) -> bool:
        """Makes one call and returns whether it returned normally.

        Raises `ProcessGone` where the implementation exits: that scenario has died.
        """
        rig, emit = self.rig, self.rig.emit
        self._calls += 1
        emit(CallBegin("trainer", method, self._calls))
        try:
            rig.run(getattr(self.trainer, method)())
        except SaverFatal:
            return False
        except Exception as error:
            emit(CallRaise("trainer", method, self._calls, type(error).__name__, str(error)[:300]))
            ok = False
        except BaseException as error:
            if self.over:
                return False
            emit(CallRaise("trainer", method, self._calls, type(error).__name__, str(error)[:300]))
            raise ProcessGone(f"{method}() ended the process with {type(error).__name__}: {error}") from error
        else:
            if self.over:  # the framework swallowed the exit
                return False
            emit(CallEnd("trainer", method, self._calls))
            ok = True
        if method != "close":
            self.believed()
        return ok

    def believed(self) -> None:
        """Writes what the trainer's own flags say, if it says anything."""
        if self.has("believed"):
            stated = self.rig.run(self.trainer.believed()) or {}
            self.rig.emit(Believed({str(tag): bool(released) for tag, released in stated.items()}, statement=True))


def build(implementation: Any, rig: Rig) -> Session:
    """A fresh trainer from the implementation's factory.

    Raises `TrainerShapeError` if the factory returns None or an object without the calls of the contract.
    """
    trainer = rig.run(implementation.trainer(rig))
    if trainer is None:
        raise TrainerShapeError("trainer(rig) must return the trainer object (got None)")
    missing = [m for m in TRAINER_METHODS if not callable(getattr(trainer, m, None))]
    if missing:
        raise TrainerShapeError(
            f"the trainer must have {', '.join(m + '()' for m in TRAINER_METHODS)} (got {type(trainer).__name__} "
            f"without {', '.join(m + '()' for m in missing)})"
        )
    session = Session(rig, trainer)
    rig.faults.passed.clear()
    session.believed()
    return session
