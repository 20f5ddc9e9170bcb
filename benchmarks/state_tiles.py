"""Count what one layer with a state holds in its backward, whole and in tiles; its products; and its time on a CPU.

    python benchmarks/state_tiles.py                       # bytes and products, on fake tensors at real shapes
    python benchmarks/state_tiles.py --tokens 1048576 --tile 16384
    python benchmarks/state_tiles.py --time                # seconds of a smaller layer on this CPU, 8,192 tokens

The layer is Qwen3.5-9B's: hidden 4,096, MLP 12,288, 32 value and 16 key heads of 128, in bf16, one row. Bytes are the
most that is live in a backward, beside the weights and their former gradients, in hidden-state tensors (8 KiB per
token). The chunked kernel is a model of flash-linear-attention's: what it saves, and what its backward allocates, stage
by stage (queries, keys and their gradients per value head, a state per chunk of 64 tokens). ``checkpointed`` is the
layer under PyTorch's non-reentrant checkpoint, as Transformers runs it; the tiles are under it too.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import transformers
import transformers.models.qwen3_5.modeling_qwen3_5 as modeling
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

import seqtile
from seqtile.counting.fake import fake_tensors, make_fake

LENGTHS = (8192, 32768, 131072)
SHAPE = dict(
    hidden_size=4096, intermediate_size=12288, num_attention_heads=16, num_key_value_heads=4, head_dim=256,
    linear_num_value_heads=32, linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
)  # fmt: skip
SMALL = dict(
    hidden_size=1024, intermediate_size=3072, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
    linear_num_value_heads=8, linear_num_key_heads=4, linear_key_head_dim=128, linear_value_head_dim=128,
)  # fmt: skip
CHUNK = 64
VERSIONS = f"torch {torch.__version__}, transformers {transformers.__version__}, {datetime.date.today()}"


class _Kernel(torch.autograd.Function):
    """What ``chunk_gated_delta_rule`` of fla-core 0.6 allocates, read from its source; nothing is computed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> Any:
        q, k = _normed(q, v), _normed(k, v)
        ctx.has_state = state is not None
        cumulated, inverse = torch.empty_like(g, dtype=torch.float32), _inverse(v)
        ctx.save_for_backward(q, k, v, cumulated, beta, inverse, *([] if state is None else [state]))
        w, u = torch.empty_like(k), torch.empty_like(v)
        states, new_values = _states(v), torch.empty_like(v)
        del w, u
        output = torch.empty_like(v)
        del states, new_values
        return output, v.new_empty(v.shape[0], v.shape[2], v.shape[3], v.shape[3], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, do: Tensor, dstate: Tensor | None) -> Any:
        q, k, v, g, beta, inverse, *state = ctx.saved_tensors
        w, u = torch.empty_like(k), torch.empty_like(v)
        states, new_values = _states(v), torch.empty_like(v)
        del u
        dv = torch.empty_like(v)
        dstates, dinitial = _states(v), torch.empty_like(state[0]) if state else None
        dv2 = torch.empty_like(v)
        del dv
        dq, dk, dw, dg = torch.empty_like(q), torch.empty_like(k), torch.empty_like(w), torch.empty_like(g)
        del states, dstates, new_values, w
        dk2, dvalue, dbeta = torch.empty_like(k), torch.empty_like(v), torch.empty_like(beta)
        del dw, dv2, dk2, inverse
        return _summed(dq), _summed(dk), dvalue, dg, dbeta, dinitial


def _normed(x: Tensor, v: Tensor) -> Tensor:
    """Normed queries or keys, one per value head."""
    return torch.empty_like(v)


def _summed(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:2], x.shape[2] // 2, x.shape[3])


def _inverse(v: Tensor) -> Tensor:
    return v.new_empty(*v.shape[:3], CHUNK)


