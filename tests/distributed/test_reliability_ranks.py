"""Two ranks: their checkpoints are marked when both have written, and both stop when one has met a broken loss."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny_run
from seqtile.train.run_directory import MARK, find_checkpoint, numbered, read_mark, why_not_whole

LIMIT = 240  # far above the half minute that it takes: a rank that waits for the other for ever ends here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both ranks left behind: a whole run, and one that broke in step 3 and was resumed."""
    folder = tmp_path_factory.mktemp("ranks")
    model = tiny_run.save_model(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks, logs = [], [folder / f"rank{rank}.log" for rank in range(2)]
    for rank, log in enumerate(logs):
        environment = {
            **os.environ,
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        command = [sys.executable, str(Path(__file__).with_name("_ranks.py")), str(model), str(folder)]
        with log.open("wb") as file:
            ranks.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=folder))
    try:
        codes = [process.wait(LIMIT) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return folder


@pytest.fixture
def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_the_mark_lists_what_both_ranks_wrote(folder: Path):
    checkpoint = find_checkpoint(folder / "whole")
    mark = read_mark(checkpoint)
    assert mark is not None and (mark.step, mark.processes) == (4, 2)
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt", "model.safetensors"} <= mark.files.keys()
    assert {*mark.files} | {MARK} == {path.name for path in checkpoint.iterdir()}
    # One is kept, and the one before it went only when this one was whole.
    assert [step for step, _ in numbered(folder / "whole")] == [4]
    (checkpoint / "rng_state_1.pth").rename(checkpoint / "away")
    assert why_not_whole(checkpoint) == "rng_state_1.pth is missing"
    (checkpoint / "away").rename(checkpoint / "rng_state_1.pth")


def test_both_ranks_stop_and_name_the_one_with_the_broken_loss(told: list[dict[str, Any]], folder: Path):
    assert told[0]["said"] == told[1]["said"]
    assert told[0]["said"].startswith("stopped at step 3: the loss is nan on rank 1\n  micro-batch 1 of 1, 1 x ")
    assert "rank 0" not in told[0]["said"]
    assert f"the last complete checkpoint is {folder / 'parts' / 'checkpoint-2'}" in told[0]["said"]


def test_what_was_saved_before_goes_on_as_if_nothing_had_been(told: list[dict[str, Any]], folder: Path):
    assert len(told[0]["whole"]) == 4
    assert told[0]["resumed"] == told[0]["whole"]
    assert why_not_whole(folder / "parts") == ""
