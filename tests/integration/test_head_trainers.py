"""The tiled head in use: Trainer and TRL's trainers, each with and without to one trajectory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, inject_adapter_in_model
from transformers import Trainer, TrainingArguments

import seqtile
import tiny_run
import trainers
from numerics._births import births
from numerics.test_attention_saved import attention_calls
from refusals import refused
from seqtile.integrations.trl import tile_trainer
from seqtile.lm_loss.tiled_loss import TiledLoss
from trainers import COMMON, STEPS, gkd, load

VOCABULARY = 257
pytestmark = pytest.mark.filterwarnings("ignore")  # what the trainers have to say about their own defaults


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


def trajectory(trainer: Any, *names: str) -> dict[str, torch.Tensor]:
    """Logged numbers of each step, and the weights at the end."""
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == STEPS
    numbers = {name: torch.tensor([log[name] for log in logs]) for name in ("loss", "grad_norm", *names)}
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return {**numbers, "weights": weights}


def assert_one_trajectory(build: Callable[[bool], Any], *names: str) -> None:
    expected, got = (trajectory(build(tiled), *names) for tiled in (False, True))
    assert expected["grad_norm"].min() > 0
    # The differences of a few steps add up to ten times what assert_close allows for one.
    torch.testing.assert_close(got, expected, rtol=1.3e-5, atol=1e-5)


@pytest.fixture
def trl_is_silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Called, forbids TRL's own fused head from then on."""
    from trl.trainer import utils

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("TRL's own head ran")

    with monkeypatch.context() as patch:
        yield lambda: patch.setattr(utils._ChunkedLogProbFunction, "apply", fail)


def lora(*targets: str, **settings: Any) -> LoraConfig:
    return LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=list(targets), **settings)


ADAPTERS = {
    "full": None,
    "lora": lora("q_proj", "down_proj"),
    "head-saved": lora("q_proj", modules_to_save=["lm_head"]),
}
MARGINS = ("rewards/margins", "logps/chosen")
SAMPLED = ("entropy", "kl", "reward")
DIVERGENCE = "divergence from the two heads"
TRAINERS: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...], str]] = {
    "SFT": (trainers.sft, {}, ("entropy", "mean_token_accuracy"), "model"),
    **{f"DPO, {name}": (trainers.dpo, {"adapters": adapters}, MARGINS, "ref_model" if adapters is None else "model")
       for name, adapters in ADAPTERS.items()},
    **{f"KTO, {name}": (trainers.kto, {"adapters": adapters}, (), "ref_model" if adapters is None else "model")
       for name, adapters in ADAPTERS.items()},
    "GRPO": (trainers.grpo, {}, SAMPLED, "ref_model"),
    "RLOO": (trainers.rloo, {}, SAMPLED, "ref_model"),
    "online DPO": (
        trainers.online_dpo, {}, ("rewards/margins", "logps/chosen", "objective/kl"),
        "log-probabilities from deferred logits",
    ),
    "GKD": (gkd, {}, (), DIVERGENCE),
    "GKD, reverse": (gkd, {"beta": 1.0}, (), DIVERGENCE),
    "GKD, on policy": (gkd, {"beta": 0.0, "lmbda": 1.0}, (), DIVERGENCE),
}  # fmt: skip
"""How it is built, what it logs, and what ``tile_trainer`` says last."""


@pytest.mark.parametrize("name", TRAINERS)
def test_one_trajectory(
    name: str, directory: Path, tmp_path: Path, trl_is_silent: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    make, settings, logged, last = TRAINERS[name]

    def build(tiled: bool) -> Any:
        trainer = make(directory, tmp_path, **settings)
        if tiled:
            trl_is_silent()
            done = tile_trainer(trainer, loss_tile=16)
            assert done[0].startswith("model: ") and done[-1].partition(":")[0] == last
        return trainer

    assert_one_trajectory(build, *logged)
    assert "runs untiled" not in caplog.text


def test_trainer(directory: Path, tmp_path: Path) -> None:
    """Rows of different lengths, their first tokens without a label."""
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
    output = build(tiled=True).predict(data.select(range(2)))
    assert output.predictions.shape == (2, 30, VOCABULARY)  # evaluation has its logits


@pytest.mark.parametrize("bf16", [False, True])
def test_sft_of_a_model_that_was_tiled_before(
    directory: Path, tmp_path: Path, trl_is_silent: Callable[[], None], bf16: bool
) -> None:
    """TRL's head stands over the tiled loss then, and accelerate's autocast over both."""

    def build(tiled: bool) -> Any:
        model = load(directory)
        if tiled:
            trl_is_silent()
            seqtile.apply(model, blocks="none", loss="tiled", loss_tile=16)
        return trainers.sft(directory, tmp_path, model=model, bf16=bf16)

    if bf16:
        trajectory(build(True))
    else:
        assert_one_trajectory(build, "entropy", "mean_token_accuracy")


def test_undone_under_trls_head(directory: Path, tmp_path: Path) -> None:
    model = load(directory)
    seqtile.apply(model, loss="tiled")
    trainers.sft(directory, tmp_path, model=model)
    again = seqtile.apply(model, loss="tiled", loss_impl="auto")
    assert any("which loss_impl='auto' does not support" in note for note in again.notes)
    assert isinstance(model.forward, TiledLoss)
    seqtile.undo(model)
    assert model.forward.__func__.__code__.co_name == "_fused_forward"
    ids = torch.arange(1, 20).view(1, -1)
    model.train()
    assert model(input_ids=ids, labels=ids).logits is not None  # what lies below TRL's forward does nothing any more


def test_trl_refuses_lora_on_the_head(directory: Path, tmp_path: Path) -> None:
    """Its head reads the weight alone; once it takes an adapter, docs/techniques.md has to say so."""
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        trainers.sft(directory, tmp_path, adapters=lora("q_proj", "lm_head"))


def test_gkd_makes_no_logits_in_training_and_real_ones_for_whoever_wants_them(directory: Path, tmp_path: Path) -> None:
    trainer = gkd(directory, tmp_path)
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
    trainer = gkd(directory, tmp_path)
    tile_trainer(trainer)
    inject_adapter_in_model(LoraConfig(target_modules=["lm_head"]), trainer.model)
    batch = next(iter(trainer.get_train_dataloader()))
    with refused("divergence.head-not-plain", "Linear"):
        trainer.compute_loss(trainer.model, batch)


def test_what_is_no_trainer_is_refused() -> None:
    with refused("trl.no-model"):
        tile_trainer(object())
    with refused("loss.not-applied"), seqtile.deferred_logits(torch.nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize("tiled", [True, False])
def test_the_recipe_keeps_attention_and_offloads(directory: Path, tmp_path: Path, tiled: bool) -> None:
    from seqtile.train.recipe import build_recipe
    from seqtile.train.run import train

    data = tiny_run.write_jsonl(tmp_path / "data.jsonl", tiny_run.text_rows())
    values: dict[str, Any] = {
        "model": str(directory), "dataset": str(data), "max_length": 64, "steps": 3, "report": False,
        "tiled_mlp": tiled, "attention": "sdpa",
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
        assert "attention's output saved" in str(runs["kept"].tiling)
