"""Causal attention of one chunk of a sequence to itself and to the chunks before it.

Keys and values of all chunks lie in one buffer. A chunk's queries read the keys before it in blocks and their own
causally, each by a fused kernel, and the pieces are joined by their log-sum-exp. In the backward chunks run in reverse:
each adds the gradients of the keys before it to a second buffer, and returns the buffer's slice of its own. So no
``[chunk, tokens]`` scores or masks exist, and autograd sees no tensor that grows with the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqtile._compat import FakeTensor, version_of
from seqtile.ops.attention import piece_kernels
from seqtile.ops.attention.piece_kernels import HIDDEN, Piece
from seqtile.ops.grad_accumulator import LOW
from seqtile.ops.rng import Autocast
from seqtile.ops.token_tiles import refuse_second_derivative

KEYS_AT_ONCE = 2**16
"""Keys of one piece: bounds the gradients that a kernel's backward returns."""

MASKED_KEYS = 2**12
"""Keys of one piece that needs a mask of its own."""

WINDOWED_QUERIES = 256
"""Fewest queries at once where a sliding window hides most keys of a chunk."""


class KeyValues:
    """Keys and values of one attention over a whole sequence, ``[B, K, T, E]``, and their gradients in a backward."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._gradients: tuple[Tensor, Tensor] | None = None

    def write(self, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store a chunk's keys and values; returns the buffers."""
        if self.keys is None or self.values is None:
            self.keys = key.new_empty(*key.shape[:2], self.tokens, key.shape[-1])
            self.values = value.new_empty(*value.shape[:2], self.tokens, value.shape[-1])
        end = start + key.shape[2]
        self.keys[:, :, start:end], self.values[:, :, start:end] = key, value
        return self.keys, self.values

    def gradients(self, end: int) -> tuple[Tensor, Tensor]:
        """Buffers of the gradients, in fp32 for low precision; new where the last chunk's backward begins."""
        assert self.keys is not None and self.values is not None
        if self._gradients is None or end == self.tokens:
            # The error of a sum in bf16 over 128 chunks is 2.4 times that of a sum in fp32.
            sums = [torch.float32 if x.dtype in LOW else x.dtype for x in (self.keys, self.values)]
            self._gradients = (
                torch.zeros_like(self.keys, dtype=sums[0]), torch.zeros_like(self.values, dtype=sums[1]),
            )  # fmt: skip
        return self._gradients

    def take(self) -> tuple[Tensor, Tensor]:
        """Hand over keys and values; the caller must put them back before a backward."""
        assert self.keys is not None and self.values is not None
        taken, self.keys, self.values = (self.keys, self.values), None, None
        return taken

    def drop(self) -> None:
        """Release keys, values and gradients."""
        self.keys = self.values = self._gradients = None


