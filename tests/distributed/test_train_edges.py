"""``seqtile train --engine`` where ranks could disagree, or an engine does not know the model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import tiny_run
from grid.launch import TESTS
from seqtile.cli import main
from seqtile.train.recipe import build_recipe
from seqtile.train.run import train

SECONDS = 600
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=10, max_position_embeddings=256, pad_token_id=0, bos_token_id=None, eos_token_id=0)  # fmt: skip
TOWER = dict(hidden_size=24, intermediate_size=60, num_hidden_layers=2, num_attention_heads=2, image_size=28,
             patch_size=14)  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", tiny_run.text_rows())


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]))


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("rate", "best"), [(0.01, 3), pytest.param(2.0, 1, marks=pytest.mark.slow)], ids=["the last", "the first"]
)
def test_fsdp2_loads_the_best_checkpoint_at_the_end(rate: float, best: int, rows: Path, tmp_path: Path) -> None:
    """When Transformers looks for the checkpoint, FSDP has written nothing of it: one rank saw it, another did not."""
    tiny_run.save_model(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    trainer = {"load_best_model_at_end": True, "lr_scheduler_type": "constant", "warmup_steps": 0}
    recipe.write_text(yaml.safe_dump({"learning_rate": rate, "trainer": trainer}))
    output = tmp_path / "out"
    given = ["--model", str(tmp_path / "model"), "--dataset", str(rows), "--eval-dataset", str(rows), "--steps", "3"]
    more = ["--eval-steps", "1", "--max-length", "64", "--output", str(output), "--recipe", str(recipe)]
    assert main(["train", *given, *more, "--engine", "fsdp2", "--nproc", "2"]) == 0
    found = json.loads((output / "report" / "report.json").read_text())["best"]
    assert found["step"] == best
    assert tiny_run.mean_loss(output, rows, 1, 64) == pytest.approx(found["eval_loss"], rel=1e-5)
    for step in (2, 3):
        state = json.loads((output / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert Path(state["best_model_checkpoint"]).name == f"checkpoint-{state['best_global_step']}"


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_a_model_with_a_tower_trains_on_text(engine: str, rows: Path, tmp_path: Path) -> None:
    """DDP would wait for gradients of the tower; accelerate looks for classes of a tower that SigLIP has not."""
    vocab = tiny_run.save_tokenizer(tmp_path / "model")
    text: dict[str, Any] = {**SIZES, "vocab_size": vocab}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=TOWER, mm_tokens_per_image=4, image_token_index=5, boi_token_index=6,
        eoi_token_index=7,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    values = {"learning_rate": 0.01, "tile": 16, "max_length": 64, "trainer": {"lr_scheduler_type": "constant"}}
    recipe.write_text(yaml.safe_dump(values))
    given = ["--model", str(tmp_path / "model"), "--dataset", str(rows), "--recipe", str(recipe), "--steps", "2"]
    assert main(["train", *given, "--engine", engine, "--nproc", "2", "--output", str(tmp_path / "out")]) == 0
    alone = {**values, "model": str(tmp_path / "model"), "dataset": str(rows), "steps": 2, "gradient_accumulation": 2}
    losses = train(build_recipe({**alone, "output": str(tmp_path / "alone")}, {})[0]).losses
    report = json.loads((tmp_path / "out" / "report" / "report.json").read_text())
    torch.testing.assert_close([row["loss"] for row in report["losses"]], [x for _, x in losses], rtol=1e-5, atol=0)
    start, end = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", tmp_path / "out"))
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved == {name for name in start if "vision_tower" not in name and "multi_modal" not in name}
