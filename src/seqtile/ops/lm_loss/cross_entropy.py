"""The language-model head and its loss over tiles of tokens: no ``[tokens, V]`` tensor ever.

Two nodes, chosen by what the upstream gradient can be:

* ``_Total``, for a scalar loss: a tile's logits become their own gradient while they are there, so that the forward
  leaves the gradients of hidden states and weights behind and the backward only multiplies them by the upstream
  scalar. Three products in all. The gradients stand on the node itself and nothing is saved, so that an activation
  checkpoint around the loss has nothing to recompute for it.
* ``_PerToken``, for one number per token, each with an upstream gradient of its own: the backward computes the logits
  again. Four products. Input and weights are saved ahead, as in :mod:`seqtile.ops.mlp`.

The plain twin is ``F.cross_entropy(scaling.on(F.linear(hidden, weight, bias)).float(), labels)``.

Source: gradients in the forward as in Liger's fused linear cross-entropy, arXiv 2410.10989.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from seqtile._compat import keeps_graph
from seqtile.ops.grad_accumulator import Sum
from seqtile.ops.lm_loss.logits_tile import HeadPass, LogitScaling, Objective, Wanted
from seqtile.ops.lm_loss.loss_kernels import choose_kernel, kernel_sum
from seqtile.ops.mlp import _Save
from seqtile.ops.rng import Autocast
from seqtile.ops.token_tiles import refuse_second_derivative
from seqtile.tiling import BlockShape, TileRule, head_sizes, parse_tile

REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    scaling: LogitScaling | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
    num_items: Tensor | int | float | None = None,
    tile: int | str | TileRule = "auto",
    impl: str = "torch",
) -> Tensor:
    """Cross-entropy of a linear head, one tile of tokens at a time.

    Replaces ``F.cross_entropy(scaling.on(F.linear(hidden, weight, bias)).float(), labels)``. Labels are the targets of
    their own positions: shift them before.

    Args:
        hidden: ``[..., D]``, ``N`` tokens.
        weight: ``[V, D]``.
        labels: ``[...]``, the target of each token.
        bias: ``[V]``.
        scaling: what the model does to the product (scale, soft-cap, temperature).
        ignore_index: label of tokens that count nothing.
        label_smoothing: as in :func:`torch.nn.functional.cross_entropy`.
        z_loss: weight of ``logsumexp(logits)**2`` in each token's loss.
        token_weights: ``[...]``, a constant factor for each token's loss.
        reduction: ``"mean"`` over the tokens that count (weighted: over their weights), ``"sum"`` or ``"none"``.
        num_items: divides the sum instead of this batch's own count: the tokens of a whole optimiser step, over all
            micro-batches and ranks. With ``"mean"`` only.
        tile: tokens per tile, or a rule of :func:`seqtile.apply`. Depends on lengths alone, so that ranks agree.
        impl: ``"torch"``: what is described here; ``"liger"`` or ``"cce"``: that kernel, an error with the reason where
            it cannot compute the same; ``"auto"``: the fastest one that is installed and can, else ``"torch"``. A
            kernel has a memory and a tile size of its own.

    Returns:
        A scalar in fp32 (float64 for float64 states), or ``[...]`` for ``"none"``.

    Cost:
        Matrix products in units of ``2 * N * D * V``: 3 for a scalar (2 if either the head or the states need no
        gradient), 4 for ``"none"``; without a gradient 1. Memory: one tile of logits in the compute dtype and a few
        fp32 blocks of rows; the gradients of states and head (fp32 sums for low precision), from the forward on.

    Raises:
        ValueError: shapes that do not fit, an unknown reduction, weights that need a gradient (use ``"none"``), or a
            kernel that cannot compute this.
        NotImplementedError: ``create_graph=True``.
    """
    aim = Objective(scaling or LogitScaling(), ignore_index, label_smoothing, z_loss)
    call = HeadCall(hidden, weight, bias, labels, aim, parse_tile(tile))
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: expected one of {', '.join(map(repr, REDUCTIONS))}")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"num_items goes with reduction='mean', got reduction={reduction!r}")
    if token_weights is not None:
        if token_weights.shape != labels.shape:
            raise ValueError(
                f"token_weights have shape {tuple(token_weights.shape)}, expected that of the labels, "
                f"{tuple(labels.shape)}"
            )
        if token_weights.requires_grad and reduction != "none":
            raise ValueError("token_weights need a gradient; use reduction='none' and multiply by them yourself")
    kernel = choose_kernel(impl, call, weighted=token_weights is not None, per_token=reduction == "none")
    if reduction == "none":
        loss = call.per_token().loss.view(labels.shape)
        if token_weights is None:
            return loss
        return loss * torch.where(call.valid.view(labels.shape), token_weights.to(loss.device), 0)
    factors = None if token_weights is None else token_weights.detach().reshape(-1).to(call.hidden.device)
    divisor = 1 if reduction == "sum" else call.count(factors) if num_items is None else num_items
    if kernel == "torch":
        return call.total(factors, divisor)
    total, any_valid = kernel_sum(kernel, call), call.valid.any()
    divisor = torch.as_tensor(divisor, device=total.device)
    # As in the node of this module: a mean over no token is no number, and has a zero gradient.
    return torch.where(any_valid, total / torch.where(any_valid, divisor, 1), total.detach() / divisor)


@dataclass
class Scores:
    """Results of one pass, ``[N]`` each; None where not asked for, 0 where the target is ignored."""

    loss: Tensor
    entropy: Tensor | None
    extra: Wanted


@dataclass(frozen=True)
class Cut:
    """What a node has to know of a call, without a tensor."""

    objective: Objective
    sizes: tuple[int, ...]
    dtype: torch.dtype
    casts: Autocast

    def starts(self) -> Iterator[tuple[int, int]]:
        return zip(accumulate(self.sizes[:-1], initial=0), self.sizes, strict=True) if self.sizes else iter(())

    def work(self, weight: Tensor, bias: Tensor | None) -> HeadPass:
        return HeadPass(self.objective, weight, bias, self.dtype, max(self.sizes, default=0))


class HeadCall:
    """One call of a plain head: checked, flattened, cut.

    Raises:
        ValueError: shapes that do not fit.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, aim: Objective, rule: TileRule
    ) -> None:
        if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"hidden states {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit, expected [..., D] "
                "and [V, D]"
            )
        if labels.shape != hidden.shape[:-1]:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}, expected one per token, {tuple(hidden.shape[:-1])}"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias has shape {tuple(bias.shape)}, expected {tuple(weight.shape[:1])}")
        self.hidden, self.weight, self.bias = hidden.reshape(-1, hidden.shape[-1]), weight, bias
        self.valid, self.target = aim.targets(labels.reshape(-1).to(hidden.device))
        casts = Autocast.of(hidden)
        trains = weight.requires_grad
        shape = BlockShape(
            hidden=weight.shape[1], intermediate=weight.shape[0], itemsize=casts.dtype.itemsize,
            weight_numel=weight.numel() if trains else 0, weight_itemsize=weight.element_size(),
            device_type=hidden.device.type, live_widths=1,
        )  # fmt: skip
        self.cut = Cut(aim, head_sizes(self.hidden.shape[0], rule, shape), casts.dtype, casts)

    @property
    def _needs_gradient(self) -> bool:
        tensors = (self.hidden, self.weight, self.bias)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    def count(self, factors: Tensor | None) -> Tensor:
        """Divisor of a mean: the tokens that count, or the sum of their weights."""
        return self.valid.sum() if factors is None else torch.where(self.valid, factors, 0).sum()

    def total(self, factors: Tensor | None = None, divisor: Tensor | int | float = 1) -> Tensor:
        """Sum of the tokens' losses times ``factors``, over ``divisor``."""
        if isinstance(divisor, Tensor):
            divisor = divisor.to(self.hidden.device)
        if not self._needs_gradient:
            loss = self.per_token().loss
            return (loss if factors is None else loss * torch.where(self.valid, factors, 0)).sum() / divisor
        return _Total.apply(self.cut, self.hidden, self.weight, self.bias, self.target, self.valid, factors, divisor)  # type: ignore[no-any-return, no-untyped-call]

    def per_token(self, entropy: bool = False, extra: Wanted | None = None) -> Scores:
        """Each token's loss, and whatever else is wanted."""
        extra = extra or Wanted()
        if not self._needs_gradient:
            loss, _, found = _score(
                self.cut, self.hidden, self.weight, self.bias, self.target, self.valid, entropy, extra
            )
            return Scores(loss, found, extra)
        given = (self.hidden, self.weight, *(() if self.bias is None else (self.bias,)))
        token = _Save.apply(*given, self.target, self.valid)  # type: ignore[no-untyped-call]
        loss, found = _PerToken.apply(self.cut, token.grad_fn, token, entropy, extra, self.target, self.valid, *given)  # type: ignore[no-untyped-call]
        return Scores(loss, found if entropy else None, extra)


