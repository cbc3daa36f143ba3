"""Reading an adapter from files: a folder with `adapter_model.safetensors` and `adapter_config.json`, as PEFT writes.

Knows the safetensors format, so that the kit needs no package for it, and copies what it reads. Does not know engines.

    8 bytes, little-endian     length of the header
    header                     JSON: name to dtype, shape and data_offsets; `__metadata__` is for people
    data                       each tensor's bytes, contiguous, row by row
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODEL, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class BadAdapterFile(ValueError):
    """The folder does not hold an adapter in PEFT's format."""


def read_adapter(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of an adapter by name, in new memory, and its configuration.

    Raises `BadAdapterFile` for a missing, torn or foreign file.
    """
    folder = Path(folder)
    try:
        raw, config = (folder / MODEL).read_bytes(), json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return read_tensors(raw), config
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadAdapterFile(
            f"{folder} must hold {MODEL} and {CONFIG} as PEFT writes them (got {type(error).__name__}: {error})"
        ) from error


def read_tensors(raw: bytes) -> dict[str, Any]:
    """The tensors of a safetensors file. Raises `ValueError` if it is not one."""
    import torch

    dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    length = int.from_bytes(raw[:8], "little")
    if not 0 < length <= len(raw) - 8:
        raise ValueError(f"a header of {length} bytes does not fit a file of {len(raw)}")
    header = json.loads(raw[8 : 8 + length])
    data = raw[8 + length :]
    found = {}
    for name, told in header.items():
        if name != "__metadata__":
            start, end = told["data_offsets"]
            if not 0 <= start <= end <= len(data):
                raise ValueError(f"{name} must lie within the file's {len(data)} bytes of data (got {start}:{end})")
            flat = torch.frombuffer(bytearray(data[start:end]), dtype=dtypes[told["dtype"]])
            found[name] = flat.view(told["shape"]).clone()
    return found
