"""Accelerators by name: how much memory a process sees, and how fast their bf16 products are on paper."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from seqtile._errors import UserError
from seqtile.devices import GIB, compute_capability, device_name, total_device_bytes
from seqtile.tiling import parse_bytes


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        name: as asked for.
        memory: bytes in all, before the driver's context takes its part.
        tflops: dense bf16 products on paper (fp16 where there is no bf16); None if unknown.
        source: where both come from.
        capability: CUDA compute capability, (9, 0) for Hopper; None if unknown or none.
        host_link: bytes per second from pinned host memory; None if unknown.
    """

    name: str
    memory: int
    tflops: float | None
    source: str
    capability: tuple[int, int] | None = None
    host_link: float | None = None


_SEEN = "thundergolfer.com/blog/nvidia-gpu-memory-capacity (nvidia-smi)"


_CAPABILITIES = {
    "b200": (10, 0), "h200": (9, 0), "h100": (9, 0), "a100-80": (8, 0), "a100-40": (8, 0), "l40s": (8, 9),
    "a10": (8, 6), "l4": (8, 9), "t4": (7, 5), "rtx5090": (12, 0), "rtx4090": (8, 9), "rtx3090": (8, 6),
}  # fmt: skip
"""From developer.nvidia.com/cuda/gpus."""


_LINKS = {
    **dict.fromkeys(("b200", "h200", "h100", "rtx5090"), 55e9),
    **dict.fromkeys(("a100-80", "a100-40", "l40s", "a10", "l4", "rtx4090", "rtx3090"), 25e9),
    "t4": 12e9,
}
"""PCIe 5.0, 4.0 and 3.0 with 16 lanes: 55 GB/s as measured on one H100 (2026-11-26), the others assumed by it."""


def _device(name: str, mib: int, seen: str, tflops: float | None, sheet: str) -> tuple[str, Device]:
    source = f"memory: {seen}; bf16 dense: {sheet}"
    return name, Device(name, mib * 2**20, tflops, source, _CAPABILITIES[name], _LINKS[name])


DEVICES: dict[str, Device] = dict(
    (
        _device("b200", 183359, "docs.vultr.com, HGX B200: 179 GB", 2250.0, "NVIDIA DGX B200 datasheet"),
        _device("h200", 143771, _SEEN, 989.0, "NVIDIA H200 datasheet, half of its sparse 1,979"),
        _device("h100", 81559, _SEEN, 989.0, "NVIDIA H100 SXM datasheet, half of its sparse 1,979"),
        _device("a100-80", 81920, _SEEN, 312.0, "NVIDIA A100 datasheet"),
        _device("a100-40", 40960, _SEEN, 312.0, "NVIDIA A100 datasheet"),
        _device("l40s", 46068, _SEEN, 362.0, "NVIDIA L40S datasheet"),
        _device("a10", 23028, _SEEN, 125.0, "NVIDIA A10 datasheet"),
        _device("l4", 23034, _SEEN, 121.0, "NVIDIA L4 datasheet, half of its sparse 242"),
        _device("t4", 15360, _SEEN, 65.0, "NVIDIA T4 datasheet, fp16"),
        _device("rtx5090", 32607, "nvidia-smi", 209.5, "NVIDIA RTX Blackwell architecture paper"),
        _device("rtx4090", 24564, "RLinf/RLinf issue 255 (nvidia-smi)", 165.2, "NVIDIA Ada architecture paper"),
        _device("rtx3090", 24576, "noonghunna/club-3090 issue 1127 (nvidia-smi)", 71.0, "NVIDIA Ampere GA102 paper"),
    )
)  # fmt: skip
DEVICES["mi300x"] = Device("mi300x", 192 * GIB, 1307.0, "AMD Instinct MI300X datasheet")


def device_here(index: int | None = None) -> Device:
    """The accelerator of this machine: its memory by the driver, its speed by its name.

    Raises:
        UserError: it does not report its memory.
    """
    memory, name = total_device_bytes(index), device_name(index)
    if not memory:
        raise UserError(
            "device.memory-unreported",
            f"{name} does not report its memory; pass it, such as device='80GiB' or --fit-memory 80GiB",
        )
    words = name.lower().replace("rtx ", "rtx").replace("-", " ").split()  # "NVIDIA H100 80GB HBM3", "GeForce RTX 4090"
    known = next((known for key, known in DEVICES.items() if key.partition("-")[0] in words), None)
    speed = (None, None) if known is None else (known.tflops, known.host_link)
    return Device(name, memory, speed[0], "the driver", compute_capability(), speed[1])


def find_device(text: str) -> Device:
    """The device called ``text``, or one with that much memory (``"141GiB"``).

    Raises:
        UserError: neither.
    """
    name = text.strip().lower()
    if name in DEVICES:
        return DEVICES[name]
    if not name.isdigit() and (memory := parse_bytes(name)):
        return Device(text.strip(), memory, None, "as given")
    close = difflib.get_close_matches(name, DEVICES, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    names = ", ".join(DEVICES)
    raise UserError(
        "device.unknown", f"unknown device {text!r}; {hint}use one of {names}, or its memory, such as 80GiB"
    )
