"""The language-model head and its loss over tiles of the tokens that count: no ``[tokens, V]`` tensor ever.

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

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from seqtile._compat import keeps_graph
from seqtile._errors import expect_number, expect_tensors
from seqtile.ops.grad_accumulator import Sum
from seqtile.ops.lm_loss.kept_tokens import Condition, KeptTokens, empty_gradient, read_rows, write_rows
from seqtile.ops.lm_loss.logits_tile import HeadPass, LogitScaling, Objective, TileTargets, Wanted
from seqtile.ops.lm_loss.loss_kernels import choose_kernel, kernel_sum
from seqtile.ops.mlp import SaveAhead
from seqtile.ops.rng import Autocast
from seqtile.ops.token_tiles import refuse_second_derivative
from seqtile.tiling import BlockShape, TileRule, head_sizes, parse_tile, tile_ranges

REDUCTIONS = ("mean", "sum", "none")


class LossOptions(TypedDict, total=False):
    """Every option of :func:`linear_cross_entropy` but ``return_z_loss``, for type checkers."""

    bias: Tensor | None
    scaling: LogitScaling | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    class_weights: Tensor | None
    token_weights: Tensor | None
    reduction: str
    num_items: Tensor | int | float | None
    tile: int | str | TileRule
    impl: str


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, return_z_loss: Literal[False] = False,
    **options: Unpack[LossOptions],
) -> Tensor: ...  # fmt: skip
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, return_z_loss: Literal[True], **options: Unpack[LossOptions]
) -> tuple[Tensor, Tensor]: ...
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
    class_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
    num_items: Tensor | int | float | None = None,
    return_z_loss: bool = False,
    tile: int | str | TileRule = "auto",
    impl: str = "torch",
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of a linear head, one tile of tokens at a time.

    Replaces ``F.cross_entropy(scaling.on(F.linear(hidden, weight, bias)).float(), labels)``. Labels are the targets of
    their own positions: shift them before.

    Args:
        hidden: ``[..., D]``, ``N`` tokens of which ``n`` count.
        weight: ``[V, D]``.
        labels: ``[...]``, the target of each token.
        bias: ``[V]``.
        scaling: what the model does to the product (scale, soft-cap, temperature).
        ignore_index: label of tokens that count nothing; nothing is computed for them.
        label_smoothing: as in :func:`torch.nn.functional.cross_entropy`.
        z_loss: weight of ``logsumexp(logits)**2`` in each token's loss.
        class_weights: ``[V]``, a constant factor for each target, as ``weight=`` of
            :func:`torch.nn.functional.cross_entropy`; it does not weight the z-loss.
        token_weights: ``[...]``, a constant factor for each token's loss.
        reduction: ``"mean"`` over the tokens that count (weighted: over the weights of tokens and of their targets),
            ``"sum"`` or ``"none"``.
        num_items: divides the sum instead of this batch's own count: the tokens of a whole optimiser step, over all
            micro-batches and ranks. With ``"mean"`` only. A tensor of one element is not read on the host.
        return_z_loss: return the part of the loss that is z-loss too, reduced as the loss is, without a gradient.
        tile: tokens per tile, or a rule of :func:`seqtile.apply`; tiles are of equal work, in tokens that count.
        impl: ``"torch"``: what is described here; ``"native"``: PyTorch's own chunked operator, fp32 and float64, where
            the installed PyTorch has one; ``"liger"`` or ``"cce"``: that kernel; an error with the reason where one
            cannot compute the same; ``"auto"``: the fastest kernel that is installed and can, else ``"torch"``. Another
            operator has a memory and a tile size of its own.

    Returns:
        A scalar in fp32 (float64 for float64 states), or ``[...]`` for ``"none"``; with ``return_z_loss`` a pair.

    Cost:
        Matrix products in units of ``2 * n * D * V``: 3 for a scalar (2 if either the head or the states need no
        gradient), 4 for ``"none"``; without a gradient 1. Memory: one tile of logits in the compute dtype and a few
        fp32 blocks of rows; the gradients of states and head (fp32 sums for low precision), from the forward on. One
        synchronisation with the host, for ``n``.

    Raises:
        ValueError: what is no tensor, no number or of no floating-point dtype where one is expected, shapes that do not
            fit, labels outside the vocabulary, an unknown reduction, weights that need a gradient (use ``"none"``), or
            another operator that cannot compute this.
        NotImplementedError: ``create_graph=True``.
    """
    aim = Objective(scaling or LogitScaling(), ignore_index, label_smoothing, z_loss, class_weights)
    call = HeadCall(hidden, weight, bias, labels, aim, parse_tile(tile))
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: expected one of {', '.join(map(repr, REDUCTIONS))}")
    check_num_items(num_items, reduction)
    factors = None
    if token_weights is not None:
        expect_tensors(token_weights=token_weights)
        if token_weights.shape != labels.shape:
            raise ValueError(
                f"token_weights have shape {tuple(token_weights.shape)}, expected that of the labels, "
                f"{tuple(labels.shape)}"
            )
        if token_weights.requires_grad and reduction != "none":
            raise ValueError("token_weights need a gradient; use reduction='none' and multiply by them yourself")
        factors = call.kept.take(token_weights.reshape(-1).to(call.hidden.device))
    kernel = choose_kernel(
        impl, call, weighted=factors is not None, per_token=reduction == "none", returns_z_loss=return_z_loss
    )
    if reduction == "none":
        found = call.per_token()
        factor = 1 if factors is None else call.kept.spread(factors)
        loss, squares = ((each * factor).view(labels.shape) for each in (found.loss, found.squares))
        return (loss, z_loss * squares) if return_z_loss else loss
    divisor = 1 if reduction == "sum" else call.count(factors) if num_items is None else num_items
    if kernel == "torch" or not len(call.kept):
        loss, squares = call.total(factors, divisor)
        return (loss, z_loss * squares) if return_z_loss else loss
    total = kernel_sum(kernel, call)
    return total / (divisor.to(total.device) if isinstance(divisor, Tensor) else divisor)


