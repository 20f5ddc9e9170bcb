"""Tile rules, and the tile sizes of a batch.

Everything that needs a cut (forward, backward, report, benchmark) uses this module.
Tokens here are rows: ``batch * sequence`` of the block's input, flattened.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

MULTIPLE = 128
"""Tiles are multiples of this many tokens where that keeps them within the rule (matrix-product tiling)."""

LIVE_WIDTHS = 6
"""``[tile, intermediate]`` tensors at the peak of a gated MLP's eager backward (5.3 counted); a plain MLP has fewer."""

UNTILED_WIDTHS = 5
"""``[tokens, intermediate]`` tensors of an untiled block, rounded down (5.3 counted): "auto" tiles only what pays."""

FUSED_WIDTHS = 4
"""``[tile, intermediate]`` tensors of the fused operator: the buffers that all its tiles share."""

PRODUCTS_PER_SECOND, BYTES_PER_SECOND, LAUNCH_SECONDS = 700e12, 3e12, 6.6e-6
"""Rates of bf16 products and copies, and the host's cost of launching a kernel. Measured on an
H100 80GB HBM3 (764 TFLOP/s, 2,993 GB/s and 6.6 us; torch 2.11, 2026-11-26)."""

LAUNCHES = {"block": 94, "fused": 32, "projection": 6, "norm": 5}
"""Kernels that one tile starts, forward, recompute and backward together: of an MLP with adapters and its norm in the
generic and in the fused operator, where it starts the most (counted)."""

FILLS = {"block": 20, "projection": 4, "norm": 4}
"""A tile of the ``"auto"`` rule keeps the device busy for at least so many times what its launches take.

A block's launches take 5 % of it at most. Norms and projections compute so little per token that they would rarely be
tiled then. A block that was cut at 4 times was bound by the host: generic, with adapters, it took 114 ms in tiles of
2,048 tokens, untiled 74 (32,768 tokens, the same H100).
"""

READING_TOKENS = 4096
"""Tokens of a block's tile, at least: reading each product's matrix then takes 6 % of the product, at 2,048 tokens 11.
A power of two, so that lengths which are one are cut into equal tiles."""

_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


@dataclass(frozen=True)
class BlockShape:
    """Properties of a block that tile rules depend on.

    Attributes:
        hidden: width ``D`` of the block's input.
        intermediate: width ``F`` of its widest tensor (times the experts per token in a mixture of experts).
        itemsize: bytes per activation element.
        weight_numel: elements of the weights that train; 0 when all are frozen.
        weight_itemsize: bytes per element of those weights.
        device_type: ``torch.device.type`` of the weights.
        live_widths: ``[tile, intermediate]`` tensors alive at the peak of one tile.
    """

    hidden: int
    intermediate: int
    itemsize: int
    weight_numel: int
    weight_itemsize: int
    device_type: str
    live_widths: int = LIVE_WIDTHS

    @property
    def trains(self) -> bool:
        """Whether at least one of its matrices does; adapters, norms and biases alone count as frozen."""
        return self.weight_numel >= self.hidden * self.intermediate

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one tile's own intermediates, per token."""
        return self.live_widths * self.intermediate * self.itemsize

    @property
    def untiled_bytes_per_token(self) -> int:
        """Bytes of the untiled block's own intermediates, per token."""
        return UNTILED_WIDTHS * self.intermediate * self.itemsize

    @property
    def sum_bytes(self) -> int:
        """Bytes of the fp32 sums over tiles that an untiled block does not need (none for fp32 weights)."""
        return 4 * self.weight_numel if self.weight_itemsize < 4 else 0


