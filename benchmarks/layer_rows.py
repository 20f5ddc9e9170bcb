"""Count what each part of Llama-8B's step holds with `blocks=` of more and more, in hidden-state tensors ("rows").

    python benchmarks/layer_rows.py [--tokens 131072]

By the plan's fake runs, in bf16, tiled loss, activation checkpoints, all layers: at the peak of each part of the
backward everything that is not weights, gradients, optimizer states or checkpointed layer inputs, with what
FlashAttention-2 takes inside itself. A row is 8 KiB per token, 1 GiB at 131,072 tokens. With adapters (rank 16 on every
linear layer, in fp32, products in bf16 by autocast) the base is frozen.
"""

from __future__ import annotations

import argparse
import datetime

import torch
import transformers

from seqtile.models.configs import read_config
from seqtile.models.layer_fields import first_layers
from seqtile.options import changed
from seqtile.planner.extrapolate import predict
from seqtile.planner.fake_step import build
from seqtile.planner.kernel_workspace import flash2_workspace
from seqtile.planner.live_at_peaks import CHECKPOINTS, GRADIENTS, OPTIMIZER, WEIGHTS
from seqtile.planner.step_config import Lora, Setup
from seqtile.planner.tile_choice import head_tile

STANDING = (WEIGHTS, GRADIENTS, OPTIMIZER, CHECKPOINTS)
BLOCKS = ("mlp", "mlp+norm", "mlp+norm+projections")
TRAIN = {
    "full": Setup(attention="flash", device_type="cuda"),
    "LoRA": Setup(attention="flash", device_type="cuda", lora=Lora(16), autocast=True),
}


def count_parts(train: str, blocks: str, tokens: int) -> dict[str, float]:
    """Hidden-state tensors at the peak of each part of a step of Llama-8B, by phase.

    Args:
        train: a key of :data:`TRAIN`.
        blocks: what is tiled, as in :func:`seqtile.apply`.
        tokens: of one row.
    """
    config = read_config("llama-8b")
    row = 2 * config.hidden_size * tokens
    asked = changed(TRAIN[train], blocks=blocks)
    head = head_tile(build(first_layers(config, 1), asked, "meta"), asked, tokens, "cuda")
    asked = changed(asked, loss_tile=head)
    found = predict(config, asked, tokens, workspace=flash2_workspace, device_type="cuda")
    return {
        str(phase): sum(value for name, value in terms.items() if name not in STANDING) / row
        for phase, terms in found.parts.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    tokens = parser.parse_args().tokens
    print(f"Fake tensors, torch {torch.__version__}, transformers {transformers.__version__}, {datetime.date.today()}; "
          f"{tokens:,} tokens")  # fmt: skip
    for train in TRAIN:
        for blocks in BLOCKS:
            parts = count_parts(train, blocks, tokens)
            told = ", ".join(f"{phase} {rows:.2f}" for phase, rows in sorted(parts.items(), key=lambda p: -p[1])
                             if rows > 1 and "forward" not in phase and "#0" not in phase)  # fmt: skip
            print(f"{train}, {blocks}: {told}", flush=True)


if __name__ == "__main__":
    main()
