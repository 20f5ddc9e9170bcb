"""The head's product and loss as autograd nodes over tiles of tokens, without a ``[tokens, V]`` tensor.

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
from typing import Any

import torch
from torch import Tensor

from seqtile._compat import keeps_graph
from seqtile._errors import expect_tensors
from seqtile.ops.grad_accumulator import Sum
from seqtile.ops.lm_loss.kept_tokens import Condition, KeptTokens, empty_gradient, read_rows, write_rows
from seqtile.ops.lm_loss.logits_tile import HeadPass, LogNormaliser, Objective, TileTargets, Wanted
from seqtile.ops.mlp import SaveAhead
from seqtile.ops.rng import Autocast
from seqtile.ops.token_tiles import refuse_second_derivative
from seqtile.tiling import BlockShape, TileRule, head_sizes, tile_ranges


def expect_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, whose: str = "") -> None:
    """Refuse hidden states and a head that cannot be multiplied.

    Args:
        hidden, weight, bias: as :func:`seqtile.linear_cross_entropy` takes them.
        whose: begins the sentence, such as ``"the teacher's "``.

    Raises:
        ValueError: what is no floating-point tensor, or shapes that do not fit.
    """
    tensors = {f"{whose}hidden": hidden, f"{whose}weight": weight}
    tensors |= {} if bias is None else {f"{whose}bias": bias}
    expect_tensors(**tensors)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is of dtype {tensor.dtype}, expected a floating-point one")
    if weight.dim() != 2 or not hidden.dim() or hidden.shape[-1] != weight.shape[1] or not weight.shape[1]:
        raise ValueError(
            f"got {whose}hidden states {tuple(hidden.shape)} and weight {tuple(weight.shape)}, expected [..., D] "
            "and [V, D]"
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
    """The arguments of a call, except tensors with a gradient."""

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


def as_divisor(count: Tensor | int | float, hidden: Tensor) -> Tensor | int | float:
    """A count as the divisor of a sum over ``hidden``; in half precision it would make the loss so."""
    if not isinstance(count, Tensor):
        return count
    return count.reshape(()).to(hidden.device, torch.promote_types(hidden.dtype, torch.float32))


class HeadCall:
    """One call of a plain head: checked, flattened, cut into tiles.

    Args:
        hidden, weight, bias, labels: as :func:`seqtile.linear_cross_entropy` takes them.
        aim: what is summed per token.
        rule: rule of the tile size.
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
    def score_dtype(self) -> torch.dtype:
        """Dtype of losses, scores, their weights and all of their sums: fp32, float64 for float64 states."""
        return torch.promote_types(self.plan.dtype, torch.float32)

    @property
    def _needs_gradient(self) -> bool:
        tensors = (self.hidden, self.weight, self.bias)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    def divisors(self, temperature: Tensor | float) -> Tensor | None:
        """What divides the logits of each token that counts, ``[n]``; None where nothing does."""
        if isinstance(temperature, Tensor):
            return self.kept.take(temperature.detach().reshape(-1).to(self.hidden.device, self.score_dtype))
        if temperature == 1.0:
            return None
        return self.hidden.new_full((len(self.kept),), temperature, dtype=self.score_dtype)

    def count(self, factors: Tensor | None) -> Tensor | int:
        """Divisor of a mean: the tokens that count, or the sum of their weights and their targets'."""
        weights = self.plan.objective.class_weights
        if weights is not None:
            target_weights = weights.detach().to(self.hidden.device, self.score_dtype)[self.kept.targets]
            return (target_weights if factors is None else target_weights * factors).sum()
        return len(self.kept) if factors is None else factors.sum()

    def total(self, factors: Tensor | None = None, divisor: Tensor | int | float = 1) -> tuple[Tensor, Tensor]:
        """Sums of the tokens' losses and squared log-normalisers times ``factors``, over ``divisor``."""
        factors, divisor = None if factors is None else factors.detach(), as_divisor(divisor, self.hidden)
        if not self._needs_gradient:
            scores = self.per_token()
            factor = 1 if factors is None else self.kept.spread(factors)
            return (scores.loss * factor).sum() / divisor, (scores.squares * factor).sum() / divisor
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
        differentiated = (self.hidden, self.weight, *(() if self.bias is None else (self.bias,)))
        if self._needs_gradient:
            token = SaveAhead.apply(*differentiated, kept.index, *targets.tensors())  # type: ignore[no-untyped-call]
            per_token = _PerToken.apply(self.plan, token.grad_fn, token, entropy, extra, kept, targets, *differentiated)  # type: ignore[no-untyped-call]
        else:
            loss, normaliser, *others = _score(self.plan, kept.index, targets, entropy, extra, *differentiated)
            per_token = _spread(kept, (loss, normaliser.total(), *others))
        loss, lse, entropies, scored = per_token
        return Scores(loss, lse.square(), entropies, scored)


def _score(
    plan: LossPlan, index: Tensor | None, targets: TileTargets, entropy: bool, extra: Wanted, hidden: Tensor,
    weight: Tensor, bias: Tensor | None = None,
) -> tuple[Tensor, LogNormaliser, Tensor | None, Tensor | None]:  # fmt: skip
    """Loss, log-normaliser, entropy and candidates of each token that counts."""
    with torch.no_grad(), plan.casts.off():
        work = plan.work(weight, bias)
        loss = hidden.new_empty(len(targets.ids), dtype=work.wide)
        normaliser = LogNormaliser.empty_like(loss)
        extra.entropy = torch.empty_like(loss) if entropy else None
        if targets.candidates is not None:
            extra.candidates = loss.new_empty(targets.candidates.shape)
        for tile in plan.parts():
            y = work.product(read_rows(hidden, index, tile))  # [t, D] -> [t, V]
            work.losses(y, targets[tile], loss[tile], normaliser[tile], extra.narrow(tile))
        per_token = loss, normaliser, extra.entropy, extra.candidates
        extra.entropy = extra.candidates = None
    return per_token


