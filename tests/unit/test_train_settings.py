"""Settings of a recipe reach what they are for, both halves of a pair, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny_run
from seqtile import UserError
from seqtile.planner import names
from seqtile.train.arguments import trainer_arguments
from seqtile.train.recipe import build_recipe, resolve


def recipe_of(**values: Any) -> Any:
    return resolve(build_recipe({"model": "m", "dataset": "d", "max_length": 64, **values}, {})[0])


def arguments_of(tmp_path: Path, **values: Any) -> Any:
    return trainer_arguments(recipe_of(**values), tmp_path, documents=False)


# --- activation checkpoints


@pytest.mark.parametrize("name", ["activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"])
@pytest.mark.parametrize("given", [{"preserve_rng_state": False}, '{"preserve_rng_state": false}'])
def test_how_checkpoints_are_made_reaches_the_trainer(name: str, given: Any, tmp_path: Path) -> None:
    made = arguments_of(tmp_path, trainer={name: given})
    assert made.gradient_checkpointing_kwargs == {"use_reentrant": False, "preserve_rng_state": False}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"activation_checkpointing": False, "trainer": {"gradient_checkpointing_kwargs": {"use_reentrant": False}}},
         "drop one of the two"),
        ({"trainer": {"gradient_checkpointing_kwargs": "no"}}, "expected keys and values"),
        ({"trainer": {"gradient_checkpointing_kwargs": {}, "activation_checkpointing_kwargs": {"debug": True}}},
         "two names of one setting"),
    ],
)  # fmt: skip
def test_checkpoint_settings_that_nothing_would_read(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        arguments_of(tmp_path, **values)


def test_adapters_under_zero3_need_reentrant_checkpoints_of_old_deepspeed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, needed in (("0.18.9", True), ("0.19.3+cu130", True), ("0.19.4", False), ("1.0.0", False)):
        monkeypatch.setattr(names, "package_version", lambda _, version=version: version)
        assert names.adapters_need_reentrant("zero3") == needed
        assert not names.adapters_need_reentrant("zero2")


SHARING = dict(
    num_kv_shared_layers=1, layer_types=["full_attention", "full_attention"], head_dim=8, global_head_dim=8,
    hidden_size_per_layer_input=8, vocab_size_per_layer_input=257,
)  # fmt: skip


def test_reentrant_checkpoints_over_shared_keys_are_refused(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from seqtile.train.run import train

    vocab = tiny_run.save_tokenizer(tmp_path / "model")
    sizes = dict(hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=vocab,
                 num_key_value_heads=1, bos_token_id=None, eos_token_id=0, pad_token_id=0)  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **sizes, **SHARING)).save_pretrained(
        tmp_path / "model"
    )
    rows = tiny_run.write_jsonl(tmp_path / "rows.jsonl", tiny_run.text_rows(2))
    values = {"model": str(tmp_path / "model"), "dataset": str(rows), "max_length": 64, "steps": 1, "tile": 16}
    reentrant = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(UserError, match="share keys and values.*drop use_reentrant"):
        train(build_recipe({**values, "output": str(tmp_path / "out"), "trainer": reentrant}, {})[0])
    assert not (tmp_path / "out").exists()
    assert train(build_recipe({**values, "output": str(tmp_path / "out")}, {})[0]).step == 1
