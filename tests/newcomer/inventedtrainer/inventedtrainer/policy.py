"""The model: one frozen linear layer with a LoRA adapter, its gradients in a flat buffer of their own."""

from __future__ import annotations

import torch
from torch_memory_saver import torch_memory_saver

from inventedtrainer.pools import Pool, inside


class Policy:
    def __init__(self, width: int = 16, rank: int = 2, device: str = "cuda") -> None:
        made = torch.Generator().manual_seed(0)
        with inside(Pool.MODEL):
            self.base = torch.randn(width, width, generator=made).to(device)
            self.down = torch.randn(rank, width, generator=made).to(device).requires_grad_()
            self.up = torch.zeros(width, rank, device=device).requires_grad_()
            self.moments = [torch.zeros_like(p) for p in self.parameters for _ in range(2)]
        with inside(Pool.GRADIENTS):
            self.gradients = torch.zeros(2 * width * rank, device=device)
        for parameter, part in zip(self.parameters, self.gradients.split(width * rank), strict=True):
            parameter.grad = part.view_as(parameter)  # autograd adds to what is there
        self.steps = 0

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [self.down, self.up]

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Adds the gradients of one batch."""
        loss = ((inputs @ (self.base + self.up @ self.down).T - targets) ** 2).mean()
        loss.backward()
        return float(loss.detach())

    @torch.no_grad()
    def step(self, rate: float = 0.02) -> None:
        """One step of Adam over the gradients that are there."""
        self.steps += 1
        for i, parameter in enumerate(self.parameters):
            first, second = self.moments[2 * i : 2 * i + 2]
            first.lerp_(parameter.grad, 0.1)
            second.lerp_(parameter.grad**2, 0.001)
            scale = (1 - 0.9**self.steps) / (1 - 0.999**self.steps) ** 0.5
            parameter -= rate * first / (scale * second.sqrt() + 1e-8)

    def clear_gradients(self) -> None:
        self.gradients.zero_()

    def export(self, *, away: bool) -> dict[str, torch.Tensor]:
        """The adapter for the engine; from the host copy while the model is off the device."""
        named = {"lora_A.weight": self.down, "lora_B.weight": self.up}
        read = torch_memory_saver.get_cpu_backup if away else torch.Tensor.cpu
        return {name: read(tensor.detach()).clone() for name, tensor in named.items()}
