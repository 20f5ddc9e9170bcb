"""What holds for every test: no network, no telemetry, no cache of the user's, one thread, fixed seeds.

The environment is set while this file is imported, before any library reads it; the processes that tests start
inherit it. ``socket.connect`` is guarded in this process; in the others the proxy that does not exist and the
offline switches keep clients in.
"""

from __future__ import annotations

import ctypes
import gc
import ipaddress
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import extension_builds
import processor_times
import triton_interpreter

if TYPE_CHECKING:
    import torch

_BEFORE = "SEQTILE_TESTS_ENVIRONMENT"
ENVIRONMENT_BEFORE: dict[str, str] = json.loads(os.environ.get(_BEFORE, "null")) or dict(os.environ)
"""What the tests were started with, for the one test that has to install packages; pytest's workers are told."""
os.environ[_BEFORE] = json.dumps(ENVIRONMENT_BEFORE)

_CACHE = tempfile.TemporaryDirectory(prefix="seqtile-tests-")
_NO_PROXY_HERE = "http://127.0.0.1:9"  # the discard port of this machine: nothing listens there

os.environ.update(
    {
        # Programs of this environment first, also where it is not activated: seqtile, and ninja for DeepSpeed.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "WANDB_MODE": "disabled",
        "TRL_EXPERIMENTAL_SILENCE": "1",  # a warning at the first import of trl.experimental
        "HF_HOME": str(Path(_CACHE.name, "huggingface")),
        "XDG_CACHE_HOME": str(Path(_CACHE.name, "xdg")),
        "MPLBACKEND": "Agg",
        extension_builds.NAME: str(extension_builds.folder()),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **{
            name: _NO_PROXY_HERE
            for scheme in ("http", "https", "all")
            for name in (f"{scheme}_proxy", f"{scheme}_PROXY".upper())
        },
        "no_proxy": "localhost,127.0.0.1,::1",
        "NO_PROXY": "localhost,127.0.0.1,::1",
    }
)


class NetworkBlockedError(RuntimeError):
    """A test reached for another machine. It is not an OSError, so no client retries or hides it."""


def _refuse_other_machines(address: Any) -> None:
    if not isinstance(address, tuple):  # a path or name of AF_UNIX
        return
    host = address[0]
    try:
        is_local = ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if not is_local:
        raise NetworkBlockedError(f"a test tried to reach {host}: tests run without a network")


def _guarded(method: Any) -> Any:
    def connect(self: socket.socket, address: Any) -> Any:
        _refuse_other_machines(address)
        return method(self, address)

    return connect


socket.socket.connect = _guarded(socket.socket.connect)  # type: ignore[method-assign]
socket.socket.connect_ex = _guarded(socket.socket.connect_ex)  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _seeds_and_threads() -> Iterator[None]:
    """The same random numbers whatever ran before, and the process's thread count and default dtype put back."""
    import torch

    random.seed(0)
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture(autouse=True, scope="module")
def _free_memory_given_back() -> Iterator[None]:
    """After each file the C library gives the memory that it keeps back to the system, where it can (glibc).

    Collections look at what the file made: a full one takes half a second with all that the libraries hold.
    """
    gc.freeze()
    yield
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@pytest.fixture(autouse=True, scope="module")
def _compiler_as_it_was() -> Iterator[None]:
    """What one file compiled does not count towards the limit after which the next one's functions run uncompiled."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


@pytest.fixture(autouse=True)
def _terms_of_plans_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test plans, no term is negative, and terms add up to the expected memory."""
    memory_plan = sys.modules.get("seqtile.planner.memory_plan")
    if memory_plan is None:
        return
    estimate_of = memory_plan.Planner.estimate

    def estimate(*args: Any, **kwargs: Any) -> Any:
        planned = estimate_of(*args, **kwargs)
        for terms, bounds in ((planned.terms, planned.device), (planned.host_terms, planned.host)):
            assert min(terms.values()) >= 0, terms
            assert abs(sum(terms.values()) - bounds.expected) <= 1e-9 * bounds.expected, (terms, bounds)
        return planned

    monkeypatch.setattr(memory_plan.Planner, "estimate", estimate)


@pytest.fixture
def device(pytestconfig: pytest.Config) -> torch.device:
    """The device of ``--device``, for a test that places its tensors itself. Others get it as the default device."""
    import torch

    return torch.device(pytestconfig.getoption("--device"))