def _spread(kept: KeptTokens, per_token: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple(None if value is None else kept.spread(value) for value in per_token)


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
            loss = hidden.new_empty(len(targets.ids), dtype=work.wide)
            normaliser = LogNormaliser.empty_like(loss)
            dx = empty_gradient(hidden, index) if needs_x else None
            totals = [Sum(weight) if needs_weight else None, Sum(bias) if bias is not None and needs_bias else None]
            for tile in plan.parts():
                x = read_rows(hidden, index, tile)  # [t, D]
                y = work.product(x)  # [t, V]
                of_tile = None if factors is None else factors[tile]
                work.losses_and_gradient(y, targets[tile], of_tile, loss[tile], normaliser[tile])
                add_gradients(work, y, x, index, tile, dx, totals)
            # On the node and not saved through autograd, and the division here and not after it: what is saved this
            # late, the divisor too, an activation checkpoint gets back only by running the whole head again.
            ctx.left, ctx.any, ctx.divisor = (dx, *totals), len(loss) > 0, divisor
            squares = normaliser.total().square_()
            sums = [(each if factors is None else each * factors).sum() / divisor for each in (loss, squares)]
            ctx.mark_non_differentiable(sums[1])
            return sums[0], sums[1]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, _: Tensor | None) -> Any:
        refuse_second_derivative(NO_SECOND_DERIVATIVE)
        if upstream is None:
            return (None,) * 8
        return None, None, None, None, None, *hand_out(ctx, upstream)


class _PerToken(torch.autograd.Function):
    """One loss per token (and log-normaliser, entropy, candidates); the logits are computed again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, plan: LossPlan, save: Any, token: Tensor, entropy: bool, extra: Wanted, kept: KeptTokens,
        targets: TileTargets, *differentiated: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        loss, normaliser, entropies, scored = _score(plan, kept.index, targets, entropy, extra, *differentiated)
        ctx.plan, ctx.save, ctx.normaliser, ctx.entropy = plan, save, normaliser, entropies
        ctx.set_materialize_grads(False)
        # [N] here and not by an operator after it: that one would save the positions too late, as above. Copies, since
        # what the backward needs is not to be changed from outside.
        loss, lse, entropies, scored = _spread(kept, (loss, normaliser.total(), entropies, scored))
        entropies = None if entropies is None else entropies.clone()
        ctx.mark_non_differentiable(lse)
        return loss, lse, entropies, scored

    @staticmethod
    def backward(
        ctx: Any, upstream: Tensor | None, _: Tensor | None, entropy_upstream: Tensor | None,
        candidates_upstream: Tensor | None,
    ) -> Any:  # fmt: skip
        refuse_second_derivative(NO_SECOND_DERIVATIVE)
        none = (None,) * 7
        if upstream is None and entropy_upstream is None and candidates_upstream is None:
            return (None,) * len(ctx.needs_input_grad)
        plan: LossPlan = ctx.plan
        needs = ctx.needs_input_grad[7:]
        hidden, weight, *biases, index, ids, temperature, candidates, is_local = ctx.save.saved_tensors
        kept = KeptTokens(hidden.shape[0], ids, index)
        upstream, entropy_upstream, candidates_upstream = (
            None if each is None else kept.take(each) for each in (upstream, entropy_upstream, candidates_upstream)
        )
        targets, bias = TileTargets(ids, temperature, candidates, is_local), biases[0] if biases else None
        with plan.casts.off():
            work = plan.work(weight, bias)
            factor = torch.zeros_like(ctx.normaliser.top) if upstream is None else upstream
            dx = empty_gradient(hidden, index) if needs[0] else None
            totals = [Sum(tensor) if need else None for tensor, need in zip((weight, *biases), needs[1:], strict=True)]
            for tile in plan.parts():
                x = read_rows(hidden, index, tile)  # [t, D]
                y = work.product(x)  # [t, V]
                others = [None if t is None else t[tile] for t in (ctx.entropy, entropy_upstream, candidates_upstream)]
                work.gradient(y, targets[tile], factor[tile], ctx.normaliser[tile], *others)
                add_gradients(work, y, x, index, tile, dx, totals)
        return *none, dx, *(None if total is None else total.result() for total in totals)


def add_gradients(
    work: HeadPass, dy: Tensor, x: Tensor, index: Tensor | None, tile: slice, dx: Tensor | None,
    totals: Sequence[Sum | None],
) -> None:  # fmt: skip
    """The two products of one tile's gradient, and the bias's sum; ``x`` ``[t, D]`` are the tile's states."""
    if dx is not None:
        if index is None and dx.dtype == work.dtype:
            torch.mm(dy, work.matrix, out=dx[tile])  # [t, V] @ [V, D]
        else:
            write_rows(dx, index, tile, torch.mm(dy, work.matrix))
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
            "the tiled head already returned its gradients in an earlier backward; use retain_graph=True there"
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


NO_SECOND_DERIVATIVE = "the tiled head does not support double backward, got create_graph=True"
"""How a second derivative is refused here."""
