"""What models ``seqtile train`` takes: one for pictures trains on text, and what it cannot train it refuses at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback

import tiny_run
from refusals import command_refused
from seqtile.cli import main
from seqtile.train.recipe import build_recipe
from seqtile.train.run import train


def flags(model: Path, output: Path, rows: str) -> list[str]:
    return ["train", "--model", str(model), "--dataset", rows, "--max-length", "64", "--steps", "2", "--tile", "16",
            "--output", str(output)]  # fmt: skip


@pytest.mark.parametrize("lora", [[], ["--lora", "4"]], ids=["full", "lora"])
def test_a_model_for_pictures_trains_on_text(
    lora: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny_run.save_llava(tmp_path / "llava")
    rows = tiny_run.write_jsonl(tmp_path / "rows.jsonl", tiny_run.text_rows())
    assert main([*flags(tmp_path / "llava", tmp_path / "out", str(rows)), *lora]) == 0
    assert "frozen, because no text reaches them: model.vision_tower" in capfd.readouterr().err
    if lora:
        saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
        assert saved and not any("vision" in name or "projector" in name for name in saved)
        return
    start, end = (load_file(folder / "model.safetensors") for folder in (tmp_path / "llava", tmp_path / "out"))
    still = {name for name in start if torch.equal(start[name], end[name])}
    assert still == {name for name in start if "vision_tower" in name or "projector" in name}


@pytest.mark.parametrize("model_type", ["t5", "bert", "clip"])
@pytest.mark.parametrize("engine", [[], ["--engine", "ddp", "--nproc", "2"]], ids=["single", "ddp"])
def test_another_kind_of_model_is_refused_before_anything_is_read(
    model_type: str, engine: list[str], tmp_path: Path
) -> None:
    tiny_run.save_tokenizer(tmp_path / "model")
    AutoConfig.for_model(model_type).save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("not JSON")  # is not looked at
    code = "model.encoder" if model_type == "bert" else "model.not-causal"
    shown = command_refused([*flags(tmp_path / "model", tmp_path / "out", str(rows)), *engine], code, model_type)
    assert "accelerate launch" not in shown and not (tmp_path / "out").exists()


class Interrupted(TrainerCallback):
    """Ctrl-C while step 2 runs."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGINT)


def save_experts(directory: Path) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=tiny_run.save_tokenizer(directory), hidden_size=32, intermediate_size=52, moe_intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=10, num_experts=4,
        num_experts_per_tok=2, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "save", [save_experts, tiny_run.save_llava, pytest.param(tiny_run.save_qwen_vl, marks=pytest.mark.slow)],
    ids=["experts", "llava", "qwen-vl"],
)  # fmt: skip
def test_a_resumed_run_has_the_weights_of_its_checkpoint_under_whatever_names(save: Any, tmp_path: Path) -> None:
    """Transformers saves experts and towers under the names of their first release, which its Trainer does not find."""
    model, rows = save(tmp_path / "model"), tiny_run.write_jsonl(tmp_path / "rows.jsonl", tiny_run.text_rows())
    values = dict(model=str(model), dataset=str(rows), max_length=64, steps=3, report=False, learning_rate=1e-2)

    def run(output: str, **how: Any) -> Any:
        return train(build_recipe({**values, "output": str(tmp_path / output)}, {})[0], **how)

    whole = run("whole")
    assert run("parts", callbacks=[Interrupted()]).stopped_by is not None
    assert run("parts", resume=True).losses == whole.losses
    start, end = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert start.keys() == end.keys() and all(torch.equal(start[name], end[name]) for name in start)
