"""Count what the ways of computing a language model's loss cost: matrix products, and bytes of live tensors.

    python benchmarks/head_cost.py [--tokens 4096 --hidden 256 --vocabulary 32768 --tile 512]

One forward and backward of head and loss each, all of them on the same states, weight and labels; beside it the larger
relative L2 error of the two gradients, against plain PyTorch in fp32 on the same rounded numbers. Counted, so a busy
machine changes nothing.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version

import torch
from torch import Tensor
from torch.nn import functional as F

from seqtile import count_live_bytes, count_products, linear_cross_entropy, token_logprobs


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, tile: int) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def tiled(hidden: Tensor, weight: Tensor, labels: Tensor, tile: int) -> Tensor:
    return linear_cross_entropy(hidden, weight, labels, tile=tile)


def tiled_scores(hidden: Tensor, weight: Tensor, labels: Tensor, tile: int) -> Tensor:
    return -token_logprobs(hidden, weight, labels, tile=tile, entropy=True, argmax=True).log_probs.mean()


def trl(hidden: Tensor, weight: Tensor, labels: Tensor, tile: int) -> Tensor:
    utils = import_module("trl.trainer.utils")
    names = ("log_probs", "entropy", "is_top1")
    chunk, function = utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._ChunkedLogProbFunction
    log_probs: Tensor = function.apply(hidden, weight, None, labels, 1.0, chunk, None, 1.0, names)[0]
    return -log_probs.mean()


WAYS: dict[str, Callable[..., Tensor]] = {
    "plain PyTorch": plain,
    "TRL's fused head (log-probabilities, entropy, top-1)": trl,
    "seqtile, log-probabilities, entropy, argmax": tiled_scores,
    "seqtile, scalar loss": tiled,
}


def made(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """States ``[tokens, hidden]``, weight ``[vocabulary, hidden]`` and labels ``[tokens]``."""
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, hidden) / hidden**0.5).to(dtype).requires_grad_()
    return states, weight, torch.randint(0, vocabulary, (tokens,))


def count(
    way: Callable[..., Tensor], given: tuple[Tensor, Tensor, Tensor], tile: int
) -> tuple[float, float, tuple[Tensor, ...]]:
    """Products in units of ``2 * tokens * hidden * vocabulary``, MiB of live tensors at the peak, and the gradients."""
    hidden, weight, labels = given
    with count_products() as products, count_live_bytes() as live:
        gradients = torch.autograd.grad(way(hidden, weight, labels, tile), (hidden, weight))
    return products.flops / (2 * hidden.numel() * len(weight)), live.peak / 2**20, gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("hidden", 256), ("vocabulary", 32768), ("tile", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    print(f"{asked.tokens} tokens, {asked.hidden} x {asked.vocabulary}, tiles of {asked.tile}; CPU, torch "
          f"{torch.__version__}, trl {version('trl')}, {datetime.date.today()}")  # fmt: skip
    print("| dtype | head and loss | matrix products | peak MiB | gradient error |\n|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        given = hidden, weight, labels = made(asked.tokens, asked.hidden, asked.vocabulary, dtype)
        wide = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
        expected = torch.autograd.grad(plain(*wide, labels, asked.tile), wide)
        for name, way in WAYS.items():
            units, peak, gradients = count(way, given, asked.tile)
            worst = max(
                float((got.float() - true).norm() / true.norm()) for got, true in zip(gradients, expected, strict=True)
            )
            kind = str(dtype).removeprefix("torch.")
            print(f"| {kind} | {name} | {units:g} | {peak:.0f} | {worst:.1e} |", flush=True)


if __name__ == "__main__":
    main()
