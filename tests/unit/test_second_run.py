"""What `make test` does with tests that did not pass: they run once more, without those that did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

WRITTEN = """
from pathlib import Path

def test_passes():
    with Path("calls.txt").open("a") as file:
        print("passes", file=file)

def test_passes_the_second_time():
    seen = Path("calls.txt").read_text()
    with Path("calls.txt").open("a") as file:
        print("second", file=file)
    assert "second" in seen

def test_fails():
    assert False
"""


def _pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    return subprocess.run(
        [*command, *arguments, "test_written.py"], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_what_did_not_pass_runs_once_more(tmp_path: Path) -> None:
    (tmp_path / "test_written.py").write_text(WRITTEN, encoding="utf-8")
    first = _pytest(tmp_path, "--write-passed=passed.txt")
    assert "2 failed, 1 passed" in first.stdout
    assert (tmp_path / "passed.txt").read_text(encoding="utf-8") == "test_written.py::test_passes\n"
    second = _pytest(tmp_path, "--without-passed=passed.txt")
    assert "1 failed, 1 passed, 1 deselected" in second.stdout and second.returncode == 1
    assert (tmp_path / "calls.txt").read_text(encoding="utf-8").split() == ["passes", "second", "second"]
