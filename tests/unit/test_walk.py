"""The walk from a decoder layer to its first matrix product stays short: counted, not timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "walk.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="no benchmarks here: an installed package")


@pytest.mark.parametrize(("way", "calls", "switches"), [("fused", 60, 36), ("head-wise", 103, 49)])
def test_the_walk_is_short(way: str, calls: int, switches: int) -> None:
    """It was 284 calls with 91 switches between files, and 230 with 102; the norm before attention has 8 of them.

    In a process of its own: what other tests leave behind in this one has moved the count by a call.
    """
    command = [sys.executable, str(SCRIPT), "--way", way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert 40 < found["calls"] <= calls
    assert 20 < found["switches"] <= switches