def check_num_items(num_items: Tensor | int | float | None, reduction: str) -> None:
    """Refuse a divisor that is none, or that another reduction would ignore.

    Raises:
        ValueError: with what it is.
    """
    if num_items is None:
        return
    if reduction != "mean":
        raise ValueError(f"num_items goes with reduction='mean', got reduction={reduction!r}")
    if not isinstance(num_items, Tensor):
        expect_number("num_items", num_items, 0, sys.float_info.max, "a number of tokens, or a tensor of one element")
    elif num_items.numel() != 1:
        raise ValueError(f"num_items has shape {tuple(num_items.shape)}, expected a number or a tensor of one element")


def expect_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, whose: str = "") -> None:
    """Refuse hidden states and a head that cannot be multiplied.

    Args:
        hidden, weight, bias: as :func:`linear_cross_entropy` takes them.
        whose: begins the sentence, such as ``"the teacher's "``.

    Raises:
        ValueError: what is no floating-point tensor, or shapes that do not fit.
    """
    given = {f"{whose}hidden": hidden, f"{whose}weight": weight}
    given |= {} if bias is None else {f"{whose}bias": bias}
    expect_tensors(**given)
    for name, tensor in given.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is of dtype {tensor.dtype}, expected a floating-point one")
    if weight.dim() != 2 or not hidden.dim() or hidden.shape[-1] != weight.shape[1] or not weight.shape[1]:
        raise ValueError(
            f"{whose}hidden states {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit, expected "
            "[..., D] and [V, D]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{whose}bias has shape {tuple(bias.shape)}, expected {tuple(weight.shape[:1])}")


@dataclass
class Scores:
    """Results of one pass, ``[N]`` each; None where not asked for, 0 where a token does not count."""

    loss: Tensor
    squares: Tensor
    entropy: Tensor | None
    candidates: Tensor | None


