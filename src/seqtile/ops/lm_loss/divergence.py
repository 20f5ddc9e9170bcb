"""Divergence between a student's and a teacher's next-token distributions, over tiles of tokens.

The nodes are those of :mod:`seqtile.ops.lm_loss.head_nodes` with two heads in the place of one: a scalar leaves its
gradients behind in the forward, a number per token computes both products again in the backward. The plain twin is
``F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)``.

Source: generalised Jensen-Shannon divergence as in on-policy distillation, arXiv 2306.13649.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqtile._errors import expect_number, expect_tensors
from seqtile.ops.grad_accumulator import Sum
from seqtile.ops.lm_loss.cross_entropy import REDUCTIONS, check_num_items
from seqtile.ops.lm_loss.head_nodes import (
    NO_SECOND_DERIVATIVE,
    HeadCall,
    LossPlan,
    add_gradients,
    as_divisor,
    expect_head,
    hand_out,
)
from seqtile.ops.lm_loss.kept_tokens import Condition, KeptTokens, empty_gradient, read_rows
from seqtile.ops.lm_loss.logits_tile import (
    HeadPass,
    LogitScaling,
    LogNormaliser,
    Objective,
    to_log_probs,
    top_and_log_sum,
)
from seqtile.ops.lm_loss.row_kernels import run_over_rows
from seqtile.ops.lm_loss.token_logprobs import HeadInput, check_candidates, check_head_input
from seqtile.ops.mlp import SaveAhead
from seqtile.ops.token_tiles import refuse_second_derivative
from seqtile.tiling import TileRule, parse_tile


@dataclass(frozen=True, eq=False)
class TeacherTopK:
    """Log-probabilities of a remote teacher's most likely tokens.

    Attributes:
        log_probs: ``[..., k]``, under the temperature of the divergence; at most 0, their probabilities summing to 1 at
            most.
        tokens: ``[..., k]``, all different.
    """

    log_probs: Tensor
    tokens: Tensor


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: HeadInput | TeacherTopK,
    *,
    beta: float = 0.0,
    bias: Tensor | None = None,
    scaling: LogitScaling | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: Tensor | int | float | None = None,
    tile: int | str | TileRule = "auto",
) -> Tensor:
    """Divergence of a student's linear head from a teacher, one tile of tokens at a time; neither's logits are kept.

    With ``s`` and ``t`` the two distributions and ``m = (1 - beta) * s + beta * t``: ``KL(t || s)`` for ``beta=0``,
    ``KL(s || t)`` for ``beta=1``, between them ``beta * KL(t || m) + (1 - beta) * KL(s || m)``. Natural logarithms; not
    multiplied by ``temperature**2``. The gradient goes to the student alone.

    Args:
        hidden: ``[..., D]``, the student's ``N`` tokens, ``n`` of them not ignored.
        weight: ``[V, D]``.
        labels: ``[...]``, ``ignore_index`` where a token is ignored; shifted as the hidden states are.
        teacher: its hidden states and head, of any width and the same vocabulary; or its most likely tokens, then the
            divergence is that of ``k + 1`` classes, the last one being every other token.
        beta: from 0 to 1, as above.
        bias: ``[V]``.
        scaling: scale, soft-cap and temperature of the student's logits.
        temperature: divides the logits of both.
        ignore_index: label of ignored tokens; nothing is computed for them.
        reduction: ``"mean"`` over the tokens that are not ignored, ``"sum"`` or ``"none"``.
        num_items: divides the sum instead of this batch's own count. With ``"mean"`` only.
        tile: tokens per tile, or a rule of :func:`seqtile.apply`.

    Returns:
        A scalar in fp32 (float64 for float64 states), or ``[...]`` for ``"none"``.

    Cost:
        Matrix products in units of ``2 * n * D * V`` with the student's ``D``: 3 for a scalar, 4 for ``"none"`` and for
        a teacher's most likely tokens; beside them 1 of the teacher's width, 2 for ``"none"``. Memory: one tile of each
        one's logits in the compute dtype (on a CPU a few fp32 blocks of its rows too), and the student's gradients. One
        synchronisation with the host, for ``n``.

    Raises:
        ValueError: a wrong type, dtype or shape, another vocabulary, labels or a teacher's tokens outside it, the same
            token twice, invalid log-probabilities, ``beta`` outside 0 to 1, a temperature that is not above 0, or an
            unknown reduction.
        NotImplementedError: ``create_graph=True``.
    """
    expect_number("beta", beta, 0.0, 1.0, "a number from 0.0 (KL(teacher || student)) to 1.0 (the reverse)")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: expected one of {', '.join(map(repr, REDUCTIONS))}")
    check_num_items(num_items, reduction)
    LogitScaling(temperature=temperature)  # refuses what is not above 0
    scaling, rule = scaling or LogitScaling(), parse_tile(tile)
    if isinstance(teacher, TeacherTopK):
        expect_tensors(weight=weight, labels=labels)
        expect_head(hidden, weight, bias)
        conditions = _check_top_k(teacher, hidden, weight, labels)
        call = HeadCall(hidden, weight, bias, labels, Objective(scaling, ignore_index), rule, conditions=conditions)
        tokens = teacher.tokens.reshape(-1, teacher.tokens.shape[-1]).to(hidden.device).long()
        scored = call.per_token(temperature=call.divisors(temperature), candidates=call.kept.take(tokens)).candidates
        assert scored is not None
        valid = labels.to(hidden.device) != ignore_index
        of_top_k = torch.where(valid, _of_top_k(scored.view(teacher.tokens.shape), teacher, valid, beta), 0)
        if reduction == "none":
            return of_top_k
        return of_top_k.sum() / divided_by(reduction, num_items, valid.sum(), of_top_k)
    if not isinstance(teacher, HeadInput):
        raise ValueError(f"teacher is of type {type(teacher).__name__}, expected a HeadInput or a TeacherTopK")
    expect_head(hidden, weight, bias)
    check_head_input(teacher, hidden, "the teacher's ")
    if teacher.weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"the teacher's head has {teacher.weight.shape[0]} rows, expected the student's vocabulary, "
            f"{weight.shape[0]}; distillation across vocabularies is not supported"
        )
    call = HeadCall(hidden, weight, bias, labels, Objective(scaling, ignore_index), rule)
    aim = Objective(teacher.scaling, ignore_index)
    teacher_call = HeadCall(teacher.hidden, teacher.weight, teacher.bias, labels, aim, rule, call.kept)
    pair, constants = _Pair(call.plan, teacher_call.plan, beta), (*_tensors(teacher_call), call.divisors(temperature))
    student_tensors = _tensors(call)
    each: Tensor
    trains = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in student_tensors)
    if reduction == "none" or not trains:
        if trains:
            token = SaveAhead.apply(*student_tensors, *constants, call.kept.index, call.kept.targets)  # type: ignore[no-untyped-call]
            each = _DivergencePerToken.apply(pair, token.grad_fn, token, call.kept, constants, *student_tensors)  # type: ignore[no-untyped-call]
        else:
            each = call.kept.spread(pair.divergences(call.kept, student_tensors, constants))
        if reduction == "none":
            return each.view(labels.shape)
        return each.sum() / divided_by(reduction, num_items, len(call.kept), each)
    divisor = divided_by(reduction, num_items, len(call.kept), hidden)
    return _DivergenceTotal.apply(pair, call.kept, divisor, constants, *student_tensors)  # type: ignore[no-any-return, no-untyped-call]


def _tensors(call: HeadCall) -> tuple[Tensor, Tensor, Tensor | None]:
    return call.hidden, call.weight, call.bias


def divided_by(
    reduction: str, num_items: Tensor | int | float | None, count: Tensor | int, like: Tensor
) -> Tensor | int | float:
    """The divisor of a sum."""
    return as_divisor(1 if reduction == "sum" else count if num_items is None else num_items, like)


def _check_top_k(teacher: TeacherTopK, hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Condition]:
    """Conditions on the teacher's log-probabilities and tokens."""
    log_probs, tokens = teacher.log_probs, teacher.tokens
    expect_tensors(**{"the teacher's log_probs": log_probs, "the teacher's tokens": tokens})
    conditions = check_candidates(tokens, hidden, labels, weight.shape[0])
    if log_probs.shape != tokens.shape or not log_probs.is_floating_point():
        raise ValueError(
            f"the teacher's log_probs are {log_probs.dtype} of shape {tuple(log_probs.shape)}, expected floating "
            f"point of the shape of its tokens, {tuple(tokens.shape)}"
        )
    values = log_probs.detach().reshape(-1, log_probs.shape[-1]).to(hidden.device)
    ordered = conditions[0].values.sort(-1).values
    return [
        *conditions,
        Condition(
            (ordered[:, 1:] != ordered[:, :-1]).all(-1), conditions[0].values,
            "the teacher's tokens {value} of one position: expected different ones",
        ),
        Condition(
            (values <= 0).all(-1) & (values.float().logsumexp(-1) < _ROUNDING), values,
            "the teacher's log_probs {value} of one position: expected logarithms of probabilities, at most 1 in sum",
        ),
    ]  # fmt: skip


