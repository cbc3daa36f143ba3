"""The two lifecycle tests quoted in the first seed (miles#3100) hold on the reference, call for call.

They look at the saver's calls by tag, in order, and at nothing between them.
"""

from __future__ import annotations

from colocert.record.drive import Session, build
from colocert.record.scenarios import LORA, make_config
from colocert.rig.contract import Claims
from colocert.rig.rig import Rig
from colocert.trace import AnyEvent
from colocert.trace.events import SaverCall
from colocert_reference.colocert_impl import implementation


class Worker:
    """The reference's trainer under LoRA, awake, and what it asked of the saver."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        claims = Claims.of(implementation.claims)
        self.session: Session = build(implementation, Rig(make_config(LORA), claims, self.events.append))

    def calls(self, *methods: str) -> None:
        """Each returns."""
        assert all(self.session.call(method) for method in methods)

    def asked(self, op: str) -> list[str | None]:
        """The tags of the saver's `pause` or `resume` calls."""
        return [event.tag for event in self.events if isinstance(event, SaverCall) and event.op == op]


def test_lora_sleep_pauses_the_grad_buffers_and_wake_up_resumes_them() -> None:
    """Gradients have no host backup: a sleep that leaves them out keeps them on the GPU."""
    worker = Worker()
    worker.calls("sleep", "wake_up")
    assert worker.asked("pause") == ["grad_buffer", "default"]
    assert worker.asked("resume") == ["default", "grad_buffer"]


def test_offload_grad_buffer_frees_them_once_and_sleep_does_not_pause_them_again() -> None:
    """The two pause the gradients exactly once between them, and the record of it is clear after the wake-up."""
    worker = Worker()
    worker.calls("offload_grad_buffer", "offload_grad_buffer", "sleep", "wake_up")
    assert worker.asked("pause") == ["grad_buffer", "default"]
    assert worker.asked("resume") == ["default", "grad_buffer"]
    assert worker.session.trainer.believed()["grad_buffer"] is False


def test_the_early_release_is_the_first_of_the_two_pauses() -> None:
    """The engine can resume its weights before the trainer sleeps."""
    worker = Worker()
    worker.calls("offload_grad_buffer")
    assert worker.asked("pause") == ["grad_buffer"]
    worker.calls("sleep")
    assert worker.asked("pause") == ["grad_buffer", "default"]
