"""Count what a sliding-window layer would hold in its backward if it ran in tiles with its window as the state.

    python benchmarks/window_tiles.py

Fake tensors at real shapes, bf16, one row. A tile's state is the keys and values of the window before it, handed on by
:func:`seqtile.ops.tile_checkpoint.run_with_state`. Bytes are the most live in a backward, beside the weights and
their former gradients, in hidden-state tensors; PyTorch's flash attention for CPUs stands for a windowed kernel, which
allocates the same. Nothing in seqtile runs a layer so: the command says what it would be worth.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

import seqtile
from seqtile.counting.fake import fake_tensors, make_fake
from seqtile.ops.tile_checkpoint import run_with_state

LENGTHS, TILE = (32768, 131072), 2048
HOW = ("under a checkpoint", "MLP and heads in tiles", "the layer in tiles")
SHAPES: dict[str, dict[str, Any]] = {
    "Mistral-7B-v0.1": dict(
        model_type="mistral", hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, sliding_window=4096,
    ),
    "Gemma-3-12B": dict(
        model_type="gemma3_text", hidden_size=3840, intermediate_size=15360, num_attention_heads=16,
        num_key_value_heads=8, head_dim=256, sliding_window=1024, layer_types=["sliding_attention"],
    ),
}  # fmt: skip


class _Window:
    """What the layer takes for its cache: the keys and values before the tile, and after it."""

    def __init__(self, state: Sequence[Tensor], window: int) -> None:
        self.state, self.window = tuple(state), window

    def update(self, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Those of the tile, each ``[B, heads, t, d]``, behind those before it."""
        new = (keys, values)
        whole = tuple(torch.cat(pair, 2) for pair in zip(self.state, new, strict=True)) if self.state else new
        self.state = tuple(one[:, :, 1 - self.window :].clone() for one in whole)
        return whole[0], whole[1]


def _layer_of(shape: Mapping[str, Any]) -> Any:
    words = {name: value for name, value in shape.items() if name != "model_type"}
    config: Any = AutoConfig.for_model(
        shape["model_type"], **words, num_hidden_layers=1, vocab_size=64, use_cache=False, attn_implementation="sdpa"
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def _runs(model: Any, angles: tuple[Tensor, Tensor], window: int) -> dict[str, Callable[[Tensor], Tensor]]:
    layer = model.model.layers[0]

    def whole(x: Tensor) -> Tensor:
        found: Tensor = checkpoint(lambda x: layer(x, position_embeddings=angles), x, use_reentrant=False)
        return found

    def untiled(x: Tensor) -> Tensor:
        seqtile.undo(model)
        return whole(x)

    def today(x: Tensor) -> Tensor:
        seqtile.apply(model, heads=1)
        return whole(x)

    def in_tiles(x: Tensor) -> Tensor:
        seqtile.undo(model)

        def run(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor], state: Any, _: int) -> Any:
            cache = _Window(state, window)
            words = dict(position_embeddings=tuple(tiles[1:]), past_key_values=cache)
            return functional_call(layer, dict(aliases), (tiles[0],), words), cache.state

        sizes = (TILE,) * (x.shape[1] // TILE)
        y: Tensor = run_with_state(run, (x, *angles), sizes, weights=lambda: dict(layer.named_parameters()))
        return y

    return {"under a checkpoint": untiled, "MLP and heads in tiles": today, "the layer in tiles": in_tiles}


def count_layer(shape: Mapping[str, Any], how: str, tokens: int) -> tuple[float, float]:
    """What one layer holds, in hidden-state tensors: at the peak of its backward, and kept from forward to backward."""
    model = _layer_of(shape)
    with fake_tensors():
        make_fake(model)
        for weight in model.model.layers[0].parameters():
            weight.grad = torch.empty_like(weight)
        x = torch.empty(1, tokens, shape["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        angles = (torch.empty(1, tokens, shape["head_dim"], dtype=torch.bfloat16),) * 2
        run = _runs(model, angles, shape["sliding_window"])[how]
        with seqtile.count_live_bytes() as live:
            y = run(x)
            kept = live.now
            y.backward(torch.empty_like(y))
    unit = x.numel() * 2
    return live.peak / unit, kept / unit


def main() -> None:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {datetime.date.today()}"
    print(f"Fake tensors, {versions}; tiles of {TILE:,}; in hidden-state tensors: live in the backward, kept before it")
    for name, shape in SHAPES.items():
        for tokens in LENGTHS:
            counted = {how: count_layer(shape, how, tokens) for how in HOW}
            found = [f"{how} {live:.2f}, {kept:.2f}" for how, (live, kept) in counted.items()]
            print(f"{name}, window {shape['sliding_window']:,}, {tokens:,} tokens: {'; '.join(found)}")


if __name__ == "__main__":
    main()
