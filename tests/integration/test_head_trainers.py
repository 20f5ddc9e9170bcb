"""The tiled head in use: Trainer, and TRL's SFT, DPO and GRPO trainers, each with and without to one trajectory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import seqtile
import tiny_run
from numerics.test_attention_saved import attention_calls
from seqtile.models.lm_loss.tiled_loss import TiledLoss

STEPS = 4
COMMON = dict(
    max_steps=STEPS, per_device_train_batch_size=2, learning_rate=0.3, optim="sgd", logging_steps=1, save_strategy="no",
    report_to="none", use_cpu=True, disable_tqdm=True, seed=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory)


def trajectory(trainer: Any, *names: str) -> dict[str, torch.Tensor]:
    """Logged numbers of each step, and the weights at the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the trainers have to say about their own defaults
        trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == STEPS
    numbers = {name: torch.tensor([log[name] for log in logs]) for name in ("loss", "grad_norm", *names)}
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return {**numbers, "weights": weights}


def assert_one_trajectory(build: Callable[[bool], Any], *names: str) -> None:
    expected, got = (trajectory(build(tiled), *names) for tiled in (False, True))
    assert expected["grad_norm"].min() > 0
    for name, values in expected.items():
        # Plain SGD, which does not blow up the order of sums where a gradient is zero in theory, as Adam does; the
        # differences of a few steps add up to ten times what assert_close allows for one.
        torch.testing.assert_close(got[name], values, rtol=1.3e-5, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


@pytest.fixture
def trl_is_silent(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, forbids TRL's own fused head from then on."""
    from trl.trainer import utils

    def forbid() -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise AssertionError("TRL's own head ran")

        monkeypatch.setattr(utils._ChunkedLogProbFunction, "apply", fail)

    return forbid


def quietly(build: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build()


def test_trainer(directory: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 250, (length,), generator=generator).tolist() for length in (30, 17, 40, 9) * 4]
    data = Dataset.from_dict({"input_ids": rows, "labels": [[-100] * 3 + row[3:] for row in rows]})

    def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in batch)
        return {
            name: torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in batch])
            for name, fill in (("input_ids", 0), ("labels", -100))
        }

    def build(tiled: bool) -> Trainer:
        model = load(directory)
        if tiled:
            seqtile.apply(model, tile=16, loss="tiled", loss_tile=16)
        arguments = TrainingArguments(str(tmp_path), gradient_accumulation_steps=2, **COMMON)
        return Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=collate)

    assert_one_trajectory(build)
    trainer = build(tiled=True)
    output = trainer.predict(data.select(range(2)))
    assert output.predictions.shape == (2, 30, 257)  # evaluation has its logits


def sft(directory: Path, out: Path) -> Any:
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list(tiny_run.text_rows(16))
    arguments = SFTConfig(str(out), max_length=64, bf16=False, **COMMON)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return quietly(lambda: SFTTrainer(load(directory), args=arguments, train_dataset=data, processing_class=tokenizer))


def test_sft(directory: Path, tmp_path: Path, trl_is_silent: Callable[[], None]) -> None:
    def build(tiled: bool) -> Any:
        trainer = sft(directory, tmp_path)
        if tiled:
            trl_is_silent()
            seqtile.apply(trainer.model, blocks="none", loss="tiled", loss_tile=16)
        return trainer

    assert_one_trajectory(build, "entropy", "mean_token_accuracy")


@pytest.mark.parametrize("bf16", [False, True])
def test_sft_of_a_model_that_was_tiled_before(
    directory: Path, tmp_path: Path, trl_is_silent: Callable[[], None], bf16: bool
) -> None:
    """TRL's head stands over the tiled loss then, and accelerate's autocast over both."""
    from trl import SFTConfig, SFTTrainer

    def build(tiled: bool) -> Any:
        model = load(directory)
        if tiled:
            trl_is_silent()
            seqtile.apply(model, blocks="none", loss="tiled", loss_tile=16)
        arguments = SFTConfig(str(tmp_path), max_length=64, bf16=bf16, **COMMON)
        return quietly(
            lambda: SFTTrainer(
                model,
                args=arguments,
                train_dataset=Dataset.from_list(tiny_run.text_rows(16)),
                processing_class=AutoTokenizer.from_pretrained(directory),
            )
        )

    if bf16:
        assert len(trajectory(build(True))["loss"]) == STEPS
    else:
        assert_one_trajectory(build, "entropy", "mean_token_accuracy")


def test_undone_under_trls_head(directory: Path, tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    model = load(directory)
    seqtile.apply(model, loss="tiled")
    data, arguments = Dataset.from_list(tiny_run.text_rows(4)), SFTConfig(str(tmp_path), bf16=False, **COMMON)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    quietly(lambda: SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer))
    again = seqtile.apply(model, loss="tiled", loss_impl="auto")
    assert any("which loss_impl='auto' does not compute" in note for note in again.notes)
    assert isinstance(model.forward, TiledLoss)
    seqtile.undo(model)
    assert model.forward.__func__.__code__.co_name == "_fused_forward"
    ids = torch.arange(1, 20).view(1, -1)
    model.train()
    assert model(input_ids=ids, labels=ids).logits is not None  # what lies below TRL's forward does nothing any more


LORA: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": {"target_modules": ["q_proj", "down_proj"]},
    "head-saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("adapters", LORA)
