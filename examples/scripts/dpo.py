"""DPO with adapters on long pairs; rows of DATASET (JSONL) have prompt, chosen and rejected:

python examples/scripts/dpo.py MODEL DATASET --max-length 32768
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

import seqtile


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("dataset")
    parser.add_argument("--output", default="runs/dpo")
    parser.add_argument("--max-length", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(words)

    trainer = DPOTrainer(
        options.model,  # the reference is the same model without its adapters: no second copy
        args=DPOConfig(
            options.output, max_length=options.max_length, max_steps=options.steps, per_device_train_batch_size=1,
            learning_rate=5e-6, gradient_checkpointing_kwargs={"use_reentrant": False}, report_to="none",
            bf16=torch.accelerator.is_available(), model_init_kwargs={"dtype": "auto"},
        ),
        train_dataset=load_dataset("json", data_files=options.dataset, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    # After the trainer is built, so that the tiled head answers its calls; before it trains, so before any engine.
    print(seqtile.apply(trainer.model, loss="tiled"))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
