"""Whole steps of benchmarks/step.py and cpu.py, tiny, on the CPU; a method that fails leaves the others alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cpu import measure_whole_steps, steps_table


def test_whole_steps_on_a_cpu() -> None:
    """DeepSpeed's loss and MLP and ours compute Transformers' gradients; one that fails leaves the others."""
    pytest.importorskip("deepspeed")
    job = {"methods": ["transformers", "alst", "seqtile", "nothing"], "lora": 0, "turns": 1, "layers": 1}
    shape = {"tokens": 256, "hidden": 64, "intermediate": 176, "vocabulary": 320}
    threads = torch.get_num_threads()
    try:
        rows = measure_whole_steps(job | shape)["rows"]
    finally:
        torch.set_num_threads(threads)
    assert [row["method"] for row in rows] == job["methods"]
    assert all(row["gradient_error"] < 1e-5 and row["ratio"] > 0 for row in rows[:3])
    assert "expected one of" in rows[3]["error"] and rows[3]["error"] in steps_table(rows, "all weights")


@pytest.mark.slow
def test_the_command_goes_on_after_a_method_that_fails(tmp_path: Path) -> None:
    command = [
        sys.executable, "benchmarks/step.py", "--device", "cpu", "--smoke", "--methods", "liger", "seqtile", "--train",
        "lora", "--rounds", "1", "--out", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [file] = tmp_path.glob("step-smoke-*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    steps = {row["method"]: row for row in rows if row["kind"] == "steps, lora"}
    assert "error" in steps["liger"]  # Triton has no driver on a CPU
    assert steps["seqtile"]["layers"] == 4
    assert {row["way"] for row in rows if row["kind"] == "loss" and "ms" in row} >= {"seqtile, scalar loss"}
