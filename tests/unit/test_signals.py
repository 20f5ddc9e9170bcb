"""Which signals stop a run, what a second one means, and which failure of several processes is raised."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from refusals import refused
from seqtile._errors import RunError
from seqtile.cli import main, worker
from seqtile.train import launch, signals
from seqtile.train.recipe import build_recipe
from seqtile.train.signals import REPEAT_SECONDS, StoppedAtOnce, StopRequest, exit_code, stop_at_once, stop_signals


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

    monkeypatch.setattr("seqtile.cli.train_command.read_recipe", stopped)
    assert main(["train", "--recipe", "any.yaml"]) == exit_code(number) == code
    assert capsys.readouterr().err == "seqtile: interrupted; nothing else was saved\n"


FRONT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], start_new_session=True)
time.sleep(600)
"""
RANK = """
import signal, sys
from seqtile.cli import worker
worker.ORPHAN_SECONDS = 0.2
signal.signal(signal.SIGTERM, lambda *_: print("asked to save", flush=True))
print("waits", flush=True)
worker.follow(int(sys.argv[1]))
"""


def test_a_rank_whose_front_was_killed_is_asked_to_save_and_killed_where_it_hangs():
    with subprocess.Popen([sys.executable, "-c", FRONT, RANK], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None and front.stdout.readline() == "waits\n"
        front.kill()
        assert front.stdout.read() == "asked to save\n"  # to the end of the pipe: nobody is left who could write there
    assert 1.0 + worker.ORPHAN_SECONDS < 30


def run_stand_ins(folder: Path, monkeypatch: pytest.MonkeyPatch, *ends: str) -> int:
    """Two processes that end so, through torch's agent."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    recipe = build_recipe({"engine": "ddp", "nproc": 2, "model": "m", "dataset": "d", "output": "out"}, {})[0]
    return launch.run_ranks(recipe, folder, {"ends": ends}, "rank_stand_in")


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (("hang", "RuntimeError: planted"), "rank 1 failed first:\nTraceback of rank 1"),
        (("hang", "killed"), "rank 1 was ended by SIGKILL without an error.*--resume continues"),
        (("StoppedAtOnce: ", "DistBackendError: closed"), "rank 1 lost its connection to a process on another"),
    ],
)
def test_the_failure_that_came_first_is_the_one_that_is_raised(
    ends: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(RunError, match=words):
        run_stand_ins(tmp_path, monkeypatch, *ends)


def test_a_refusal_by_one_rank_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = ("RuntimeError: [gloo] closed by peer", "RankRefused: nodes.port-in-use: rank 1: refuses")
    with refused("nodes.port-in-use") as raised:
        run_stand_ins(tmp_path, monkeypatch, *ends)
    assert str(raised.value) == "rank 1: refuses"


def test_ranks_that_do_not_answer_are_killed_when_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def ask() -> None:
        while len([*tmp_path.glob("*.hangs")]) < 2:
            time.sleep(0.01)
        for _ in range(3):  # a stand-in has SIGINT blocked
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

    threading.Thread(target=ask, daemon=True).start()
    with pytest.raises(StoppedAtOnce) as stopped:
        run_stand_ins(tmp_path, monkeypatch, "hang", "hang")
    assert stopped.value.number == signal.SIGINT
