"""Attention of several samples with common prefixes that lie in one row, each prefix once.

The row is a forest of segments in depth-first order: a prompt, then its answers; an answer may branch again. Everything
below a segment is then one range of the row, so the queries of *all* its descendants read its keys in one dense call,
without a mask and without gathered or repeated keys. Each segment's queries read their own keys causally. The pieces
are joined by their log-sum-exp, in the forward and in the backward (:mod:`seqtile.ops.attention.piece_kernels`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqtile.ops.attention import piece_kernels
from seqtile.ops.attention.piece_kernels import Piece
from seqtile.ops.attention.prefix import KEYS_AT_ONCE, MASKED_KEYS, Visible
from seqtile.ops.grad_accumulator import LOW
from seqtile.ops.rng import Autocast
from seqtile.ops.token_tiles import refuse_second_derivative

ARGUMENT = "shared_prompts"
"""Keyword argument of a model, its layers and their attention that carries the segments."""


class SegmentTable:
    """Segments of one row, each behind its parent.

    Engines copy dataclasses among a module's arguments, so it is none: its identity goes through a model.

    Args:
        starts: first token of each segment, ascending from 0.
        parents: number of the segment that each continues; -1 for a root.
        tokens: tokens of the row.
        tokens_apart: tokens of all samples, a shared prefix counted once for each.

    Attributes:
        attended: which layers' mixers have read the table.
        at_once: most keys of a segment that the queries below it read at once.

    Raises:
        ValueError: the segments are not in depth-first order.
    """

    def __init__(self, starts: tuple[int, ...], parents: tuple[int, ...], tokens: int, tokens_apart: int = 0) -> None:
        self.starts, self.parents, self.tokens, self.tokens_apart = starts, parents, tokens, tokens_apart
        self.attended: set[Any] = set()
        self.at_once = KEYS_AT_ONCE
        path: list[int] = []
        for number, parent in enumerate(parents):
            while path and path[-1] != parent:
                path.pop()
            if parent != -1 and not path:
                raise ValueError(f"segment {number} does not follow its parent {parent} in depth-first order")
            path.append(number)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """One beyond the last token of each segment."""
        return (*self.starts[1:], self.tokens)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each segment."""
        return tuple(end - start for start, end in zip(self.starts, self.ends, strict=True))

    @cached_property
    def below(self) -> tuple[int, ...]:
        """One beyond the last token of everything that continues each segment, however indirectly."""
        ends = list(self.ends)
        for number in reversed(range(len(ends))):
            if (parent := self.parents[number]) != -1:
                ends[parent] = max(ends[parent], ends[number])
        return tuple(ends)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Position of each segment's first token in its samples."""
        positions: list[int] = []
        for parent in self.parents:
            positions.append(0 if parent == -1 else positions[parent] + self.ends[parent] - self.starts[parent])
        return tuple(positions)

    @cached_property
    def longest(self) -> int:
        """Most tokens from a root to the end of a segment."""
        lengths = zip(self.positions, self.starts, self.ends, strict=True)
        return max((position + end - start for position, start, end in lengths), default=0)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The segments that continue each segment."""
        children: list[list[int]] = [[] for _ in self.starts]
        for number, parent in enumerate(self.parents):
            if parent != -1:
                children[parent].append(number)
        return tuple(map(tuple, children))

    def blocks(self, start: int, end: int) -> Iterator[slice]:
        """The keys from ``start`` to ``end``, as many at once as :attr:`at_once` allows."""
        for first in range(start, end, self.at_once):
            yield slice(first, min(first + self.at_once, end))

    def number_of(self, token: int) -> int:
        """The segment that a token of the row is in."""
        return bisect_right(self.starts, token) - 1

    def path(self, number: int) -> list[int]:
        """The segments from the root to this one."""
        path = [number]
        while (parent := self.parents[path[-1]]) != -1:
            path.append(parent)
        return path[::-1]

    def rows_of(self, number: int, first: int, last: int) -> Iterator[tuple[slice, slice]]:
        """Where positions ``first`` to ``last`` of a segment's path lie: (part of these, tokens of the row)."""
        for segment in self.path(number):
            begin, start = self.positions[segment], self.starts[segment]
            low, high = max(first, begin), min(last, begin + self.ends[segment] - start)
            if low < high:
                yield slice(low - first, high - first), slice(start + low - begin, start + high - begin)


