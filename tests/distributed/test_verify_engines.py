"""``verify`` under every engine, two processes: right is right on both ranks, and a lost tile is named."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grid.launch import ROOT, TESTS
from grid.verify import MLP
from unit.test_cli_verify import CONFIG

ENGINES = ["ddp", "fsdp2", *(["zero2", "zero3"] if importlib.util.find_spec("deepspeed") else [])]
SECONDS = 1200
"""A guard against a hang; DeepSpeed compiles an operator the first time."""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What both ranks found, by engine and kind."""
    folder = tmp_path_factory.mktemp("verify")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT / "src")]),
        "DS_ACCELERATOR": "cpu",
    }
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0", "--local-addr=localhost", "-m", "grid.verify", str(folder / "rank"), *ENGINES,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for rank in range(2):
        for line in (folder / f"rank{rank}").read_text().splitlines():
            one = json.loads(line)
            found.setdefault((one["engine"], one["kind"]), []).append(one)
    return found


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2", "zero3"])
def test_both_ranks_find_the_same(engine: str, lines: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    if engine not in ENGINES:
        pytest.skip("needs deepspeed, which is installed where it can compile: a C++ compiler, Python.h")
    for kind in ("full", "lora", "lost"):
        one, other = lines[engine, kind]
        assert one["parameters"] == other["parameters"] and one["with_dropout"] == other["with_dropout"]
        assert one["blocks"] == 2 and one["ran"]["cut"] and one["reference"] == "float64"
        errors = [found["untiled_error"] for found in one["parameters"]]
        assert max(errors) < 1e-5  # the engine itself gives the mean over the ranks
    assert lines[engine, "full"][0]["ok"], lines[engine, "full"][0]["text"]
    assert len(lines[engine, "full"][0]["parameters"]) == 21 + 1
    assert lines[engine, "lora"][0]["ok"], lines[engine, "lora"][0]["text"]
    assert len(lines[engine, "lora"][0]["with_dropout"]) == 12 + 1
    lost = lines[engine, "lost"][0]
    assert not lost["ok"] and lost["worst"]["name"].startswith(MLP), lost["text"]


def test_the_command_starts_the_processes(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    command = ["seqtile", "verify", "--model", str(tmp_path), "--engine", "ddp", "--nproc", "2", "--tokens", "100"]
    flags = ["--lora", "r=4,dropout=0.2", "--dtype", "bfloat16", "--json"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # one object, nothing else
    assert found["verdict"] == "same" and found["engine"] == "ddp" and found["with_dropout"]["compared"] == 29
    assert found["notes"][0] == "under ddp on 2 processes; costs are those of one"