@dataclass(frozen=True)
class LossPlan:
    """What a node has to know of a call, without a tensor that has a gradient."""

    objective: Objective
    sizes: tuple[int, ...]
    dtype: torch.dtype
    casts: Autocast

    def parts(self) -> Iterator[slice]:
        """The tiles, as slices of the tokens that count."""
        for start, size in tile_ranges(self.sizes):
            yield slice(start, start + size)

    def work(self, weight: Tensor, bias: Tensor | None) -> HeadPass:
        return HeadPass(self.objective, weight, bias, self.dtype, max(self.sizes, default=0))


class HeadCall:
    """One call of a plain head: checked, flattened, cut into tiles.

    Args:
        hidden, weight, bias, labels: as :func:`linear_cross_entropy` takes them.
        aim: what is summed per token.
        rule: of the tiles.
        kept: what is known of the labels already, from another call with the same ones.
        vocabulary: ``V``, where ``weight`` has some of its rows.
        conditions: as :meth:`KeptTokens.of` takes them.

    Raises:
        ValueError: shapes that do not fit, labels outside the vocabulary, or a condition that does not hold.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, aim: Objective, rule: TileRule,
        kept: KeptTokens | None = None, vocabulary: int | None = None, conditions: Sequence[Condition] = (),
    ) -> None:  # fmt: skip
        expect_head(hidden, weight, bias)
        expect_tensors(labels=labels)
        if labels.shape != hidden.shape[:-1]:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}, expected one per token, {tuple(hidden.shape[:-1])}"
            )
        if aim.class_weights is not None:
            expect_tensors(class_weights=aim.class_weights)
            if aim.class_weights.shape != weight.shape[:1]:
                raise ValueError(
                    f"class_weights have shape {tuple(aim.class_weights.shape)}, expected {tuple(weight.shape[:1])}"
                )
            if aim.class_weights.requires_grad:
                raise ValueError("class_weights need a gradient, expected constants; pass class_weights.detach()")
        self.hidden, self.weight, self.bias = hidden.reshape(-1, weight.shape[1]), weight, bias
        if kept is None:
            kept = KeptTokens.of(
                labels.reshape(-1).to(hidden.device), aim.ignore_index, vocabulary or weight.shape[0], conditions
            )
        self.kept = kept
        casts = Autocast.of(hidden)
        trains = weight.requires_grad
        shape = BlockShape(
            hidden=weight.shape[1], intermediate=weight.shape[0], itemsize=casts.dtype.itemsize,
            weight_numel=weight.numel() if trains else 0, weight_itemsize=weight.element_size(),
            device_type=hidden.device.type, live_widths=1,
        )  # fmt: skip
        self.plan = LossPlan(aim, head_sizes(len(self.kept), rule, shape), casts.dtype, casts)

    @property
    def _needs_gradient(self) -> bool:
        tensors = (self.hidden, self.weight, self.bias)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    def count(self, factors: Tensor | None) -> Tensor | int:
        """Divisor of a mean: the tokens that count, or the sum of their weights and their targets'."""
        weights = self.plan.objective.class_weights
        if weights is not None:
            own = weights.detach().to(self.hidden.device)[self.kept.targets]
            return (own if factors is None else own * factors).sum()
        return len(self.kept) if factors is None else factors.sum()

    def total(self, factors: Tensor | None = None, divisor: Tensor | int | float = 1) -> tuple[Tensor, Tensor]:
        """Sums of the tokens' losses and squared log-normalisers times ``factors``, over ``divisor``."""
        factors = None if factors is None else factors.detach()
        if isinstance(divisor, Tensor):
            divisor = divisor.to(self.hidden.device)
        if not self._needs_gradient:
            found = self.per_token()
            factor = 1 if factors is None else self.kept.spread(factors)
            return (found.loss * factor).sum() / divisor, (found.squares * factor).sum() / divisor
        return _Total.apply(  # type: ignore[no-any-return, no-untyped-call]
            self.plan, self.kept.index, TileTargets(self.kept.targets), factors, divisor, self.hidden, self.weight,
            self.bias,
        )  # fmt: skip

    def per_token(
        self, entropy: bool = False, extra: Wanted | None = None, temperature: Tensor | None = None,
        candidates: Tensor | None = None,
    ) -> Scores:  # fmt: skip
        """Each token's loss, and whatever else is wanted; ``temperature`` and ``candidates`` as :class:`TileTargets`.

        What has no gradient is left in ``extra``, ``[n]``.
        """
        extra = extra or Wanted()
        kept, targets = self.kept, TileTargets(self.kept.targets, temperature, candidates)
        given = (self.hidden, self.weight, *(() if self.bias is None else (self.bias,)))
        if self._needs_gradient:
            token = SaveAhead.apply(*given, kept.index, *targets.tensors())  # type: ignore[no-untyped-call]
            found = _PerToken.apply(self.plan, token.grad_fn, token, entropy, extra, kept, targets, *given)  # type: ignore[no-untyped-call]
        else:
            found = _spread(kept, _score(self.plan, kept.index, targets, entropy, extra, *given))
        loss, lse, entropies, scored = found
        return Scores(loss, lse.square(), entropies, scored)


