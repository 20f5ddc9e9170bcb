"""TRL's trainers log the same losses with decoder layers in chunks, set up before training or by the callback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

import seqtile
import tiny_run
import trainers
from seqtile.blocks.instance import installed_forwards
from seqtile.chunks.segment import ChunkForward
from seqtile.integrations.callback import TilingCallback

ADAPTERS = LoraConfig(r=3, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
TRAINERS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "sft, packed": (trainers.sft, dict(packing=True), dict(segment=2)),
    "sft, accumulated": (
        trainers.sft, dict(gradient_accumulation_steps=2, gradient_checkpointing=True), dict(segment=2, loss="tiled")
    ),
    "sft, on the host": (trainers.sft, dict(gradient_checkpointing=True), dict(offload=True)),
    "sft, adapters": (trainers.sft, dict(adapters=ADAPTERS), dict(segment=2)),
    "dpo": (trainers.dpo, {}, dict(segment=2)),
    "grpo": (trainers.grpo, {}, dict(segment=2)),
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", TRAINERS)
def test_losses_of_every_step_are_the_same(case: str, directory: Path, tmp_path: Path) -> None:
    make, settings, apply = TRAINERS[case]

    def losses(how: str) -> torch.Tensor:
        torch.manual_seed(0)
        trainer = make(
            directory, tmp_path, *([TilingCallback(chunk=8, **apply)] if how == "callback" else []), **settings
        )
        if how == "apply":
            seqtile.apply(trainer.model, chunk=8, **apply)
        trainer.train()
        chunked = [forward for forward in installed_forwards(trainer.model) if isinstance(forward, ChunkForward)]
        assert bool(chunked) == (how != "plain")
        assert all(forward.chunks > 1 and not forward.refused for forward in chunked)
        return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    whole = losses("plain")
    assert len(whole) == trainers.STEPS and whole.unique().numel() > 1
    for how in ("apply", "callback"):
        torch.testing.assert_close(losses(how), whole, rtol=1e-4, atol=2e-6)