@dataclass(frozen=True)
class VisibleInTree(Visible):
    """Which keys the queries of a part of a row see: of their segment and of those that it continues.

    Attributes:
        segments: segments of the row.
    """

    segments: SegmentTable = field(kw_only=True)

    def query_ranges(self) -> Iterator[tuple[int, int]]:
        segments, start = self.segments, self.start
        while start < self.end:
            end = min(self.end, segments.ends[segments.number_of(start)])
            yield from Visible(0, start, end, self.window).query_ranges()
            start = end

    def pieces(
        self, first: int, last: int, like: Tensor, *, at_once: int
    ) -> Iterator[tuple[int, int, bool, Tensor | None]]:
        segments, number = self.segments, self.segments.number_of(first)
        position = segments.positions[number] - segments.starts[number]
        first, last = first + position, last + position
        in_sample = Visible(0, first, last, self.window)
        for low, high, causal, bias in in_sample.pieces(first, last, like, at_once=at_once):
            for part, keys in segments.rows_of(number, low, high):
                yield keys.start, keys.stop, causal, None if bias is None else bias[..., part]


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: SegmentTable,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of each segment's tokens to their own segment and to all segments that it continues.

    Replaces ``scaled_dot_product_attention(q, k, v, mask)`` with a mask ``[T, T]`` of the tree, or one row per sample.

    Args:
        query: ``[1, H, T, E]``.
        key: ``[1, K, T, E]``, with ``K`` a divisor of ``H``.
        value: ``[1, K, T, V]`` with ``V <= E``.
        segments: segments of the row.
        scale: factor of the scores.
        window: most keys that a query sees, its own included, by position in its sample; None for all.
        softcap: bound of the scores, 0 for none.
        sinks: ``[H]``, a score without a value that joins each row's softmax.

    Returns:
        ``[1, H, T, V]``.

    Cost:
        The products of the scores that are seen, each once. Kernel calls: one per segment, and one more per segment
        that others continue. Memory: output and log-sum-exp are saved; a segment that others continue adds one output
        of these while they run. With a window or a soft cap, pieces with a mask run as plain products where the device
        has no kernel that takes one.
    """
    if window is not None and window >= segments.longest:
        window = None
    with Autocast.of(query).off():
        output: Tensor = _TreeAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, sinks, segments, window, scale, softcap
        )
    return output


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, segments: SegmentTable, window: int | None,
        scale: float, softcap: float,
    ) -> Tensor:  # fmt: skip
        output = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)  # as projections read it
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32 if q.dtype in LOW else q.dtype)
        results = (
            _dense_results(q, k, v, segments, scale) if window is None and not softcap
            else _windowed_results(q, k, v, segments, window, scale, softcap)
        )  # fmt: skip
        for rows, joined, log_sum in results:
            if sinks is not None:
                with_sink = torch.logaddexp(log_sum, sinks.to(lse.dtype)[:, None])
                joined, log_sum = joined * (log_sum - with_sink).exp()[..., None], with_sink
            output[:, :, rows], lse[:, :, rows] = joined, log_sum
        ctx.save_for_backward(q, k, v, sinks, output, lse)
        ctx.rest = segments, window, scale, softcap
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_derivative()
        q, k, v, sinks, output, lse = ctx.saved_tensors
        segments, window, scale, softcap = ctx.rest
        with Autocast.of(grad).off():
            saved = (grad, q, k, v, output, lse)
            if window is None and not softcap:
                dq, dk, dv = _dense_gradients(saved, segments, scale)
            else:
                dq, dk, dv = _windowed_gradients(saved, segments, window, scale, softcap)
            dsinks = None
            if sinks is not None:
                probability = (sinks.to(lse.dtype)[:, None] - lse).exp()
                dsinks = -(probability * (grad * output).sum(-1, dtype=lse.dtype)).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, dsinks, None, None, None, None


def _dense_results(
    q: Tensor, k: Tensor, v: Tensor, segments: SegmentTable, scale: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(tokens, output, log-sum-exp) of each segment."""
    causal, dense = Piece(scale, True), Piece(scale, False)
    # What the queries of a segment, and of all below it, have read of the segments before it.
    of_ancestors: dict[int, tuple[Tensor, Tensor] | None] = {}
    for number, (start, end, below) in enumerate(zip(segments.starts, segments.ends, segments.below, strict=True)):
        size, own = end - start, slice(start, end)
        earlier = of_ancestors.pop(number, None)
        result = piece_kernels.forward(q[:, :, own], k[:, :, own], v[:, :, own], causal)
        if earlier is not None:
            result = _join_pieces((earlier[0][:, :, :size], earlier[1][:, :, :size]), result)
        yield own, *result
        del result
        if below == end:
            continue
        descendants = None if earlier is None else (earlier[0][:, :, size:], earlier[1][:, :, size:])
        del earlier
        for keys in segments.blocks(start, end):
            piece = piece_kernels.forward(q[:, :, end:below], k[:, :, keys], v[:, :, keys], dense)
            descendants = piece if descendants is None else _join_pieces(descendants, piece)
            del piece
        assert descendants is not None
        for child in segments.children[number]:
            part = slice(segments.starts[child] - end, segments.below[child] - end)
            of_ancestors[child] = descendants[0][:, :, part], descendants[1][:, :, part]
        del descendants


