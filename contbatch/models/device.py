"""Device and number format by name, checked before anything is loaded."""

from __future__ import annotations

import psutil
import torch

from contbatch.errors import DeviceError

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Number formats by name."""


def available_devices() -> list[str]:
    """Names of the devices that this machine has, the CPU first."""
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.cuda.is_available() and cuda:
        cuda.insert(0, "cuda")
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def find_device(name: str) -> torch.device:
    """The device called `name`.

    Raises:
        DeviceError: this machine has no such device.
    """
    there = available_devices()
    if name not in there:
        raise DeviceError(f"device {name!r} is not there; this machine has: {', '.join(there)}")
    return torch.device(name)


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format called `name`; "auto" is float32 on a CPU and bfloat16 on a GPU that has it.

    Raises:
        DeviceError: no such format, or not on this device.
    """
    if name == "auto":
        return _automatic(device)
    if name not in DTYPES:
        raise DeviceError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}")
    if device.type == "mps" and name == "float64":
        raise DeviceError("device 'mps' has no float64; use float32")
    return DTYPES[name]


def _automatic(device: torch.device) -> torch.dtype:
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on a device; of unified memory (mps) what the whole machine has left."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
