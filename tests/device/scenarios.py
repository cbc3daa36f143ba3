"""Bodies of child processes for the tests of this folder. Each takes a stage and returns what it saw."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from colocert.device.errors import DeviceOutOfMemory
from colocert.device.ports import HostDevice, Stage

MIB = 1 << 20


def nothing(stage: Stage) -> str:
    return "here"


def raises(stage: Stage) -> None:
    raise KeyError("not there")


def exits(stage: Stage, code: int) -> None:
    os._exit(code)


def hangs_with_a_child(stage: Stage) -> None:
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    stage.tell(helper.pid)
    time.sleep(600)


def environment(stage: Stage) -> dict[str, str]:
    return dict(os.environ)


def figures(stage: Stage, sticky: bool) -> dict[str, int]:
    """The stand-in's own figures around a pause with a host backup."""
    device = stage.device
    assert isinstance(device, HostDevice)
    hook = device.hook
    block = device.alloc("default", True, 5 * MIB + 3)
    device.pause()
    paused = hook.standin("pinned_bytes")
    device.resume()
    resumed = hook.standin("pinned_bytes")
    device.free(block)
    return {"paused": paused, "resumed": resumed, "peak": hook.standin("own_peak"), "own": hook.standin("own_bytes")}


def does_not_fit(stage: Stage, tag: str | None) -> dict[str, Any]:
    """An allocation larger than the device, and one that fits after it."""
    device = stage.device
    free = device.free_bytes()
    try:
        device.alloc(tag, False, free + 1)
    except DeviceOutOfMemory as error:
        refused = str(error)
    after_refusal = device.free_bytes()
    device.free(device.alloc(tag, False, free))
    return {"refused": refused, "free": [free, after_refusal, device.free_bytes()]}


def machine_is_full(stage: Stage, tag: str | None) -> list[int]:
    """An allocation that fits on the device while the machine has no memory to stand in for it."""
    import resource

    device = stage.device
    free = device.free_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 * MIB, resource.RLIM_INFINITY))
    refused = 0
    try:
        device.alloc(tag, False, 4 * MIB)
    except DeviceOutOfMemory:
        refused = 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    after = device.free_bytes()
    device.alloc(tag, False, 4 * MIB)
    return [refused, free - after, after - device.free_bytes()]


def holds(stage: Stage, nbytes: int) -> None:
    """Holds memory until it is killed."""
    stage.device.alloc("default", True, nbytes)
    stage.tell(stage.device.own_bytes())
    time.sleep(600)


def free_now(stage: Stage) -> int:
    return stage.device.free_bytes()


def forks(stage: Stage) -> list[int]:
    """A child forked before the first allocation has a slot of its own; what it holds goes when it ends."""
    device = stage.device
    free = device.free_bytes()
    reads, writes = os.pipe()
    if os.fork() == 0:
        device.alloc("default", True, 4 * MIB)
        os.write(writes, f"{device.own_bytes()} {free - device.free_bytes()}".encode())
        os._exit(0)
    os.wait()
    seen = [int(n) for n in os.read(reads, 100).split()]
    return [*seen, device.own_bytes() or 0, free - device.free_bytes()]


def spawns(stage: Stage) -> list[int]:
    """A sibling on the same device sees what this process holds."""
    stage.device.alloc("default", True, 8 * MIB)
    with stage.device.spawn(free_now) as sibling:
        return [stage.device.free_bytes(), sibling.wait().expect()]


def imports_torch_mode(stage: Stage) -> None:
    """What importing megatron-core 0.16.1 does to a saver that was not used before."""
    import torch_memory_saver

    torch_memory_saver.torch_memory_saver.hook_mode = "torch"


def imports_megatron(stage: Stage, repaired: bool) -> str:
    """The import itself, and the order that repairs it."""
    import megatron.core.inference.contexts.dynamic_context  # noqa: F401

    from colocert.device import tensors

    if repaired:
        tensors.start()
    return "imported"


def tensors_round_trip(stage: Stage) -> dict[str, Any]:
    """Factories, conversions and views placed in two tags, and what a sleep does to them."""
    import torch

    from colocert.device import tensors

    device, saver = stage.device, tensors.start()
    start = device.own_bytes() or 0
    with tensors.region(saver, "default", backup=True):
        layer = torch.nn.Linear(700, 300)
        lora = torch.nn.Parameter(torch.randn(8, 700).to(torch.bfloat16))
        channels_last = torch.empty_like(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
        integers = torch.arange(10, device="cuda")
        wanted = torch.zeros(3, requires_grad=True)
        view = integers.view(2, 5)
    with tensors.region(saver, "grad_buffer", backup=False):
        gradients = layer.weight.new_zeros(300, 700)
    outside = torch.zeros(1000)
    addresses = [t.data_ptr() for t in (layer.weight, lora, gradients)]
    bits = [t.detach().clone() for t in (layer.weight, layer.bias, lora, integers)]
    held = device.own_bytes() or 0
    saver.pause("grad_buffer")
    without_gradients = device.own_bytes() or 0
    saver.pause("default")
    asleep = device.own_bytes() or 0
    saver.resume("default")
    saver.resume("grad_buffer")
    now = (layer.weight, layer.bias, lora, integers)
    seen = {
        "held": held - start,
        "gradients": held - without_gradients,
        "asleep": asleep - start,
        "same": all(torch.equal(a, b) for a, b in zip(bits, now, strict=True)),
        "addresses": addresses == [t.data_ptr() for t in (layer.weight, lora, gradients)],
        "poison": gradients.view(torch.uint8).unique().tolist(),
        "strides": channels_last.stride(),
        "requires_grad": [wanted.requires_grad, layer.weight.requires_grad, integers.requires_grad],
        "shared": view.data_ptr() == integers.data_ptr(),
        "outside": bool((outside == 0).all()),
    }
    del layer, lora, gradients, channels_last, integers, wanted, view, now
    seen["after"] = (device.own_bytes() or 0) - start
    return seen


def tensors_out_of_memory(stage: Stage) -> str:
    import torch

    from colocert.device import tensors

    saver = tensors.start()
    try:
        with tensors.region(saver, "default", backup=True):
            torch.empty(stage.device.free_bytes() + 1, dtype=torch.uint8)
    except torch.OutOfMemoryError as error:
        return str(error)
    return "fitted"
