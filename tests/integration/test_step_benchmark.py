"""benchmarks/step.py on the CPU, tiny: its jobs, its table, and that a method that fails leaves the others alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cpu import measure_whole_steps, steps_table
from step import TINY, compare_gradients, measure_steps, table

JOB = {"model": str(TINY), "device": "cpu", "layers": 2, "tokens": 256, "lora": 4}


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("method", ["seqtile", "seqtile+attention-saved"])
def test_gradients_of_ours_are_transformers(method: str, lora: int) -> None:
    itself = compare_gradients({**JOB, "lora": lora, "method": "transformers"})
    ours = compare_gradients({**JOB, "lora": lora, "method": method})
    assert itself["gradient_error"] == itself["own_error"] > 0
    assert 0 < ours["gradient_error"] < 3 * ours["own_error"]
    assert "tiled 2 of 2 MLPs" in ours["ran"]


def test_a_step_is_measured() -> None:
    row = measure_steps({**JOB, "method": "seqtile"})
    assert len(row["step_ms"]) == 2
    assert row["peak_gib"] > 0
    assert row["layers_of_model"] == json.loads((TINY / "config.json").read_text())["num_hidden_layers"]


def test_the_table_takes_layers_and_the_rest_apart() -> None:
    base = {
        "kind": "steps, lora",
        "tokens": 1000,
        "layers_of_model": 10,
        "peak_gib": 1.0,
        "lora": 4,
        "model": str(TINY),
    }
    rows = [
        {**base, "method": "ours", "layers": 2, "step_ms": [50.0, 52.0, 54.0]},
        {**base, "method": "ours", "layers": 4, "step_ms": [72.0]},
        {**base, "method": "peer", "layers": 2, "error": "out of memory"},
        {"kind": "gradients, lora", "method": "ours", "gradient_error": 0.002, "own_error": 0.001},
    ]
    text = table(rows, "lora", 1000, (2, 4), {})
    assert "| ours | 10.0 | 32.0 |  | 1.00 | 7,576 | 2.0e-03, 1.0e-03 |" in text  # 1000 tokens in 32 + 10 * 10 ms
    assert "| peer | out of memory |" in text
    assert "| ours | 52.0 | 1.00 | 19,231 | 2.0e-03, 1.0e-03 |" in table(rows, "lora", 1000, (2,), {})


@pytest.mark.parametrize("lora", [0, 4])
def test_whole_steps_on_a_cpu(lora: int) -> None:
    """DeepSpeed's loss and MLP and ours compute Transformers' gradients; one that fails leaves the others."""
    pytest.importorskip("deepspeed")
    job = {"methods": ["transformers", "alst", "seqtile", "nothing"], "lora": lora, "turns": 1, "layers": 1}
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


def test_without_an_accelerator_it_says_so() -> None:
    command = [sys.executable, "benchmarks/step.py", "--device", "cpu", "--out", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--smoke" in done.stderr
