"""Adapters on a vision-language model; rows of DATASET (JSONL) have image (a path), question and answer:

python examples/scripts/vision_language.py MODEL DATASET
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import seqtile

LANGUAGE_MODEL = r".*language_model.*(q|k|v|o|gate|up|down)_proj"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("dataset")
    parser.add_argument("--output", default="runs/vision-language")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(words)

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    processor = AutoProcessor.from_pretrained(options.model)
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype="auto").to(device)
    model = get_peft_model(model, LoraConfig(r=16, target_modules=LANGUAGE_MODEL))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    print(seqtile.apply(model, loss="tiled", vision="auto"))  # the frozen tower keeps its features alone
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    rows = load_dataset("json", data_files=options.dataset, split="train")
    model.train()
    for step in range(options.steps):
        row = rows[step % len(rows)]
        asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["question"]}]}
        told = {"role": "assistant", "content": [{"type": "text", "text": row["answer"]}]}
        text = processor.apply_chat_template([asked, told])
        batch = processor(text=text, images=Image.open(row["image"]).convert("RGB"), return_tensors="pt").to(device)
        labels = batch["input_ids"].masked_fill(batch["input_ids"] == model.config.image_token_id, -100)
        loss = model(**batch, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.4f}, {labels.shape[1]} tokens")
    model.save_pretrained(options.output)


if __name__ == "__main__":
    main()
