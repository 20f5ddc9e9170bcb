"""TRL's trainers with each prompt computed once, against the same trainers without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

import seqtile
import tiny_run
import trainers
from integration.test_head_trainers import MARGINS, SAMPLED, trajectory
from seqtile import UserError
from seqtile.integrations.trl import tile_trainer
from seqtile.shared_prompts.trl_calls import share_in_calls

pytestmark = pytest.mark.filterwarnings("ignore")  # what the trainers have to say about their own defaults

LONG = " ".join(trainers.WORDS[:4])
PROMPTS = Dataset.from_dict({"prompt": [f"{LONG} {word}" for word in trainers.WORDS[4:12]]})
ALIKE = [f"once upon a time in {place}" for place in "Rome Oslo Bonn Lima Kyiv Riga Bern Cork".split() * 3]
ADAPTERS = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"])
TRAINERS: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = {
    "GRPO": (trainers.grpo, {}, SAMPLED),
    "GRPO, checkpoints": (trainers.grpo, {"gradient_checkpointing": True}, SAMPLED),
    "RLOO": (trainers.rloo, {}, SAMPLED),
    "DPO": (trainers.dpo, {}, MARGINS),
    "DPO, adapters": (trainers.dpo, {"adapters": ADAPTERS}, MARGINS),
    "KTO": (trainers.kto, {}, ()),
    "SFT": (trainers.sft, {}, ("entropy", "mean_token_accuracy")),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "PROMPTS", PROMPTS)
    monkeypatch.setattr(tiny_run, "text_rows", lambda count: [{"text": text} for text in ALIKE[:count]])
    monkeypatch.setattr(trainers, "WORDS", ALIKE)  # of KTO, whose two samples have different prompts


class Tokens:
    """Counts what goes through a model's embeddings, and with the padding of a batch."""

    def __init__(self, model: Any) -> None:
        self.trained = 0
        model.get_input_embeddings().register_forward_hook(self.see)

    def see(self, embeddings: Any, args: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            self.trained += args[0].numel()


@pytest.mark.parametrize("tiled_first", [True, False])
@pytest.mark.parametrize("name", TRAINERS)
def test_one_trajectory(name: str, tiled_first: bool, directory: Path, tmp_path: Path) -> None:
    make, settings, logged = TRAINERS[name]
    results, tokens = [], []
    for shared in (False, True):
        trainer = make(directory, tmp_path, **settings)
        tokens.append(Tokens(trainer.model))
        if shared and tiled_first:
            seqtile.apply(trainer.model, tile=16, loss="tiled", loss_tile=16)
        if shared:
            done = tile_trainer(trainer, loss_tile=16, shared_prompts=True)
            assert "model: shared prompts are computed once" in done
            if not tiled_first:
                seqtile.apply(trainer.model, tile=16)
        results.append(trajectory(trainer, *logged))
    expected, got = results
    assert expected["grad_norm"].min() > 0
    torch.testing.assert_close(got, expected, rtol=1.3e-5, atol=1e-5)
    assert tokens[1].trained < 0.85 * tokens[0].trained


def scored(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All that TRL's head returns, and the gradients of some of it."""
    model.zero_grad()
    output = model(**batch, fused_lm_head=True)
    weights = torch.linspace(0.5, 1.5, output.log_probs.numel()).view(output.log_probs.shape)
    (output.loss + (output.log_probs * weights).sum()).backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return {**{name: value.detach() for name, value in output.items()}, **gradients}


@pytest.mark.parametrize("count", [None, 7])
@pytest.mark.parametrize("tiled", [False, True])
def test_one_call(tiled: bool, count: int | None, directory: Path) -> None:
    """Of a batch that is padded on both sides, with tokens in the middle of an answer that are not scored."""
    from trl.trainer.utils import add_fused_lm_head

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 250, (5, 60), generator=generator)
    ids[:4, 4:40] = ids[:1, 4:40]
    mask = torch.ones_like(ids)
    mask[:4, :4], mask[1, 50:], mask[2, 41:] = 0, 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :40], labels[3, 44:47] = -100, -100
    batch = dict(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=count)
    results = []
    for shared in (False, True):
        model = trainers.load(directory).train()
        add_fused_lm_head(
            model, temperature=0.7, outputs=("log_probs", "entropy", "is_top1", "log_sum_sq_probs", "mean_logits")
        )
        if shared and tiled:
            seqtile.apply(model, tile=16, loss="tiled", loss_tile=16)
        if shared:
            calls = share_in_calls(model)
        results.append(scored(model, batch))
    torch.testing.assert_close(results[1], results[0])
    assert calls.tokens == 37 + 3 + 20 + 10 + 1 + 20 + 60 - 1 and calls.tokens_apart == int(mask.sum())
    calls.remove()
    torch.testing.assert_close(scored(model, batch), results[0])
    assert calls.tokens_apart == int(mask.sum())


def test_without_effect(directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainers.sft(directory, tmp_path, per_device_train_batch_size=1)
    tile_trainer(trainer, shared_prompts=True)
    with caplog.at_level(logging.WARNING, "seqtile"):
        trainer.train()
    assert [
        record.message
        for record in caplog.records
        if "shared_prompts" in record.message and "no effect" in record.message
    ]


def test_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="GKDTrainer"):
        tile_trainer(trainers.gkd(directory, tmp_path), shared_prompts=True)
    trainer = trainers.sft(directory, tmp_path)
    trainer.model.config.output_router_logits = True
    with pytest.raises(UserError, match="output_router_logits"):
        tile_trainer(trainer, shared_prompts=True)
    assert not any("TreeCalls" in repr(hook) for m in trainer.model.modules() for hook in m._forward_hooks.values())
