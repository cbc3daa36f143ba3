"""The reference, with an early release that returns where it has nothing to do: a SHOULD rule is broken."""

from colocert_reference.colocert_impl import Reference, ReferenceTrainer


class SilentWithoutLora(ReferenceTrainer):
    def offload_grad_buffer(self) -> None:
        if self.settings.lora and self.settings.offload_train:
            super().offload_grad_buffer()


implementation = Reference(SilentWithoutLora)
