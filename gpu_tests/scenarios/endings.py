"""The ways in which a child can end, for the tests of the harness."""

from __future__ import annotations

import os
import signal
import time

from gpu_tests.harness.port import Port


def returns(port: Port, fault: str | None) -> dict[str, int]:
    return {"value": 7}


def raises(port: Port, fault: str | None) -> None:
    raise KeyError("not there")


def exits_as_the_saver_does(port: Port, fault: str | None) -> None:
    os._exit(1)


def leaves_quietly(port: Port, fault: str | None) -> None:
    os._exit(0)


def kills_itself(port: Port, fault: str | None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps_on(port: Port, fault: str | None) -> None:
    time.sleep(600)


def holds(port: Port, fault: str | None) -> None:
    """Holds memory until it is ended."""
    port.alloc("default", port.unit)
    port.tell("holding")
    time.sleep(600)
