"""Facts of the machine: the host with its containers, and accelerators of any kind."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from seqtile import devices

V2, V1 = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The files of a host with 8 KiB available, and no container; a test adds to them."""
    found = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  8 kB\n"}
    monkeypatch.setattr(devices, "_read", lambda path: found.get(path, ""))
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1024, "SC_PHYS_PAGES": 9}[name])
    return found


def test_one_thread_for_a_while() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(ValueError), devices.one_thread():
            assert torch.get_num_threads() == 1
            raise ValueError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_the_host_is_read() -> None:
    assert 2**20 < devices.available_host_bytes() <= devices.total_host_bytes()
    assert 1 <= devices.cpu_cores() <= (os.cpu_count() or 1)


def test_without_a_limit_the_host_counts(files: dict[str, str]) -> None:
    assert devices.available_host_bytes() == 8192 and devices.total_host_bytes() == 9216
    files.update({f"{V2}/memory.max": "max\n", f"{V2}/memory.current": "100\n"})
    assert devices.available_host_bytes() == 8192 and devices.total_host_bytes() == 9216
    files[f"{V2}/memory.max"] = "1000000\n"
    assert devices.available_host_bytes() == 8192 and devices.total_host_bytes() == 9216


def test_a_containers_limit_counts(files: dict[str, str]) -> None:
    files.update({f"{V2}/memory.max": "5100\n", f"{V2}/memory.current": "100\n"})
    assert devices.available_host_bytes() == 5000 and devices.total_host_bytes() == 5100
    del files["/proc/meminfo"]
    assert devices.available_host_bytes() == 0


def test_the_older_control_groups_count(files: dict[str, str]) -> None:
    files.update({f"{V1}/memory.limit_in_bytes": "5100\n", f"{V1}/memory.usage_in_bytes": "100\n"})
    assert devices.available_host_bytes() == 5000 and devices.total_host_bytes() == 5100


@pytest.mark.parametrize(("line", "root", "names"), [
    ("0::/jobs/seven", V2, ("memory.max", "memory.current")),
    ("4:cpu,cpuacct:/jobs/seven\n9:memory:/jobs/seven", V1, ("memory.limit_in_bytes", "memory.usage_in_bytes")),
])  # fmt: skip
@pytest.mark.parametrize("folder", ["/jobs/seven", "/jobs"])
def test_the_limit_of_a_job_or_of_what_it_is_in_counts(
    files: dict[str, str], line: str, root: str, names: tuple[str, str], folder: str
) -> None:
    files["/proc/self/cgroup"] = f"{line}\n"
    files.update({f"{root}{folder}/{names[0]}": "5100\n", f"{root}{folder}/{names[1]}": "100\n"})
    assert devices.available_host_bytes() == 5000


@pytest.mark.parametrize(("root", "names"), [
    (V2, ("memory.max", "memory.current", "inactive_file")),
    (V1, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
])  # fmt: skip
def test_files_that_are_only_cached_can_be_had(files: dict[str, str], root: str, names: tuple[str, str, str]) -> None:
    files.update({f"{root}/{names[0]}": "5000\n", f"{root}/{names[1]}": "4900\n"})
    assert devices.available_host_bytes() == 100
    files[f"{root}/memory.stat"] = f"anon 900\n{names[2]} 4000\nactive_file 7\n"
    assert devices.available_host_bytes() == 4100


def test_a_full_container_has_something_left_to_divide(files: dict[str, str]) -> None:
    """0 would mean that the system does not say."""
    files.update({f"{V2}/memory.max": "100\n", f"{V2}/memory.current": "100\n"})
    assert devices.available_host_bytes() == 1


def test_a_system_that_does_not_say_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", refuse)
    monkeypatch.setattr(devices, "_read", lambda path: "")
    assert devices.total_host_bytes() == devices.available_host_bytes() == 0


def test_versions() -> None:
    # A build may name itself ("+cu132") in one of the two alone, as PyPI's do.
    version = devices.package_version("torch")
    assert version is not None and version.partition("+")[0] == torch.__version__.partition("+")[0]
    assert devices.package_version("a-package-of-no-name") is None


def test_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert devices.accelerator() is None and devices.device_type() == "cpu"
    assert devices.device_name().startswith("CPU ") and " threads of " in devices.device_name()
    assert devices.total_device_bytes() == 0 and devices.device_bytes(torch.device("cpu")) == (0, 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: pytest.fail("the CPU has done everything"))
    devices.synchronize()
    devices.synchronize(torch.device("cpu"))
    devices.empty_cache()
    devices.empty_cache(torch.device("cpu"))


def has(monkeypatch: pytest.MonkeyPatch, kind: str, **module: Any) -> None:
    """A machine with two accelerators of this kind, the second of them current."""
    here = torch.device(kind, 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: here)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: SimpleNamespace(**module))
    monkeypatch.delattr(torch.accelerator, "get_memory_info", raising=False)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "hpu"])
def test_any_accelerator_is_read_through_its_own_module(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: pytest.fail("this is no CUDA device"))
    has(
        monkeypatch, kind, get_device_properties=lambda index: SimpleNamespace(total_memory=80 + index),
        get_device_name=lambda index: f"card {1 if index is None else index}", mem_get_info=lambda device: (30, 81),
    )  # fmt: skip
    assert devices.device_type() == kind and devices.is_accelerator(torch.device(kind, 0))
    assert not devices.is_accelerator(torch.device("cpu"))
    assert (devices.total_device_bytes(), devices.total_device_bytes(0)) == (81, 80)
    assert (devices.device_name(), devices.device_name(0)) == ("card 1", "card 0")
    assert devices.device_bytes(torch.device(kind)) == (30, 81)
    assert devices.device_bytes(torch.device("cpu")) == (0, 0)


def test_newer_torch_says_what_is_free_for_any_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "xpu")
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (3, 4), raising=False)
    assert devices.device_bytes(torch.device("xpu")) == (3, 4)


def test_an_accelerator_that_says_little(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "mps", recommended_max_memory=lambda: 12)
    assert devices.total_device_bytes() == 12 and devices.device_name() == "mps"
    assert devices.device_bytes(torch.device("mps")) == (0, 0)
    devices.empty_cache()
    has(monkeypatch, "hpu")
    assert devices.total_device_bytes() == 0


def test_waiting_is_for_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "xpu")
    waited: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    for device in (None, torch.device("xpu", 0), torch.device("cpu")):
        devices.synchronize(device)
    assert waited == [None, torch.device("xpu", 0)]
