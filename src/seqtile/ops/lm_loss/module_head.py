"""A head that is more than a weight (adapters, quantised layers, a bottleneck): the module itself, tile by tile.

The plain head of :mod:`seqtile.ops.lm_loss.head_nodes` differentiates by hand; here autograd does, one tile at a
time and while the forward runs, from the gradient that the loss leaves in the place of the tile's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from seqtile.ops.grad_accumulator import Sum
from seqtile.ops.lm_loss.head_nodes import NO_SECOND_DERIVATIVE, as_divisor, hand_out
from seqtile.ops.lm_loss.kept_tokens import KeptTokens, empty_gradient, read_rows, write_rows
from seqtile.ops.lm_loss.logits_tile import HeadRows, LogNormaliser, Objective, TileTargets, Wanted
from seqtile.ops.lm_loss.token_logprobs import TokenScores
from seqtile.ops.tile_checkpoint import Changed, run_in_tiles
from seqtile.ops.token_tiles import refuse_second_derivative
from seqtile.tiling import tile_ranges

HeadRun = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""The head on one tile, with other weights in the place of its own: ``(x [t, D], {name: weight}) -> [t, V]``."""

Sizes = Callable[[int], Sequence[int]]
"""The sizes of the tiles of so many tokens."""


def module_cross_entropy(
    run: HeadRun, hidden: Tensor, labels: Tensor, weights: Mapping[str, Tensor], sizes: Sizes, vocabulary: int,
    aim: Objective, divisor: Tensor | int | float | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy of any position-wise head, divided by ``divisor`` (None: by the tokens that count).

    Args:
        run: the head.
        hidden: ``[..., D]``, ``N`` tokens.
        labels: ``[...]``.
        weights: what trains in it, by name.
        sizes: tokens of each tile, from the tokens that count.
        vocabulary: ``V``.
        aim: what is summed per token.
        divisor: as above.

    Cost:
        The head's own forward and backward products once each: 3 for a linear one. Memory: one tile of logits twice
        where the head adds to its product, and what :func:`seqtile.linear_cross_entropy` names.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    kept = KeptTokens.of(labels.reshape(-1).to(hidden.device), aim.ignore_index, vocabulary)
    divisor = len(kept) if divisor is None else as_divisor(divisor, hidden)
    if not torch.is_grad_enabled():
        rows, weights = rows.detach(), {name: weight.detach() for name, weight in weights.items()}
    plan = _HeadPlan(run, tuple(weights), sizes(len(kept)), aim)
    return _HeadTotal.apply(plan, kept, divisor, rows, *weights.values())  # type: ignore[no-any-return, no-untyped-call]


def module_logprobs(
    run: HeadRun, hidden: Tensor, targets: Tensor, weights: Callable[[], Mapping[str, Tensor]], sizes: Sizes,
    vocabulary: int, aim: Objective, changed: Changed = str,
) -> TokenScores:  # fmt: skip
    """Everything but candidates and the ``top_`` fields of :class:`TokenScores` under any head, without a reference.

    Each tile is recomputed in the backward.
    """
    kept = KeptTokens.of(targets.reshape(-1).to(hidden.device), aim.ignore_index, vocabulary)

    def score(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        y, target = run(tiles[0], aliases), tiles[1]
        wide = torch.promote_types(y.dtype, torch.float32)
        z = aim.scaling.on(y.to(wide))  # [t, V]
        log_p = z.log_softmax(-1)
        log_probs = log_p.gather(-1, target).squeeze(-1)  # [t]
        entropy = -(log_p.exp() * log_p).sum(-1)  # [t]
        fixed = log_p.detach()
        results = (log_probs, entropy, fixed.argmax(-1), (2 * fixed).logsumexp(-1), z.detach().mean(-1))
        return tuple(value.unsqueeze(-1) for value in results)  # [t, 1] each: one row per token

    rows = kept.take(hidden.reshape(-1, hidden.shape[-1]))  # [..., D] -> [N, D] -> [n, D]
    parts = run_in_tiles(score, (rows, kept.targets.unsqueeze(-1)), sizes(len(kept)), weights, changed=changed)
    log_probs, entropy, argmax, squares, mean = (kept.spread(score.squeeze(-1)).view(targets.shape) for score in parts)
    return TokenScores(log_probs, entropy, argmax=argmax, log_sum_squares=squares, mean_logit=mean)


class _HeadPlan:
    """The node's arguments besides tensors."""

    def __init__(self, run: HeadRun, names: tuple[str, ...], sizes: Sequence[int], aim: Objective) -> None:
        self.run, self.names, self.sizes, self.aim = run, names, sizes, aim

    def tile(self, x: Tensor, weights: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Tensor, list[Tensor]]:
        """The head on one tile as leaves of a graph of its own: products, and the leaves that need a gradient."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_(needs[0])
            aliases = {
                name: weight.detach().requires_grad_(need)
                for name, weight, need in zip(self.names, weights, needs[1:], strict=True)
            }
            with _uncached():
                y = self.run(leaf, aliases)
        return y, [tensor for tensor in (leaf, *aliases.values()) if tensor.requires_grad]


@contextmanager
def _uncached() -> Iterator[None]:
    """Autocast without its cache: every tile's leaves are new to it, and it would hold a cast of each until it ends."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


class _HeadTotal(torch.autograd.Function):
    """As the plain head's: the gradients are there when the forward ends, and stand on the node."""

    @staticmethod
    def forward(
        ctx: Any, plan: _HeadPlan, kept: KeptTokens, divisor: Tensor | int | float, hidden: Tensor, *weights: Tensor
    ) -> Tensor:  # fmt: skip
        needs = ctx.needs_input_grad[3:]
        ctx.set_materialize_grads(False)
        dx = empty_gradient(hidden, kept.index) if needs[0] else None
        sums = [Sum(weight) if need else None for weight, need in zip(weights, needs[1:], strict=True)]
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for start, size in tile_ranges(plan.sizes):
            tile = slice(start, start + size)
            y, leaves = plan.tile(read_rows(hidden, kept.index, tile), weights, needs)  # [t, D] -> [t, V]
            dy = y.detach()  # the gradient replaces the logits where they are; PyTorch notices a head that needs them
            rows, targets = HeadRows(plan.aim, y.dtype, y.device), TileTargets(kept.targets[tile])
            loss = dy.new_empty(size, dtype=rows.wide)
            normaliser = LogNormaliser.empty_like(loss)
            if not leaves:
                rows.losses(dy, targets, loss, normaliser, Wanted())
            else:
                rows.losses_and_gradient(dy, targets, None, loss, normaliser)
                gradients = iter(torch.autograd.grad(y, leaves, dy, allow_unused=True))
                if dx is not None:
                    gradient = next(gradients)
                    write_rows(dx, kept.index, tile, torch.zeros_like(dy[:, :1]) if gradient is None else gradient)
                for total_of_weight, gradient in zip(filter(None, sums), gradients, strict=True):
                    if gradient is not None:
                        total_of_weight.add(gradient)
            total += loss.sum()
        ctx.left, ctx.any, ctx.divisor = (dx, *sums), len(kept) > 0, divisor
        return total / divisor

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> Any:
        refuse_second_derivative(NO_SECOND_DERIVATIVE)
        if upstream is None:
            return (None,) * len(ctx.needs_input_grad)
        return None, None, None, *hand_out(ctx, upstream)
