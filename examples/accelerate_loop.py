"""A loop with accelerate, any engine: ``seqtile.apply`` comes before ``accelerator.prepare``.

    accelerate launch --config_file examples/accelerate/fsdp2.yaml --num_processes 8 examples/accelerate_loop.py \
        --model PATH_OR_ID --text FILE --length 32768 --epochs 1
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import seqtile


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--untiled", action="store_true", help="the same losses, with more memory")
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = torch.tensor(tokenizer(args.text.read_text(encoding="utf-8"))["input_ids"])
    rows = DataLoader(ids[: len(ids) // args.length * args.length].view(-1, args.length), batch_size=1)
    model = AutoModelForCausalLM.from_pretrained(args.model).train()
    if not args.untiled:  # after adapters, before the engine
        accelerator.print(seqtile.apply(model, loss="tiled", checkpoint="layer"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)

    for epoch in range(args.epochs):
        for number, row in enumerate(rows):
            with accelerator.accumulate(model):
                loss = model(input_ids=row, labels=row).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), "mean").item()
            accelerator.print(f"epoch {epoch + 1}, batch {number + 1}: loss {mean:.5f}", flush=True)
    if args.output:
        whole = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            args.output, state_dict=whole, is_main_process=accelerator.is_main_process
        )


if __name__ == "__main__":
    main()
