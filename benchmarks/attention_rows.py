"""Count what one decoder layer of Llama-8B's shape holds in its backward, in hidden-state tensors ("rows" per token).

    python benchmarks/attention_rows.py [--tokens 131072 1048576]

One layer under an activation checkpoint, in bf16, on fake tensors: its input, forward, backward, input's gradient. The
weights are frozen, so that only what grows with the tokens is counted: input and output's gradient, everything
between, attention's output where the checkpoint keeps it. The second number adds what FlashAttention-2's backward
takes inside itself on a GPU, by its shapes. A row is 8 KiB per token.
"""

from __future__ import annotations

import argparse
import datetime
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import seqtile
from seqtile.counting.fake import fake_tensors, make_fake
from seqtile.planner.flash_shapes import register_flash_shapes
from seqtile.planner.kernel_workspace import flash2_workspace
from seqtile.planner.live_at_peaks import track

LLAMA_8B = dict(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    num_hidden_layers=1, vocab_size=256, max_position_embeddings=1 << 20, rms_norm_eps=1e-5, use_cache=False,
)  # fmt: skip
SAVED: dict[str, Any] = {"checkpoint": "attention-saved"}
TILED: dict[str, Any] = {"tile": "shards:64"}
WAYS: dict[str, dict[str, Any]] = {
    "untiled": {},
    "MLP and its norm tiled": TILED,
    "+ attention saved": TILED | SAVED,
    "+ head-wise, 1 of 8": TILED | {"heads": 1},
    "+ head-wise and attention saved, 8 of 8": TILED | SAVED | {"heads": 8},
    "+ head-wise and attention saved, 4 of 8": TILED | SAVED | {"heads": 4},
    "+ head-wise and attention saved, 2 of 8": TILED | SAVED | {"heads": 2},
    "+ head-wise and attention saved, 1 of 8": TILED | SAVED | {"heads": 1},
}


class _End(torch.autograd.Function):
    """Stands for the layers above: takes the output, and gives its gradient when the backward begins."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.like = output.shape, output.dtype
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        return torch.empty(ctx.like[0], dtype=ctx.like[1])


@dataclass(frozen=True)
class Rows:
    """Hidden-state tensors.

    Attributes:
        held: between forward and backward, the layer's input among them.
        tensors: at the peak.
        kernels: at the peak, with what FlashAttention-2 takes inside itself.
    """

    held: float
    tensors: float
    kernels: float


def count_rows(tokens: int, how: dict[str, Any], **config: Any) -> Rows:
    """What one layer holds with the settings ``how`` of :func:`seqtile.apply`."""
    shape = {**LLAMA_8B, **config}
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", **shape), dtype=torch.bfloat16, attn_implementation=register_flash_shapes()
        )
    model.train().requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if how:
        seqtile.apply(model, **how)
    with fake_tensors() as shapes, track(flash2_workspace, shapes=shapes) as live:
        make_fake(model)
        layer: nn.Module = model.model.layers[0]
        angles = torch.empty(1, tokens, shape["head_dim"], dtype=torch.bfloat16)
        before, live.watching = live.now, True
        x = torch.empty(1, tokens, shape["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        output = layer(x, position_embeddings=(angles, angles.clone()), attention_mask=None)
        end = _End.apply(output)  # type: ignore[no-untyped-call]
        del output
        held = live.now - before
        end.backward()
        kernels = max(part.total for part in live.peaks.values()) - before
        row = tokens * shape["hidden_size"] * 2
        return Rows(held / row, (live.peak - before) / row, kernels / row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072, 1048576])
    asked = parser.parse_args()
    print(f"Fake tensors, torch {torch.__version__}, transformers {transformers.__version__}, {datetime.date.today()}")
    print("MLP in 64 tiles; 1 of 8 means one of eight key-value heads per pass")
    for tokens in asked.tokens:
        print(f"\n{tokens:,} tokens\n")
        print("| | kept from forward to backward | peak of backward | with FlashAttention-2's own |")
        print("|---|---|---|---|")
        for name, how in WAYS.items():
            rows = count_rows(tokens, how)
            print(f"| {name} | {rows.held:.2f} | {rows.tensors:.2f} | {rows.kernels:.2f} |")


if __name__ == "__main__":
    main()
