"""Properties of this machine and its accelerators, each read in one place.

Sizes are bytes, 0 where the system does not report them. torch is imported inside the functions that need it.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

GIB, MIB = 2**30, 2**20

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")
"""Parts of the messages of failed allocations."""

# ---- host ----


def package_version(name: str) -> str | None:
    """The version of an installed package, None without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_host_bytes() -> int:
    """Memory of the host, or of this process's container where that is less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not on Windows
        return 0
    return min([total, *(limit for limit, _ in _container_limits())])


def available_host_bytes() -> int:
    """Memory that this process can have without swapping, within its container's limits.

    Pages that only cache files count as available, as in the kernel's own ``MemAvailable``.
    """
    free = 1024 * _number_after("MemAvailable:", _read("/proc/meminfo"))
    if not free:
        return 0
    return min([free, *(max(1, limit - used) for limit, used in _container_limits())])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is a failed allocation: an accelerator's, PyTorch's on the CPU, or Python's own."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in OUT_OF_MEMORY)


def _container_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes used) of each control group that this process is in and that has a limit.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory, and ``cgroup-v1/memory.html`` beside it.
    """
    for line in [*_read("/proc/self/cgroup").splitlines(), "0::/", "0:memory:/"]:  # the last two are a container's own
        _, kinds, path = (*line.split(":", 2), "", "")[:3]
        if kinds and "memory" not in kinds.split(","):
            continue
        root, most, now, cache = _VERSION_1 if kinds else _VERSION_2
        folders = [folder for folder in path.split("/") if folder]
        for depth in range(len(folders), -1, -1):
            folder = "/".join([root, *folders[:depth]])
            limit, used = _read(f"{folder}/{most}").strip(), _read(f"{folder}/{now}").strip()
            if limit.isdigit() and used.isdigit():  # "max" where there is no limit
                yield int(limit), int(used) - _number_after(cache, _read(f"{folder}/memory.stat"))


_VERSION_2 = ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Folder of the control groups of Linux, the files with limit and use, and the line of files that are only cached."""


def _number_after(name: str, text: str) -> int:
    fields = text.split()
    return int(fields[fields.index(name) + 1]) if name in fields else 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""


# ---- accelerators ----


def accelerator() -> torch.device | None:
    """The accelerator that this process uses, None on a machine without one."""
    import torch

    return torch.accelerator.current_accelerator(check_available=True)


def device_type() -> str:
    """``"cuda"``, ``"xpu"``, ...: the kind of the accelerator, ``"cpu"`` without one."""
    current = accelerator()
    return "cpu" if current is None else current.type


def is_accelerator(device: torch.device) -> bool:
    """Whether ``device`` is of the kind of this machine's accelerator."""
    current = accelerator()
    return current is not None and current.type == device.type


def device_name(index: int | None = None) -> str:
    """The accelerator's name, its type where it has none, or the CPU with its threads.

    Args:
        index: number of the accelerator; None is the current one.
    """
    import torch

    current = accelerator()
    if current is None:
        return f"CPU {platform.machine()}, {torch.get_num_threads()} threads of {cpu_cores()} cores"
    module = torch.get_device_module(current)
    return str(module.get_device_name(index)) if hasattr(module, "get_device_name") else current.type


def compute_capability(device: torch.device | None = None) -> tuple[int, int] | None:
    """The compute capability of a CUDA device, such as (9, 0) for Hopper; None on any other kind.

    Args:
        device: None is the current one.
    """
    import torch

    current = accelerator()
    if current is None or current.type != "cuda" or torch.version.cuda is None:  # ROCm has other numbers
        return None
    if device is not None and device.type != "cuda":
        return None
    return torch.cuda.get_device_capability(device)


def total_device_bytes(index: int | None = None) -> int:
    """Memory of an accelerator.

    Args:
        index: number of the accelerator; None is the current one.
    """
    import torch

    current = accelerator()
    if current is None:
        return 0
    module: Any = torch.get_device_module(current)
    index = torch.accelerator.current_device_index() if index is None else index
    total = 0
    if hasattr(module, "get_device_properties"):
        total = getattr(module.get_device_properties(index), "total_memory", 0)
    elif hasattr(module, "recommended_max_memory"):  # Apple's, which share the host's memory
        total = module.recommended_max_memory()
    return int(total)


def device_bytes(device: torch.device) -> tuple[int, int]:
    """(free, total) memory of the accelerator ``device``, as its driver has it; zeros for the CPU."""
    import torch

    if not is_accelerator(device):
        return 0, 0
    read: Any = getattr(torch.accelerator, "get_memory_info", None)  # from torch 2.12 on, torch/accelerator/memory.py
    try:
        free, total = (read or torch.get_device_module(device).mem_get_info)(device)
    except (AttributeError, RuntimeError):  # this backend does not report it
        return 0, 0
    return int(free), int(total)


def synchronize(device: torch.device | None = None) -> None:
    """Wait until the device, by default the current accelerator, has done everything; the CPU has."""
    import torch

    if accelerator() is not None if device is None else is_accelerator(device):
        torch.accelerator.synchronize(device)


@contextmanager
def one_thread() -> Iterator[None]:
    """Operators on the CPU run in one thread meanwhile: on some thousand numbers several only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def empty_cache(device: torch.device | None = None) -> None:
    """Give back what the allocator of ``device``, by default the current accelerator, holds and no tensor uses.

    Does nothing on the CPU, and where a backend cannot.
    """
    import torch

    device = device or accelerator()
    if device is not None and device.type != "cpu":
        getattr(torch.get_device_module(device), "empty_cache", lambda: None)()


def peak_resident_bytes() -> int:
    """The most host memory that this process ever held; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
