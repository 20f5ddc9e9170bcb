"""DeepSpeed's builds of the tests: a folder of their own, or the user's; locks of dead builds go, others stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import extension_builds

TESTS = Path(extension_builds.__file__).parent


def folder_of_the_tests(**environment: str) -> str:
    """What processes that tests start are told, when the tests are started with this environment."""
    code = "import json, os, conftest; print(json.dumps(os.environ['TORCH_EXTENSIONS_DIR']))"
    start = {name: value for name, value in os.environ.items() if not name.startswith(("SEQTILE_", "TORCH_EXT"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**start, **environment}, cwd=TESTS
    )
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout))


def test_the_tests_have_a_folder_of_their_own_in_the_repository() -> None:
    found = Path(folder_of_the_tests())
    assert found == extension_builds.OWN
    assert found.is_relative_to(TESTS.parent / ".cache")


def test_the_users_folder_wins(tmp_path: Path) -> None:
    assert folder_of_the_tests(TORCH_EXTENSIONS_DIR=str(tmp_path)) == str(tmp_path)


def test_the_lock_of_a_dead_build_goes_and_that_of_a_running_one_stays(tmp_path: Path) -> None:
    now = time.time()
    for name, age in (("dead", 2 * extension_builds.BUILD_SECONDS), ("running", 60.0)):
        (tmp_path / name).mkdir()
        lock = tmp_path / name / "lock"
        lock.touch()
        os.utime(lock, (now - age, now - age))
    extension_builds.unlock(0.0, now - extension_builds.BUILD_SECONDS, tmp_path)
    assert [lock.parent.name for lock in tmp_path.glob("*/lock")] == ["running"]
    extension_builds.unlock(0.0, now, tmp_path / "there is none")
