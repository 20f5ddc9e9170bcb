"""A head whose vocabulary is sharded over ranks, which exchange a few numbers per token.

Tiles run without a collective inside. The forward reduces twice, ``[n]`` and ``[n, 3]`` numbers, once all tiles are
through; the backward reduces the gradient of the hidden states once. No rank has another's rows, nor logits of them.

Source: the vocabulary-parallel cross-entropy of Megatron-LM, arXiv 1909.08053.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from seqtile.ops.grad_accumulator import Sum
from seqtile.ops.lm_loss.head_nodes import NO_SECOND_DERIVATIVE, HeadCall, LossPlan, add_gradients
from seqtile.ops.lm_loss.kept_tokens import KeptTokens, empty_gradient, read_rows
from seqtile.ops.lm_loss.logits_tile import LogitScaling, LogNormaliser, TileTargets, finite
from seqtile.ops.lm_loss.row_kernels import run_over_rows
from seqtile.ops.mlp import SaveAhead
from seqtile.ops.token_tiles import refuse_second_derivative


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of a head this rank has.

    Attributes:
        group: the ranks that share the rows out, in their order.
        start: number of this rank's first row.
        vocabulary: rows of all.
    """

    group: dist.ProcessGroup
    start: int
    vocabulary: int


def own_rows(weight: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, VocabularyShard | None]:
    """This rank's rows of a weight, and where they lie; None where it has them all.

    Args:
        weight: a ``DTensor`` with ``Shard(0)``; or this rank's rows, as many as every other rank of ``group`` has.
        group: the ranks, for a weight that is no ``DTensor``.

    Raises:
        ValueError: a tensor that is shared out in another way.
    """
    if type(weight).__name__ != "DTensor":
        if group is None:
            return weight, None
        rows = weight.shape[0]
        return weight, VocabularyShard(group, rows * dist.get_rank(group), rows * dist.get_world_size(group))
    sharded: Any = weight
    if len(sharded.placements) != 1 or not sharded.placements[0].is_shard(0):
        raise ValueError(
            f"the head's weight is a DTensor with placements {sharded.placements}, expected (Shard(dim=0),) over "
            "one mesh dimension; redistribute it, or use full_tensor()"
        )
    mesh, vocabulary = sharded.device_mesh, weight.shape[0]
    chunk = -(-vocabulary // mesh.size())  # as torch.chunk cuts
    if chunk * (mesh.size() - 1) >= vocabulary:
        raise ValueError(
            f"a head of {vocabulary} rows leaves the last of {mesh.size()} ranks without any; use full_tensor()"
        )
    start = min(vocabulary, chunk * mesh.get_local_rank())
    return sharded.to_local(), VocabularyShard(mesh.get_group(), start, vocabulary)


def sharded_scores(call: HeadCall, shard: VocabularyShard, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each token, ``[N]`` each, on every rank of the group.

    Args:
        call: the call on this rank's rows of the weight, with the same tokens and targets on every rank.
        shard: which rows these are.
        temperature: ``[n]`` or None.
    """
    differentiated = (call.hidden, call.weight, *(() if call.bias is None else (call.bias,)))
    local = call.kept.targets - shard.start
    is_local = (local >= 0) & (local < call.weight.shape[0])
    targets = TileTargets(torch.where(is_local, local, 0), temperature, None, is_local)
    token = SaveAhead.apply(*differentiated, call.kept.index, *targets.tensors())  # type: ignore[no-untyped-call]
    return _Sharded.apply(call.plan, token.grad_fn, token, call.kept, targets, shard.group, *differentiated)  # type: ignore[no-any-return, no-untyped-call]


def _write_shares(
    scaling: LogitScaling, y: Tensor, ids: Tensor, temperature: Tensor | None, is_local: Tensor, top: Tensor,
    total: Tensor, at_target: Tensor, below: Tensor,
) -> None:  # fmt: skip
    """Statistics of this rank's rows of the head.

    The largest logit, ``sum(exp(z - top))``, the target's logit (0 elsewhere), ``sum(exp(z - top) * (top - z))``.
    """
    z = finite(scaling.logits(y, temperature))
    local = scaling.logits(y.gather(-1, ids.unsqueeze(-1)), temperature).squeeze(-1)
    at_target.copy_(torch.where(is_local, local, 0))
    largest = z.amax(-1, keepdim=True)
    z.sub_(largest)
    weights = z.exp()
    top.copy_(largest.squeeze(-1))
    total.copy_(weights.sum(-1))
    below.copy_(-weights.mul_(z).sum(-1))


class _Sharded(torch.autograd.Function):
    """As the per-token node of a whole head; the logits are computed again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, plan: LossPlan, save: Any, token: Tensor, kept: KeptTokens, targets: TileTargets, group: Any,
        hidden: Tensor, weight: Tensor, bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        is_local = targets.tensors()[3]
        assert is_local is not None
        with torch.no_grad(), plan.casts.off():
            work = plan.work(weight, bias)
            numbers = [hidden.new_empty(len(kept), dtype=work.wide) for _ in range(4)]
            for tile in plan.parts():
                y, of_tile = work.product(read_rows(hidden, kept.index, tile)), targets[tile]  # [t, rows of this rank]
                per_row = (of_tile.ids, of_tile.temperature, of_tile.is_local, *(each[tile] for each in numbers))
                run_over_rows(_write_shares, plan.objective.scaling, (y, *per_row))
            local_top, total, at_target, below = numbers
            top = local_top.clone()
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            share = (local_top - top).exp_()
            # A rank of which no token can be has nothing to add, and an infinite distance to the largest logit.
            below = torch.where(share == 0, 0, share * (below + total * (top - local_top)))
            reduced = torch.stack([share * total, at_target, below], -1)
            dist.all_reduce(reduced, group=group)
            total, at_target, below = reduced.unbind(-1)  # [n] each
            log_sum = total.log()
            entropy = log_sum + below / total
        ctx.plan, ctx.save, ctx.group, ctx.entropy = plan, save, group, entropy
        ctx.normaliser = LogNormaliser(top, log_sum)
        ctx.set_materialize_grads(False)
        return kept.spread((at_target - top) - log_sum), kept.spread(entropy).clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, entropy_upstream: Tensor | None) -> Any:
        refuse_second_derivative(NO_SECOND_DERIVATIVE)
        plan: LossPlan = ctx.plan
        needs = ctx.needs_input_grad[6:]
        hidden, weight, *biases, index, ids, temperature, _, is_local = ctx.save.saved_tensors
        targets, kept = TileTargets(ids, temperature, None, is_local), KeptTokens(hidden.shape[0], ids, index)
        # Every rank runs this, also without a gradient, or the reduction would hang.
        factor = torch.zeros_like(ctx.entropy) if upstream is None else -kept.take(upstream)
        of_entropy = None if entropy_upstream is None else kept.take(entropy_upstream)
        with plan.casts.off():
            work = plan.work(weight, biases[0] if biases else None)
            dx = empty_gradient(hidden, index) if needs[0] else None
            totals = [Sum(tensor) if need else None for tensor, need in zip((weight, *biases), needs[1:], strict=True)]
            for tile in plan.parts():
                x = read_rows(hidden, index, tile)
                y = work.product(x)
                others = (None, None) if of_entropy is None else (ctx.entropy[tile], of_entropy[tile])
                work.gradient(y, targets[tile], factor[tile], ctx.normaliser[tile], *others)
                add_gradients(work, y, x, index, tile, dx, totals)
            if dx is not None:
                dist.all_reduce(dx, group=ctx.group)
        return *(None,) * 6, dx, *(None if total is None else total.result() for total in totals)
