"""On-policy distillation on long answers; rows of DATASET (JSONL) have messages, the last one the assistant's:

python examples/scripts/distill.py STUDENT TEACHER DATASET --length 16384
"""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer

import seqtile
from seqtile.integrations.trl import tile_trainer


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("student")
    parser.add_argument("teacher", help="of the student's vocabulary, of any width")
    parser.add_argument("dataset")
    parser.add_argument("--output", default="runs/distill")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--max-completion", type=int, default=4096)
    parser.add_argument("--beta", type=float, default=0.5, help="0: KL(teacher || student), 1: the reverse")
    parser.add_argument(
        "--on-policy", type=float, default=0.5, help="fraction of the steps on the student's own answers"
    )
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(words)

    trainer = GKDTrainer(
        AutoModelForCausalLM.from_pretrained(options.student),
        teacher_model=AutoModelForCausalLM.from_pretrained(options.teacher, dtype="auto"),
        args=GKDConfig(
            options.output, max_length=options.length, max_new_tokens=options.max_completion, beta=options.beta,
            lmbda=options.on_policy, per_device_train_batch_size=1, max_steps=options.steps, learning_rate=1e-5,
            gradient_checkpointing_kwargs={"use_reentrant": False}, report_to="none",
            bf16=torch.accelerator.is_available(),
        ),
        train_dataset=load_dataset("json", data_files=options.dataset, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.student),
    )  # fmt: skip
    print(seqtile.apply(trainer.model))  # the blocks
    print("\n".join(tile_trainer(trainer)))  # the heads: neither model's logits are made
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
