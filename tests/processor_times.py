"""How long each test function took when `make times` measured it: `make test-fast` leaves out the long ones."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("times.txt")
RECORDED = 0.1
"""Seconds of processor time, over all cases of a test function and its processes, from which it is listed."""

PROPERTY = "processor seconds"
START = pytest.StashKey[float]()


def now() -> float:
    """Processor seconds of this process and of the ended processes that it had started."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def function(nodeid: str) -> str:
    """The test function of a case: ``file::function`` without the case's parameters."""
    return nodeid.partition("[")[0]


def listed() -> dict[str, float]:
    """The functions in the file and their seconds."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return {name: float(value) for value, name in rows}


def write(seconds: dict[str, float]) -> None:
    """Write the functions above the limit, the longest first; those that did not run keep their times."""
    head = (
        f"# Test functions of more than {RECORDED} s of processor time, some too long for `make test-fast`.\n"
        f"# make times, {datetime.date.today().isoformat()}, {platform.machine()}, one thread each\n"
    )
    rows = sorted(((value, name) for name, value in (listed() | seconds).items() if value > RECORDED), reverse=True)
    text = "".join(f"{value:6.1f} {name}\n" for value, name in rows if _exists(name))
    FILE.write_text(head + text, encoding="utf-8")


def _exists(name: str) -> bool:
    file, _, test = name.partition("::")
    path = FILE.parents[1] / file
    return path.is_file() and f"def {test}(" in path.read_text(encoding="utf-8")
