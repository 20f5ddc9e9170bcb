"""Settings of a recipe reach what they are for, both halves of a pair, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny_run
from refusals import refused
from seqtile.cli import main
from seqtile.train.arguments import trainer_arguments
from seqtile.train.load import load_model
from seqtile.train.recipe import build_recipe, resolve
from seqtile.train.trainer_fields import check_trainer_section


def recipe_of(**values: Any) -> Any:
    return resolve(build_recipe({"model": "m", "dataset": "d", "max_length": 64, **values}, {})[0])


def arguments_of(tmp_path: Path, **values: Any) -> Any:
    return trainer_arguments(recipe_of(**values), tmp_path, documents=False)


# --- activation checkpoints


@pytest.mark.parametrize("name", ["activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"])
def test_how_checkpoints_are_made_reaches_the_trainer(name: str, tmp_path: Path) -> None:
    made = arguments_of(tmp_path, trainer={name: {"preserve_rng_state": False}})
    assert made.gradient_checkpointing_kwargs == {"use_reentrant": False, "preserve_rng_state": False}


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"checkpoint": "none", "trainer": {"gradient_checkpointing_kwargs": {"use_reentrant": False}}},
         "trainer.checkpointing-off"),
        ({"trainer": {"gradient_checkpointing_kwargs": "no"}}, "trainer.not-a-mapping"),
        ({"trainer": {"gradient_checkpointing_kwargs": {}, "activation_checkpointing_kwargs": {"debug": True}}},
         "trainer.key-given-twice"),
    ],
)  # fmt: skip
def test_checkpoint_settings_that_nothing_would_read(values: dict[str, Any], code: str, tmp_path: Path) -> None:
    with refused(code):
        arguments_of(tmp_path, **values)


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
    with refused("checkpoint.reentrant-shared-keys"):
        train(build_recipe({**values, "output": str(tmp_path / "out"), "trainer": reentrant}, {})[0])
    assert not (tmp_path / "out").exists()
    assert train(build_recipe({**values, "output": str(tmp_path / "out")}, {})[0]).step == 1


# --- the best checkpoint


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({}, ("loss", False)),
        ({"metric_for_best_model": "eval_loss"}, ("loss", False)),
        ({"metric_for_best_model": "mean_token_accuracy"}, ("mean_token_accuracy", True)),
        ({"metric_for_best_model": "entropy", "greater_is_better": False}, ("entropy", False)),
    ],
)
def test_a_metric_comes_with_its_direction(trainer: dict[str, Any], expected: tuple[str, bool], tmp_path: Path) -> None:
    made = arguments_of(tmp_path, eval_dataset="e", trainer=trainer)
    assert (made.metric_for_best_model.removeprefix("eval_"), made.greater_is_better) == expected


def test_a_metric_that_no_evaluation_has() -> None:
    trainer = {"metric_for_best_model": "rouge"}
    with refused("trainer.unknown-best-metric", "mean_token_accuracy"):
        check_trainer_section(recipe_of(eval_dataset="e", trainer=trainer))


def test_the_most_accurate_checkpoint_is_kept_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_run.save_model(tmp_path / "model")
    rows = tiny_run.write_jsonl(tmp_path / "rows.jsonl", tiny_run.text_rows())
    recipe = tmp_path / "recipe.yaml"
    trainer = {"metric_for_best_model": "mean_token_accuracy", "lr_scheduler_type": "constant"}
    recipe.write_text(json.dumps({"trainer": trainer, "learning_rate": 0.01}))
    given = ["--model", str(tmp_path / "model"), "--dataset", str(rows), "--eval-dataset", str(rows), "--steps", "4"]
    more = ["--recipe", str(recipe), "--output", str(tmp_path / "out"), "--max-length", "64", "--eval-steps", "1"]
    assert main(["train", *given, *more]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["eval_mean_token_accuracy"] for line in lines if "eval_mean_token_accuracy" in line}
    best = max(found, key=lambda step: found[step])
    assert len(found) == 4 and found[best] > min(found.values())
    assert json.loads((tmp_path / "out" / "report" / "report.json").read_text())["best"] == {
        "step": best, "eval_mean_token_accuracy": pytest.approx(found[best]),
    }  # fmt: skip
    assert f"evaluation mean token accuracy {found[best]:.4f} at step {best}" in capsys.readouterr().out
    assert (tmp_path / "out" / f"checkpoint-{best}").is_dir()


# --- keys that nothing would read


def test_a_name_on_the_hub_is_not_ignored() -> None:
    with refused("trainer.hub-key-without-push", "hub_model_id"):
        check_trainer_section(recipe_of(trainer={"hub_model_id": "me/model"}))


# --- arguments of from_pretrained


def load(folder: Path, **values: Any) -> Any:
    return load_model(recipe_of(model=str(folder), **values))[0]


def test_fields_of_the_configuration_are_set_as_from_pretrained_sets_them(tmp_path: Path) -> None:
    tiny_run.save_model(tmp_path / "model")
    model = load(tmp_path / "model", attention="eager", model_kwargs={"attention_dropout": 0.25})
    assert model.config.attention_dropout == 0.25 and model.model.layers[0].self_attn.attention_dropout == 0.25
    assert model.config._attn_implementation == "eager"
    assert load(tmp_path / "model", model_kwargs={"use_cache": False}).config.use_cache is False
    with refused("model-kwargs.unknown", "attention_droput", "'attention_dropout'"):
        load(tmp_path / "model", model_kwargs={"attention_droput": 0.25})


def test_fields_of_a_text_model_and_of_routers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=20,
                 eos_token_id=0, num_key_value_heads=1, num_local_experts=2, pad_token_id=0,
                 bos_token_id=None)  # fmt: skip
    vocab = tiny_run.save_tokenizer(tmp_path / "moe")
    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", vocab_size=vocab, sliding_window=None, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe")
    model = load(tmp_path / "moe", model_kwargs={"output_router_logits": True, "sliding_window": 16})
    assert model.config.output_router_logits is True and model.config.sliding_window == 16
