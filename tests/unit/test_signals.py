"""Which signals stop a run, what a second one means, and what a launch does with them; the processes are stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seqtile._errors import RunError
from seqtile.cli import main, worker
from seqtile.train import launch, signals
from seqtile.train.processes import started_at
from seqtile.train.recipe import build_recipe
from seqtile.train.signals import REPEAT_SECONDS, StoppedAtOnce, StopRequest, exit_code, stop_at_once, stop_signals

SECONDS = 60.0
"""A guard against a hang."""


@pytest.mark.parametrize(
    ("first", "second", "later", "urgent"),
    [
        (signal.SIGTERM, signal.SIGTERM, 1.0, False),
        (signal.SIGTERM, signal.SIGHUP, 1.0, False),
        (signal.SIGINT, signal.SIGTERM, 1.0, False),
        (signal.SIGTERM, signal.SIGTERM, REPEAT_SECONDS + 1, True),
        (signal.SIGINT, signal.SIGINT, 0.1, True),
        (signal.SIGTERM, signal.SIGINT, 0.1, True),
    ],
)
def test_a_repeated_sigterm_is_the_same_request_and_a_second_ctrl_c_is_not(
    first: signal.Signals, second: signal.Signals, later: float, urgent: bool, monkeypatch: pytest.MonkeyPatch
):
    clock = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    request = StopRequest()
    assert not request.is_urgent(first)
    clock[0] += later
    assert request.is_urgent(second) is urgent
    assert request.first == first


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_repeats_an_answered_request_ends_nothing():
    request = signals.new_request()
    with pytest.raises(StoppedAtOnce):
        stop_at_once(signal.SIGTERM, None)
    request.is_urgent(signal.SIGTERM)
    stop_at_once(signal.SIGTERM, None)
    with pytest.raises(StoppedAtOnce):
        stop_at_once(signal.SIGINT, None)
    signals.new_request()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_exit_code_says_which_signal(number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys):
    def stopped(*_: object) -> None:
        raise StoppedAtOnce(number)

    monkeypatch.setattr("seqtile.train.recipe.read_recipe", stopped)
    assert main(["train", "--recipe", "any.yaml"]) == exit_code(number) == code
    assert capsys.readouterr().err == "seqtile: interrupted; nothing more was saved\n"


# A launcher that starts one worker and waits for it. The worker lists the signals that are blocked, counts those that
# come within a second of the first, and ends as one that has saved.
LAUNCHER = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]], start_new_session=True))"
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
folder, came = Path(sys.argv[1]), []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: came.append(number))
blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
signal.pthread_sigmask(signal.SIG_UNBLOCK, json.loads(sys.argv[2]))
(folder / "0.pid").write_text(str(os.getpid()))
while not came:
    time.sleep(0.01)
time.sleep(1)
Path(sys.argv[3]).write_text(json.dumps([blocked, came, os.getppid()]))
(folder / "0.end").write_text(json.dumps({"code": 128 + came[0], "message": "", "together": True}))
"""


def launched(folder: Path, script: str, *arguments: str) -> launch.Launch:
    recipe = build_recipe({"engine": "ddp", "nproc": 1, "model": "m", "dataset": "d"}, {})[0]
    return launch.Launch(recipe, [sys.executable, "-c", script, *arguments], folder)


def test_sigterm_to_every_process_twice_is_one_request(tmp_path: Path):
    import json

    told = tmp_path / "told"
    wanted = json.dumps([int(number) for number in stop_signals()])
    run = launched(tmp_path, LAUNCHER, "-c", WORKER, str(tmp_path), wanted, str(told))

    def stop() -> None:
        while not (tmp_path / "0.pid").is_file() or not (pid := (tmp_path / "0.pid").read_text()):
            time.sleep(0.01)
        launcher = int(Path(f"/proc/{pid}/stat").read_text().split()[3])
        for _ in range(2):
            for process in (launcher, os.getpid(), int(pid)):
                os.kill(process, signal.SIGTERM)
            time.sleep(0.3)

    threading.Thread(target=stop, daemon=True).start()
    assert run.wait() == 143
    blocked, came, _ = json.loads(told.read_text())
    assert set(blocked) >= {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    assert set(came) == {signal.SIGTERM} and len(came) >= 2


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL and said nothing"),
        ("raise SystemExit(3)", "ended with exit code 3 and said nothing"),
    ],
)
def test_a_launcher_that_dies_without_a_word_is_reported(script: str, words: str, tmp_path: Path):
    with pytest.raises(RunError, match=f"the launcher of the 1 processes {words}.*--resume goes on"):
        launched(tmp_path, script).wait()


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    started = [subprocess.Popen(command, start_new_session=True) for _ in range(3)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_no_orphan_of_a_front_that_was_killed(
    sleepers: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # One worker hangs, another is stopped and could not end itself; the front is killed and nobody has looked.
    front, hangs, frozen = sleepers
    frozen.send_signal(signal.SIGSTOP)
    for rank, process in enumerate((hangs, frozen)):
        (tmp_path / f"{rank}.pid").write_text(str(process.pid))
    monkeypatch.setattr(worker, "ORPHAN_SECONDS", 0.2)
    asked: list[Any] = []
    worker.follow(front.pid, started_at(front.pid) or 0.0, lambda: asked.append(hangs.poll()),
                  lambda: launch.kill_workers(tmp_path))  # fmt: skip
    time.sleep(1.5)
    assert not asked
    front.send_signal(signal.SIGKILL)
    assert [process.wait(SECONDS) for process in (hangs, frozen)] == [-signal.SIGKILL] * 2
    assert asked == [None]  # first asked to save and to end
    assert 1.0 + worker.ORPHAN_SECONDS < 30
