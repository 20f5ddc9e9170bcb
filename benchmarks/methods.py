"""How each method runs a block: what replaces ``forward`` on one instance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seqtile
from cell import OURS
from seqtile.install.apply import apply_options
from seqtile.options import TilingOptions
from seqtile.tiling import FUSED_WIDTHS, LIVE_WIDTHS, BlockShape, parse_tile

PACKAGES = {"liger": "liger_kernel", "deepspeed": "deepspeed", "deepspeed-compute": "deepspeed"}
"""The package that a method needs, where it is somebody else's."""


_ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"


class NotInstalledError(RuntimeError):
    """A peer's package is missing."""


def install(model: nn.Module, blocks: dict[str, nn.Module], method: str, ours: TilingOptions | None, count: int) -> str:
    """Make ``blocks`` of ``model`` run by ``method``.

    Args:
        model: holds the blocks.
        blocks: MLP modules by qualified name.
        method: one of :data:`cell.METHODS`.
        ours: the options of ours, where the method is ours.
        count: number of tiles for the others.

    Returns:
        What runs the blocks, in words.

    Raises:
        NotInstalledError: the peer's package is missing.
    """
    if method == "untiled":
        return "untiled"
    if ours is not None:
        report = apply_options(model, replace(ours, only=tuple(blocks), trust=("*",)))
        together = sorted({", ".join(block.together) for block in report.blocks if len(block.together) > 1})
        return str(report) + "".join(f"; in one tile: {names}" for names in together)
    if (package := PACKAGES.get(method)) and find_spec(package) is None:
        raise NotInstalledError(f"not installed: {package}")
    build = {
        "tile-checkpoint": _tile_checkpoint, "liger": _liger, "deepspeed": _deepspeed,
        "deepspeed-compute": _deepspeed_compute,
    }[method]  # fmt: skip
    for block in blocks.values():
        block.__dict__["forward"] = build(block, count)
    return f"{method}, {count:,} tiles"


def uninstall(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Take off what :func:`install` put on."""
    seqtile.undo(model)
    for block in blocks:
        block.__dict__.pop("forward", None)


def tile_count(method: str, tile: int | str, tokens: int, shape: BlockShape) -> int:
    """Tiles that a method runs: by the rule; where that leaves the batch whole, the others run DeepSpeed's default.

    That default is ``ceil(tokens / hidden)``; Liger has the same.
    """
    if method == "untiled":
        return 0
    if method == "generic":
        shape = replace(shape, live_widths=LIVE_WIDTHS)
    count = len(parse_tile(tile).tile_sizes(tokens, shape))
    return count if method in OURS else count or math.ceil(tokens / shape.hidden)


def block_shape(mlp: nn.Module, hidden: int, intermediate: int, itemsize: int, device_type: str) -> BlockShape:
    """What the tile rule needs to know of a block that the fused operator runs."""
    trained = [weight for weight in mlp.parameters() if weight.requires_grad]
    return BlockShape(
        hidden, intermediate, itemsize, sum(weight.numel() for weight in trained),
        min((weight.element_size() for weight in trained), default=4), device_type, FUSED_WIDTHS,
    )  # fmt: skip


def _tile_checkpoint(block: nn.Module, count: int) -> Callable[[Tensor], Tensor]:
    forward = type(block).forward

    def run(x: Tensor) -> Tensor:
        tiles = x.chunk(count, dim=-2)
        return torch.cat([checkpoint(forward, block, tile, use_reentrant=False) for tile in tiles], dim=-2)

    return run


def _liger(block: nn.Module, count: int) -> Callable[[Tensor], Tensor]:
    apply_tiled_mlp = import_module("liger_kernel.ops.tiled_mlp").apply_tiled_mlp
    forward, weights = type(block).forward, list(block.parameters())
    return lambda x: apply_tiled_mlp(forward, block, x, num_shards=count, compute_params=weights)


def _deepspeed(block: nn.Module, count: int) -> Callable[[Tensor], Tensor]:
    run = import_module(_ULYSSES).TiledMLP.apply
    forward, weights = type(block).forward, list(block.parameters())
    return lambda x: run(forward, block, x, count, weights)


def _deepspeed_compute(block: nn.Module, count: int) -> Callable[[Tensor], Tensor]:
    sequence_tiled_compute = import_module(_ULYSSES).sequence_tiled_compute
    forward, weights = type(block).forward, [weight for weight in block.parameters() if weight.requires_grad]

    def run(x: Tensor) -> Tensor:
        return sequence_tiled_compute(  # type: ignore[no-any-return]
            lambda x, self: forward(self, x), x.shape[-2], count, {"x": x}, {"self": block}, "x",
            compute_params=weights, output_unshard_dimension=1, output_reduction=None,
        )  # fmt: skip

    return run