def _states(v: Tensor) -> Tensor:
    """A state ``[128, 128]`` per head and chunk."""
    return v.new_empty(v.shape[0], -(-v.shape[1] // CHUNK), v.shape[2], v.shape[3], v.shape[3])


def kernel(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    output, final = _Kernel.apply(query, key, value, g, beta, initial_state)  # type: ignore[no-untyped-call]
    return output, final if output_final_state else None


def layer_of(shape: dict[str, int], dtype: torch.dtype, device: str) -> Any:
    """A model of one such layer."""
    config: Any = AutoConfig.for_model(
        "qwen3_5_text", **shape, num_hidden_layers=1, layer_types=["linear_attention"], vocab_size=64, use_cache=False
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def runs(model: Any, tile: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """How the layer can be run."""
    layer = model.model.layers[0]

    def run(x: Tensor) -> Tensor:
        found: Tensor = checkpoint(lambda x: layer(x, position_embeddings=None), x, use_reentrant=False)
        return found

    def checkpointed(x: Tensor) -> Tensor:
        seqtile.undo(model)
        return run(x)

    def mixer_in_tiles(x: Tensor) -> Tensor:
        if "forward" not in layer.linear_attn.__dict__:  # once, as a run does: what the trials compute is not counted
            seqtile.apply(model, blocks="none", state=tile)
            layer.__dict__["forward"].remove()
        return run(x)

    def layer_in_tiles(x: Tensor) -> Tensor:
        if "forward" not in layer.__dict__:
            seqtile.apply(model, blocks="none", state=tile)
        return run(x)

    return {"checkpointed": checkpointed, "mixer in tiles": mixer_in_tiles, "layer in tiles": layer_in_tiles}


def count_layer(name: str, tile: int, tokens: int) -> tuple[float, float, int]:
    """What one layer holds at real shapes, and FLOPs of its products.

    Args:
        name: a key of :func:`runs`.
        tile: tokens of a tile.
        tokens: of the row.

    Returns:
        hidden-state tensors at the peak of the backward, those kept from forward to backward, and FLOPs.
    """
    model: Any = layer_of(SHAPE, torch.bfloat16, "meta")
    with fake_tensors(), patch.object(modeling, "torch_chunk_gated_delta_rule", kernel):
        make_fake(model)
        run = runs(model, tile)[name]
        for weight in model.model.layers[0].parameters():
            weight.grad = torch.empty_like(weight)  # of an earlier micro-step; counted with the weights
        x = torch.empty(1, tokens, SHAPE["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        with seqtile.count_live_bytes() as live:
            y = run(x)
            kept = live.now
            y.backward(torch.empty_like(y))
        with FlopCounterMode(display=False) as products:  # which holds tensors of its own
            y = run(x)
            y.backward(torch.empty_like(y))
    unit = x.numel() * 2
    return live.peak / unit, kept / unit, products.get_total_flops()


def count(tile: int, lengths: list[int]) -> None:
    """Bytes and products at real shapes."""
    row: dict[str, list[str]] = {}
    for tokens in lengths:
        for name in ("checkpointed", "mixer in tiles", "layer in tiles"):
            live, kept, flops = count_layer(name, tile, tokens)
            row.setdefault(name, []).append(f"{live:.2f} live, {kept:.2f} kept, {flops:.6g} products")
    print(f"Fake tensors, {VERSIONS}; tiles of {tile:,}; in hidden-state tensors")
    for name, found in row.items():
        for tokens, words in zip(lengths, found, strict=True):
            print(f"{name}, {tokens:,} tokens: {words}")


def clock(tile: int, tokens: int) -> None:
    """Processor seconds of forward and backward of a smaller layer, PyTorch's code, fp32."""
    model = layer_of(SMALL, torch.float32, "cpu")
    print(f"CPU, {torch.get_num_threads()} threads, {VERSIONS}; hidden {SMALL['hidden_size']:,}, {tokens:,} tokens, "
          f"tiles of {tile:,}")  # fmt: skip
    x = torch.randn(1, tokens, SMALL["hidden_size"], requires_grad=True)
    for name, run in runs(model, tile).items():
        seconds = []
        for _ in range(2):
            run(x[:, : 2 * tile])  # installs, and tries
            start = time.process_time()
            y = run(x)
            y.backward(torch.ones_like(y))
            seconds.append(time.process_time() - start)
        print(f"{name}: {min(seconds):.1f} s of processor time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tile", type=int, default=2048)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="*", default=LENGTHS)
    given = parser.parse_args()
    clock(given.tile, given.tokens[0]) if given.time else count(given.tile, given.tokens)


if __name__ == "__main__":
    main()
