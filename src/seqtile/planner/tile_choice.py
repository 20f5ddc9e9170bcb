"""Choose the tiles of a step, and shorter steps with tiles of the same size."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from seqtile.blocks.instance import Installed
from seqtile.blocks.layer import TiledLayer, tiled_layer
from seqtile.models.causal import causal_model
from seqtile.options import changed
from seqtile.planner.layer_structure import Depths
from seqtile.planner.step_config import Built, Setup
from seqtile.tiling import BlockShape, chunk_sizes, head_sizes, parse_tile, sizes_within

MANY_ROWS = 8
"""Rows of a batch from which fake rows are shorter than a tile, which would take as many tiles as there are rows."""

SHORTEST = 128
"""Fake rows of so many are multiples of this, longer than the shortest windows of local attention."""

MOST_HEAD_TILES = 12
"""Longest fake run, in tiles, where only the head is tiled, which has far fewer operators a tile."""


def largest_tile(built: Built, setup: Setup, tokens: int, device_type: str) -> int | None:
    """Tokens in the largest tile that a batch of ``tokens`` is cut into; None if every block runs untiled.

    Args:
        built: a tiled model, of any depth.
        setup: setup that gives the dtype of the activations.
        tokens: tokens of the batch.
        device_type: type of the planned device, which ``"auto"`` depends on.
    """
    dtype = torch.bfloat16 if setup.autocast else setup.dtype
    x = torch.empty(0, dtype=dtype, device="meta")
    sizes: list[int] = []
    chunks = _chunks(setup, tokens)
    tokens = chunks[0] * setup.batch if chunks else tokens
    for block in built.blocks:
        parts = [built.model.get_submodule(block.name)]
        standing = parts[0].__dict__.get("forward")
        if block.kind in ("inline", "pair"):  # children of a layer, whose forward runs them
            layer = built.model.get_submodule(block.name.rpartition(".")[0])
            standing = tiled_layer(layer)
            members = [getattr(layer, name) for name in standing.names] if isinstance(standing, TiledLayer) else []
            parts = [member for member in members if isinstance(member, nn.Module)]
        if not isinstance(standing, Installed):
            continue
        weights = [weight for block_part in parts for weight in block_part.parameters() if weight.requires_grad]
        shape = replace(standing.setting.shape(x, weights, block.path == "fused"), device_type=device_type)
        one_tile = (tokens,) if chunks and block.path == "fused" else ()
        sizes += standing.setting.rule.tile_sizes(tokens, shape) or one_tile
    return max(sizes) if sizes else None


def _chunks(setup: Setup, tokens: int) -> tuple[int, ...]:
    """Tokens of a row in each chunk, largest first; empty where the layers run whole."""
    if setup.options.chunk is None:
        return ()
    sizes = chunk_sizes(tokens // setup.batch, setup.batch, setup.options.chunk).sizes
    # A layer alone runs whole where it has one chunk.
    return tuple(sorted(sizes, reverse=True)) if len(sizes) > 1 or setup.options.segment > 1 else ()


def kept_share(built: Built, setup: Setup, tokens: int, device_type: str, depths: Depths) -> float:
    """Fraction of the tiles that keep gate and up in a batch of ``tokens``: what ``keep`` of ``setup`` comes to.

    Args:
        built: a tiled model, with the layers of the first sample of ``depths``.
        setup: setup whose ``keep`` is the rule, a share or a number of bytes.
        tokens: tokens of the batch.
        device_type: type of the planned device.
        depths: samples that give the number of blocks that share the bytes.
    """
    if not setup.options.keep or not setup.options.tiled:
        return 0.0
    rule = setup.options.keep_rule(len(built.blocks) * depths.layers // len(depths.samples[0].layers))
    x = torch.empty(0, dtype=torch.bfloat16 if setup.autocast else setup.dtype, device="meta")
    kept_fractions = [0.0]
    for block in built.blocks:
        standing = built.model.get_submodule(block.name).__dict__.get("forward")
        if not isinstance(standing, Installed) or block.path != "fused":
            continue
        weights = [weight for weight in built.model.get_submodule(block.name).parameters() if weight.requires_grad]
        shape = replace(standing.setting.shape(x, weights, True), device_type=device_type)
        sizes = standing.setting.rule.tile_sizes(tokens, shape)
        if sizes:
            kept_fractions.append(math.floor(rule.share(sizes, shape) * len(sizes) + 1e-9) / len(sizes))
    return max(kept_fractions)


def head_tile(built: Built, setup: Setup, tokens: int, device_type: str) -> int:
    """Tokens in the largest tile of the head, by the rule that ``"auto"`` follows."""
    head = causal_model(built.model).get_output_embeddings()
    if head is None or setup.options.loss is None:
        return setup.loss_tile
    dtype = torch.bfloat16 if setup.autocast else setup.dtype
    shape = BlockShape(
        hidden=head.weight.shape[1], intermediate=head.weight.shape[0], itemsize=dtype.itemsize, weight_numel=0,
        weight_itemsize=dtype.itemsize, device_type=device_type, live_widths=1,
    )  # fmt: skip
    return max(head_sizes(tokens, parse_tile("auto"), shape))


def resolve_tiles(setup: Setup, tokens: int, tile: int | None) -> Setup:
    """``setup`` with the sizes that the tiles of ``tokens`` really have, as numbers; untiled where ``tile`` is None."""
    head = max(sizes_within(tokens, setup.loss_tile)) if setup.options.loss else setup.loss_tile
    chunks = _chunks(setup, tokens)
    if len(chunks) > 1:
        setup = changed(setup, chunk=chunks[0], keep=0.0)
    elif not chunks:
        setup = changed(setup, chunk=None)
    if tile is None:
        return changed(setup, blocks="none", tile="auto", loss_tile=head)
    return changed(setup, tile=tile, loss_tile=head)


def sample_lengths(setup: Setup, tokens: int, window: int = 0, fewest: int = 2) -> tuple[int, ...]:
    """Three lengths whose tiles are as large as those of ``tokens``: multiples of a tile.

    Args:
        setup: resolved for ``tokens``.
        tokens: the length to predict.
        window: tokens of local attention's window, 0 for none; the sample is longer, as sdpa then builds a mask.
        fewest: tiles of the shortest.
    """
    tile, chunk = setup.options.tile, setup.options.chunk
    if chunk is not None and len(chunk_sizes(tokens, setup.batch, chunk).sizes) == 1:
        longest = max(tokens, 8)
        return longest // 2, longest * 3 // 4, longest
    if isinstance(chunk, int):  # from three chunks on the last but one has keys before it, and sums of gradients
        needed = max(setup.loss_tile if setup.options.loss else 0, window + 1 if window < tokens else 0)
        first = max(3, min(-(-needed // chunk), MOST_HEAD_TILES))
        return first * chunk, (first + 1) * chunk, (first + 2) * chunk
    tiles = [tile] if isinstance(tile, int) else []
    tiles += [setup.loss_tile] if setup.options.loss else []
    window = window if window < tokens else 0
    if not tiles:
        begin = max(window, tokens // 5)
        step = max(1, (tokens - begin) // 4)
        return begin + step, begin + 2 * step, begin + 3 * step
    unit = math.lcm(*tiles)
    if unit > 4 * max(tiles):  # no common divisor: the smaller one becomes slightly smaller than needed
        unit = max(tiles)
    if setup.batch >= MANY_ROWS:  # a tile is of all rows together: few tokens of each fill it
        unit = max(unit // setup.batch, min(SHORTEST, tokens // 4), 1)
    first, last = fewest, fewest + 1  # each tile costs its operators once more
    if not isinstance(tile, int):  # a tile of the head alone has far fewer
        last = min(max(tokens // unit, 4), MOST_HEAD_TILES)
        first = last * 3 // 4
    first = max(first, window // unit + 1)
    last = max(last, first + 1)
    return first * unit, last * unit, (last + 1) * unit
