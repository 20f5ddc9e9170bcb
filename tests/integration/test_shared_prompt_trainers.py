"""TRL's trainers with each prompt computed once, against the same trainers without."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

import seqtile
import tiny_run
import trainers
from integration.test_head_trainers import MARGINS, SAMPLED, trajectory
from numerics.test_chunks import chunks_of
from refusals import refused
from seqtile.integrations.rl.shared_prompts import score_shared
from seqtile.integrations.trl import tile_trainer
from seqtile.shared_prompts import share_prompts
from seqtile.shared_prompts.model import shares_prompts
from seqtile.shared_prompts.trl_calls import FoldedCalls, share_in_calls

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


@pytest.mark.parametrize("name", ["GRPO, checkpoints", "DPO, adapters"])
def test_one_trajectory_in_chunks(name: str, directory: Path, tmp_path: Path) -> None:
    make, settings, logged = TRAINERS[name]
    results = []
    for chunked in (False, True):
        trainer = make(directory, tmp_path, **settings)
        if chunked:
            seqtile.apply(trainer.model, blocks="none", loss="tiled", loss_tile=16, chunk=16)
            tile_trainer(trainer, loss_tile=16, shared_prompts=True)
        results.append(trajectory(trainer, *logged))
    torch.testing.assert_close(results[1], results[0], rtol=1.3e-5, atol=1e-5)
    assert min(chunks_of(trainer.model)) > 1


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
    from trl.trainer.utils import add_fused_lm_head

    batch = {**padded_batch(), "num_items_in_batch": count}
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
    assert calls.tokens == 37 + 3 + 20 + 10 + 1 + 20 + 60 - 1 and calls.tokens_apart == int(
        batch["attention_mask"].sum()
    )
    calls.remove()
    torch.testing.assert_close(scored(model, batch), results[0])
    assert calls.tokens_apart == int(batch["attention_mask"].sum())


def padded_batch() -> dict[str, torch.Tensor]:
    """Padded on both sides, with tokens in the middle of an answer that are not scored."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 250, (5, 60), generator=generator)
    ids[:4, 4:40] = ids[:1, 4:40]
    mask = torch.ones_like(ids)
    mask[:4, :4], mask[1, 50:], mask[2, 41:] = 0, 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :40], labels[3, 44:47] = -100, -100
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


@pytest.mark.parametrize("shared", [True, False])
def test_scores_for_other_stacks(shared: bool, directory: Path) -> None:
    batch = padded_batch()
    if not shared:
        batch = {name: values[3:] for name, values in batch.items()}
    results = []
    for ours in (False, True):
        model = trainers.load(directory).train()
        if ours:
            calls = share_prompts(model)
            seqtile.apply(model, tile=16, loss="tiled", loss_tile=16)
            scores = score_shared(model, *batch.values(), temperature=0.7, entropy=True)
            log_probs, entropies = scores.log_probs, scores.entropy
            assert (calls.tokens > 0) == shared
        else:
            log_p = (model(**{**batch, "labels": None}).logits[:, :-1] / 0.7).log_softmax(-1)
            kept = batch["labels"][:, 1:] >= 0
            log_probs = log_p.gather(-1, batch["input_ids"][:, 1:, None])[..., 0] * kept
            entropies = -(log_p.exp() * log_p).sum(-1) * kept
        weights = torch.linspace(0.5, 1.5, log_probs.numel()).view(log_probs.shape)
        (log_probs * weights).sum().backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        results.append({"log_probs": log_probs.detach(), "entropy": entropies.detach(), **gradients})
    torch.testing.assert_close(results[1], results[0])