@dataclass(frozen=True)
class TileRule:
    """A parsed ``tile=`` argument.

    Attributes:
        kind: ``"auto"``, ``"tokens"``, ``"shards"``, ``"arctic"`` or ``"memory"``.
        value: tokens, tiles or bytes; for ``"auto"`` how many times its tokens go into one tile; else 0.
        part: what is tiled, one of :data:`LAUNCHES`.
    """

    kind: str
    value: int = 0
    part: str = "block"

    def tokens_per_tile(self, tokens: int, shape: BlockShape) -> int:
        """Largest number of tokens that one tile of a batch of ``tokens`` may hold."""
        if self.kind == "tokens":
            return self.value
        if self.kind == "shards":
            return max(1, math.ceil(tokens / self.value))
        if self.kind == "arctic":
            return max(1, math.ceil(tokens / math.ceil(tokens / shape.hidden)))
        if self.kind == "memory":
            return tokens_within(self.value, shape)
        return max(auto_tokens(shape) * max(1, self.value), filling_tokens(shape, self.part))

    def tile_sizes(self, tokens: int, shape: BlockShape) -> tuple[int, ...]:
        """Sizes of the tiles of a batch of ``tokens``, in order; empty when the batch is to run untiled.

        Sizes are as equal as whole multiples of 128 tokens allow, so that no short tail is left. An explicit
        rule always tiles a non-empty batch, even into one tile (which is then recomputed in backward);
        ``"auto"`` leaves a batch untiled where tiling would not lower the block's peak.
        """
        if tokens == 0:
            return ()
        if self.kind in ("shards", "arctic"):
            count = self.value if self.kind == "shards" else math.ceil(tokens / shape.hidden)
            return equal_sizes(tokens, min(count, tokens))
        sizes = sizes_within(tokens, self.tokens_per_tile(tokens, shape))
        if self.kind == "auto" and not lowers_peak(tokens, max(sizes), shape):
            return ()
        return sizes

    def describe(self, shape: BlockShape) -> str:
        """Description of the rule, for the report."""
        if self.kind == "shards":
            return f"{self.value:,} tile{'s' if self.value != 1 else ''}"
        if self.kind == "arctic":
            return f"ceil(tokens / {shape.hidden:,}) tiles"
        return f"{self.tokens_per_tile(0, shape):,} tokens per tile"

    def __str__(self) -> str:
        if self.kind == "tokens":
            return str(self.value)
        if self.kind in ("shards", "memory"):
            return f"{self.kind}:{self.value}"
        return self.kind


def parse_tile(tile: int | str | TileRule) -> TileRule:
    """Turn a ``tile=`` argument into a :class:`TileRule`.

    Args:
        tile: ``"auto"``; an int, tokens per tile; ``"shards:N"``, N tiles; ``"arctic"``, ``ceil(tokens / hidden)``
            tiles (arXiv 2506.13996); ``"memory:1GiB"``, the largest tile whose working set fits.

    Raises:
        TypeError: not an int or a string.
        ValueError: a size below 1 or an unknown word.
    """
    if isinstance(tile, TileRule):
        return tile
    if isinstance(tile, bool) or not isinstance(tile, (int, str)):
        raise TypeError(f"tile={tile!r}: got {type(tile).__name__}, expected an int or a string; {_EXPECTED}")
    if isinstance(tile, int) or re.fullmatch(r"[+-]?\d+", tile.strip()):
        if int(tile) < 1:
            raise ValueError(f"tile={tile}: got {int(tile)} tokens per tile, expected at least 1; {_EXPECTED}")
        return TileRule("tokens", int(tile))
    word, _, value = tile.strip().lower().partition(":")
    if word in ("auto", "arctic") and not value:
        return TileRule(word)
    if word == "shards" and re.fullmatch(r"\d+", value) and int(value) >= 1:
        return TileRule("shards", int(value))
    if word == "memory" and (budget := parse_bytes(value)):
        return TileRule("memory", budget)
    raise ValueError(f"tile={tile!r} is not a tile rule; {_EXPECTED}")


_EXPECTED = 'use "auto", a number of tokens such as 8192, "shards:4", "arctic" or "memory:1GiB"'


def parse_bytes(text: str) -> int:
    """Bytes in ``"1GiB"``, ``"512 MB"`` or ``"4096"``; 0 if the text is no positive size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in _UNITS:
        return 0
    return int(float(match[1]) * _UNITS[match[2]])


def equal_sizes(tokens: int, count: int) -> tuple[int, ...]:
    """``count`` sizes that sum to ``tokens``: equal multiples of 128 with the remainder last, if there are enough."""
    if math.ceil(tokens / MULTIPLE) >= 8 * count:
        return _whole_units(tokens, count)
    return even_sizes(tokens, count)


def even_sizes(total: int, count: int) -> tuple[int, ...]:
    """``count`` sizes that sum to ``total``, no two of them further apart than 1, the larger ones first."""
    size = total // count
    larger = total - size * count  # no divmod: torch.compile has none of a symbolic length
    return (size + 1,) * larger + (size,) * (count - larger)


def tile_ranges(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first token and the number of tokens of each tile, in order: what ``Tensor.narrow`` takes."""
    return zip(accumulate(sizes, initial=0), sizes, strict=False)  # the last sum, all tokens, begins no tile