def _score(
    cut: Cut, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, valid: Tensor, entropy: bool,
    extra: Wanted,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Loss, log-normaliser and entropy of each token."""
    with torch.no_grad(), cut.casts.off():
        work = cut.work(weight, bias)
        loss, lse = (hidden.new_empty(hidden.shape[0], dtype=work.wide) for _ in range(2))
        extra.entropy = torch.empty_like(loss) if entropy else None
        for start, size in cut.starts():
            rows = slice(start, start + size)
            y = work.product(hidden[rows])
            work.losses(y, target[rows], valid[rows], loss[rows], lse[rows], extra.narrow(rows))
        found, extra.entropy = extra.entropy, None
    return loss, lse, found


class _Total(torch.autograd.Function):
    """Sum over tokens, divided; the gradients are there when the forward ends."""

    @staticmethod
    def forward(
        ctx: Any, cut: Cut, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, valid: Tensor,
        factors: Tensor | None, divisor: Tensor | int | float,
    ) -> Tensor:  # fmt: skip
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[1:4]
        ctx.set_materialize_grads(False)
        with cut.casts.off():
            work = cut.work(weight, bias)
            loss = hidden.new_empty(hidden.shape[0], dtype=work.wide)
            factor = torch.ones_like(loss) if factors is None else factors.to(loss.dtype)
            factor = torch.where(valid, factor, 0)
            dx = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs_x else None
            totals = [Sum(weight) if needs_weight else None, Sum(bias) if bias is not None and needs_bias else None]
            for start, size in cut.starts():
                rows = slice(start, start + size)
                y = work.product(hidden[rows])
                lse = torch.empty_like(loss[rows])
                work.losses_and_gradient(y, target[rows], valid[rows], factor[rows], loss[rows], lse)
                _gradients(work, y, hidden[rows], None if dx is None else dx[rows], totals)
            # On the node and not saved through autograd, and the division here and not after it: what is saved this
            # late, the divisor too, an activation checkpoint gets back only by running the whole head again.
            ctx.left, ctx.any, ctx.divisor = (dx, *totals), valid.any(), divisor
            return (loss * factor).sum() / divisor

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> Any:
        refuse_second_derivative(REFUSED)
        if upstream is None:
            return (None,) * 8
        dx, *sums = hand_out(ctx, upstream)
        return None, dx, *sums, None, None, None, None


class _PerToken(torch.autograd.Function):
    """One loss per token (and entropy); the logits are computed again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, cut: Cut, save: Any, token: Tensor, entropy: bool, extra: Wanted, target: Tensor, valid: Tensor,
        hidden: Tensor, weight: Tensor, bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        loss, lse, found = _score(cut, hidden, weight, bias, target, valid, entropy, extra)
        ctx.cut, ctx.save, ctx.lse, ctx.entropy = cut, save, lse, found
        ctx.set_materialize_grads(False)
        return loss, loss.new_empty(0) if found is None else found.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, entropy_upstream: Tensor | None) -> Any:
        refuse_second_derivative(REFUSED)
        none = (None,) * 7
        if upstream is None and entropy_upstream is None:
            return (None,) * len(ctx.needs_input_grad)
        cut: Cut = ctx.cut
        needs = ctx.needs_input_grad[7:]
        hidden, weight, *rest, target, valid = ctx.save.saved_tensors
        bias = rest[0] if rest else None
        with cut.casts.off():
            work = cut.work(weight, bias)
            dx = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else None
            totals = [Sum(tensor) if need else None for tensor, need in zip((weight, *rest), needs[1:], strict=True)]
            for start, size in cut.starts():
                rows = slice(start, start + size)
                y = work.product(hidden[rows])
                factors = [None if f is None else f[rows] for f in (upstream, ctx.entropy, entropy_upstream)]
                work.gradient(y, target[rows], valid[rows], factors[0], ctx.lse[rows], *factors[1:])
                _gradients(work, y, hidden[rows], None if dx is None else dx[rows], totals)
        return *none, dx, *(None if total is None else total.result() for total in totals)


