"""Tiles of a position-wise function under plain autograd: the reference of the operators, and the compiled path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seqtile._compat import tree_flatten, tree_unflatten
from seqtile.ops.token_tiles import Cuts

RunTiles = Callable[[Sequence[Tensor], Mapping[str, Tensor]], Any]


def run_compiled(run: RunTiles, tensors: Sequence[Tensor], cuts: Cuts) -> Any:
    """PyTorch's checkpoint per tile, from which the compiler plans its own recompute; ``torch.export`` takes none."""
    if not torch.is_grad_enabled() or torch.compiler.is_exporting():
        return _run_joined(run, tensors, cuts)

    def run_checkpointed(tiles: Sequence[Tensor], _: Mapping[str, Tensor]) -> Any:
        return checkpoint(lambda *tile: run(tile, {}), *tiles, use_reentrant=False)

    return _run_joined(run_checkpointed, tensors, cuts)


def run_in_plain_tiles(run: RunTiles, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Any:
    """The same tiles in the same order under plain autograd, nothing recomputed.

    The twin of :func:`seqtile.ops.tile_checkpoint.run_in_tiles`. It draws the same random numbers in the forward, so
    it is what a recompute has to agree with. Costs the memory that tiling saves.
    """
    return _run_joined(run, tensors, Cuts(tensors, sizes))


def _run_joined(run: RunTiles, tensors: Sequence[Tensor], cuts: Cuts) -> Any:
    """Tile after tile, joined by ``cat``."""
    rows = cuts.rows(tensors)  # [N, D_i] each
    results = [run(cuts.tiles(rows, index), {}) for index in range(len(cuts.sizes))]
    flat = [tree_flatten(result) for result in results]
    joined = []
    for number, first in enumerate(flat[0][0]):
        if not isinstance(first, Tensor):
            joined.append(first)
            continue
        whole = torch.cat([cuts.as_rows(leaves[number], index) for index, (leaves, _) in enumerate(flat)])
        joined.append(whole.reshape(cuts.joined_shape(first, 0)))
    return tree_unflatten(joined, flat[0][1])
