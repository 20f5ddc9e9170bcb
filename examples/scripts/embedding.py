"""Adapters on an embedding model, long texts, contrastive; rows of DATASET (JSONL) have anchor and positive:

python examples/scripts/embedding.py MODEL DATASET --max-length 8192 --batch-size 4
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

import seqtile


def embed(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over a text's tokens, of length 1: ``[texts, hidden]``."""
    states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return F.normalize((states * mask).sum(1).float() / mask.sum(1), dim=-1)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("dataset")
    parser.add_argument("--output", default="runs/embedding")
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(words)

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModel.from_pretrained(options.model, dtype="auto").to(device)
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    print(seqtile.apply(model))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    rows = load_dataset("json", data_files=options.dataset, split="train")
    for step, some in zip(range(options.steps), rows.repeat(options.steps).iter(options.batch_size), strict=False):
        texts = some["anchor"] + some["positive"]
        batch = tokenizer(texts, padding=True, truncation=True, max_length=options.max_length, return_tensors="pt")
        anchors, positives = embed(model, batch.to(device)).chunk(2)
        scores = anchors @ positives.T / 0.05
        loss = F.cross_entropy(scores, torch.arange(len(scores), device=device))  # the other rows are the wrong ones
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.4f}, {batch['input_ids'].numel()} tokens")
    model.save_pretrained(options.output)


if __name__ == "__main__":
    main()
