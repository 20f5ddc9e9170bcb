"""What models ``seqtile train`` takes: one for pictures trains on text, and what it cannot train it refuses at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import tiny_run
from seqtile.cli import main


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
    model_type: str, engine: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny_run.save_tokenizer(tmp_path / "model")
    AutoConfig.for_model(model_type).save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("not JSON")  # is not looked at
    assert main([*flags(tmp_path / "model", tmp_path / "out", str(rows)), *engine]) == 2
    shown = capfd.readouterr().err
    assert model_type in shown.splitlines()[-1] and "causal language model" in shown.splitlines()[-1]
    assert "accelerate launch" not in shown and not (tmp_path / "out").exists()
