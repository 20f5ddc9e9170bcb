"""What the ways of computing a language model's loss cost: matrix products, and bytes of live tensors.

    python benchmarks/head_cost.py [--tokens 4096 --hidden 256 --vocabulary 32768 --tile 512]

One forward and backward of head and loss each, all of them on the same states, weight and labels; beside it the larger
relative L2 error of the two gradients, against plain PyTorch in fp32 on the same rounded numbers. Counted, so a busy
machine changes nothing. `step.py` measures them on an accelerator.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from methods import NotInstalledError
from seqtile import count_live_bytes, count_products, linear_cross_entropy, token_logprobs
from seqtile.devices import is_accelerator, synchronize

JOB = f"{__file__}:measure_loss"
Tile = int | str


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, tile: Tile) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def tiled(hidden: Tensor, weight: Tensor, labels: Tensor, tile: Tile) -> Tensor:
    return linear_cross_entropy(hidden, weight, labels, tile=tile)


def fastest(hidden: Tensor, weight: Tensor, labels: Tensor, tile: Tile) -> Tensor:
    return linear_cross_entropy(hidden, weight, labels, tile=tile, impl="auto")


def tiled_scores(hidden: Tensor, weight: Tensor, labels: Tensor, tile: Tile) -> Tensor:
    return -token_logprobs(hidden, weight, labels, tile=tile, entropy=True, argmax=True).log_probs.mean()


def trl(hidden: Tensor, weight: Tensor, labels: Tensor, tile: Tile) -> Tensor:
    utils = import_module("trl.trainer.utils")
    names = ("log_probs", "entropy", "is_top1")
    chunk, function = utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._ChunkedLogProbFunction
    log_probs: Tensor = function.apply(hidden, weight, None, labels, 1.0, chunk, None, 1.0, names)[0]
    return -log_probs.mean()


def liger(hidden: Tensor, weight: Tensor, labels: Tensor, tile: Tile) -> Tensor:
    function = import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction
    loss: Tensor = function.apply(hidden, weight, labels)[0]
    return loss


def cce(hidden: Tensor, weight: Tensor, labels: Tensor, tile: Tile) -> Tensor:
    if find_spec("cut_cross_entropy") is None:
        raise NotInstalledError("not installed: cut_cross_entropy")
    loss: Tensor = import_module("cut_cross_entropy").linear_cross_entropy(hidden, weight, labels)
    return loss


def quack(hidden: Tensor, weight: Tensor, labels: Tensor, tile: Tile) -> Tensor:
    if find_spec("quack") is None:
        raise NotInstalledError("not installed: quack")
    return linear_cross_entropy(hidden, weight, labels, tile=tile, impl="quack")


WAYS: dict[str, Callable[..., Tensor]] = {
    "plain PyTorch": plain,
    "TRL's fused head (log-probabilities, entropy, top-1)": trl,
    "seqtile, log-probabilities, entropy, argmax": tiled_scores,
    "seqtile, scalar loss": tiled,
    "seqtile, scalar loss, impl='auto'": fastest,
    "Liger": liger,
    "CCE": cce,
    "Quack": quack,
}
ON_ACCELERATORS = (fastest, liger, cce, quack)


def measure_loss(arguments: dict[str, Any]) -> dict[str, Any]:
    """One way of :data:`WAYS` in bf16, forward and backward.

    Args:
        arguments: ``way``, ``tokens``, ``hidden``, ``vocabulary``, ``device``.

    Returns:
        ``ms``, the median of five after a warm-up, and ``peak_gib`` above states, weight and labels.
    """
    way, device = WAYS[arguments["way"]], torch.device(arguments["device"])
    tokens, width, vocabulary = (int(arguments[name]) for name in ("tokens", "hidden", "vocabulary"))
    hidden, weight, labels = made(tokens, width, vocabulary, torch.bfloat16, device)

    def step() -> None:
        torch.autograd.grad(way(hidden, weight, labels, "auto"), (hidden, weight))

    if is_accelerator(device):
        step()
        start = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        step()
        peak = torch.accelerator.max_memory_allocated(device) - start
    else:
        with count_live_bytes("cpu") as live:
            step()
        peak = live.peak
    times = []
    for _ in range(5):
        synchronize(device)
        begin = time.perf_counter()
        step()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return {"ms": statistics.median(times), "peak_gib": peak / 2**30}


def made(
    tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """States ``[tokens, hidden]``, weight ``[vocabulary, hidden]`` and labels ``[tokens]``."""
    torch.manual_seed(0)
    with torch.device(device):
        states = torch.randn(tokens, hidden, dtype=dtype).requires_grad_()
        weight = (torch.randn(vocabulary, hidden, dtype=dtype) / hidden**0.5).requires_grad_()
        return states, weight, torch.randint(0, vocabulary, (tokens,))


def count(
    way: Callable[..., Tensor], given: tuple[Tensor, Tensor, Tensor], tile: Tile
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
            if way in ON_ACCELERATORS:
                continue
            units, peak, gradients = count(way, given, asked.tile)
            worst = max(
                float((got.float() - true).norm() / true.norm()) for got, true in zip(gradients, expected, strict=True)
            )
            kind = str(dtype).removeprefix("torch.")
            print(f"| {kind} | {name} | {units:g} | {peak:.0f} | {worst:.1e} |", flush=True)


if __name__ == "__main__":
    main()
