"""Benchmarks end to end on tiny shapes: every process starts, every file is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from cell import Cell
from measure_block import measure_cell
from seqtile.options import TilingOptions

ROOT = Path(__file__).parents[2]
EVERY_ROW = {"date", "command", "device_name", "versions", "python", "kind"}


def written(directory: Path) -> list[dict[str, Any]]:
    [file] = directory.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert all(row.keys() >= EVERY_ROW for row in rows)
    assert all(row["versions"]["torch"] for row in rows)
    return rows


WITHOUT = """
from importlib.machinery import PathFinder

MISSING = {"pydantic", "typer", "rich", "trl", "datasets", "deepspeed", "liger_kernel"}
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *where: None if name.partition(".")[0] in MISSING else find(name, *where)
)
"""
"""A ``sitecustomize.py`` for a machine with torch, transformers and peft (which brings accelerate) alone."""


def bare(folder: Path) -> dict[str, str]:
    """The environment of a process on such a machine, from a clone."""
    (folder / "sitecustomize.py").write_text(WITHOUT, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")])}


@pytest.mark.slow
def test_the_ladder_runs_on_a_bare_machine(tmp_path: Path) -> None:
    sizes = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=256)
    AutoConfig.for_model("llama", **sizes, pad_token_id=0).save_pretrained(tmp_path / "model")
    out = tmp_path / "rows" / "rows.jsonl"
    words = ["--model", str(tmp_path / "model"), "--device", "cpu", "--memory", "24MiB", "--precision", "float32",
             "--rungs", "7", "--lora", "r=4", "--within", "0.5", "--start", "4096", "--out", str(out)]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_ladder.py", *words], cwd=ROOT, capture_output=True, text=True, timeout=600,
        env=bare(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *attempts, rung = written(out.parent)
    assert rung["search_ended"] == "close enough" and rung["max_length"] > 0
    assert all(row["attention"] for row in attempts if "error" not in row)


@pytest.mark.slow
def test_the_gpu_suite_runs_small_on_a_bare_machine_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "rows"
    arguments = ["benchmarks/gpu.py", "--device", "cpu", "--smoke", "--out", str(out)]
    environment = bare(tmp_path)

    def run() -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600,
            env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    begin = time.monotonic()
    run()
    print(f"the GPU suite's dry run on the CPU: {time.monotonic() - begin:.0f} s")
    rows = written(out)
    checks = {row["claim"]: row for row in rows if row["kind"] == "check"}
    measured = [row for row in rows if row["kind"] != "check"]
    assert rows[0]["kind"] == "machine" and rows[0]["gemm_tflops"] > 0
    assert rows[0]["attention"]["chosen"]["operators"] == ["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert not [row["error"] for row in rows if "error" in row]
    assert len(checks) == 12
    [halves] = [check for claim, check in checks.items() if "two halves" in claim]
    assert halves["holds"] is True  # the one claim that means something at this size
    [file] = out.iterdir()
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(lines[: len(measured) - 1]) + lines[-1][:30], encoding="utf-8")  # ended before the last row
    said = run()
    again = written(out)
    assert again[: len(measured) - 1] == measured[:-1] and again[len(measured) - 1]["kind"] == measured[-1]["kind"]
    assert said.count(" s] ") == 1, "what was measured is not measured again"
    assert all(claim in said for claim in checks)
    assert "| llama-8b, full | 512 | fused |" in said and "| estimated ms | estimated GiB |" in said
    assert "| + head-wise attention | 2 of 4 | 64 |" in said and "| planned GiB |" in said


@pytest.mark.gpu
def test_the_allocator_is_read_on_an_accelerator() -> None:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert accelerator is not None
    cell = Cell(1024, 2816, 8192, device=accelerator.type, options=TilingOptions(tile="shards:4"))
    found = measure_cell(cell)
    assert found["peak_from"] == "allocator" and found["units"] == 11
    rows, buffer = 8192 * 1024 * 2, 8192 // 4 * 2816 * 2
    sums = 3 * 1024 * 2816 * 4
    # Two hidden states, four buffers, fp32 sums; the allocator rounds up each by 2 MiB at most.
    assert found["beyond_bytes"] <= 2 * rows + 4 * buffer + sums + 12 * 2**21
