"""A run's directory: one run at a time, no run refused because of a killed one, and checks that leave nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from refusals import refused
from seqtile.train.recipe import build_recipe
from seqtile.train.run import locate
from seqtile.train.run_directory import LOCK, check_output, check_unlocked, check_writable, take_lock


def test_a_run_keeps_others_out_and_frees_its_directory(tmp_path: Path):
    recipe = build_recipe({"output": str(tmp_path), "model": "m", "dataset": "d"}, {})[0]
    first = FileLock(tmp_path / LOCK)
    take_lock(first)
    take_lock(first)  # after a retry
    for resume in (False, True):
        (tmp_path / "checkpoint-1").mkdir(exist_ok=True)
        with refused("output.in-use"):
            locate(recipe, resume=resume, resume_from=None, overwrite=False)
    with refused("output.in-use"):
        take_lock(FileLock(tmp_path / LOCK))
    first.release(force=True)
    check_unlocked(tmp_path)
    take_lock(FileLock(tmp_path / LOCK))


def test_the_directory_of_a_killed_run_is_free_at_once(tmp_path: Path):
    """Also before its parent has looked, and while a process that it forked, such as a data loader's, lives on."""
    script = (
        "import os, signal, sys, time; from filelock import FileLock; from pathlib import Path\n"
        "from seqtile.train.run_directory import LOCK, take_lock\n"
        "lock = FileLock(Path(sys.argv[1], LOCK)); take_lock(lock)\n"
        "if child := os.fork():\n    print(child, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        child = int(killed.stdout.readline())
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        try:
            check_unlocked(tmp_path)
            check_output(build_recipe({}, {})[0], tmp_path, overwrite=False)
            take_lock(FileLock(tmp_path / LOCK))
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_lock_is_refused(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    (tmp_path / LOCK).touch()
    monkeypatch.setattr(FileLock, "_acquire", refuse)
    for check in (lambda: take_lock(FileLock(tmp_path / LOCK)), lambda: check_unlocked(tmp_path)):
        with refused("output.cannot-lock"):
            check()


def test_a_look_whether_it_is_locked_leaves_nothing(tmp_path: Path):
    check_unlocked(tmp_path)
    check_unlocked(tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_look_whether_it_can_be_written_leaves_nothing(tmp_path: Path):
    check_writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with refused("output.not-writable", "Not a directory"):
        check_writable(tmp_path / "file" / "a")
