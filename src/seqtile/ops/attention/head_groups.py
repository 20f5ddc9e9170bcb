"""Attention one group of key-value heads after another, as one autograd node from the layer's input to its output.

``o_proj(attention(rotary(q_norm(q_proj(norm(x)))), ...))``: what stands before and after the kernel is position-wise
and runs over tiles of tokens; what the model does between the projections runs once per group of key-value heads and
the query heads that read them, by the model's own code, and so do its gradients.

What is alive in backward, in hidden-state tensors (``q`` 1, ``k`` and ``v`` together ``2K / H``, ``o`` 1): input,
output's gradient, ``o``, and ``q, k, v``, whose gradients are written over them group by group; then the input's.
The input's gradient is one product with all of those, so it is rounded as the untiled one is, and a slice of the
projections per group would save nothing: sums over groups would need twice the memory in fp32.

What the kernels returned is recorded (:mod:`seqtile.ops.attention.kernel_calls`): a backward runs no kernel forward
again. Under a checkpoint policy that keeps attention's output the node keeps it there, and the layer's recompute takes
it from there without computing ``q, k, v``, which the node's backward computes instead.

Source: UPipe, which sends the heads through Ulysses' all-to-all in groups; here on one device. Selective activation
recomputation, arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqtile._compat import keeps_graph
from seqtile.ops.attention.group_core import REFUSED, Done, Groups, HeadGroup
from seqtile.ops.attention.kernel_calls import kept_now
from seqtile.ops.grad_accumulator import Sum
from seqtile.ops.linear import Kind, Layer, Projection
from seqtile.ops.normed_linears import Norm, NormedLinears, sums_for
from seqtile.ops.rng import Autocast, NormKind, RandomState, RowWise
from seqtile.ops.token_tiles import refuse_second_derivative, refuse_trace
from seqtile.tiling import tile_ranges


@dataclass(frozen=True)
class HeadWeights:
    """An attention that :func:`head_wise` can run.

    Attributes:
        first: the projections to query, key and value.
        out: the output projection.
        before: row-wise norm of the input, or None.
        between: other weights that ``Groups.between`` reads: norms of queries and keys, sinks.
    """

    first: tuple[Projection, Projection, Projection]
    out: Projection
    before: RowWise | None = None
    between: tuple[Tensor, ...] = ()

    def tensors(self) -> list[Tensor]:
        """Every tensor, in the order in which a pass takes them back."""
        tensors = list(self.before.weights) if self.before is not None else []
        for projection in (*self.first, self.out):
            tensors += projection.tensors()
        return [*tensors, *self.between]


@dataclass(frozen=True)
class HeadGroupsPlan:
    """All of one call but its tensors; the autograd node holds it."""

    first: tuple[Kind, ...]
    out: Kind
    norm: NormKind | None
    others: int
    groups: Groups
    sizes: tuple[int, ...]
    autocast: Autocast
    random: RandomState | None

    def tiles(self) -> Iterator[tuple[int, int]]:
        """First token and tokens of each tile."""
        return tile_ranges(self.sizes)


def head_wise(x: Tensor, attention: HeadWeights, groups: Groups, sizes: Sequence[int]) -> tuple[Tensor, Any]:
    """Compute an attention layer one group of key-value heads at a time, with one gradient per weight.

    Replaces ``o_proj(between(q_proj(n), k_proj(n), v_proj(n)))`` with ``n = before(x)``.

    Args:
        x: ``[B, T, D]``.
        attention: its live weights.
        groups: what stands between the projections, and the passes.
        sizes: tokens of each tile of the projections, in order; they sum to ``B * T``.

    Returns:
        ``[B, T, D]`` in the dtype of ``x``, or autocast's; and what ``groups.between`` returned beside its output.

    Cost:
        Matrix products and attention calls of the untiled layer under the same checkpoint policy. Memory in backward,
        beyond the weights and their gradients: input, output's gradient, attention's output, queries, keys and values,
        then the input's gradient, and what one pass needs; untiled all of that at once, and every pass's.
        Between forward and backward: input, attention's output and log-sum-exp, and, unless the layer's checkpoint
        keeps attention's output, queries, keys and values.

    Composes with:
        What :func:`seqtile.ops.mlp.fused_mlp` does, autocast as there. Dropout inside attention is drawn per pass, so
        a seed gives other masks than the untiled layer; the backward draws the same ones.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        refuse_trace()
    tensors = attention.tensors()
    kinds = []
    drops = False
    for projection in (*attention.first, attention.out):
        kind = projection.kind()
        drops |= kind.has_adapter and kind.dropout > 0
        kinds.append(kind)
    norm = attention.before.kind() if attention.before else None
    plan = HeadGroupsPlan(
        tuple(kinds[:-1]), kinds[-1], norm, len(attention.between), groups, tuple(sizes), groups.autocast,
        RandomState(x.device) if drops else None,
    )  # fmt: skip
    if not torch.is_grad_enabled() or not any([t.requires_grad for t in (x, *tensors)]):
        with torch.no_grad():
            y, done, _ = _forward(plan, x.detach(), [t.detach() for t in tensors], for_backward=False)
            return y, done.beside
    result: tuple[Tensor, Any] = _HeadGroups.apply(plan, x, *tensors)  # type: ignore[no-untyped-call]
    return result


