"""The trainers that people use, each on a tiny model: transformers' own and TRL's.

Each takes the model's directory, a folder for its output, callbacks, and more settings; ``model`` is one that was
loaded (and perhaps tiled) before. The learning rate is that of plain SGD, which does not blow up the order of sums
where a gradient is zero in theory, as Adam does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

import tiny_run

STEPS = 4
COMMON: dict[str, Any] = dict(
    max_steps=STEPS, per_device_train_batch_size=2, learning_rate=0.3, optim="sgd", logging_steps=1, save_strategy="no",
    report_to="none", use_cpu=True, disable_tqdm=True, seed=3,
)  # fmt: skip
WORDS = tiny_run.SENTENCES
PAIRS = [{"prompt": WORDS[i], "chosen": WORDS[i + 3], "rejected": WORDS[i + 9]} for i in range(8)]
PROMPTS = Dataset.from_dict({"prompt": WORDS[:8]})


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory)


def _in_trl(directory: Path, callbacks: tuple[Any, ...], rows: Any) -> dict[str, Any]:
    data = Dataset.from_list(rows) if isinstance(rows, list) else rows
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return {"train_dataset": data, "processing_class": tokenizer, "callbacks": list(callbacks)}


def ids(count: int = 16) -> Dataset:
    rows = [list(range(1 + row, 33 + row)) for row in range(count)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def plain(directory: Path, out: Path, *callbacks: Any, model_init: Any = None, **settings: Any) -> Trainer:
    return Trainer(
        model=None if model_init else load(directory), model_init=model_init, train_dataset=ids(), eval_dataset=ids(4),
        args=TrainingArguments(str(out), **{**COMMON, "learning_rate": 0.1, **settings}), callbacks=list(callbacks),
    )  # fmt: skip


def sft(directory: Path, out: Path, *callbacks: Any, model: Any = None, adapters: Any = None, **settings: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(str(out), max_length=64, **{"bf16": False, **COMMON, **settings})
    data = _in_trl(directory, callbacks, tiny_run.text_rows(16))
    return SFTTrainer(model or load(directory), args=config, peft_config=adapters, **data)


def dpo(directory: Path, out: Path, *callbacks: Any, adapters: Any = None, **settings: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    torch.manual_seed(0)  # of the adapters
    config = DPOConfig(str(out), max_length=64, bf16=False, **{**COMMON, **settings})
    return DPOTrainer(load(directory), args=config, peft_config=adapters, **_in_trl(directory, callbacks, PAIRS))


def kto(directory: Path, out: Path, *callbacks: Any, adapters: Any = None) -> Any:
    from trl import KTOConfig, KTOTrainer

    rows = [{"prompt": WORDS[i], "completion": WORDS[i + 3 + 6 * (i % 2)], "label": i % 2 == 0} for i in range(8)]
    torch.manual_seed(0)
    config = KTOConfig(str(out), max_length=64, bf16=False, **COMMON)
    return KTOTrainer(load(directory), args=config, peft_config=adapters, **_in_trl(directory, callbacks, rows))


def _reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 7 for token in completion) / 10 for completion in completion_ids]


_SAMPLING: dict[str, Any] = {"num_generations": 2, "max_completion_length": 8, "beta": 0.1, "bf16": False}


def grpo(directory: Path, out: Path, *callbacks: Any, **settings: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(str(out), temperature=0.7, **{**_SAMPLING, **COMMON, **settings})
    return GRPOTrainer(load(directory), reward_funcs=_reward, args=config, **_in_trl(directory, callbacks, PROMPTS))


def rloo(directory: Path, out: Path, *callbacks: Any) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    config = RLOOConfig(str(out), temperature=0.7, **_SAMPLING, **COMMON)
    return RLOOTrainer(load(directory), reward_funcs=_reward, args=config, **_in_trl(directory, callbacks, PROMPTS))


def reward_model(directory: Path, out: Path, *callbacks: Any, **settings: Any) -> Any:
    from trl import RewardConfig, RewardTrainer

    pairs = [{"chosen": f"{WORDS[i]} {WORDS[i + 3]}", "rejected": f"{WORDS[i]} {WORDS[i + 9]}"} for i in range(8)]
    torch.manual_seed(0)  # the score's weights
    model = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1)
    config = RewardConfig(str(out), max_length=64, bf16=False, **{**COMMON, **settings})
    return RewardTrainer(model, args=config, **_in_trl(directory, callbacks, pairs))


def online_dpo(directory: Path, out: Path, *callbacks: Any) -> Any:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    def judge(prompts: list[str], completions: list[Any], **_: Any) -> list[float]:
        return [float(sum(map(ord, str(text))) % 11) for text in completions]

    config = OnlineDPOConfig(
        str(out), max_new_tokens=8, max_length=64, temperature=0.7, bf16=False, **{**COMMON, "learning_rate": 0.05}
    )
    data = _in_trl(directory, callbacks, PROMPTS)
    return OnlineDPOTrainer(load(directory), ref_model=load(directory), reward_funcs=judge, args=config, **data)


def gkd(directory: Path, out: Path, *callbacks: Any, beta: float = 0.5, lmbda: float = 0.0, **settings: Any) -> Any:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    rows = [
        {"messages": [{"role": "user", "content": WORDS[i]}, {"role": "assistant", "content": WORDS[i + 3]}]}
        for i in range(8)
    ]
    config = GKDConfig(
        str(out), max_length=64, max_new_tokens=8, beta=beta, lmbda=lmbda, bf16=False,
        **{**COMMON, "learning_rate": 0.05, **settings},
    )  # fmt: skip
    teacher = load(directory)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.mul_(1.3)
    data = _in_trl(directory, callbacks, rows)
    template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    data["processing_class"].chat_template = template
    return GKDTrainer(load(directory), teacher_model=teacher, args=config, **data)
