"""Your own loop, one device: tiling is the line with ``seqtile.apply``.

python examples/pytorch_loop.py --model PATH_OR_ID --text FILE --length 32768 --steps 100
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import seqtile


def rows(tokenizer, file: Path, length: int) -> Iterator[torch.Tensor]:
    """The file's tokens, ``length`` at a time, over and over."""
    ids = torch.tensor(tokenizer(file.read_text(encoding="utf-8"))["input_ids"])
    while True:
        yield from ids[: len(ids) // length * length].view(-1, 1, length)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--untiled", action="store_true", help="the same losses, with more memory")
    args = parser.parse_args()

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).to(device).train()
    if not args.untiled:  # blocks and loss over tiles, activation checkpointing on; says what it did
        print(seqtile.apply(model, loss="tiled", checkpoint="layer"))

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    batches = rows(tokenizer, args.text, args.length)
    for step in range(args.steps):
        row = next(batches).to(device)
        loss = model(input_ids=row, labels=row).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.5f}", flush=True)
    if args.output:
        model.save_pretrained(args.output)  # nothing of the tiling is in it
        tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
