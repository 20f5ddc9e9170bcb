"""Adapters of an earlier run go on with new data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import tiny_run
from refusals import refused
from seqtile.train.recipe import build_recipe, parse_lora, read_recipe
from seqtile.train.result_report import Outcome
from seqtile.train.run import train


def save_experts(directory: Path) -> Path:
    """A mixture of experts, all of which get adapters."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=tiny_run.save_tokenizer(directory), hidden_size=32, intermediate_size=52, moe_intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=10, num_experts=4,
        num_experts_per_tok=2, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


def run(model: Path, rows: list[dict[str, Any]], output: Path, **values: Any) -> Outcome:
    data = tiny_run.write_jsonl(output.parent / f"{output.name}.jsonl", rows)
    defaults = dict(max_length=tiny_run.LENGTH, tile=16, steps=2, report=False, learning_rate=1e-2)
    paths = {"model": str(model), "dataset": str(data), "output": str(output)}
    return train(build_recipe({**defaults, **paths, **values}, {})[0])


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # of PEFT's own conversion
@pytest.mark.parametrize("save", [tiny_run.save_model, save_experts], ids=["dense", "experts"])
def test_adapters_go_on_where_they_ended(save: Any, tmp_path: Path) -> None:
    model, rows = save(tmp_path / "model"), tiny_run.text_rows()
    run(model, rows[:6], tmp_path / "first", lora={"r": 3, "alpha": 7}, trainer={"lr_scheduler_type": "constant"})
    before = load_file(tmp_path / "first" / "adapter_model.safetensors")
    lora = parse_lora(f"start={tmp_path / 'first'}")
    still = run(model, rows[6:], tmp_path / "still", lora=lora, steps=1, learning_rate=1e-30)
    after = load_file(tmp_path / "still" / "adapter_model.safetensors")
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert still.recipe.lora is not None and (still.recipe.lora.r, still.recipe.lora.alpha) == (3, 7)

    # Its first loss is that of the trained model, and differs from that of the base.
    base = run(model, rows[6:], tmp_path / "base", lora={"r": 3}, steps=1, learning_rate=1e-30)
    assert still.losses != base.losses
    again = train(build_recipe(read_recipe(tmp_path / "still" / "recipe.yaml"), {"output": str(tmp_path / "again")})[0])
    assert again.losses == still.losses


def test_adapters_that_do_not_fit(tmp_path: Path) -> None:
    model = tiny_run.save_model(tmp_path / "model")
    run(model, tiny_run.text_rows(), tmp_path / "first", lora={"r": 3}, steps=1)
    tiny_run.save_model(model, hidden_size=40)
    with refused("lora.start-does-not-fit"):
        run(model, tiny_run.text_rows(), tmp_path / "second", lora={"start": str(tmp_path / "first")})
    with refused("lora.start-without-adapters"):
        run(model, tiny_run.text_rows(), tmp_path / "second", lora={"start": str(model)})