@pytest.fixture(autouse=True)
def _default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    where = request.config.getoption("--device")
    if where == "cpu" or "device" in request.fixturenames:
        yield
        return
    import torch

    torch.set_default_device(where)
    yield
    torch.set_default_device(None)


@pytest.fixture
def liger_on_cpu() -> Iterator[None]:
    """Liger's kernels run on the CPU, in Triton's interpreter."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    pytest.importorskip("triton", reason="Triton is not installed")
    if not triton_interpreter.is_on():
        pytest.skip("Triton compiles for the accelerator here, so its kernels take no tensor of the CPU")
    with triton_interpreter.liger_kernels(), triton_interpreter.modeling_as_it_was():
        yield


@pytest.fixture(scope="session")
def installer_environment() -> dict[str, str]:
    """The environment that tests were started with: for installing packages, never for running what is tested."""
    return dict(ENVIRONMENT_BEFORE)


def pytest_sessionstart() -> None:
    """A killed run of the tests may have left a lock on DeepSpeed's builds, for which the next would wait for ever."""
    extension_builds.unlock(0.0, time.time() - extension_builds.BUILD_SECONDS)


def pytest_configure(config: pytest.Config) -> None:
    triton_interpreter.switch_on_without_accelerator()
    if config.getoption("--device") == "tiledev":
        import second_device

        second_device.use()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", metavar="TYPE",
        help="run the tests marked `device`, and no others, on this device: cuda, xpu, or tiledev (second_device.py)",
    )  # fmt: skip
    parser.addoption(
        "--quick", type=float, metavar="SECONDS",
        help="leave out the test functions that took longer, in processor time, as tests/times.txt lists",
    )  # fmt: skip
    parser.addoption("--write-passed", metavar="FILE", type=Path, help="write the names of the tests that pass")
    parser.addoption("--without-passed", metavar="FILE", type=Path, help="leave out the tests that FILE names")
    parser.addoption("--write-times", action="store_true", help="write tests/times.txt from this run")


BEGIN_FIRST = ("test_train_demo.py", "test_bench.py", "test_released_sizes.py")
"""Files with tests of minutes: a worker that begins one last lets the others wait."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts several processes; skip what needs an accelerator where there is none, and say so."""
    items.sort(key=lambda item: item.path.name not in BEGIN_FIRST)
    for item in items:
        if Path(__file__).parent / "distributed" in item.path.parents:
            item.add_marker(pytest.mark.distributed)
    if (limit := config.getoption("--quick")) is not None:
        seconds = processor_times.listed()
        long = {item.nodeid for item in items if seconds.get(processor_times.function(item.nodeid), 0) > limit}
        _leave_out(config, items, long)
    if passed := config.getoption("--without-passed"):
        _leave_out(config, items, set(passed.read_text(encoding="utf-8").splitlines()))
    if config.getoption("--device") != "cpu":
        stays_here = [item for item in items if not any(item.get_closest_marker(mark) for mark in ("device", "gpu"))]
        _leave_out(config, items, {item.nodeid for item in stays_here})
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.accelerator.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator, and torch finds none here"))


def _leave_out(config: pytest.Config, items: list[pytest.Item], names: set[str]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in names])
    items[:] = [item for item in items if item.nodeid not in names]


_ENDED: set[str] = set()
_FAILED: set[str] = set()
_SECONDS: dict[str, float] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[processor_times.START] = processor_times.now()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """The last report of a test carries its processor time to the process that writes the file."""
    if call.when == "teardown":
        item.user_properties.append(
            (processor_times.PROPERTY, processor_times.now() - item.stash[processor_times.START])
        )
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _FAILED.add(report.nodeid)
    if report.when == "teardown":
        _ENDED.add(report.nodeid)
    for name, seconds in report.user_properties:
        if name == processor_times.PROPERTY:
            function = processor_times.function(report.nodeid)
            _SECONDS[function] = _SECONDS.get(function, 0.0) + float(seconds)  # type: ignore[arg-type]


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # the interpreter's end frees everything, or bindings report leaks
    if hasattr(session.config, "workerinput"):
        return
    if session.config.getoption("--write-times"):
        processor_times.write(_SECONDS)
    if file := session.config.getoption("--write-passed"):
        file.write_text("".join(f"{name}\n" for name in sorted(_ENDED - _FAILED)), encoding="utf-8")