_ROUNDING = 0.1
"""Above 0 by which the logarithm of a teacher's summed probabilities may be through rounding (bf16, 1,000 tokens)."""


def _of_top_k(student: Tensor, teacher: TeacherTopK, valid: Tensor, beta: float) -> Tensor:
    """Divergence of ``k + 1`` classes, ``[...]``, from the student's log-probabilities ``[..., k]``."""
    log_probs = teacher.log_probs.detach().to(student.device, student.dtype)
    aside = -math.log(2 * student.shape[-1])  # any distribution, for ignored tokens
    log_s, log_t = (_with_rest(torch.where(valid.unsqueeze(-1), each, aside)) for each in (student, log_probs))
    t = log_t.exp()
    if beta == 0.0:
        return torch.where(t == 0, 0, t * (log_t - log_s)).sum(-1)
    log_s = log_s.clamp(min=torch.finfo(log_s.dtype).min)  # a token that cannot be adds 0, not 0 times -inf
    if beta == 1.0:
        return (log_s.exp() * (log_s - log_t)).sum(-1)
    log_m = torch.logaddexp(log_s + math.log1p(-beta), log_t + math.log(beta))
    of_teacher = torch.where(t == 0, 0, t * (log_t - log_m))
    return (beta * of_teacher + (1 - beta) * log_s.exp() * (log_s - log_m)).sum(-1)


