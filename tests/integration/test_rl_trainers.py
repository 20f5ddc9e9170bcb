"""TRL's RLOO, online DPO and GKD trainers with tiled heads, each to TRL's own trajectory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

import seqtile
import tiny_run
from integration.test_head_trainers import COMMON, assert_one_trajectory, load, quietly, trl_is_silent
from numerics._births import births
from seqtile.integrations.trl import tile_trainer

__all__ = ["trl_is_silent"]
VOCABULARY = 257


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 7 for token in ids) / 10 for ids in completion_ids]


def test_rloo(directory: Path, tmp_path: Path, trl_is_silent: Callable[[], None]) -> None:
    from trl import RLOOConfig, RLOOTrainer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompts = Dataset.from_dict({"prompt": tiny_run.SENTENCES[:8]})

    def build(tiled: bool) -> Any:
        arguments = RLOOConfig(
            str(tmp_path), num_generations=2, max_completion_length=8, temperature=0.7, beta=0.1, bf16=False, **COMMON
        )
        trainer = quietly(
            lambda: RLOOTrainer(
                load(directory), reward_funcs=reward, args=arguments, train_dataset=prompts, processing_class=tokenizer
            )
        )
        if tiled:
            trl_is_silent()
            assert [line.partition(":")[0] for line in tile_trainer(trainer, loss_tile=16)] == ["model", "ref_model"]
        return trainer

    assert_one_trajectory(build, "entropy", "kl", "reward")


def judge(prompts: list[str], completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(map(ord, str(text))) % 11) for text in completions]


def online_dpo(directory: Path, folder: Path) -> Any:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompts = Dataset.from_dict({"prompt": tiny_run.SENTENCES[:8]})
    arguments = OnlineDPOConfig(
        str(folder), max_new_tokens=8, max_length=64, temperature=0.7, bf16=False, **{**COMMON, "learning_rate": 0.05}
    )
    return quietly(
        lambda: OnlineDPOTrainer(
            load(directory), ref_model=load(directory), reward_funcs=judge, args=arguments, train_dataset=prompts,
            processing_class=tokenizer,
        )
    )  # fmt: skip


def test_online_dpo(directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build(tiled: bool) -> Any:
        trainer = online_dpo(directory, tmp_path)
        if tiled:
            assert tile_trainer(trainer, loss_tile=16)[-1] == "log-probabilities from deferred logits"
        return trainer

    assert_one_trajectory(build, "rewards/margins", "logps/chosen", "objective/kl")
    assert "runs untiled" not in caplog.text


def gkd(directory: Path, folder: Path, beta: float, lmbda: float) -> Any:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    words = tiny_run.SENTENCES
    rows = [
        {"messages": [{"role": "user", "content": words[i]}, {"role": "assistant", "content": words[i + 3]}]}
        for i in range(8)
    ]
    arguments = GKDConfig(
        str(folder), max_length=64, max_new_tokens=8, beta=beta, lmbda=lmbda, bf16=False,
        **{**COMMON, "learning_rate": 0.05},
    )  # fmt: skip
    teacher = load(directory)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.mul_(1.3)
    return quietly(
        lambda: GKDTrainer(
            load(directory), teacher_model=teacher, args=arguments, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("beta", "lmbda"), [(0.5, 0.0), (1.0, 0.0), (0.0, 1.0)])
def test_gkd(directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, beta: float, lmbda: float) -> None:
    def build(tiled: bool) -> Any:
        trainer = gkd(directory, tmp_path, beta, lmbda)
        if tiled:
            assert tile_trainer(trainer, loss_tile=16)[-1] == "divergence from the two heads"
        return trainer

    assert_one_trajectory(build)
    assert "runs untiled" not in caplog.text


def test_gkd_makes_no_logits_in_training_and_real_ones_for_whoever_wants_them(directory: Path, tmp_path: Path) -> None:
    trainer = gkd(directory, tmp_path, 0.5, 0.0)
    tile_trainer(trainer, loss_tile=16)
    batch = next(iter(trainer.get_train_dataloader()))
    tokens = batch["input_ids"].shape[1]
    with births() as born:
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
    assert not [shape for shape in born.shapes if VOCABULARY in shape and tokens in shape]
    again, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    torch.testing.assert_close(again, loss)
    assert outputs.logits.shape == (*batch["input_ids"].shape, VOCABULARY)


def test_a_divergence_needs_plain_heads(directory: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    trainer = gkd(directory, tmp_path, 0.5, 0.0)
    tile_trainer(trainer)
    inject_adapter_in_model(LoraConfig(target_modules=["lm_head"]), trainer.model)
    batch = next(iter(trainer.get_train_dataloader()))
    with pytest.raises(seqtile.UserError, match="takes the weight of a plain linear head, but the head is Linear"):
        trainer.compute_loss(trainer.model, batch)


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(seqtile.UserError, match="has no model that could be tiled"):
        tile_trainer(object())
    with pytest.raises(seqtile.UserError, match="has no tiled loss"), seqtile.deferred_logits(torch.nn.Linear(2, 2)):
        pass
