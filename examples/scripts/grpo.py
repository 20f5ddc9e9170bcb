"""GRPO with adapters on long prompts; rows of DATASET (JSONL) have prompt and answer:

python examples/scripts/grpo.py MODEL DATASET --max-completion 4096
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import seqtile
from seqtile.integrations.trl import tile_trainer


def holds_the_answer(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """The reward: 1 where the completion holds its row's answer. Put yours here."""
    return [float(right in said) for said, right in zip(completions, answer, strict=True)]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("dataset")
    parser.add_argument("--output", default="runs/grpo")
    parser.add_argument("--max-completion", type=int, default=4096)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=1, help="completions per forward; their prompt runs once")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(words)

    trainer = GRPOTrainer(
        options.model,
        reward_funcs=holds_the_answer,
        args=GRPOConfig(
            options.output, max_completion_length=options.max_completion, num_generations=options.generations,
            per_device_train_batch_size=options.at_once, max_steps=options.steps,
            gradient_accumulation_steps=options.generations // options.at_once,
            learning_rate=1e-5, gradient_checkpointing_kwargs={"use_reentrant": False}, report_to="none",
            bf16=torch.accelerator.is_available(), model_init_kwargs={"dtype": "auto"},
        ),
        train_dataset=load_dataset("json", data_files=options.dataset, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    # After the trainer is built, so that the tiled head answers its calls; before it trains, so before any engine.
    print(seqtile.apply(trainer.model, loss="tiled"))
    if options.at_once > 1:
        print(*tile_trainer(trainer, shared_prompts=True), sep="\n")
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