def test_row_of_async_grpo(directory: Path) -> None:
    """TRL's own row: its segments are read, no keys are gathered, and it runs without FlashAttention-3."""
    from trl.experimental.async_grpo.packing import TREE_ATTENTION, TreeRow, register_tree_attention
    from trl.trainer.utils import add_fused_lm_head

    register_tree_attention()
    generator = torch.Generator().manual_seed(1)
    head, turn = (torch.randint(1, 250, (size,), generator=generator) for size in (30, 12))
    tails = [torch.randint(1, 250, (size,), generator=generator) for size in (9, 1, 14, 20)]
    samples = [
        torch.cat([head, tails[0]]),
        torch.cat([head, turn, tails[1]]),
        torch.cat([head, turn, tails[2]]),
        tails[3],
    ]
    packed = TreeRow()
    for number, sample in enumerate(samples):
        mask = torch.arange(len(sample)) >= (30 if number < 3 else 5)
        packed.add(dict(input_ids=sample, completion_mask=mask, old_log_probs=mask * 1.0, advantage=1.0, group_id=0))
    row = packed.pack()
    model = trainers.load(directory).train()
    model.set_attn_implementation(TREE_ATTENTION)
    add_fused_lm_head(model)
    calls = share_in_calls(model)
    longest = dict(zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), row["tree_max_seqlens"].tolist(), strict=True))
    tree = {name: row[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    inputs = {name: row[name][None] for name in ("input_ids", "position_ids", "shift_labels")}
    output = model(**inputs, fused_lm_head=True, **tree, **longest)
    got = output.log_probs.flatten()[row["token_index"]].split(row["segment_id"].bincount().tolist())
    alone = trainers.load(directory).train()
    for sample, log_probs in zip(samples, got, strict=True):
        expected = alone(input_ids=sample[None]).logits.log_softmax(-1)[0, :-1].gather(-1, sample[1:, None])[:, 0]
        torch.testing.assert_close(log_probs, expected[-len(log_probs) :])
    assert calls.tokens == row["input_ids"].numel() and calls.tokens_apart == sum(map(len, samples))


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


def test_without_effect_in_calls_for_logits(directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Transformers smooths labels on logits, so TRL does not call its head."""
    trainer = trainers.sft(directory, tmp_path, label_smoothing_factor=0.1)
    tile_trainer(trainer, shared_prompts=True)
    with caplog.at_level(logging.WARNING, "seqtile"):
        trainer.train()
    assert len([record for record in caplog.records if "shared_prompts" in record.message]) == 1


def not_its_token(batch: dict[str, torch.Tensor]) -> None:
    batch["labels"][1, 45] = batch["labels"][1, 45] % 200 + 1


def on_padding(batch: dict[str, torch.Tensor]) -> None:
    batch["labels"][1, 55] = 7


def first_token(batch: dict[str, torch.Tensor]) -> None:
    batch["labels"][2, 4:40] = batch["input_ids"][2, 4:40]


def hole_in_an_answer(batch: dict[str, torch.Tensor]) -> None:
    """As a tool's output that is masked out: the tokens behind it keep their positions."""
    batch["attention_mask"][1, 43:46] = 0
    batch["labels"][1, 43:47] = -100


def hole_in_the_prompt(batch: dict[str, torch.Tensor]) -> None:
    batch["attention_mask"][:4, 10:14] = 0


CHANGES = [not_its_token, on_padding, first_token, hole_in_an_answer, hole_in_the_prompt]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_batches_that_run_as_they_are(
    change: Callable[[dict[str, torch.Tensor]], None], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from trl.trainer.utils import add_fused_lm_head

    batch = padded_batch()
    change(batch)
    results = []
    for shared in (False, True):
        model = trainers.load(directory).train()
        add_fused_lm_head(model)
        if shared:
            calls = share_in_calls(model)
        results.append(scored(model, batch))
    torch.testing.assert_close(results[1], results[0])
    assert calls.tokens == 0 and "no effect" in caplog.text


def test_shared_again(directory: Path) -> None:
    """By a user's own call, which keeps the folding, and after a call that failed, which keeps nothing."""
    from trl.trainer.utils import add_fused_lm_head

    model = trainers.load(directory).train()
    add_fused_lm_head(model)
    share_in_calls(model)
    share_in_calls(model)
    calls = share_prompts(model)
    with failing(model), pytest.raises(ZeroDivisionError):
        model(**padded_batch(), fused_lm_head=True)
    hooks = [hook.__self__ for hook in model._forward_hooks.values() if isinstance(hook.__self__, FoldedCalls)]
    model.eval()
    with torch.no_grad():
        model(**{name: values[3:] for name, values in padded_batch().items()}, fused_lm_head=True)
    assert len(hooks) == 1 and "Fold(" not in repr(vars(hooks[0]))
    scored(model, padded_batch())
    assert 0 < calls.tokens < calls.tokens_apart
    calls.remove()
    assert not model._forward_hooks


@contextmanager
def failing(model: Any) -> Iterator[None]:
    """The trunk raises."""
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    yield
    handle.remove()


def test_scores_need_shared_prompts(directory: Path) -> None:
    model = trainers.load(directory)
    seqtile.apply(model, blocks="none", loss="tiled")
    with refused("shared-prompts.not-applied"):
        score_shared(model, *padded_batch().values())


def test_refused(directory: Path, tmp_path: Path) -> None:
    with refused("shared-prompts.trainer-unsupported", "GKDTrainer"):
        tile_trainer(trainers.gkd(directory, tmp_path), shared_prompts=True)
    trainer = trainers.sft(directory, tmp_path)
    trainer.model.config.output_router_logits = True
    with refused("loss.model-unsupported"):
        share_in_calls(trainer.model.model)
    assert not shares_prompts(trainer.model)
    with refused("shared-prompts.router-loss"):
        tile_trainer(trainer, shared_prompts=True)
    assert not any("TreeCalls" in repr(hook) for m in trainer.model.modules() for hook in m._forward_hooks.values())


def test_the_collator_of_transformers_trainer(directory: Path, tmp_path: Path) -> None:
    """Groups of different sizes, prompts that are not scored, and two micro-batches per step."""
    draw = torch.Generator().manual_seed(0)
    samples = []
    for answers in (3, 1, 2, 2):
        prompt = torch.randint(5, 60, (20,), generator=draw).tolist()
        for length in range(2, 2 + answers):
            answer = torch.randint(5, 60, (length,), generator=draw).tolist()
            samples.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    results, tokens = [], []
    for shared in (False, True):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokens.append(Tokens(model))
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=3,
            logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", train_sampling_strategy="sequential",
            seed=1,
        )  # fmt: skip
        if shared:
            share_prompts(model)
        collator = seqtile.collate_tree if shared else DataCollatorForSeq2Seq(tokenizer, padding=True)
        trainer = Trainer(model, arguments, train_dataset=Dataset.from_list(samples), data_collator=collator)
        trainer.train()
        results.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(results[0]) == 3 and len(set(results[0])) == 3
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert tokens[1].trained < 0.75 * tokens[0].trained