def _score(
    plan: LossPlan, index: Tensor | None, targets: TileTargets, entropy: bool, extra: Wanted, hidden: Tensor,
    weight: Tensor, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Loss, log-normaliser, entropy and candidates of each token that counts."""
    with torch.no_grad(), plan.casts.off():
        work = plan.work(weight, bias)
        loss, lse = (hidden.new_empty(len(targets.ids), dtype=work.wide) for _ in range(2))
        extra.entropy = torch.empty_like(loss) if entropy else None
        if targets.candidates is not None:
            extra.candidates = loss.new_empty(targets.candidates.shape)
        for part in plan.parts():
            y = work.product(read_rows(hidden, index, part))  # [t, D] -> [t, V]
            work.losses(y, targets[part], loss[part], lse[part], extra.narrow(part))
        found = loss, lse, extra.entropy, extra.candidates
        extra.entropy = extra.candidates = None
    return found


def _spread(kept: KeptTokens, found: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple(None if value is None else kept.spread(value) for value in found)


class _Total(torch.autograd.Function):
    """Sum over tokens, divided; the gradients are there when the forward ends."""

    @staticmethod
    def forward(
        ctx: Any, plan: LossPlan, index: Tensor | None, targets: TileTargets, factors: Tensor | None,
        divisor: Tensor | int | float, hidden: Tensor, weight: Tensor, bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[5:]
        ctx.set_materialize_grads(False)
        with plan.casts.off():
            work = plan.work(weight, bias)
            loss, lse = (hidden.new_empty(len(targets.ids), dtype=work.wide) for _ in range(2))
            factor = None if factors is None else factors.to(loss.dtype)
            dx = empty_gradient(hidden, index) if needs_x else None
            totals = [Sum(weight) if needs_weight else None, Sum(bias) if bias is not None and needs_bias else None]
            for part in plan.parts():
                x = read_rows(hidden, index, part)  # [t, D]
                y = work.product(x)  # [t, V]
                of_tile = None if factor is None else factor[part]
                work.losses_and_gradient(y, targets[part], of_tile, loss[part], lse[part])
                add_gradients(work, y, x, index, part, dx, totals)
            # On the node and not saved through autograd, and the division here and not after it: what is saved this
            # late, the divisor too, an activation checkpoint gets back only by running the whole head again.
            ctx.left, ctx.any, ctx.divisor = (dx, *totals), len(loss) > 0, divisor
            sums = [(each if factor is None else each * factor).sum() / divisor for each in (loss, lse.square_())]
            ctx.mark_non_differentiable(sums[1])
            return sums[0], sums[1]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, _: Tensor | None) -> Any:
        refuse_second_derivative(REFUSED)
        if upstream is None:
            return (None,) * 8
        return None, None, None, None, None, *hand_out(ctx, upstream)


class _PerToken(torch.autograd.Function):
    """One loss per token (and log-normaliser, entropy, candidates); the logits are computed again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, plan: LossPlan, save: Any, token: Tensor, entropy: bool, extra: Wanted, kept: KeptTokens,
        targets: TileTargets, *given: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        found = _score(plan, kept.index, targets, entropy, extra, *given)
        ctx.plan, ctx.save, ctx.lse, ctx.entropy = plan, save, found[1], found[2]
        ctx.set_materialize_grads(False)
        # [N] here and not by an operator after it: that one would save the positions too late, as above. Copies, since
        # what the backward needs is not to be changed from outside.
        loss, lse, entropies, scored = _spread(kept, found)
        lse, entropies = lse.clone(), None if entropies is None else entropies.clone()
        ctx.mark_non_differentiable(lse)
        return loss, lse, entropies, scored

    @staticmethod
    def backward(
        ctx: Any, upstream: Tensor | None, _: Tensor | None, entropy_upstream: Tensor | None,
        candidates_upstream: Tensor | None,
    ) -> Any:  # fmt: skip
        refuse_second_derivative(REFUSED)
        none = (None,) * 7
        if upstream is None and entropy_upstream is None and candidates_upstream is None:
            return (None,) * len(ctx.needs_input_grad)
        plan: LossPlan = ctx.plan
        needs = ctx.needs_input_grad[7:]
        hidden, weight, *rest, index, ids, temperature, candidates, here = ctx.save.saved_tensors
        kept = KeptTokens(hidden.shape[0], ids, index)
        upstream, entropy_upstream, candidates_upstream = (
            None if each is None else kept.take(each) for each in (upstream, entropy_upstream, candidates_upstream)
        )
        targets, bias = TileTargets(ids, temperature, candidates, here), rest[0] if rest else None
        with plan.casts.off():
            work = plan.work(weight, bias)
            factor = torch.zeros_like(ctx.lse) if upstream is None else upstream
            dx = empty_gradient(hidden, index) if needs[0] else None
            totals = [Sum(tensor) if need else None for tensor, need in zip((weight, *rest), needs[1:], strict=True)]
            for part in plan.parts():
                x = read_rows(hidden, index, part)  # [t, D]
                y = work.product(x)  # [t, V]
                others = [None if t is None else t[part] for t in (ctx.entropy, entropy_upstream, candidates_upstream)]
                work.gradient(y, targets[part], factor[part], ctx.lse[part], *others)
                add_gradients(work, y, x, index, part, dx, totals)
        return *none, dx, *(None if total is None else total.result() for total in totals)


def add_gradients(
    work: HeadPass, dy: Tensor, x: Tensor, index: Tensor | None, part: slice, dx: Tensor | None,
    totals: Sequence[Sum | None],
) -> None:  # fmt: skip
    """The two products of one tile's gradient, and the bias's sum; ``x`` ``[t, D]`` are the tile's states."""
    if dx is not None:
        if index is None and dx.dtype == work.dtype:
            torch.mm(dy, work.matrix, out=dx[part])  # [t, V] @ [V, D]
        else:
            write_rows(dx, index, part, torch.mm(dy, work.matrix))
    if totals[0] is not None:
        totals[0].add_product(dy.t(), x.to(work.dtype))  # [V, t] @ [t, D]
    if len(totals) > 1 and totals[1] is not None:
        totals[1].add(dy.sum(0, dtype=work.wide))  # [t, V] -> [V]


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
    factor = upstream / ctx.divisor if ctx.any else torch.zeros_like(upstream)
    if dx is not None:
        # With a dimension: a device rounds a factor that has none to the states' dtype first (8 bits in bf16).
        dx = torch.mul(dx, factor.reshape(1), out=torch.empty_like(dx) if keep else dx)
    return [dx, *(None if total is None else total.scaled(factor, keep=keep) for total in sums)]


REFUSED = "the tiled head has first derivatives only, got create_graph=True; run this backward without it"
"""How a second derivative is refused here."""
