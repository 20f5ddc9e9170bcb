"""A gated or plain MLP of linear layers as one autograd node, over tiles of tokens: the fast path.

Its plain twin is :func:`seqtile.ops.tile_checkpoint.run_in_tiles`. Two nodes:

* ``SaveAhead`` saves the input and the weights *ahead*, so that an activation checkpoint around the layer stops its
  recompute there; PyTorch packs what a custom function saves only after its forward has run, so a node that saved its
  own input would run twice.
* ``_Fused`` has the weights as inputs, computes tile by tile, and returns each gradient once, or adds it to the sum of
  a tile around the call. Its backward computes gate and up again, never the down projection, and then the gradient
  products, in four ``[tile, F]`` buffers that every tile shares. It may keep gate and up of some tiles (``keep``): on
  itself, where no checkpoint drops them, or as saved tensors (``under_checkpoint``).

Source: the tiled MLP of Arctic Long Sequence Training, arXiv 2506.13996; recompute of gate and up alone as in selective
activation recomputation, arXiv 2205.05198.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seqtile.ops.linear import Kind, Packed, Projection, plain_projection
from seqtile.ops.mlp_tile import MlpPlan, Pass
from seqtile.ops.normed_linears import sums_for
from seqtile.ops.pointwise import Activation
from seqtile.ops.rng import Autocast, NormKind, RandomState, RowWise
from seqtile.ops.tile_linear import AROUND, SumOfOne
from seqtile.ops.token_tiles import refuse_second_derivative, refuse_trace
from seqtile.tiling import tile_ranges


@dataclass(frozen=True)
class FusedWeights:
    """An MLP that :func:`fused_mlp` can run: ``after(down(act(gate(n)) * up(n)))`` with ``n = before(x)``.

    Attributes:
        first: ``(gate, up)``; ``(gate_up,)`` with ``2 * F`` outputs; or ``(up,)`` of a plain MLP.
        down: ``F -> D``.
        activation: applied to the gate, or to ``up`` of a plain MLP.
        gated: whether the activation is multiplied by ``up``.
        up_first: the two halves of a fused ``gate_up`` are stored up first.
        before: row-wise norm of the input, or None.
        after: row-wise norm of the output, or None; its input is recomputed (12 units instead of 11).
        dropout: probability with which an element of ``down``'s output is dropped now.
    """

    first: tuple[Projection, ...]
    down: Projection
    activation: Activation
    gated: bool = True
    up_first: bool = False
    before: RowWise | None = None
    after: RowWise | None = None
    dropout: float = 0.0

    @cached_property
    def split(self) -> tuple[list[Tensor], list[Kind], list[NormKind | None]]:
        """Every tensor, in the order in which a pass takes them back, and the kinds of projections and norms."""
        tensors, kinds, norms = [], [], list[NormKind | None]()
        for projection in (*self.first, self.down):
            tensors += projection.tensors()
            kinds.append(projection.kind())
        for norm in (self.before, self.after):
            tensors += norm.weights if norm is not None else ()
            norms.append(norm.kind() if norm is not None else None)
        return tensors, kinds, norms

    @cached_property
    def draws(self) -> bool:
        """Whether something drops at random."""
        return self.dropout > 0 or any(kind.has_adapter and kind.dropout > 0 for kind in self.split[1])

    @cached_property
    def packed_numel(self) -> int:
        """Elements of the quantised weights, once they are dense."""
        weights = [projection.weight for projection in (*self.first, self.down)]
        return sum(math.prod(weight.shape) for weight in weights if isinstance(weight, Packed))


_requires_grad = attrgetter("requires_grad")


def fused_mlp(
    x: Tensor,
    mlp: FusedWeights,
    sizes: Sequence[int],
    *,
    keep: float = 0.0,
    holds_dense: bool = True,
    under_checkpoint: bool = False,
) -> Tensor:
    """Compute a gated or plain MLP one tile of tokens at a time, with one gradient per weight.

    Replaces ``down(act(gate(x)) * up(x))``, computed whole.

    Args:
        x: ``[..., D]`` with ``N`` rows.
        mlp: live weights and what to do with them.
        sizes: tokens of each tile, in order; they sum to ``N``.
        keep: fraction of the tiles, rounded down, whose gate and up stay in memory until their backward: 0.0 to 1.0.
        holds_dense: frozen quantised weights are made dense once per pass, all of them; else again for every product of
            every tile (3 forward, 5 in backward, gated), one at a time.
        under_checkpoint: what is kept is saved as autograd's tensors are, which an activation checkpoint around the
            call drops and computes again. For a block whose output its recompute needs: 12 products, 9 frozen.

    Returns:
        ``[..., D]`` in the dtype of ``x``, or autocast's.

    Cost:
        Matrix products in units of ``2 * N * D * F``: 11 gated (3 forward, 2 recomputed, 6 backward), 8 with frozen
        weights plus an adapter's own; the same inside a non-reentrant activation checkpoint; 1 more with ``after``;
        2 less for kept tiles. Memory beyond input, weights and their gradients: the output, the two gradients of
        that shape, four ``[tile, F]`` buffers, fp32 sums of low-precision weights, and ``2 * F`` elements per kept
        token. Under autocast one cast copy of each weight while a pass runs.

    Composes with:
        DDP, FSDP1, FSDP2, ZeRO-1/2/3 (the weights are ordinary inputs of an autograd node), activation checkpointing,
        ``torch.autograd.grad``, ``retain_graph=True`` (kept tiles are recomputed the second time). Not with
        ``torch.compile`` around it, nor with a second derivative. Dropout masks are drawn per tile, so a seed gives
        other masks than the untiled block; the recompute draws the same ones and leaves the stream alone.

        Autocast: the recompute and the gradients' products run in the state that the forward had, whatever that of
        the backward, as PyTorch's documentation says of backward operators ("run in the same type that autocast used
        for corresponding forward ops"). Untiled, a backward inside autocast of a forward outside it multiplies in low
        precision; here it does not, so its gradients are nearer the truth than untiled ones, never farther.

    Raises:
        ValueError: the sizes do not sum to the rows, or ``keep`` is not a share.
        TypeError: complex numbers, whose gradients the products here would not conjugate.
        NotImplementedError: inside ``torch.jit.trace``; a second derivative.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        refuse_trace()
    rows = x.shape[:-1].numel()
    sizes = tuple(filter(None, sizes))
    if sum(sizes) != rows:
        raise ValueError(f"cannot tile: sizes sum to {sum(sizes):,}, expected {rows:,} rows")
    if not 0.0 <= keep <= 1.0:
        raise ValueError(f"keep={keep}: expected a fraction of the tiles, 0.0 to 1.0")
    tensors, kinds, norms = mlp.split
    for t in (x, *tensors):
        if t.is_complex():
            raise TypeError(f"the fused operator does not support {t.dtype}; use run_in_tiles (path='generic')")
    plan = MlpPlan(
        tuple(kinds[:-1]), kinds[-1], mlp.activation, mlp.gated, mlp.up_first,
        norms[0], norms[1], mlp.dropout, sizes,
        math.floor(keep * len(sizes) + 1e-9), under_checkpoint, holds_dense, Autocast.of(x),
        RandomState(x.device) if mlp.draws else None,
    )  # fmt: skip
    try:
        x.view(-1, x.shape[-1])
    except RuntimeError:  # its rows cannot be walked with one stride
        x = x.contiguous()
    if not torch.is_grad_enabled() or not any(map(_requires_grad, (x, *tensors))):
        return _run_tiles(plan, x.detach(), [t.detach() for t in tensors], None)
    token = SaveAhead.apply(x, *tensors)  # type: ignore[no-untyped-call]
    around = None if AROUND.sums is None else AROUND.sums.of(tensors)
    return _Fused.apply(plan, around, token.grad_fn, token, x, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def _run_tiles(
    plan: MlpPlan, x: Tensor, tensors: Sequence[Tensor], kept: dict[int, tuple[Tensor, ...]] | None
) -> Tensor:
    with plan.autocast.off():
        work = Pass(plan, x.device, tensors, [None] * len(tensors))
        rows = x.view(-1, x.shape[-1])  # [..., D] -> [N, D]
        dtype = work.dtype if work.after is None else work.output_dtype(rows)
        output = torch.empty(*x.shape[:-1], work.output_width, dtype=dtype, device=x.device)
        flat = output.view(-1, output.shape[-1])  # [..., D] -> [N, D]
        for index, (start, size) in enumerate(tile_ranges(plan.sizes)):
            keep = kept is not None and index < plan.keep
            values = work.forward(rows.narrow(0, start, size), flat.narrow(0, start, size), keep=keep)
            if kept is not None and values:
                kept[index] = values
        return output


class SaveAhead(torch.autograd.Function):
    """Save the input and the weights ahead of the node that needs them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.count = len(tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return torch.empty(0, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return (None,) * ctx.count


class _Fused(torch.autograd.Function):
    """The whole block. Holds its plan, may hold tiles, and asks ``SaveAhead`` for everything else."""

    @staticmethod
    def forward(
        ctx: Any, plan: MlpPlan, around: Sequence[SumOfOne | None] | None, save: Any, token: Tensor, x: Tensor,
        *tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.plan, ctx.around, ctx.save, ctx.kept = plan, around, save, {}
        ctx.set_materialize_grads(False)
        output = _run_tiles(plan, x, tensors, ctx.kept)
        if plan.under_checkpoint:
            ctx.save_for_backward(*(value for values in ctx.kept.values() for value in values))
            ctx.kept = {}
        return output

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        refuse_second_derivative()
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        plan: MlpPlan = ctx.plan
        needs_x, *needs = ctx.needs_input_grad[4:]
        # Unpacked once, and before anything else: under a layer checkpoint this is what runs the layer again.
        x, *tensors = ctx.save.saved_tensors
        kept = ctx.kept
        if plan.under_checkpoint:
            saved, per_tile = ctx.saved_tensors, len(plan.first)
            kept = {index: saved[index * per_tile : (index + 1) * per_tile] for index in range(plan.keep)}
            del saved
        dy = dy.reshape(-1, dy.shape[-1])  # [..., D] -> [N, D]
        with plan.autocast.off(), plan.random.replayed() if plan.random else nullcontext():
            work = Pass(plan, x.device, tensors, sums_for(tensors, needs, ctx.around))
            rows = x.view(-1, x.shape[-1])  # [N, D]
            dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else None
            for index, (start, size) in enumerate(tile_ranges(plan.sizes)):
                work.backward(
                    rows.narrow(0, start, size),
                    dy.narrow(0, start, size),
                    None if dx is None else dx.view(-1, x.shape[-1]).narrow(0, start, size),
                    kept.pop(index, None),
                )
            gradients = work.gradients(ctx.around)
        return None, None, None, None, dx, *gradients


def plain_mlp(x: Tensor, mlp: FusedWeights) -> Tensor:
    """The twin of :func:`fused_mlp`: the whole block in plain operators, for autograd to differentiate."""
    n = x if mlp.before is None else mlp.before.function(x, mlp.before.weights)
    values = [plain_projection(n, projection) for projection in mlp.first]  # [..., F] each, or one [..., 2 F]
    if mlp.gated and len(values) == 1:
        values = list(values[0].chunk(2, dim=-1))[:: -1 if mlp.up_first else 1]
    hidden = mlp.activation.function(values[0])  # [..., F]
    y = plain_projection(hidden * values[1] if mlp.gated else hidden, mlp.down)  # [..., D]
    y = F.dropout(y, mlp.dropout) if mlp.dropout else y
    return y if mlp.after is None else mlp.after.function(y, mlp.after.weights)
