"""Peak memory of one Qwen3-8B MLP, forward and backward, as transformers#48335 measures it: all that is allocated.

    python benchmarks/one_mlp.py     # counted on fake tensors at 131,072 tokens; `gpu.py` measures it

Published there: 22.56 GB untiled, 7.97 GB tiled. Weights, their gradients, the input and its gradient are in it. What
the output's gradient is decides a third of it, so it is measured both ways: from a scalar (the output is summed and
dropped, and its gradient is one number), and with a gradient tensor while the caller holds the output.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import torch

import seqtile
from block import ResidualLayer
from cell import SHAPES
from seqtile.counting.fake import fake_tensors, make_fake
from seqtile.counting.live import count_live_bytes
from seqtile.devices import empty_cache, synchronize
from seqtile.ops.grad_accumulator import as_on_an_accelerator

JOB = f"{__file__}:measure_one_mlp"
TOKENS, TILE = 131_072, 8192
UPSTREAM = ("scalar", "tensor")


def measure_one_mlp(arguments: dict[str, Any]) -> dict[str, Any]:
    """One forward and backward after a warm-up.

    Args:
        arguments: ``hidden``, ``intermediate``, ``tokens``, ``tile`` (0 for untiled), ``upstream`` (one of
            :data:`UPSTREAM`), ``device`` (``"fake"`` to count at any size).

    Returns:
        ``peak_gb`` (10**9 bytes) and ``peak_from``, the allocator or counted live bytes.
    """
    device, fake = arguments["device"], arguments["device"] == "fake"
    made_on = "meta" if fake else device
    layer = ResidualLayer(arguments["hidden"], arguments["intermediate"], device=made_on, dtype=torch.bfloat16)
    del layer.norm
    mlp: Any = layer.mlp
    if arguments["tile"]:
        seqtile.apply(layer, only=["mlp"], trust="*", tile=arguments["tile"])
    weights = sum(weight.nbytes for weight in mlp.parameters())
    with fake_tensors() if fake else nullcontext(), as_on_an_accelerator() if fake else nullcontext():
        if fake:
            make_fake(layer)

        def step() -> None:
            where = {} if fake else {"device": device}
            x = torch.empty(1, arguments["tokens"], arguments["hidden"], dtype=torch.bfloat16, **where)
            x.normal_().requires_grad_()
            if arguments["upstream"] == "scalar":
                mlp(x).sum().backward()
            else:
                output = mlp(x)
                output.backward(torch.ones_like(output))
            for weight in mlp.parameters():
                weight.grad = None

        if device in ("cpu", "fake"):
            with count_live_bytes("cpu") as live:
                step()
            return {"peak_gb": (live.peak + weights) / 1e9, "peak_from": "counted live bytes"}
        step()
        synchronize()
        empty_cache()
        # Beside the weights there is, for example, a workspace of the products' library.
        others = torch.accelerator.memory_allocated(torch.device(device)) - weights
        torch.accelerator.reset_peak_memory_stats()
        step()
        synchronize()
        return {"peak_gb": (torch.accelerator.max_memory_allocated() - others) / 1e9, "peak_from": "allocator"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    hidden, intermediate = SHAPES["qwen3-8b"]
    print("| one Qwen3-8B MLP | output's gradient | peak GB |\n|---|---|---|")
    for tile in (0, TILE):
        for upstream in UPSTREAM:
            found = measure_one_mlp({
                "hidden": hidden, "intermediate": intermediate, "tokens": TOKENS, "tile": tile, "upstream": upstream,
                "device": "fake",
            })  # fmt: skip
            name = f"tiles of {tile:,}" if tile else "untiled"
            print(f"| {name} | {upstream} | {found['peak_gb']:.2f} |")


if __name__ == "__main__":
    main()