class _PositionWise:
    """One forward or one backward of the position-wise part.

    Args:
        plan: the call.
        tensors: those of the call.
        sums: sum of each tensor's gradient; None if it needs none.
    """

    def __init__(self, plan: HeadGroupsPlan, tensors: Sequence[Tensor], sums: Sequence[Sum | None]) -> None:
        self.plan, self.dtype = plan, plan.autocast.dtype
        take = zip(tensors, sums, strict=True)
        norm = Norm(plan.autocast, plan.norm, take) if plan.norm else None
        self.first = NormedLinears(plan.first, take, plan.autocast)
        self.first.norm = norm
        self.out = Layer(plan.out, take, plan.autocast)
        self.others = list(take)
        self._sums = sums

    def gradients(self) -> list[Tensor | None]:
        self.first.finish()
        return [None if total is None else total.result() for total in self._sums]

    def project(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values, ``[B, T, heads * E]`` each."""
        rows = x.reshape(-1, x.shape[-1])  # [B, T, D] -> [N, D]
        qkv = []
        for layer in self.first.layers:
            qkv.append(rows.new_empty(rows.shape[0], layer.width, dtype=self.dtype))  # [N, heads * E]
        for start, size in self.plan.tiles():
            masks = self.first.draw(size)
            normed = self.first.normed(rows.narrow(0, start, size))  # [t, D]
            tiles = []
            for layer, output in zip(self.first.layers, qkv, strict=True):
                tiles.append(output.narrow(0, start, size))
                layer.without_adapter(normed, tiles[-1])
            self.first.add_low_rank(normed, tiles, masks)
        return [tensor.view(*x.shape[:-1], -1) for tensor in qkv]  # [N, heads * E] -> [B, T, heads * E]

    def skip(self, x: Tensor) -> Tensor | None:
        """Draw what :meth:`project` and the output projection draw; returns the latter's mask."""
        for _, size in self.plan.tiles():
            self.first.draw(size)
        return self.out.draw(x.shape[:-1].numel())

    def project_gradients(self, x: Tensor, qkv: Sequence[Tensor], needs_x: bool) -> Tensor | None:
        """Add the gradients of the projections and the norm; returns the input's."""
        rows = x.reshape(-1, x.shape[-1])  # [N, D]
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else None
        for start, size in self.plan.tiles():
            masks = self.first.draw(size)
            tile = rows.narrow(0, start, size)  # [t, D]
            grads = [grad.view(-1, grad.shape[-1]).narrow(0, start, size) for grad in qkv]  # [t, heads * E] each
            out = None if dx is None else dx.view(-1, x.shape[-1]).narrow(0, start, size)
            self.first.backward(tile, self.first.normed(tile), grads, masks, out)
        return dx


def _forward(
    plan: HeadGroupsPlan, x: Tensor, tensors: Sequence[Tensor], *, for_backward: bool
) -> tuple[Tensor, Done, list[Tensor]]:
    """Output, what the passes leave, and queries, keys and values where they are to be kept."""
    kept = kept_now()
    qkv: list[Tensor] = []
    with plan.autocast.off():
        work = _PositionWise(plan, tensors, [None] * len(tensors))
        if kept is not None and kept.replaying and kept.outputs:
            mask = work.skip(x)
            done: Done = kept.outputs.pop(0)
            if done.after is not None:
                done.after.restore()
        else:
            qkv = work.project(x)
            mask = work.out.draw(x.shape[:-1].numel())
            others = [weight for weight, _ in work.others]
            if kept is None:
                done = plan.groups.forward(qkv, others, for_backward=for_backward)
            else:  # the node's backward projects once more instead of the layer's recompute
                with kept.alone():
                    done = plan.groups.forward(qkv, others, for_backward=for_backward)
                qkv = []
                if not kept.replaying:
                    kept.outputs.append(done)
        flat = done.whole.view(-1, done.whole.shape[-1])  # [B, T, H * E] -> [N, H * E]
        y = torch.empty(*x.shape[:-1], work.out.width, dtype=work.dtype, device=x.device)
        work.out.forward(flat, y.view(flat.shape[0], -1), mask)  # [N, H * E] -> [N, D]
    return y, done, qkv


class _HeadGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: HeadGroupsPlan, x: Tensor, *tensors: Tensor) -> tuple[Tensor, Any]:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        y, done, qkv = _forward(plan, x, tensors, for_backward=True)
        ctx.counts = len(tensors), len(done.tensors)
        ctx.notes = done.notes
        ctx.save_for_backward(x, *tensors, done.whole, *done.tensors, *qkv)
        return y, done.beside

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> Any:
        refuse_second_derivative(REFUSED)
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        plan: HeadGroupsPlan = ctx.plan
        needs_x, *needs = ctx.needs_input_grad[1:]
        x, *saved = ctx.saved_tensors
        count, extra = ctx.counts
        tensors, done = saved[:count], Done(saved[count], None, saved[count + 1 :][:extra], *ctx.notes)
        qkv = saved[count + 1 + extra :]
        del saved
        with plan.autocast.off():
            work = _PositionWise(plan, tensors, sums_for(tensors, needs))
            with plan.random.replayed() if plan.random else nullcontext():
                if not qkv:
                    qkv = work.project(x)
                    mask = work.out.draw(x.shape[:-1].numel())
                else:
                    mask = work.skip(x)
                    if keeps_graph():
                        qkv = [tensor.clone() for tensor in qkv]  # another backward will need them
            rows = dy.reshape(-1, dy.shape[-1]).to(work.dtype)  # [N, D]
            low = work.out.low_rank_gradient(rows)
            if work.out.trains:
                work.out.add_gradients(done.whole.view(rows.shape[0], -1), rows, low, mask)
            inner = work.first.trains or work.first.needs_normed(needs_x)
            dx = None
            if inner or any(total is not None for _, total in work.others):

                def gradient_of(cut: HeadGroup) -> Tensor:
                    layer = work.out.reading(cut.of)
                    out = rows.new_empty(rows.shape[0], layer.inputs)  # [N, heads of the group * E]
                    layer.input_gradient(rows, out, low, None if mask is None else cut.of(mask, 1))
                    return out

                plan.groups.backward(qkv, qkv, work.others, done, gradient_of)
                del done
            if inner:
                with plan.random.replayed() if plan.random else nullcontext():
                    dx = work.project_gradients(x, qkv, needs_x)
            del qkv
            gradients = work.gradients()
        return None, dx, *gradients
