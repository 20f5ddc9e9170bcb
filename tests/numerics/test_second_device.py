"""Every operator on a device type that is neither a CPU nor named anywhere in seqtile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import second_device

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(second_device.why_not()), reason=second_device.why_not() or "it can"),
]
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["device/test_steps.py"],
        # Its tensors change no dtype in place, are no inference tensors and have no address.
        ["numerics/test_contract.py", "-k", "many_tiles or checkpoint or non_contiguous or frozen"],
        ["numerics/test_head.py", "-k", "equal_to_the_twin or lengths"],
    ],
    ids=["steps", "contract", "loss"],
)
def test_it_runs_and_is_right(arguments: list[str]) -> None:
    """In a process of its own: a device type is registered for good."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--device={second_device.NAME}", *arguments],
        cwd=TESTS, capture_output=True, text=True, env={**os.environ, "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:] + done.stderr[-3000:]


def test_the_device_refuses_what_an_accelerator_refuses() -> None:
    code = "import torch, second_device as s; s.use(); torch.zeros(3, device=s.NAME) + torch.zeros(3)"
    folder = Path(second_device.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert "a tensor on the CPU among those on tiledev" in done.stderr
