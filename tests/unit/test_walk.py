"""The walk from a decoder layer to its first matrix product stays short: counted, not timed."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "walk.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="no benchmarks here: an installed package")


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize(("way", "calls", "switches"), [("fused", 88, 46), ("head-wise", 110, 50)])
def test_the_walk_is_short(way: str, calls: int, switches: int) -> None:
    """It was 284 calls with 91 switches between files, and 230 with 102; the norm before attention has 8 of them.

    In a process of its own: what other tests leave behind in this one has moved the count by a call.
    """
    command = [sys.executable, str(SCRIPT), "--way", way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert 60 < found["calls"] <= calls
    assert 20 < found["switches"] <= switches


def test_every_call_until_the_first_product_is_counted(script: dict[str, Any]) -> None:
    walk = script["Walk"]("/package")

    class Frame:
        def __init__(self, file: str) -> None:
            self.f_code = type("Code", (), {"co_filename": file, "co_name": "function"})

    for file in ("a", "a", "b", "a"):
        walk(Frame(f"/package/{file}.py"), "call", None)
        walk(Frame("/elsewhere/torch.py"), "call", None)
    walk(Frame("/elsewhere/torch.py"), "c_call", torch.mm)
    walk(Frame("/package/b.py"), "c_call", torch.empty)
    assert not walk.done
    walk(Frame("/package/b.py"), "c_call", torch.mm)
    walk(Frame("/package/b.py"), "call", None)
    assert walk.numbers() == {"calls": 4, "files": 2, "switches": 2}