def _whole_units(tokens: int, count: int) -> tuple[int, ...]:
    units = math.ceil(tokens / MULTIPLE)
    sizes = [MULTIPLE * size for size in even_sizes(units, count)]
    sizes[-1] -= sum(sizes) - tokens
    return tuple(sizes)


def sizes_within(tokens: int, limit: int) -> tuple[int, ...]:
    """The fewest equal sizes of at most ``limit`` tokens that sum to ``tokens``; multiples of 128 if the limit is."""
    count = math.ceil(tokens / limit)
    sizes = _whole_units(tokens, count) if limit % MULTIPLE == 0 else equal_sizes(tokens, count)
    if max(sizes) > limit:
        return even_sizes(tokens, count)
    return sizes


def tokens_within(budget: int, shape: BlockShape) -> int:
    """Largest tile whose working set fits into ``budget`` bytes: intermediates plus the fp32 sums over tiles.

    Raises:
        ValueError: not even one token fits.
    """
    tokens = (budget - shape.sum_bytes) // shape.bytes_per_token
    if tokens < 1:
        least = shape.sum_bytes + MULTIPLE * shape.bytes_per_token
        raise ValueError(
            f"tile='memory:{budget}' does not hold one tile of a block with intermediate size {shape.intermediate:,}: "
            f"{shape.sum_bytes:,} bytes of weight-gradient sums come first; give at least {least:,} bytes"
        )
    return tokens - tokens % MULTIPLE if tokens >= MULTIPLE else tokens


def auto_tokens(shape: BlockShape) -> int:
    """Tokens per tile of the ``"auto"`` rule.

    A tile re-reads and rewrites every weight gradient, which costs about ``218 / tile`` of the backward on a
    recent GPU (fp32 sums), so 8,192 tokens when weights train, 16,384 where that stays below 1 GiB of
    intermediates. Frozen weights pay nothing for that: 2,048, where products are at full speed, or as many as
    :func:`filling_tokens` asks for. A CPU core has far fewer operations per byte of memory bandwidth: 1,024 and 512
    there. What trains in less than one of the block's matrices (adapters, norms, biases) costs next to nothing to
    rewrite.
    """
    if shape.device_type == "cpu":
        return 1024 if shape.trains else 512
    if not shape.trains:
        return 2048
    return 16384 if 16384 * shape.bytes_per_token <= 2**30 else 8192


