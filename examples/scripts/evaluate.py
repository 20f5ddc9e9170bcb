"""Perplexity of long texts, no training; rows of DATASET (JSONL) have text:

python examples/scripts/evaluate.py MODEL DATASET --max-length 131072
"""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import seqtile


def main(words: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("dataset")
    parser.add_argument("--max-length", type=int, default=131072)
    options = parser.parse_args(words)

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").to(device).eval()
    print(seqtile.apply(model, loss="tiled"))

    total, count = 0.0, 0
    for row in load_dataset("json", data_files=options.dataset, split="train"):
        batch = tokenizer(row["text"], truncation=True, max_length=options.max_length, return_tensors="pt").to(device)
        with torch.no_grad():
            # Evaluation has its logits unless they are declined; the key-value cache would be as large as the text.
            output = model(**batch, labels=batch["input_ids"], return_logits=False, use_cache=False)
        predicted = batch["input_ids"].shape[1] - 1
        total, count = total + output.loss.item() * predicted, count + predicted
    perplexity = float(torch.tensor(total / count).exp())
    print(f"perplexity {perplexity:.4f} over {count} tokens")
    return perplexity


if __name__ == "__main__":
    main()
