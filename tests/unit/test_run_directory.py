"""A run's directory: one run at a time, none that is kept out by a run that has ended, and nothing left by a look."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from seqtile import UserError
from seqtile.train.recipe import build_recipe
from seqtile.train.run import locate
from seqtile.train.run_directory import (
    LOCK,
    LOCK_IS_WRITTEN_WITHIN,
    RunLock,
    check_output,
    check_unlocked,
    check_writable,
)


def written(output: Path, **values: Any) -> None:
    """The lock of this process, changed."""
    with RunLock(output) as lock:
        lock.take()
        held = json.loads((output / LOCK).read_text())
    (output / LOCK).write_text(json.dumps({**held, **values}))


def test_a_run_keeps_others_out_and_frees_its_directory(tmp_path: Path):
    recipe = build_recipe({"output": str(tmp_path), "model": "m", "dataset": "d"}, {})[0]
    with RunLock(tmp_path) as first:
        first.take()
        first.take()
        for resume in (False, True):
            (tmp_path / "checkpoint-1").mkdir(exist_ok=True)
            with pytest.raises(UserError, match=f"in use by another run .process {os.getpid()} on this machine.*;"):
                locate(recipe, resume=resume, resume_from=None, overwrite=False)
        with pytest.raises(UserError, match="another run"), RunLock(tmp_path) as second:
            second.take()
        assert (tmp_path / LOCK).is_file()
    assert not (tmp_path / LOCK).exists()
    check_unlocked(tmp_path)


def test_the_lock_of_a_killed_run_is_none(tmp_path: Path, caplog):
    script = (
        "import os, signal, sys; from pathlib import Path; from seqtile.train.run_directory import RunLock;"
        "RunLock(Path(sys.argv[1])).take(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) as killed:
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        # Its parent has not looked yet: a number that is still in the table of processes.
        assert json.loads((tmp_path / LOCK).read_text())["process"] == killed.pid
        check_unlocked(tmp_path)
        check_output(build_recipe({}, {})[0], tmp_path, overwrite=False)
        with caplog.at_level("INFO", logger="seqtile"), RunLock(tmp_path) as lock:
            lock.take()
            assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert f"removed {tmp_path / LOCK} of a finished run" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_number_that_another_process_has_now(tmp_path: Path):
    pid, started = os.getpid(), psutil.Process().create_time()
    written(tmp_path, process=pid, started=started - 100)
    check_unlocked(tmp_path)
    written(tmp_path, process=pid, started=started + 1)  # the clock was set
    with pytest.raises(UserError, match="another run"):
        check_unlocked(tmp_path)


@pytest.mark.parametrize("where", [{"host": "elsewhere"}, {"space": "pid:[1]"}], ids=str)
def test_a_run_on_another_machine_or_in_another_container(where: dict[str, str], tmp_path: Path):
    written(tmp_path, **where)
    with pytest.raises(UserError, match=r"cannot be checked.*remove '.*run\.lock' if it has ended, or use"):
        check_unlocked(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": "x"}'])
def test_a_lock_that_was_cut_off(text: str, tmp_path: Path):
    (tmp_path / LOCK).write_text(text)
    with pytest.raises(UserError, match="another run is starting"):
        check_unlocked(tmp_path)
    long_ago = time.time() - LOCK_IS_WRITTEN_WITHIN - 1
    os.utime(tmp_path / LOCK, (long_ago, long_ago))
    with RunLock(tmp_path) as lock:
        lock.take()


def test_a_lock_that_another_run_has_just_taken_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Both have seen the same stale lock; the other one was faster.
    written(tmp_path)
    lock = RunLock(tmp_path)
    with pytest.raises(UserError, match="another run"):
        lock._remove_stale()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_look_whether_it_can_be_written_leaves_nothing(tmp_path: Path):
    check_writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to output .*Not a directory"):
        check_writable(tmp_path / "file" / "a")
