"""G20: gradients that a thread other than the main one allocates. A region is a setting of the thread that entered it.

On `host` a Python thread stands for autograd's device thread. On `cuda`, not run so far, autograd is asked itself: with
gradients made beforehand in the region, which the row judges, and with those that it makes, which the row records.
"""

from __future__ import annotations

import threading
from typing import Any

from colocert.device.ports import Block
from gpu_tests.harness.port import Port

SIZES = (3, 1, 2)  # units


def backward(port: Port, fault: str | None) -> dict[str, Any]:
    """Makes the gradients, then releases `grad_buffer` and takes it again."""
    port.settle()
    by_autograd = _autograd(port, beforehand=False) if port.device.name == "cuda" else None
    blocks = _in_a_thread(port, fault) if port.device.name == "host" else _autograd(port, beforehand=True)["blocks"]
    expected = port.device.footprint(*blocks)
    seen = {
        "expected": expected,
        "released": port.moved(lambda: port.pause("grad_buffer")),
        "taken": port.moved(lambda: port.resume("grad_buffer")),
    }
    if by_autograd:
        del by_autograd["blocks"]
    return {**seen, "by autograd": by_autograd}


def _in_a_thread(port: Port, fault: str | None) -> list[Block]:
    made: list[Block] = []
    hook = port.device.hook

    def allocate() -> None:
        for units in SIZES:
            if fault == "region-in-the-main-thread-only":
                block = Block("grad_buffer", False, units * port.unit, hook.malloc(units * port.unit))
            else:
                block = port.device.alloc("grad_buffer", False, units * port.unit)
            made.append(block)

    with hook.region("grad_buffer", False):
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
    port.blocks += made
    return made


def _autograd(port: Port, beforehand: bool) -> dict[str, Any]:
    """One backward on the GPU inside the region. Without gradients beforehand: what it made and what of it is lost."""
    import torch

    from colocert.device import tensors

    saver = tensors.start("cuda")
    tag = "grad_buffer" if beforehand else "colocert.autograd"
    parameters = [torch.ones(units * port.unit // 4, device="cuda", requires_grad=True) for units in SIZES]
    loss = sum((parameter * 2).sum() for parameter in parameters)  # its temporaries are none of the region's
    seed = torch.ones_like(loss)
    with tensors.region(saver, tag, backup=False):
        if beforehand:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        loss.backward(seed)
    torch.cuda.synchronize()
    gradients = [parameter.grad for parameter in parameters]
    if beforehand:
        return {"blocks": [port.adopt(tag, gradient) for gradient in gradients]}
    held = port.device.free_bytes()
    port.device.pause(tag)
    freed = port.device.free_bytes() - held
    port.device.resume(tag)
    nbytes = sum(gradient.nbytes for gradient in gradients if gradient is not None)
    return {"blocks": [], "bytes": nbytes, "released": freed, "lost": freed < nbytes}