def test_dpo(directory: Path, tmp_path: Path, trl_is_silent: Callable[[], None], adapters: str) -> None:
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    words = tiny_run.SENTENCES
    rows = [{"prompt": words[i], "chosen": words[i + 3], "rejected": words[i + 9]} for i in range(8)]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    asked = LORA[adapters]
    lora = None if asked is None else LoraConfig(r=4, task_type="CAUSAL_LM", **asked)

    def build(tiled: bool) -> Any:
        arguments = DPOConfig(str(tmp_path), max_length=64, bf16=False, **COMMON)
        torch.manual_seed(0)
        trainer = quietly(
            lambda: DPOTrainer(
                load(directory),
                args=arguments,
                train_dataset=Dataset.from_list(rows),
                processing_class=tokenizer,
                peft_config=lora,
            )  # fmt: skip
        )
        if tiled:
            trl_is_silent()
            for model in (trainer.model, trainer.ref_model):
                if model is not None:
                    seqtile.apply(model, blocks="none", loss="tiled", loss_tile=16)
        return trainer

    assert_one_trajectory(build, "rewards/margins", "logps/chosen")


@pytest.mark.parametrize("adapters", LORA)
def test_kto(directory: Path, tmp_path: Path, trl_is_silent: Callable[[], None], adapters: str) -> None:
    from peft import LoraConfig
    from trl import KTOConfig, KTOTrainer

    words = tiny_run.SENTENCES
    rows = [{"prompt": words[i], "completion": words[i + 3 + 6 * (i % 2)], "label": i % 2 == 0} for i in range(8)]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    asked = LORA[adapters]
    lora = None if asked is None else LoraConfig(r=4, task_type="CAUSAL_LM", **asked)

    def build(tiled: bool) -> Any:
        arguments = KTOConfig(str(tmp_path), max_length=64, bf16=False, **COMMON)
        data = Dataset.from_list(rows)
        torch.manual_seed(0)
        trainer = quietly(
            lambda: KTOTrainer(
                load(directory), args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=lora
            )
        )
        if tiled:
            trl_is_silent()
            for model in (trainer.model, trainer.ref_model):
                if model is not None:
                    seqtile.apply(model, blocks="none", loss="tiled", loss_tile=16)
        return trainer

    assert_one_trajectory(build)


def test_trl_refuses_lora_on_the_head(directory: Path, tmp_path: Path) -> None:
    """Its head reads the weight alone; once it takes an adapter, docs/head.md has to say so."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    lora = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    data, arguments = Dataset.from_list(tiny_run.text_rows(4)), SFTConfig(str(tmp_path), bf16=False, **COMMON)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        quietly(
            lambda: SFTTrainer(
                load(directory), args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=lora
            )
        )


def test_grpo(directory: Path, tmp_path: Path, trl_is_silent: Callable[[], None]) -> None:
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompts = Dataset.from_dict({"prompt": tiny_run.SENTENCES[:8]})

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(token % 7 for token in ids) / 10 for ids in completion_ids]

    def build(tiled: bool) -> Any:
        arguments = GRPOConfig(
            str(tmp_path), num_generations=2, max_completion_length=8, temperature=0.7, beta=0.1, bf16=False, **COMMON
        )
        trainer = quietly(
            lambda: GRPOTrainer(
                load(directory), reward_funcs=reward, args=arguments, train_dataset=prompts, processing_class=tokenizer
            )
        )
        if tiled:
            trl_is_silent()
            for model in (trainer.model, trainer.ref_model):
                if model is not None:
                    seqtile.apply(model, blocks="none", loss="tiled", loss_tile=16)
        return trainer

    assert_one_trajectory(build, "entropy", "kl", "reward")


@pytest.mark.parametrize("tiled", [True, False])
def test_the_recipe_keeps_attention_and_offloads(directory: Path, tmp_path: Path, tiled: bool) -> None:
    from seqtile.train.recipe import build_recipe, resolve
    from seqtile.train.run import train

    data = tiny_run.write_jsonl(tmp_path / "data.jsonl", tiny_run.text_rows())
    values: dict[str, Any] = {
        "model": str(directory), "dataset": str(data), "max_length": 64, "steps": 3, "report": False,
        "tiled_mlp": tiled, "model_kwargs": {"attn_implementation": "sdpa"},
    }  # fmt: skip
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "kept": {"checkpoint": "attention-saved", "offload": True, "loss_tile": 16},
        "trl": {"trainer": {"gradient_checkpointing_kwargs": {"selective": True}}},
    }
    runs, forwards = {}, {}
    for name, more in ways.items():
        with attention_calls() as calls:
            runs[name] = train(build_recipe({**values, **more, "output": str(tmp_path / name)}, {})[0])
        forwards[name] = calls.forward / calls.backward
    assert forwards == {"plain": 2, "kept": 1, "trl": 1}  # attention runs again for the backward, or does not
    for name in ("kept", "trl"):
        torch.testing.assert_close(torch.tensor(runs[name].losses), torch.tensor(runs["plain"].losses))
    if tiled:
        assert "attention's output kept" in str(runs["kept"].tiling)
    for wrong, words in (
        ({"offload": "much"}, "expected true, false or a bound"),
        ({"checkpoint": "attention-saved", "activation_checkpointing": False}, "drop one of the two"),
    ):
        with pytest.raises(seqtile.UserError, match=words):
            resolve(build_recipe({**values, **wrong}, {})[0])
