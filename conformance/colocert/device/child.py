"""What a scenario's child does: prove the hook live, call the body, write the verdict, leave.

Started by colocert.device.launcher only. Imports nothing that imports torch before the probe has passed. It leaves by
`os._exit`, so that nothing at interpreter teardown can change a verdict that is written.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from colocert.device.errors import HookNotLive
from colocert.device.link import Link
from colocert.device.ports import Stage, open_device
from colocert.device.probe import probe, refuse_torch_mode

FAILED = 3  # a return code that the saver's exit(1) cannot be taken for


def main(job: dict[str, Any]) -> NoReturn:
    """Runs one job; its shape is that of launcher.start."""
    try:
        hook = probe(job["device"])
        stage = Stage(open_device(job["device"], hook), Link(*job["link"]))
        value = _body(job["body"])(stage, **job["arguments"])
        refuse_torch_mode()
        verdict = json.dumps({"ok": True, "value": value})
        code = 0
    except BaseException as error:
        verdict = json.dumps({"ok": False, "traceback": traceback.format_exc(), "error": _named(error)})
        code = FAILED
    _leave(job["verdict"], verdict, code)


def _body(name: str) -> Callable[..., Any]:
    module, _, function = name.rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), function)
    sys.path.insert(0, str(Path(module).parent))
    spec = importlib.util.spec_from_file_location(Path(module).stem, module)
    assert spec is not None, module
    assert spec.loader is not None, module
    loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return getattr(loaded, function)


def _named(error: BaseException) -> dict[str, str] | None:
    try:
        refuse_torch_mode()  # where it applies, it is the reason for whatever else was raised
    except HookNotLive as reason:
        error = reason
    if not isinstance(error, HookNotLive):
        return None
    return {"name": type(error).__name__, "must": error.must, "got": error.got, "fix": error.fix}


def _leave(path: str, verdict: str, code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    part = Path(path + ".part")
    part.write_text(verdict)
    part.replace(path)
    os._exit(code)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