def _gradients(work: HeadPass, dy: Tensor, x: Tensor, dx: Tensor | None, totals: Sequence[Sum | None]) -> None:
    """The two products of one tile's gradient, and the bias's sum."""
    if dx is not None:
        if dx.dtype == work.dtype:
            torch.mm(dy, work.matrix, out=dx)
        else:
            dx.copy_(torch.mm(dy, work.matrix))
    if totals[0] is not None:
        totals[0].add_product(dy.t(), x.to(work.dtype))
    if len(totals) > 1 and totals[1] is not None:
        totals[1].add(dy.sum(0, dtype=work.wide))


def hand_out(ctx: Any, upstream: Tensor) -> list[Tensor | None]:
    """The gradients that a forward left on its node (``left``: states', then sums), times the upstream scalar.

    Raises:
        RuntimeError: they were handed out already.
    """
    if ctx.left is None:
        raise RuntimeError(
            "the gradients of the tiled head were handed out by an earlier backward; pass retain_graph=True to the "
            "first one"
        )
    dx, *sums = ctx.left
    keep = keeps_graph()
    if not keep:
        ctx.left = None
    # A mean over no token has an infinite upstream gradient; nothing counts, so nothing flows.
    factor = torch.where(ctx.any, upstream / ctx.divisor, 0)
    if dx is not None:
        # With a dimension: a device rounds a factor that has none to the states' dtype first (8 bits in bf16).
        dx = torch.mul(dx, factor.reshape(1), out=torch.empty_like(dx) if keep else dx)
    return [dx, *(None if total is None else total.scaled(factor, keep=keep) for total in sums)]


REFUSED = "the tiled head has first derivatives only, got create_graph=True; run this backward without it"
"""How a second derivative is refused here."""
