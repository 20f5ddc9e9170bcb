"""Two ranks: one is out of memory, all stop, and the launcher starts them again from the last checkpoint."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny_run
from grid.launch import TESTS
from seqtile.cli import main, train_command
from seqtile.train.recipe import build_recipe, read_recipe
from seqtile.train.run import train

FAULTS = ("1:forward:1", "0:loss:2", "1:backward:4", "0:optimizer:4")
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_run.save_model(folder / "model")
    tiny_run.write_jsonl(folder / "rows.jsonl", tiny_run.text_rows())
    return folder


def values(folder: Path) -> dict[str, Any]:
    return {"model": str(folder / "model"), "dataset": str(folder / "rows.jsonl"), "learning_rate": 1e-2,
            "steps": STEPS, "max_length": tiny_run.LENGTH, "tile": 32, "loss_tile": 32, "save_steps": 2,
            "trainer": {"lr_scheduler_type": "constant"}}  # fmt: skip


@cache
def alone(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process that takes both ranks' rows in each step, and to which nothing happens."""
    output = folder / "alone"
    more = {"output": str(output), "gradient_accumulation": 2, "report": False}
    losses = train(build_recipe({**values(folder), **more}, {})[0]).losses
    return [loss for _, loss in losses], load_file(output / "model.safetensors")


@pytest.mark.slow
def test_all_ranks_start_again_and_nothing_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    check(folder, "ddp", FAULTS, monkeypatch, capfd)


@pytest.mark.slow
def test_shards_start_again_from_step_0(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    check(folder, "fsdp2", ("1:optimizer:1",), monkeypatch, capfd)


def check(folder: Path, engine: str, faults: Any, monkeypatch: Any, capfd: Any) -> None:
    import yaml

    flags = folder / f"faults-{engine}"
    flags.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values(folder)))
    monkeypatch.setattr(train_command, "WORKER", "oom_worker")
    monkeypatch.setenv("OOM_FAULTS", " ".join([str(flags), *faults]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    output = folder / engine
    words = ["--engine", engine, "--nproc", "2", "--on-oom", "retry", "--output", str(output)]
    code = main(["train", "--recipe", str(folder / "recipe.yaml"), *words])
    errors = capfd.readouterr().err
    assert code == 0, errors
    assert len([*flags.iterdir()]) == len(faults)
    found = json.loads((output / "report" / "report.json").read_text())
    told = [(again["phase"], again["step"], again["how"], again["recipe"]["tile"]) for again in found["retries"]]
    last = {"1": "checkpoint-0", "2": "checkpoint-0", "4": "checkpoint-2"}
    expected = [
        (phase, int(step), f"from {last[step]}", 32 // 2**number)
        for number, (_, phase, step) in enumerate((word.split(":") for word in faults), start=1)
    ]
    assert told == expected
    assert read_recipe(output / "recipe.yaml")["tile"] == expected[-1][-1]
    assert errors.count("out of memory at step") == len(faults)
    for rank, phase, step in (word.split(":") for word in faults):
        assert re.search(rf"out of memory at step {step}, in the {phase}[^:]*, on rank {rank}: continuing from", errors)
    assert "Traceback" not in errors, errors
    losses, trained = alone(folder)
    again = [row["loss"] for row in found["losses"]]
    # Sums in another order (two ranks, smaller tiles), and Adam's first steps divide each gradient by its own size.
    torch.testing.assert_close(torch.tensor(again), torch.tensor(losses), rtol=1e-5, atol=0)
    start = load_file(folder / "model" / "model.safetensors")
    moved = max(float((trained[name] - start[name]).abs().max()) for name in start)
    for name, tensor in load_file(output / "model.safetensors").items():
        torch.testing.assert_close(tensor, trained[name], rtol=0, atol=moved * 1e-3, msg=lambda m, n=name: n + m)
