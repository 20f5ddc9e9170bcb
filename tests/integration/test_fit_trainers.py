"""``TilingCallback(max_length=)`` in TRL's trainers: it chooses, and a step holds what was planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import seqtile
import tiny_run
from seqtile.blocks.instance import installed_forwards
from seqtile.fitting import choose_for, describe
from seqtile.integrations.callback import _go_first
from seqtile.integrations.trainer_steps import MARGIN, UNKNOWN_STEP, generation_of, known_step, question_of
from seqtile.lm_loss.tiled_loss import installed_losses
from seqtile.options import TilingOptions
from seqtile.planner.sharding_terms import CONSTANTS, CONTEXT
from seqtile.planner.step_config import Grpo, TrainerStep

trl = pytest.importorskip("trl", reason="trl is not installed: it comes with seqtile[train]")

pytestmark = [
    pytest.mark.backward_here,  # live bytes are counted on the thread that calls
    pytest.mark.filterwarnings("ignore"),  # what the trainers have to say about their own defaults
]

TOKENS, PROMPT, VOCABULARY, GIB = 768, 640, 1024, 2**30
WORDS = "a cat sees the river and wants an old book. " * 40
COMMON: dict[str, Any] = dict(
    max_steps=2, per_device_train_batch_size=2, optim="adamw_torch", save_strategy="no", report_to="none",
    use_cpu=True, disable_tqdm=True, bf16=False, gradient_checkpointing=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY, hidden_size=64, intermediate_size=384,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=24, max_position_embeddings=1024,
    )  # fmt: skip


def text(shift: int, length: int = 2 * TOKENS) -> str:
    return WORDS[shift : shift + length]


def in_trl(directory: Path, callback: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer, "callbacks": [callback]}


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory)


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


PAIRS = [{"prompt": text(n, PROMPT), "chosen": text(n + 1), "rejected": text(n + 2)} for n in range(4)]
PROMPTS = [{"prompt": text(n, PROMPT)} for n in range(8)]


def dpo(
    directory: Path,
    out: Path,
    callback: Any,
    adapters: Any = None,
    reference: Any = None,
    trainer: Any = None,
    **settings: Any,
) -> Any:
    config = trl.DPOConfig(str(out), max_length=TOKENS, **{**COMMON, **settings})
    return (trainer or trl.DPOTrainer)(
        load(directory), ref_model=reference, args=config, peft_config=adapters, **in_trl(directory, callback, PAIRS)
    )


def dpo_in_two(directory: Path, out: Path, callback: Any) -> Any:
    """Two micro-batches for each update: the second has the gradients of the first."""
    return dpo(directory, out, callback, per_device_train_batch_size=1, gradient_accumulation_steps=2)


def kto(directory: Path, out: Path, callback: Any) -> Any:
    rows = [{"prompt": text(n, PROMPT), "completion": text(n + 1), "label": n % 2 == 0} for n in range(4)]
    config = trl.KTOConfig(str(out), max_length=TOKENS, **COMMON)
    return trl.KTOTrainer(load(directory), args=config, **in_trl(directory, callback, rows))


def orpo(directory: Path, out: Path, callback: Any) -> Any:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    config = ORPOConfig(str(out), max_length=TOKENS, max_completion_length=TOKENS, **COMMON)
    return ORPOTrainer(load(directory), args=config, **in_trl(directory, callback, PAIRS))


def cpo(directory: Path, out: Path, callback: Any) -> Any:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    config = CPOConfig(str(out), max_length=TOKENS, max_completion_length=TOKENS, **COMMON)
    return CPOTrainer(load(directory), args=config, **in_trl(directory, callback, PAIRS))


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


SAMPLING: dict[str, Any] = {
    "num_generations": 2, "max_completion_length": TOKENS - PROMPT, "beta": 0.1,
    # Shorter completions are padded, for which sdpa builds a mask that no plan includes.
    "generation_kwargs": {"min_new_tokens": TOKENS - PROMPT},
}  # fmt: skip


def grpo(directory: Path, out: Path, callback: Any, trainer: Any = None, judges: Any = None, **settings: Any) -> Any:
    config = trl.GRPOConfig(str(out), **{**SAMPLING, **COMMON, **settings})
    data = in_trl(directory, callback, PROMPTS)
    return (trainer or trl.GRPOTrainer)(load(directory), reward_funcs=judges or reward, args=config, **data)


def rloo(directory: Path, out: Path, callback: Any) -> Any:
    config = trl.RLOOConfig(str(out), **SAMPLING, **COMMON)
    return trl.RLOOTrainer(load(directory), reward_funcs=reward, args=config, **in_trl(directory, callback, PROMPTS))


def reward_model(directory: Path, out: Path, callback: Any) -> Any:
    rows = [{"chosen": text(n, TOKENS - 1), "rejected": text(n + 2, TOKENS - 1)} for n in range(4)]
    config = trl.RewardConfig(str(out), max_length=TOKENS, **COMMON)
    model = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1)
    return trl.RewardTrainer(model, args=config, **in_trl(directory, callback, rows))


def distillation(directory: Path, out: Path, callback: Any) -> Any:
    config = trl.DistillationConfig(str(out), max_completion_length=TOKENS - PROMPT, **COMMON)
    data = in_trl(directory, callback, PROMPTS)
    return trl.DistillationTrainer(load(directory), teacher_model=load(directory), args=config, **data)


def gkd(directory: Path, out: Path, callback: Any) -> Any:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    rows = [
        {
            "messages": [
                {"role": "user", "content": text(n, PROMPT)},
                {"role": "assistant", "content": text(n + 3, TOKENS - PROMPT - 32)},
            ]
        }
        for n in range(4)
    ]
    config = GKDConfig(str(out), max_length=TOKENS, max_new_tokens=8, lmbda=0.0, **COMMON)
    return GKDTrainer(
        load(directory), teacher_model=str(directory), args=config, **in_trl(directory, callback, rows)
    )  # fmt: skip


def run(trainer: Any) -> float:
    """Bytes that the second step of a run holds at its peak, weights and optimizer states among them."""
    peaks, training_step = [], trainer.training_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        standing = sum(weight.grad.nbytes for weight in trainer.model.parameters() if weight.grad is not None)
        with seqtile.count_live_bytes() as live:
            loss = training_step(*args, **kwargs)
        peaks.append(standing + live.peak)
        return loss

    trainer.training_step = counted
    trainer.train()
    assert len(peaks) == 2 * trainer.args.gradient_accumulation_steps
    models = [trainer.model, getattr(trainer, "ref_model", None), getattr(trainer, "teacher_model", None)]
    weights = [weight for model in models if isinstance(model, nn.Module) for weight in model.parameters()]
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return peaks[-1] + sum(tensor.numel() * tensor.element_size() for tensor in [*weights, *states])


def counted_terms(callback: Any) -> float:
    """Bytes that the choice expects, without context and allocator."""
    return sum(value for name, value in callback._choice.estimate.terms.items() if name != CONTEXT)


SETTINGS: list[Any] = [
    pytest.param({"device": "16GiB", "checkpoint": "none", "keep": 0.0}, id="graph"),  # a reference runs beside it
    # 1.25 GiB of it are the context's at the high estimate.
    pytest.param({"device": "1325MiB"}, id="chosen", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("build", "rows", "tiles_loss"),
    [(dpo, 2, True), (dpo_in_two, 2, True), (kto, 1, True), (grpo, 1, True), (rloo, 1, True), (reward_model, 2, False),
     (orpo, 2, False), (cpo, 2, False)],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_step_holds_what_is_planned(
    build: Any, rows: int, tiles_loss: bool, settings: Any, directory: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    callback = seqtile.TilingCallback(max_length=TOKENS, **settings)
    trainer = build(directory, tmp_path, callback)
    assert callback._step.rows == rows and ("loss" in callback.report.settings) == tiles_loss
    held, planned = run(trainer), counted_terms(callback)
    # Every token is planned as a trained one; here most are of prompts, which the head leaves out.
    assert 0.93 * planned < held <= 1.01 * planned
    assert "no effect" not in caplog.text and "plans for" not in caplog.text


@pytest.mark.slow
def test_a_reference_runs_in_chunks_where_the_policy_does(directory: Path, tmp_path: Path) -> None:
    callback = seqtile.TilingCallback(max_length=TOKENS, device="16GiB", chunk=256, keep=0.0)
    trainer = dpo(directory, tmp_path, callback)
    held = run(trainer)
    assert any(forward.technique == "chunk" for forward in installed_forwards(trainer.ref_model))
    assert 0.9 * counted_terms(callback) < held <= callback._choice.estimate.device.high - CONSTANTS["context"].high


@pytest.mark.parametrize("build", [distillation, gkd], ids=lambda build: build.__name__)
def test_a_step_with_a_teacher_stays_below_the_margin(build: Any, directory: Path, tmp_path: Path) -> None:
    callback = seqtile.TilingCallback(max_length=TOKENS, device="16GiB", checkpoint="none", keep=0.0)
    trainer = build(directory, tmp_path, callback)
    assert "loss" not in callback.report.settings and not installed_losses(trainer.model)
    assert any("is left free" in sentence for sentence in callback.report.why)
    teacher = sum(weight.nbytes for weight in load(directory).parameters())
    # Prompts are planned as completions are, which fill larger tiles of distillation's head.
    held, planned = run(trainer), counted_terms(callback) + teacher
    assert 0.25 * planned < held <= 1.01 * planned


class Asked(TrainerCallback):
    """The question of a plan, at the event at which the callback asks."""

    question: dict[str, Any]

    def on_init_end(self, *_: Any, **__: Any) -> None:
        trainer = _go_first(self)
        assert trainer is not None
        self.question = question_of(trainer)


def asked(build: Any, directory: Path, out: Path, **settings: Any) -> tuple[dict[str, Any], TrainerStep]:
    callback = Asked()
    build(directory, out, callback, **settings)
    return callback.question, callback.question["step"]


def test_what_a_preference_trainer_has_beside_its_policy(directory: Path, tmp_path: Path) -> None:
    question, step = asked(dpo, directory, tmp_path, gradient_accumulation_steps=4)
    assert (step.reference, step.own_reference, step.margin, question["accumulation"]) == (True, True, 0.0, 4)
    model = load(directory)
    request, _ = describe(model, TilingOptions(), device="16GiB", step=step, batch=3, accumulation=4)
    assert (request.batch, request.accumulation, request.device.memory) == (6, 4, 16 * GIB)
    _, step = asked(dpo, directory, tmp_path, adapters=lora())
    assert (step.reference, step.own_reference) == (True, False)
    _, step = asked(dpo, directory, tmp_path, adapters=lora(), reference=load(directory))
    assert (step.reference, step.own_reference) == (True, True)
    _, step = asked(dpo, directory, tmp_path, precompute_ref_log_probs=True)
    assert (step.reference, step.own_reference) == (False, False)


def test_generation_is_asked_about(directory: Path, tmp_path: Path) -> None:
    judge = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1)
    question, step = asked(grpo, directory, tmp_path, judges=[reward, judge], steps_per_generation=2)
    assert step.grpo == Grpo(2, reference=True, generator="model") and question["accumulation"] == 2
    assert step.frozen == sum(weight.nbytes for weight in judge.parameters())
    request, notes = describe(load(directory), TilingOptions(), device="16GiB", step=step)
    assert request.grpo == step.grpo and request.device.memory == 16 * GIB - step.frozen and len(notes) == 2
    _, step = asked(grpo, directory, tmp_path, beta=0.0)
    assert step.grpo is not None and not step.grpo.reference
    for sleeps, generator in ((False, "colocate"), (True, "sleep")):
        args = trl.GRPOConfig(
            str(tmp_path), **COMMON, num_generations=2, use_vllm=True, vllm_mode="colocate",
            vllm_enable_sleep_mode=sleeps, vllm_gpu_memory_utilization=0.4,
        )  # fmt: skip
        assert generation_of(args) == Grpo(2, generator=generator, memory=0.4)


def test_a_step_that_no_plan_knows_gets_a_margin(directory: Path, tmp_path: Path) -> None:
    class OtherArguments(trl.DPOTrainer):
        """As LLaMA-Factory's: skips TRL's constructor, and reads the model's logits."""

        def __init__(self, model: Any, **arguments: Any) -> None:
            Trainer.__init__(self, model=model, **arguments)

        def concatenated_forward(self) -> None: ...

    class OwnLoss(trl.GRPOTrainer):
        def _compute_loss(self, *args: Any) -> Any:
            return super()._compute_loss(*args)

    class OwnRewards(trl.GRPOTrainer):
        def _calculate_rewards(self, *args: Any) -> Any:
            return super()._calculate_rewards(*args)

    callback = Asked()
    OtherArguments(load(directory), args=TrainingArguments(str(tmp_path), **COMMON), callbacks=[callback])
    step = callback.question["step"]
    assert (step.rows, step.head, step.margin, step.own_reference) == (2, "pairs", MARGIN, True)
    request, notes = describe(load(directory), TilingOptions(), device="16GiB", step=step)
    assert request.device.memory == 16 * GIB - int(MARGIN * 16 * GIB) and "OtherArguments" in notes[0]
    _, step = asked(grpo, directory, tmp_path, trainer=OwnLoss)
    assert (step.margin, step.head, step.grpo is None) == (MARGIN, "scores", False)
    assert asked(grpo, directory, tmp_path, trainer=OwnRewards)[1].margin == 0

    class OfTrl(trl.SFTTrainer):
        """As GOLD and whatever comes next."""

        __module__ = "trl.experimental.next"

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any: ...

    class Users(trl.SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any: ...

    assert (
        known_step(OfTrl)[1] == UNKNOWN_STEP and known_step(Users)[1] == known_step(trl.SFTTrainer)[1] == TrainerStep()
    )


def test_a_step_that_no_plan_knows_is_chosen_for(directory: Path, tmp_path: Path) -> None:
    class OwnLoss(trl.DPOTrainer):
        def _compute_loss(self, *args: Any) -> Any:
            return super()._compute_loss(*args)

    callback = seqtile.TilingCallback(max_length=TOKENS, device="16GiB", checkpoint="none", keep=0.0)
    trainer = dpo(directory, tmp_path, callback, trainer=OwnLoss)
    assert callback.report.why[0].startswith(f"{TOKENS} tokens per sequence on 16GiB with 13.60 GiB")
    assert any("is left free" in sentence and "OwnLoss" in sentence for sentence in callback.report.why)
    assert any("whole logits" in sentence for sentence in callback.report.why)
    assert run(trainer) <= counted_terms(callback) + MARGIN * 16 * GIB


def test_a_sequence_classifier_is_planned_without_a_vocabulary(directory: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=3)
    model.config.pad_token_id = None
    report = seqtile.fit(model, max_length=TOKENS, device="16GiB", checkpoint="none", keep=0.0)
    assert report.tiled == 3 and "loss" not in report.settings
    choice = choose_for(
        model, TilingOptions(checkpoint="layer"), max_length=TOKENS, device="16GiB", given={"checkpoint", "keep"}
    )
    assert choice.estimate.terms.get("logits and loss", 0) < VOCABULARY * TOKENS


def test_the_callback_reports_batches_by_their_rows(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = seqtile.TilingCallback(max_length=TOKENS // 2, device="16GiB", checkpoint="none", keep=0.0)
    dpo(directory, tmp_path, callback).train()
    assert f"has {4 * TOKENS:,} tokens on this process" in caplog.text and f"plans for {2 * TOKENS:,}" in caplog.text