class GivenMask:
    """A mask of a whole sequence, and what is known of its blocks: each look waits for the device.

    Args:
        mask: ``[B or 1, 1 or H, T, T]``, boolean (True is seen) or added to the scores.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self._version = _version(mask)
        self._kinds: dict[tuple[int, int, int, int], str] = {}

    def describes(self, mask: Tensor) -> bool:
        """Whether ``mask``, the tensor that it was made of, still has the values that it had."""
        return self._version == _version(mask)

    def _seen(self, first: int, last: int, key: int, end: int) -> Tensor:
        block = self.mask[:, :, first:last, key:end]
        return block if block.dtype == torch.bool else block > torch.finfo(block.dtype).min / 2

    def kind(self, first: int, last: int, key: int, end: int) -> str:
        """``"none"``, ``"all"``, ``"causal"`` or ``"some"`` of the keys are seen by these queries."""
        where = (first, last, key, end)
        if where not in self._kinds:
            self._kinds[where] = self._look(*where)
        return self._kinds[where]

    def _look(self, first: int, last: int, key: int, end: int) -> str:
        if isinstance(self.mask, FakeTensor):  # a plan's, without values: causal
            return "none" if key >= last else "causal" if (first, last) == (key, end) else "all"
        seen = self._seen(first, last, key, end)
        if not bool(seen.any()):
            return "none"
        block = self.mask[:, :, first:last, key:end]
        if block.dtype != torch.bool and bool((block[seen] != 0).any()):
            return "some"  # a bias of the scores
        if bool(seen.all()):
            return "all"
        square = (first, last) == (key, end)
        return (
            "causal" if square and bool((seen == seen.new_ones(last - first, last - first).tril_()).all()) else "some"
        )

    @cached_property
    def hides_all(self) -> bool:
        """Whether some query sees no key of a mask that is added: untiled, it then attends to all of them alike."""
        if self.mask.dtype == torch.bool or isinstance(self.mask, FakeTensor):
            return False
        tokens = self.mask.shape[-1]
        rows = range(0, tokens, MASKED_KEYS)
        return not all(bool(self._seen(row, row + MASKED_KEYS, 0, tokens).any(-1).all()) for row in rows)

    def reaches(self, first: int, last: int) -> bool:
        """Whether one of these queries sees a key behind them all."""
        tokens = self.mask.shape[-1]
        return last < tokens and self.kind(first, last, last, tokens) != "none"

    def bias(self, first: int, last: int, key: int, end: int, dtype: torch.dtype) -> Tensor:
        """The bias of one block."""
        block = self.mask[:, :, first:last, key:end]
        if block.dtype != torch.bool:
            return block.to(dtype)
        return torch.zeros(block.shape, dtype=dtype, device=block.device).masked_fill_(~block, -torch.inf)


def _version(mask: Tensor) -> int | None:
    return None if mask.is_inference() else version_of(mask)


@dataclass(frozen=True)
class Visible:
    """Which keys the queries of a chunk see.

    Attributes:
        begin: first token of the chunk's document.
        start: first token of the chunk.
        end: one beyond its last.
        window: most keys that a query sees, its own included; None for all.
        mask: mask of the whole sequence; it replaces causality, and no query may see a key behind its chunk.
        padding: ``[B, T]``, True at tokens; None where there is none. A padded query sees its own key.
    """

    begin: int
    start: int
    end: int
    window: int | None = None
    mask: GivenMask | None = None
    padding: Tensor | None = None

    def query_ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges of queries that are computed at a time: smaller than the chunk where a window is."""
        step = self.end - self.start
        if self.window is not None and self.mask is None:
            step = min(step, max(self.window, WINDOWED_QUERIES))
        for first in range(self.start, self.end, step):
            yield first, min(first + step, self.end)

    def pieces(
        self, first: int, last: int, like: Tensor, *, at_once: int
    ) -> Iterator[tuple[int, int, bool, Tensor | None]]:
        """(first key, one beyond the last, causal, bias or None) for queries ``first`` to ``last`` of ``like``."""
        if self.mask is not None:
            yield from self._masked_pieces(self.mask, first, last, like.dtype)
            return
        low = self.begin if self.window is None else max(self.begin, first - self.window + 1)
        needs_mask = self.window is not None and last - low > self.window
        if not needs_mask and self.padding is None:
            for key in range(low, first, at_once):
                yield key, min(key + at_once, first), False, None
            yield first, last, True, None
            return
        for key in (*range(low, first, MASKED_KEYS), *range(first, last, MASKED_KEYS)):
            end = min(key + MASKED_KEYS, first if key < first else last)
            yield key, end, False, self._bias(first, last, key, end, like)

    def _bias(self, first: int, last: int, key: int, end: int, like: Tensor) -> Tensor:
        """The bias of one piece, ``[B or 1, 1, t, s]``."""
        device = like.device
        distance = torch.arange(first, last, device=device)[:, None] - torch.arange(key, end, device=device)
        seen = (distance >= 0)[None, None]
        if self.window is not None:
            seen = seen & (distance < self.window)
        if self.padding is not None:
            seen = seen & (self.padding[:, None, None, key:end] | (distance == 0))
        return torch.zeros(seen.shape, dtype=like.dtype, device=device).masked_fill_(~seen, -torch.inf)

    def _masked_pieces(
        self, mask: GivenMask, first: int, last: int, dtype: torch.dtype
    ) -> Iterator[tuple[int, int, bool, Tensor | None]]:
        blocks = [(key, min(key + MASKED_KEYS, first)) for key in range(0, first, MASKED_KEYS)]
        if mask.kind(first, last, first, last) == "causal":
            blocks.append((first, last))
        else:
            blocks += [(key, min(key + MASKED_KEYS, last)) for key in range(first, last, MASKED_KEYS)]
        for key, end in blocks:
            kind = mask.kind(first, last, key, end)
            if kind != "none":
                bias = mask.bias(first, last, key, end, dtype) if kind == "some" else None
                yield key, end, kind == "causal", bias


def prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    store: KeyValues,
    visible: Visible,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the chunk ``visible.start`` to ``visible.end`` to all keys of its document up to its own.

    Replaces ``scaled_dot_product_attention(q, cat([earlier_keys, key]), cat([earlier_values, value]), mask)``, whose
    products it costs. Chunks are called in order in the forward and run backward in reverse order.

    Args:
        query: ``[B, H, t, E]``.
        key: ``[B, K, t, E]``, with ``K`` a divisor of ``H``.
        value: ``[B, K, t, V]`` with ``V <= E``.
        store: keys and values of all chunks; those of this chunk are written into it.
        visible: which keys are seen.
        scale: factor of the scores.
        softcap: bound of the scores, 0 for none.
        sinks: ``[H]``, a score without a value that joins each row's softmax.

    Returns:
        ``[B, H, t, V]``.

    Memory:
        The store: keys and values of the sequence, and in the backward their gradients (fp32 for low precision).
    """
    with Autocast.of(query).off():
        output: Tensor = _PrefixAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, sinks, store, visible, scale, softcap
        )
    return output


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, store: KeyValues, visible: Visible,
        scale: float, softcap: float,
    ) -> Tensor:  # fmt: skip
        keys, values = store.write(visible.start, k, v)
        batch, heads, tokens = q.shape[:3]
        at_once = MASKED_KEYS if softcap else KEYS_AT_ONCE  # no fused kernel has a soft cap
        output = q.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)  # as the output projection reads it
        lse = q.new_empty(q.shape[:-1], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        for first, last in visible.query_ranges():
            rows = slice(first - visible.start, last - visible.start)
            queries = q[:, :, rows]
            joined: tuple[Tensor, Tensor] | None = None
            for a, b, causal, bias in visible.pieces(first, last, q, at_once=at_once):
                piece = Piece(scale, causal, bias, softcap)
                of_piece = piece_kernels.forward(queries, keys[:, :, a:b], values[:, :, a:b], piece)
                if joined is None:
                    joined = of_piece
                else:
                    joined = piece_kernels.join(joined[0].to(lse.dtype), joined[1], *of_piece)
            if joined is None:  # a mask hides all keys, as from padded tokens
                joined = torch.zeros_like(output[:, :, rows]), torch.full_like(lse[:, :, rows], HIDDEN)
            if sinks is not None:
                with_sink = torch.logaddexp(joined[1], sinks.to(lse.dtype)[:, None])
                joined = joined[0] * (joined[1] - with_sink).exp()[..., None], with_sink
            output[:, :, rows], lse[:, :, rows] = joined
        ctx.save_for_backward(q, output, lse, sinks)
        ctx.rest = store, visible, scale, softcap
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_derivative()
        with Autocast.of(grad).off():
            return _PrefixAttention.gradients(ctx, grad)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> Any:
        """Those of all arguments, outside autocast."""
        q, output, lse, sinks = ctx.saved_tensors
        store, visible, scale, softcap = ctx.rest
        keys, values = store.keys, store.values
        at_once = MASKED_KEYS if softcap else KEYS_AT_ONCE
        dkeys, dvalues = store.gradients(visible.end)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        for first, last in visible.query_ranges():
            rows = slice(first - visible.start, last - visible.start)
            chunk = [x[:, :, rows] for x in (grad, q, output, lse)]
            for a, b, causal, bias in visible.pieces(first, last, q, at_once=at_once):
                of_queries, of_keys, of_values = piece_kernels.backward(
                    chunk[0], chunk[1], keys[:, :, a:b], values[:, :, a:b], chunk[2], chunk[3],
                    Piece(scale, causal, bias, softcap),
                )  # fmt: skip
                dq[:, :, rows] += of_queries
                dkeys[:, :, a:b] += of_keys
                dvalues[:, :, a:b] += of_values
        dsinks = None
        if sinks is not None:
            probability = (sinks.to(lse.dtype)[:, None] - lse).exp()
            dsinks = -(probability * (grad * output).sum(-1, dtype=lse.dtype)).sum((0, 2)).to(sinks.dtype)
        own = slice(visible.start, visible.end)
        dk, dv = dkeys[:, :, own].to(q.dtype), dvalues[:, :, own].to(q.dtype)
        return dq.to(q.dtype), dk, dv, dsinks, None, None, None, None
