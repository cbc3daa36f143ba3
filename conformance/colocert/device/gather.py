"""Looks at this machine for the preflight. Asks the driver, NVML, torch and the saver; judges nothing.

CUDA is only ever touched in child processes: one that asks for cuInit, again and again while the driver says that it is
starting (a fresh B300 node does, until its fabric manager is up); one with torch; one a device under the saver's hook.
So whoever asks stays without a CUDA context, and a call that hangs costs its deadline.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocert.device import launcher
from colocert.device.errors import DeviceError
from colocert.device.facts import Card, Driver, Facts, Host, Saver, Torch
from colocert.device.machine import ALLOCATOR_CONF, DEVICE_ORDER, SOURCE_ROOT, Machine

if TYPE_CHECKING:
    from colocert.device.ports import Stage

NOT_READY = 802
PATIENCE = 120.0
PROBE = 64 << 20
PINNED_NEED = 9 << 30
"""What the rows pin at most: the engine of G07 and G08, 8 GiB, and what stages to disk."""


def host() -> Facts:
    """This machine and the saver over the stand-in."""
    return Facts(host=_host(), saver=_saver("host", 1, pin=0))


def cuda(world: int) -> Facts:
    """This machine, its GPUs, torch and the saver on the first `world` devices."""
    up = wait_for_driver(lambda: _child("init", 60))
    if up.status != 0:
        return Facts(host=_host(), driver=up, saver=Saver(_version()))
    seen = _child("torch", 180, str(world))
    cards = tuple(Card(**{**card, "capability": tuple(card["capability"])}) for card in seen.get("cards", ()))
    torch = seen.get("torch")
    return Facts(
        host=_host(),
        driver=Driver(up.status, up.said, seen.get("driver", "") or _driver_version(), up.waited),
        nvml=seen.get("nvml", ""),
        cards=cards,
        torch=Torch(**{**torch, "archs": tuple(torch["archs"])}) if torch else None,
        torch_said=seen.get("error", ""),
        saver=_saver("cuda", min(world, len(cards)), pin=past_the_limit(_host().memlock)),
    )


def wait_for_driver(
    init: Callable[[], dict[str, Any]],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Driver:
    """cuInit's answer; asked again for up to two minutes while it is 802, "system not yet initialised"."""
    begun = clock()
    while True:
        answer = init()
        waited = clock() - begun
        status = answer.get("status")
        if status != NOT_READY or waited >= PATIENCE:
            return Driver(status, answer.get("error", ""), waited=waited)
        sleep(2.0)


def _host() -> Host:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    page = os.sysconf("SC_PAGE_SIZE")
    return Host(
        arch=platform.machine(),
        page_size=page,
        memlock=-1 if soft == resource.RLIM_INFINITY else soft,
        memory=page * os.sysconf("SC_PHYS_PAGES"),
        allocator={name: os.environ[name] for name in ALLOCATOR_CONF if name in os.environ},
        coherent=_parameter("CoherentGPUMemoryMode"),
        hbm_nodes=_nodes_without_cpus(),
        python=platform.python_version(),
    )


def _parameter(name: str, file: Path = Path("/proc/driver/nvidia/params")) -> str:
    found = re.search(rf'^{name}: "?([^"\n]*)"?$', _text(file), re.MULTILINE)
    return found[1] if found else ""


def _driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", _text(file))
    return found[1] if found else ""


def _nodes_without_cpus(folder: Path = Path("/sys/devices/system/node")) -> int:
    nodes = [node for node in folder.glob("node[0-9]*") if not _text(node / "cpulist").strip()]
    return sum(bool(re.search(r"MemTotal:\s+[1-9]", _text(node / "meminfo"))) for node in nodes)


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _version() -> str:
    try:
        return importlib.metadata.version("torch_memory_saver")
    except importlib.metadata.PackageNotFoundError:
        return ""


def past_the_limit(memlock: int) -> int:
    """What a child tries to pin: more than its limit, which tells whether the driver's pinning counts against it."""
    return memlock + PROBE if 0 <= memlock < PINNED_NEED else 0


