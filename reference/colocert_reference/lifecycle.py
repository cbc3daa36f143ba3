"""The lifecycle of a colocated trainer: what it releases, when, and how it comes back from any point.

Knows tags, their order and what is released now. Does not know how memory, groups or gradients work (`ports`).
"""

from __future__ import annotations

from typing import Any

from colocert_reference.ports import DEFAULT, GRADS, PARAMS, NotLora, OffloadOff, OutOfDeviceMemory, Ports, Settings

RELEASE_ORDER = (GRADS, PARAMS, DEFAULT)
"""Gradients first: the engine can use their room at once. Resumed in reverse: parameters are made from `default`."""


class Lifecycle:
    """One trainer rank that shares its device with an engine.

    gpu-peak:  train() offload_grad_buffer() | engine resumes weights | sleep() update_weights() | engine generates
    cpu-peak:  train() sleep() | engine resumes weights | update_weights() | engine generates
    then:      wake_up() train() ...

    The saver ends the process when it is asked twice, and has no query; so `released` is the one record of what it
    holds, changed only after a call of it returned. Each method first asks what is still due, hence it can be called
    again after any error, and does nothing when nothing is due.
    """

    def __init__(self, ports: Ports, settings: Settings) -> None:
        self.ports, self.settings = ports, settings
        self.released: set[str] = set()
        self._kept_gradients: Any = None

    def sleep(self) -> None:
        """Gives everything back; parameters that a sync still owes the engine stay until `update_weights()`."""
        self._require_offload("sleep")
        due = [tag for tag in RELEASE_ORDER if self._sleeps(tag) and tag not in self.released]
        if not due:
            return
        self.ports.work.clear_memory()
        self.ports.groups.tear_down()
        for tag in due:
            self._release(tag)

    def wake_up(self) -> None:
        """Takes everything back, an early release included, and rebuilds the groups that are gone."""
        self._require_offload("wake_up")
        due = [tag for tag in reversed(RELEASE_ORDER) if tag in self.released]
        if due and not self.ports.memory.fits(due):
            raise OutOfDeviceMemory(f"{', '.join(due)} must fit on the device before they are resumed: retry later")
        for tag in due:
            self._resume(tag)
        self.ports.groups.rebuild()

    def offload_grad_buffer(self) -> None:
        """Gives the gradient buffers back ahead of `sleep()`, so that the engine can resume its weights first."""
        self._require_offload("offload_grad_buffer")
        if not self.settings.lora:
            raise NotLora("offload_grad_buffer() needs LoRA: without it gradients are released by sleep()")
        self._release(GRADS)

    def train(self) -> None:
        """One step, awake: wakes up first if anything is released."""
        if self.settings.offload_train:
            self.wake_up()
        else:
            self.ports.groups.rebuild()
        self.ports.work.step()

    def update_weights(self) -> None:
        """Sends what the engine needs, awake or asleep; rematerialised parameters are released once they are sent."""
        if not self.settings.syncs:
            return
        if not self.settings.rematerialize:
            self.ports.work.send(DEFAULT, from_host=DEFAULT in self.released)
        elif PARAMS not in self.released:  # released only after they were sent: then nothing is owed
            self.ports.work.send(PARAMS, from_host=False)
            if DEFAULT in self.released:
                self._release(PARAMS)

    def clear_memory(self) -> None:
        self.ports.work.clear_memory()

    def close(self) -> None:
        self.ports.groups.tear_down()

    def believed(self) -> dict[str, bool]:
        """Tag to whether it is released."""
        return {tag: tag in self.released for tag in sorted(self.settings.tags)}

    def _sleeps(self, tag: str) -> bool:
        owed = tag == PARAMS and self.settings.rematerialize and self.settings.syncs
        return tag in self.settings.tags and not owed

    def _release(self, tag: str) -> None:
        if tag in self.released or tag not in self.settings.tags:
            return
        if tag == GRADS and self.ports.gradients.live():
            self._kept_gradients = self.ports.gradients.keep()
        self.ports.memory.pause(tag)
        self.released.add(tag)

    def _resume(self, tag: str) -> None:
        self.ports.memory.resume(tag)
        self.released.discard(tag)
        if tag == PARAMS:
            self.ports.work.rematerialize()
        elif tag == GRADS and self._kept_gradients is not None:
            self.ports.gradients.restore(self._kept_gradients)
            self._kept_gradients = None
        elif tag == GRADS:
            self.ports.gradients.zero()

    def _require_offload(self, call: str) -> None:
        if not self.settings.offload_train:
            raise OffloadOff(f"{call}() needs train offload (got offload_train=False): nothing was moved")
