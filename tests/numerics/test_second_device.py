"""Every operator on a device type that is neither a CPU nor named anywhere in seqtile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import device_checks
import second_device

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(second_device.why_not()), reason=second_device.why_not() or "it can"),
]


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each check, in a process of their own: a device type is registered for good."""
    result = tmp_path_factory.mktemp("device") / "result.json"
    done = subprocess.run(
        [sys.executable, device_checks.__file__, str(result)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(result.read_text()))


@pytest.mark.parametrize("name", device_checks.CHECKS)
def test_it_runs_and_is_right(name: str, problems: dict[str, str]) -> None:
    assert problems[name] == "", problems[name]


def test_no_other_check_was_forgotten(problems: dict[str, str]) -> None:
    assert problems.keys() == device_checks.CHECKS.keys()


def test_the_device_refuses_what_an_accelerator_refuses() -> None:
    code = "import torch, second_device as s; s.use(); torch.zeros(3, device=s.NAME) + torch.zeros(3)"
    folder = Path(second_device.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert "a tensor on the CPU among those on tiledev" in done.stderr