def _saver(device: str, devices: int, pin: int) -> Saver:
    version, library, freed, said, pinned = _version(), "", [], "", 0
    for index in range(devices if version else 0):
        machine = Machine("cuda") if device == "cuda" else Machine()
        try:
            env = {"LOCAL_RANK": str(index)}
            ended = launcher.run("colocert.device.gather:hooked", machine=machine, env=env, pin=pin)
        except DeviceError as error:
            said = said or f"{type(error).__name__}: {error}"
            continue
        if ended.kind == "ok":
            library = ended.value["library"]
            freed.append(int(ended.value["freed"]))
            pinned = int(ended.value["pinned"])
        else:
            words = (ended.traceback.strip().splitlines() or [ended.last_words])[-1]
            said = said or f"the probe's child ended as {ended.kind}: {words}"
    return Saver(version, library, tuple(freed), said, pinned)


def hooked(stage: Stage, pin: int) -> dict[str, Any]:
    """In a child under the hook: the preload library, what a pause of 64 MiB frees, and how much of `pin` it pinned."""
    device = stage.device
    block = device.alloc("colocert.preflight", False, PROBE)
    held = device.free_bytes()
    device.pause("colocert.preflight")
    freed = device.free_bytes() - held
    device.resume("colocert.preflight")
    device.free(block)
    pinned = pin if pin and device.hook.can_pin(pin) else 0
    return {"library": Path(os.environ["LD_PRELOAD"]).name, "freed": freed, "pinned": pinned}


def _child(what: str, deadline: float, *arguments: str) -> dict[str, Any]:
    """The JSON that `python -m colocert.device.gather WHAT` prints last; `error` where it did not."""
    path = os.pathsep.join((str(SOURCE_ROOT), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    command = [sys.executable, "-m", "colocert.device.gather", what, *arguments]
    env = {**os.environ, "PYTHONPATH": path, "CUDA_DEVICE_ORDER": DEVICE_ORDER}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=deadline)
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {deadline:.0f} s"}
    except (IndexError, ValueError):
        words = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        return {"error": f"the child ended with {done.returncode}: {words}"}
    return answer


def _init() -> dict[str, Any]:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"status": None, "error": str(error)}
    return {"status": int(library.cuInit(0))}


def _torch(world: int) -> dict[str, Any]:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    described = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "archs": torch.cuda.get_arch_list() if torch.version.cuda else [],
    }
    found: dict[str, Any] = {"torch": described}
    try:
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except Exception as error:
        return {**found, "error": f"{type(error).__name__}: {error}"}
    nvml, found["nvml"], found["driver"] = _open_nvml()
    found["cards"] = [
        {
            "name": one.name,
            "capability": [one.major, one.minor],
            "memory": one.total_memory,
            **(_ask_nvml(nvml, str(one.uuid)) if nvml else {}),
        }
        for one in devices
    ]
    described["matmul"] = _product(torch, min(world, len(devices)))
    return found


def _open_nvml() -> tuple[Any, str, str]:
    """NVML, why not, and the driver's version."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetDriverVersion()
    except Exception as error:  # the package, the library or the driver
        return None, f"{type(error).__name__}: {error}", ""
    return nvml, "", version.decode() if isinstance(version, bytes) else str(version)


def _ask_nvml(nvml: Any, uuid: str) -> dict[str, Any]:
    """What NVML says of one device. Each answer that it refuses is None."""

    def ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except nvml.NVMLError:
            return None

    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    card = ask(lambda: nvml.nvmlDeviceGetHandleByUUID(name))
    if card is None:
        return {}
    # Version 2 leaves the driver's own reserve out of `used`.
    memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(card, version=nvml.nvmlMemory_v2))
    processes = ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(card))
    return {
        "used": memory.used if memory else None,
        "foreign": None if processes is None else sum(one.pid != os.getpid() for one in processes),
        "mig": _mig(nvml, card),
    }


def _mig(nvml: Any, card: Any) -> bool | None:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(card)[0])
    except nvml.NVMLError_NotSupported:
        return False  # a card without MIG has it off
    except nvml.NVMLError:
        return None


def _product(torch: Any, devices: int) -> str:
    """Multiplies small integers on each device, whose float32 product is exact; what was wrong, or nothing."""
    try:
        left = (torch.arange(128 * 128).reshape(128, 128) % 7).float()
        right = (torch.arange(128 * 128).reshape(128, 128) % 5).float()
        wanted = (left.long() @ right.long()).float()
        for index in range(devices):
            got = (left.to(f"cuda:{index}") @ right.to(f"cuda:{index}")).cpu()
            if not torch.equal(got, wanted):
                return f"{int((got != wanted).sum())} wrong values on device {index}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    print(json.dumps(_init() if sys.argv[1] == "init" else _torch(int(sys.argv[2]))))