def _join_pieces(earlier: tuple[Tensor, Tensor], piece: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return piece_kernels.join(earlier[0].to(earlier[1].dtype), earlier[1], *piece)


def _dense_gradients(saved: Sequence[Tensor], segments: SegmentTable, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, output, lse = saved
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def piece(queries: slice, keys: slice, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        return piece_kernels.backward(
            grad[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys], output[:, :, queries],
            lse[:, :, queries], Piece(scale, causal),
        )  # fmt: skip

    of_ancestors: dict[int, Tensor] = {}
    for number, (start, end, below) in enumerate(zip(segments.starts, segments.ends, segments.below, strict=True)):
        size, own = end - start, slice(start, end)
        earlier = of_ancestors.pop(number, None)
        of_queries, of_keys, of_values = piece(own, own, True)
        if earlier is not None:
            of_queries = earlier[:, :, :size].to(lse.dtype) + of_queries
        dq[:, :, own] = of_queries
        if below > end:
            of_keys, of_values = of_keys.to(lse.dtype), of_values.to(lse.dtype)
            descendants = None if earlier is None else earlier[:, :, size:]
            for keys in segments.blocks(start, end):
                part = slice(keys.start - start, keys.stop - start)
                of_queries, dense_keys, dense_values = piece(slice(end, below), keys, False)
                descendants = of_queries if descendants is None else descendants.to(lse.dtype) + of_queries
                of_keys[:, :, part] += dense_keys
                of_values[:, :, part] += dense_values
            assert descendants is not None
            for child in segments.children[number]:
                of_ancestors[child] = descendants[:, :, segments.starts[child] - end : segments.below[child] - end]
            del descendants
        dk[:, :, own], dv[:, :, own] = of_keys, of_values
    return dq, dk, dv


_Pieces = Iterator[tuple[slice, list[tuple[slice, Piece]]]]


def _windowed_pieces(segments: SegmentTable, window: int | None, scale: float, softcap: float, like: Tensor) -> _Pieces:
    """(queries, [(keys, piece)]) for all queries of the row, a few at a time."""
    for start in range(0, segments.tokens, MASKED_KEYS):
        visible = VisibleInTree(0, start, min(start + MASKED_KEYS, segments.tokens), window, segments=segments)
        for first, last in visible.query_ranges():
            yield (
                slice(first, last),
                [
                    (slice(low, high), Piece(scale, causal, bias, softcap))
                    for low, high, causal, bias in visible.pieces(first, last, like, at_once=MASKED_KEYS)
                ],
            )


def _windowed_results(
    q: Tensor, k: Tensor, v: Tensor, segments: SegmentTable, window: int | None, scale: float, softcap: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    for queries, pieces in _windowed_pieces(segments, window, scale, softcap, q):
        joined: tuple[Tensor, Tensor] | None = None
        for keys, piece in pieces:
            result = piece_kernels.forward(q[:, :, queries], k[:, :, keys], v[:, :, keys], piece)
            joined = result if joined is None else _join_pieces(joined, result)
        assert joined is not None
        yield queries, *joined


def _windowed_gradients(
    saved: Sequence[Tensor], segments: SegmentTable, window: int | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, output, lse = saved
    dq, dk, dv = (torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (q, k, v))
    for queries, pieces in _windowed_pieces(segments, window, scale, softcap, q):
        for keys, piece in pieces:
            of_queries, of_keys, of_values = piece_kernels.backward(
                grad[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys], output[:, :, queries],
                lse[:, :, queries], piece,
            )  # fmt: skip
            dq[:, :, queries] += of_queries
            dk[:, :, keys] += of_keys
            dv[:, :, keys] += of_values
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
