"""The reference, with an early release that forgets what it released."""

from colocert_reference.colocert_impl import Reference, ReferenceTrainer


class ReleasesAgain(ReferenceTrainer):
    def offload_grad_buffer(self) -> None:
        self.ports.memory.pause("grad_buffer")


implementation = Reference(ReleasesAgain)
