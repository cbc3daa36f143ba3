"""G11: a low-rank adapter trained by AdamW on managed memory, with a hand-off after every step or without."""

from __future__ import annotations

import hashlib
from typing import Any

from gpu_tests.harness.port import Port
from gpu_tests.scenarios.trainer import GRADS, WEIGHTS

WIDTH, RANK, BATCH = 64, 4, 16


def train(port: Port, fault: str | None, hand_offs: bool, steps: int) -> dict[str, Any]:
    """The loss and a hash of parameters and moments after each step, and what each hand-off gave back."""
    import torch

    from colocert.device import tensors

    where = "cuda" if port.device.name == "cuda" else "cpu"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    saver = tensors.start(port.device.name)
    with tensors.region(saver, WEIGHTS, backup=True):
        base = [torch.randn(WIDTH, WIDTH, device=where) / WIDTH**0.5 for _ in range(2)]
        base = [weight.clone() for weight in base]  # a quotient is not placed on `host`, its copy is
        lora = [torch.nn.Parameter(torch.randn(RANK, WIDTH, device=where).clone()) for _ in base]
        lora += [torch.nn.Parameter(torch.zeros(WIDTH, RANK, device=where)) for _ in base]
    optimizer = torch.optim.AdamW(lora, lr=1e-2, foreach=False)
    with tensors.region(saver, GRADS, backup=False):
        for parameter in lora:
            parameter.grad = torch.zeros_like(parameter)
    held = sum(tensor.nbytes for tensor in (*base, *lora, *lora))
    seen: dict[str, Any] = {"losses": [], "hashes": [], "released": [], "held": held}
    for step in range(steps):
        for number, parameter in enumerate(lora):
            if number or step == 0 or fault != "gradient-not-zeroed":
                parameter.grad.zero_()
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).to(where)
        y = x
        for weight, a, b in zip(base, lora, lora[len(base) :], strict=False):
            y = torch.tanh(y @ weight.T + (y @ a.T) @ b.T)
        loss = (y - x).pow(2).mean()
        loss.backward()
        with tensors.region(saver, WEIGHTS, backup=True):
            optimizer.step()
        if fault == "optimizer-without-backup" and step == 0:
            with tensors.region(saver, WEIGHTS, backup=False):
                for state in optimizer.state.values():
                    state["exp_avg"] = state["exp_avg"].clone()
        seen["losses"].append(loss.item().hex())
        seen["hashes"].append(_hash([*base, *lora, *_moments(optimizer)]))
        if hand_offs:
            free = port.device.free_bytes()
            for tag in (GRADS, WEIGHTS):
                port.device.pause(tag)
            seen["released"].append(port.device.free_bytes() - free)
            for tag in (WEIGHTS, GRADS):
                port.device.resume(tag)
    return seen


def _moments(optimizer: Any) -> list[Any]:
    return [value for state in optimizer.state.values() for _, value in sorted(state.items())]


def _hash(tensors: list[Any]) -> str:
    return hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)).hexdigest()