def filling_tokens(shape: BlockShape, part: str = "block") -> int:
    """The fewest tokens whose work in one tile of ``part`` is :data:`FILLS` times its launches; 0 on a CPU.

    At least :data:`READING_TOKENS` of a block. As long as the tile's intermediates stay below 1 GiB, which very narrow
    and very wide blocks reach first. A step of a checkpointed block has 11 products of ``tokens * hidden *
    intermediate``, 8 where its weights are frozen; a projection has 4 or 3. A norm reads or writes its input's size
    seven times.
    """
    if shape.device_type == "cpu":
        return 0
    if part == "norm":
        seconds = 7 * shape.hidden * shape.itemsize / BYTES_PER_SECOND
    else:
        products = {"block": (8, 11), "projection": (3, 4)}[part][shape.trains]
        seconds = 2 * products * shape.hidden * shape.intermediate / PRODUCTS_PER_SECOND
    fused = part == "block" and shape.live_widths == FUSED_WIDTHS
    tokens = math.ceil(FILLS[part] * LAUNCHES["fused" if fused else part] * LAUNCH_SECONDS / seconds)
    if part == "block":
        tokens = max(tokens, READING_TOKENS)
    return MULTIPLE * min(-(-tokens // MULTIPLE), 2**30 // (MULTIPLE * shape.bytes_per_token))


def head_sizes(tokens: int, rule: TileRule, shape: BlockShape) -> tuple[int, ...]:
    """Sizes of a head's tiles; ``shape.intermediate`` is the vocabulary.

    ``"auto"`` keeps a tile's logits within 1 GiB, but takes 1,024 to 8,192 tokens: below, the products slow down and
    every tile rewrites the head's gradient; 512 on a CPU. It never leaves a batch untiled: one tile that turns its
    logits into their gradient holds less than plain autograd does.
    """
    if rule.kind != "auto":
        return rule.tile_sizes(tokens, shape)
    limit = 512 if shape.device_type == "cpu" else min(8192, max(1024, 2**30 // shape.bytes_per_token))
    return sizes_within(tokens, limit - limit % MULTIPLE) if tokens else ()


def lowers_peak(tokens: int, tile: int, shape: BlockShape) -> bool:
    """Whether tiles of ``tile`` tokens lower the block's peak: what they free is more than the sums they add.

    One tile is no tile: the block then runs untiled, without a recompute, however few buffers the operator has. Every
    tile adds to every weight's gradient, so all of them are there at the peak; untiled, two thirds of them are not yet.
    """
    if tile >= tokens:
        return False
    gradients = 2 * shape.weight_numel * shape.weight_itemsize // 3
    fixed = shape.sum_bytes + gradients
    return tokens * shape.untiled_bytes_per_token > tile * shape.bytes_per_token + fixed


@dataclass(frozen=True)
class KeepRule:
    """A parsed ``keep=`` argument: how many of a batch's tiles keep gate and up for their backward.

    Attributes:
        kind: ``"share"``, ``"memory"`` or ``"auto"``.
        value: fraction of the tiles, or bytes per block; 0 until ``"auto"`` has read the free memory.
        blocks: number of blocks that share the bytes.
    """

    kind: str = "share"
    value: float = 0.0
    blocks: int = 1

    def holds_dense(self, dense_bytes: int) -> bool:
        """Whether quantised weights stay dense while a block's pass runs: a share says nothing against it."""
        return self.kind == "share" or dense_bytes <= self.value * self.blocks

    def share(self, sizes: Sequence[int], shape: BlockShape, dense_bytes: int = 0) -> float:
        """Fraction of the tiles whose gate and up fit beside the dense weights, which one block at a time holds."""
        if self.kind == "share":
            return self.value
        value = self.value - dense_bytes / self.blocks if self.holds_dense(dense_bytes) else self.value
        per_token = 2 * shape.intermediate * shape.itemsize
        return sum(per_token * rows <= value for rows in accumulate(sizes)) / len(sizes)

    def __str__(self) -> str:
        return f"{self.value:g}" if self.kind == "share" else f"{self.kind}:{int(self.value):,} bytes per block"


def parse_keep(keep: float | str, blocks: int) -> KeepRule:
    """Turn a ``keep=`` argument into a rule for each of ``blocks`` blocks.

    Args:
        keep: fraction of the tiles, 0.0 to 1.0; ``"memory:4GiB"``, a total over all blocks; or ``"auto"``, whose value
            is read from the device by the caller.
        blocks: number of blocks that share a total.

    Raises:
        TypeError: not a number or a string.
        ValueError: out of range, or an unknown word.
    """
    expected = 'use a fraction of the tiles from 0.0 to 1.0, "memory:4GiB" or "auto"'
    if isinstance(keep, bool) or not isinstance(keep, (int, float, str)):
        raise TypeError(f"keep={keep!r}: got {type(keep).__name__}, expected a number or a string; {expected}")
    if isinstance(keep, str):
        word, _, value = keep.strip().lower().partition(":")
        if word == "auto" and not value:
            return KeepRule("auto")
        if word == "memory" and (budget := parse_bytes(value)):
            return KeepRule("memory", budget / max(1, blocks), max(1, blocks))
        raise ValueError(f"keep={keep!r} is not a rule; {expected}")
    if not 0.0 <= keep <= 1.0:
        raise ValueError(f"keep={keep}: got a fraction outside 0.0 to 1.0; {expected}")
    return KeepRule("share", float(keep))


def projection_sizes(tokens: int) -> tuple[int, ...]:
    """Tiles of the projections around head-wise attention: 1/32 of the tokens, 128 to 8,192, each.

    So what a tile takes stays small beside the hidden states, and weight gradients are read and written few times.
    """
    limit = min(max(tokens // 32, 128), 8192)
    return equal_sizes(tokens, -(-tokens // limit)) if tokens else ()


def head_passes(tokens: int, per_group: int, groups: int) -> int:
    """Key-value heads per pass of ``heads="auto"``: as many as keep a device busy, all of them where that is no fewer.

    A kernel is busy from about 1,024 blocks of 128 queries; below that, passes would cost time and there is little to
    save.

    Args:
        tokens: tokens of the batch on this rank.
        per_group: query heads per key-value head.
        groups: key-value heads.
    """
    return min(groups, max(1, -(-BUSY_QUERIES // max(1, tokens * per_group))))


BUSY_QUERIES = 128 * 1024
"""Queries, over all heads, that keep the largest devices busy."""


STATE_TOKENS = 2048
"""Tokens of all rows in one tile of a layer with a state: products are at full speed, and a tile's tensors are small
beside the hidden states of the sequences that need tiles."""

STATE_MULTIPLE = 256
"""Tiles of such a layer are multiples of this where they can be: kernels compute in chunks of 64 to 256 tokens."""


@dataclass(frozen=True)
class StateTiles:
    """Where a layer with a state is cut along its sequence.

    Attributes:
        sizes: tokens of each tile, in order.
        begins: numbers of the tiles at which a document begins, besides the first.
        documents: how many documents of equal length a tile holds, by its number, where it holds more than one.
    """

    sizes: tuple[int, ...]
    begins: frozenset[int] = frozenset()
    documents: Mapping[int, int] = field(default_factory=dict)


def state_tiles(
    tokens: int, batch: int, tile: int | str, documents: Sequence[int] = (), together: bool = True
) -> StateTiles:
    """Cut a sequence into tiles that hand a state on; a single tile where that is all of it.

    No tile is one token that is handed a state: layers take that for a step of generation.

    Args:
        tokens: length of the sequence.
        batch: rows of the batch, which share each tile.
        tile: tokens of the sequence per tile, or ``"auto"``: :data:`STATE_TOKENS` over all rows.
        documents: lengths of the documents that are packed into the sequence, in order.
        together: whether neighbouring documents of equal length share a tile, as the rows of a batch. TRL's collator
            makes a document of each padding token.
    """
    if isinstance(tile, str):
        tile = max(STATE_MULTIPLE, STATE_TOKENS // max(1, batch) // STATE_MULTIPLE * STATE_MULTIPLE)
    sizes: list[int] = []
    begins, sharing = set(), {}
    for length, equal in groupby(documents or (tokens,)):
        # Kernels pad a row to 64 tokens, and leave a state for each.
        left, most = len(list(equal)), tile // max(length, CHUNK_MULTIPLE) if together else 1
        while left:
            begins.add(len(sizes))
            count = max(1, min(left, most))
            left -= count
            if count > 1:
                sharing[len(sizes)] = count
            whole, remainder = divmod(count * length, tile)
            cut = [tile] * whole + [remainder] * (remainder > 0)
            if len(cut) > 1 and cut[-1] == 1:  # a tile has two tokens at least, so the one before keeps one
                cut[-2:] = [tile + 1] if tile == 2 else [tile - 1, 2]
            sizes += cut
    return StateTiles(tuple(sizes), frozenset(begins - {0}), sharing)


GROUP_PATCHES = 2048
"""Patches of pictures in one group of a vision tower: products are at full speed, and more would only take memory."""


def group_ranges(patches: Sequence[int], group: int | str) -> list[tuple[int, int]]:
    """Cut pictures into groups, as (first, one after the last).

    Args:
        patches: patches of each picture, or frame of a video, in order.
        group: how many of them are in a group, or ``"auto"``: as many as have :data:`GROUP_PATCHES`, at least one.
    """
    if not isinstance(group, str):
        return [(first, min(first + group, len(patches))) for first in range(0, len(patches), group)]
    ranges, first, total = list[tuple[int, int]](), 0, 0
    for number, count in enumerate(patches):
        if number > first and total + count > GROUP_PATCHES:
            ranges.append((first, number))
            first, total = number, 0
        total += count
    return [*ranges, (first, len(patches))] if patches else []


CHUNK_TOKENS = 8192
"""Tokens of all rows in one chunk of a decoder layer: products and attention kernels are at full speed."""

CHUNK_MULTIPLE = 64
"""Larger chunks are multiples of this: delta rules compute in blocks of 64 tokens from a document's beginning, and a
cut inside a block changes their rounding."""


def chunk_sizes(tokens: int, batch: int, chunk: int | str, documents: Sequence[int] = ()) -> StateTiles:
    """Cut a sequence into the chunks that decoder layers run on, as :func:`state_tiles` does.

    Args:
        tokens: length of the sequence.
        batch: rows of the batch, which share each chunk.
        chunk: tokens of each row per chunk, or ``"auto"``: :data:`CHUNK_TOKENS` over all rows.
        documents: lengths of the documents that are packed into the sequence, in order.
    """
    size = max(1024, CHUNK_TOKENS // max(1, batch)) if isinstance(chunk, str) else chunk
    if size > CHUNK_MULTIPLE:
        size = -(-size // CHUNK_MULTIPLE) * CHUNK_MULTIPLE
    return state_tiles(tokens, batch, size, documents, together=False)