def _with_rest(log_p: Tensor) -> Tensor:
    """``[..., k]`` and the logarithm of what they leave over."""
    taken = log_p.logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(log_p.dtype).eps)  # all of it, after rounding
    return torch.cat([log_p, (-torch.expm1(taken)).log()], -1)


def _write_normaliser(
    scaling: LogitScaling, y: Tensor, temperature: Tensor | None, top: Tensor, log_sum: Tensor
) -> None:
    """The log-normaliser of each row of products."""
    largest, rest = top_and_log_sum(scaling.logits(y, temperature))
    top.copy_(largest.squeeze(-1))
    log_sum.copy_(rest.squeeze(-1))


@dataclass(frozen=True)
class _PairFormula:
    """The arithmetic of two heads' rows of products, ``y`` the student's, whose log-normalisers are known.

    The temperature divides both heads' logits: a tensor, as a number would compile kernels for each of its values.
    """

    student: LogitScaling
    teacher: LogitScaling
    beta: float

    def _log_probs(
        self, y: Tensor, y_teacher: Tensor, temperature: Tensor | None, top: Tensor, log_sum: Tensor,
        teacher_top: Tensor, teacher_log_sum: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return (
            to_log_probs(self.student.logits(y, temperature), top, log_sum),
            to_log_probs(self.teacher.logits(y_teacher, temperature), teacher_top, teacher_log_sum),
        )

    def _mixed(self, log_s: Tensor, log_t: Tensor) -> Tensor:
        """The distribution that the student is compared with: the teacher, or the mean of both."""
        if self.beta == 1.0:
            return log_t
        return torch.logaddexp(log_s + math.log1p(-self.beta), log_t + math.log(self.beta))

    def write_divergences(
        self, y: Tensor, y_teacher: Tensor, temperature: Tensor | None, top: Tensor, log_sum: Tensor,
        teacher_top: Tensor, teacher_log_sum: Tensor, divergences: Tensor, of_student: Tensor,
    ) -> None:  # fmt: skip
        """Each row's divergence; ``of_student`` is ``KL(s || m)``, which its gradient takes."""
        log_s, log_t = self._log_probs(y, y_teacher, temperature, top, log_sum, teacher_top, teacher_log_sum)
        if self.beta == 0.0:
            t = log_t.exp()
            divergences.copy_((t * (log_t - log_s)).masked_fill_(t == 0, 0).sum(-1))
            return
        s, mixed = log_s.exp(), self._mixed(log_s, log_t)
        student_part = (s * (log_s - mixed)).masked_fill_(s == 0, 0).sum(-1)
        of_student.copy_(student_part)
        if self.beta < 1.0:
            t = log_t.exp()
            teacher_part = (t * (log_t - mixed)).masked_fill_(t == 0, 0).sum(-1)
            divergences.copy_(self.beta * teacher_part + (1 - self.beta) * student_part)
        else:
            divergences.copy_(student_part)

    def write_gradient(
        self, y: Tensor, y_teacher: Tensor, temperature: Tensor | None, top: Tensor, log_sum: Tensor,
        teacher_top: Tensor, teacher_log_sum: Tensor, of_student: Tensor, factor: Tensor | None,
    ) -> None:  # fmt: skip
        """Over the student's products, the gradient of the divergences times ``factor``."""
        log_s, log_t = self._log_probs(y, y_teacher, temperature, top, log_sum, teacher_top, teacher_log_sum)
        if self.beta == 0.0:
            dz = log_s.exp_().sub_(log_t.exp_())
        else:
            s = log_s.exp()
            dz = (log_s - self._mixed(log_s, log_t)).sub_(of_student.unsqueeze(-1)).mul_(s).masked_fill_(s == 0, 0)
            if self.beta < 1.0:
                dz.mul_(1 - self.beta)
        if factor is not None:
            dz.mul_(factor.unsqueeze(-1))
        self.student.through(dz, y, temperature)
        y.copy_(dz)


@dataclass(frozen=True)
class _Pair:
    """The two heads of a call, without a tensor.

    ``constants`` are the teacher's states, weight and bias, and the temperature of each token or None.
    """

    student: LossPlan
    teacher: LossPlan
    beta: float

    def passes(self, student_tensors: Sequence[Any], constants: Sequence[Any]) -> tuple[HeadPass, HeadPass]:
        tile = max(self.student.sizes, default=0)
        student, teacher = (
            HeadPass(plan.objective, weight, bias, plan.dtype, tile)
            for plan, (_, weight, bias, *_) in ((self.student, student_tensors), (self.teacher, constants))
        )
        return student, teacher

    def divergences(self, kept: KeptTokens, student_tensors: Sequence[Any], constants: Sequence[Any]) -> Tensor:
        """The divergence of each token that is not ignored."""
        with torch.no_grad(), self.student.casts.off():
            passes = self.passes(student_tensors, constants)
            divergences: Tensor = student_tensors[0].new_empty(len(kept), dtype=passes[0].wide)
            for tile in self.student.parts():
                y, y_teacher = (  # [t, V] each
                    work.product(read_rows(x[0], kept.index, tile))
                    for work, x in zip(passes, (student_tensors, constants), strict=True)
                )
                self.of_rows(y, y_teacher, _rows_of(constants[3], tile), divergences[tile])
        return divergences

    def of_rows(
        self, y: Tensor, y_teacher: Tensor, temperature: Tensor | None, divergences: Tensor,
        factor: Tensor | None = None, gradient: bool = False,
    ) -> None:  # fmt: skip
        """Write each row's divergence; with ``gradient``, write that over ``y``, times ``factor`` (None: 1)."""
        student, teacher = self.student.objective.scaling, self.teacher.objective.scaling
        formula = _PairFormula(student, teacher, self.beta)
        rows: list[Tensor | None] = [y, y_teacher, temperature]
        for scaling, logits in ((student, y), (teacher, y_teacher)):
            normaliser = LogNormaliser.empty_like(divergences).tensors()
            run_over_rows(_write_normaliser, scaling, (logits, temperature, *normaliser))
            rows += normaliser
        of_student = torch.empty_like(divergences)
        run_over_rows(_PairFormula.write_divergences, formula, (*rows, divergences, of_student))
        if gradient:
            factor = None if factor is None else factor.contiguous()
            run_over_rows(_PairFormula.write_gradient, formula, (*rows, of_student, factor))

    def gradients(
        self, kept: KeptTokens, student_tensors: Sequence[Any], constants: Sequence[Any], needs: Sequence[bool],
        factor: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, list[Sum | None]]:  # fmt: skip
        """Divergences ``[n]``, the gradient of the student's states, and the sums of its weight's and bias's."""
        hidden, weight, bias = student_tensors
        with torch.no_grad(), self.student.casts.off():
            student, teacher = self.passes(student_tensors, constants)
            divergences = hidden.new_empty(len(kept), dtype=student.wide)
            dx = empty_gradient(hidden, kept.index) if needs[0] else None
            needed = zip((weight, bias), needs[1:], strict=True)
            totals = [Sum(each) if each is not None and need else None for each, need in needed]
            for tile in self.student.parts():
                x = read_rows(hidden, kept.index, tile)  # [t, D]
                y, y_teacher = student.product(x), teacher.product(read_rows(constants[0], kept.index, tile))
                per_row = (_rows_of(constants[3], tile), divergences[tile], _rows_of(factor, tile))
                self.of_rows(y, y_teacher, *per_row, gradient=True)
                add_gradients(student, y, x, kept.index, tile, dx, totals)
        return divergences, dx, totals


def _rows_of(values: Tensor | None, tile: slice) -> Tensor | None:
    return None if values is None else values[tile]


class _DivergenceTotal(torch.autograd.Function):
    """Sum over tokens, divided; the gradients are there when the forward ends, and stand on the node."""

    @staticmethod
    def forward(
        ctx: Any, pair: _Pair, kept: KeptTokens, divisor: Any, constants: Any, *student: Tensor | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        divergences, dx, totals = pair.gradients(kept, student, constants, ctx.needs_input_grad[4:], None)
        ctx.left, ctx.any, ctx.divisor = (dx, *totals), len(kept) > 0, divisor
        return divergences.sum() / divisor  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> Any:
        refuse_second_derivative(NO_SECOND_DERIVATIVE)
        if upstream is None:
            return (None,) * 7
        return None, None, None, None, *hand_out(ctx, upstream)


class _DivergencePerToken(torch.autograd.Function):
    """One divergence per token; both heads' logits are computed again in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        pair: _Pair,
        save: Any,
        token: Tensor,
        kept: KeptTokens,
        constants: Any,
        *student: Tensor | None,
    ) -> Tensor:
        ctx.pair, ctx.save = pair, save
        ctx.set_materialize_grads(False)
        return kept.spread(pair.divergences(kept, student, constants))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> Any:
        refuse_second_derivative(NO_SECOND_DERIVATIVE)
        if upstream is None:
            return (None,) * 8
        *tensors, index, targets = ctx.save.saved_tensors
        kept = KeptTokens(tensors[0].shape[0], targets, index)
        needs = ctx.needs_input_grad[5:]
        _, dx, totals = ctx.pair.gradients(kept, tensors[:3], tensors[3:], needs, kept.take(upstream))
        return None, None, None, None, None, dx, *(None if total is None else total.result() for total in totals)
