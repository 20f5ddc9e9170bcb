"""Log-probabilities of given tokens, and what else RL and distillation compute in the same pass over tiles."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from seqtile._errors import expect_number, expect_tensors
from seqtile.ops.lm_loss.head_nodes import HeadCall, expect_head
from seqtile.ops.lm_loss.kept_tokens import Condition
from seqtile.ops.lm_loss.logits_tile import LogitScaling, Objective, Wanted
from seqtile.ops.lm_loss.vocabulary_shards import own_rows, sharded_scores
from seqtile.tiling import TileRule, parse_tile


@dataclass(frozen=True, eq=False)
class HeadInput:
    """Hidden states and the head that they go into: another policy's, or a teacher's.

    Attributes:
        hidden: ``[..., D]``, of any width ``D``.
        weight: ``[V, D]``.
        bias: ``[V]``.
        scaling: what that model does to the product.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    scaling: LogitScaling = field(default_factory=LogitScaling)


@dataclass(frozen=True)
class TokenScores:
    """Result of :func:`token_logprobs`, each of the targets' shape; None where it was not requested.

    Attributes:
        log_probs: log-probability of each target; 0 where it is ignored, as in every other field.
        entropy: entropy of the next-token distribution.
        candidates: ``[..., k]``, log-probabilities of the candidates.
        reference: log-probability of each target under the reference.
        argmax: the most likely token.
        top_k: whether the target is among the ``k`` most likely tokens (a tie counts for it).
        top_log_probs: ``[..., k]``, the ``k`` largest log-probabilities, descending.
        top_tokens: ``[..., k]``, their tokens.
        log_sum_squares: ``log(sum(p**2))``.
        mean_logit: mean of the logits over the vocabulary.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    candidates: Tensor | None = None
    reference: Tensor | None = None
    argmax: Tensor | None = None
    top_k: Tensor | None = None
    top_log_probs: Tensor | None = None
    top_tokens: Tensor | None = None
    log_sum_squares: Tensor | None = None
    mean_logit: Tensor | None = None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    scaling: LogitScaling | None = None,
    temperature: Tensor | float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
    candidates: Tensor | None = None,
    reference: Tensor | HeadInput | None = None,
    argmax: bool = False,
    top_k: int | None = None,
    top_log_probs: int | None = None,
    log_sum_squares: bool = False,
    mean_logit: bool = False,
    tile: int | str | TileRule = "auto",
    vocabulary_group: dist.ProcessGroup | None = None,
) -> TokenScores:
    """Log-probabilities of given tokens under a linear head, for DPO, GRPO, distillation and evaluation.

    Replaces ``(scaling.on(F.linear(hidden, weight, bias)) / temperature).float().log_softmax(-1).gather(-1, targets)``.
    Targets are those of their own positions: shift them before.

    Args:
        hidden: ``[..., D]``, ``N`` tokens, ``n`` of them not ignored.
        weight: ``[V, D]``.
        targets: ``[...]``.
        bias: ``[V]``.
        scaling: scale, soft-cap and temperature of the logits.
        temperature: divides the logits last, the reference's too: a number, or one for each token, ``[...]``.
        ignore_index: target of tokens that are not scored; nothing is computed for them.
        entropy: also return the entropy; like the log-probabilities of targets and candidates, and unlike the rest, it
            has a gradient.
        candidates: ``[..., k]``, more tokens to score at each position, such as a teacher's most likely ones.
        reference: also score the targets under a frozen model: its hidden states ``[..., D]`` where it has the same
            head (the policy with its adapter off), else states and head.
        argmax: also return the most likely token.
        top_k: also return whether the target is among this many most likely tokens.
        top_log_probs: also return this many of the most likely tokens and their log-probabilities.
        log_sum_squares: also return ``log(sum(p**2))``.
        mean_logit: also return the mean logit.
        tile: tokens per tile, or a rule of :func:`seqtile.apply`.
        vocabulary_group: ranks over which the head's rows are sharded evenly, in rank order, and which have the same
            tokens; ``weight`` and ``bias`` are then this rank's rows. Not needed for a ``DTensor`` weight with
            ``Shard(0)``. Log-probabilities and entropies only. The group reduces ``4 * n`` numbers in the forward and
            the hidden states' gradient in the backward, in their dtype, whatever the number of tiles.

    Cost:
        Matrix products in units of ``2 * n * D * V``: 4 with a gradient (the backward computes the logits again, since
        each token has an upstream gradient of its own), 1 without; the reference 1 more. Memory: as
        :func:`seqtile.ops.lm_loss.cross_entropy.linear_cross_entropy`, and one number per token and result. One
        synchronisation with the host, for ``n``.

    Raises:
        ValueError: a wrong type, dtype or shape, targets or candidates outside the vocabulary, a temperature that is
            not above 0, or a number of tokens below 1 or above the vocabulary.
    """
    expect_tensors(weight=weight, targets=targets)
    if vocabulary_group is not None and not isinstance(vocabulary_group, dist.ProcessGroup):
        raise ValueError(f"vocabulary_group is of type {type(vocabulary_group).__name__}, expected a process group")
    weight, shard = own_rows(weight, vocabulary_group)
    vocabulary = weight.shape[0]
    if shard is not None:
        vocabulary = shard.vocabulary
        bias = None if bias is None else own_rows(bias, shard.group)[0]
        options = {"candidates": candidates is not None, "reference": reference is not None, "argmax": argmax,
                   "top_k": top_k, "top_log_probs": top_log_probs, "log_sum_squares": log_sum_squares,
                   "mean_logit": mean_logit}  # fmt: skip
        if refused := [name for name, requested in options.items() if requested]:
            raise ValueError(
                f"a head with a sharded vocabulary supports log-probabilities and entropies only, got {refused[0]}; "
                "gather the weight"
            )
    for name, requested in (("top_k", top_k), ("top_log_probs", top_log_probs)):
        if requested is not None:
            most = f"at least 1 and at most the vocabulary, {vocabulary}, an integer"
            expect_number(name, requested, 1, vocabulary, most, whole=True)
    rule, aim = parse_tile(tile), Objective(scaling or LogitScaling(), ignore_index)
    conditions = _check_temperature(temperature, hidden, targets)
    if candidates is not None:
        conditions += check_candidates(candidates, hidden, targets, vocabulary)
    if reference is not None:
        reference = _check_reference(reference, hidden, weight, bias, aim.scaling)
    call = HeadCall(hidden, weight, bias, targets, aim, rule, vocabulary=vocabulary, conditions=conditions)
    kept, shape = call.kept, targets.shape
    score_dtype = call.score_dtype
    divisors = call.divisors(temperature)
    if shard is not None:
        log_probs, entropies = sharded_scores(call, shard, divisors)
        return TokenScores(log_probs.view(shape), entropies.view(shape) if entropy else None)
    if candidates is not None:
        candidates = kept.take(candidates.reshape(-1, candidates.shape[-1]).to(call.hidden.device).long())

    def empty(dtype: torch.dtype, *trailing: int) -> Tensor:
        return call.hidden.new_empty(len(kept), *trailing, dtype=dtype)

    numbers = {"log_sum_squares": log_sum_squares, "mean_logit": mean_logit}
    made: dict[str, Tensor] = {name: empty(score_dtype) for name, requested in numbers.items() if requested}
    if argmax:
        made["argmax"] = empty(torch.long)
    if top_k is not None:
        made["hit"] = empty(torch.bool)
    if top_log_probs is not None:
        made["top_log_probs"], made["top_tokens"] = empty(score_dtype, top_log_probs), empty(torch.long, top_log_probs)
    results = Wanted(**made, top_k=top_k or 1)
    scores = call.per_token(entropy, results, divisors, candidates)
    scored: dict[str, Tensor | None] = {
        ("top_k" if name == "hit" else name): kept.spread(value) for name, value in made.items()
    }
    scored |= {"log_probs": -scores.loss, "entropy": scores.entropy, "candidates": scores.candidates}
    if reference is not None:
        scored["reference"] = _log_probs_under(reference, call, targets, divisors, rule)
    return TokenScores(
        **{name: value.view(*shape, *value.shape[1:]) for name, value in scored.items() if value is not None}
    )


def _check_temperature(temperature: Tensor | float, hidden: Tensor, targets: Tensor) -> list[Condition]:
    if not isinstance(temperature, Tensor):
        LogitScaling(temperature=temperature)  # refuses what is not above 0
        return []
    if temperature.shape != targets.shape:
        raise ValueError(
            f"temperature has shape {tuple(temperature.shape)}, expected a number or that of the targets, "
            f"{tuple(targets.shape)}"
        )
    if temperature.is_complex():
        raise ValueError(f"temperature is of dtype {temperature.dtype}, expected numbers above 0")
    values = temperature.detach().reshape(-1).to(hidden.device)
    sentence = "temperature={value} of a token in the loss, expected numbers above 0"
    return [Condition((values > 0) & values.isfinite(), values, sentence)]


def check_candidates(candidates: Tensor, hidden: Tensor, targets: Tensor, vocabulary: int) -> list[Condition]:
    """A condition on the candidates of each token that is not ignored.

    Args:
        candidates: ``[..., k]``.
        hidden: ``[..., D]``.
        targets: ``[...]``.
        vocabulary: ``V``.

    Raises:
        ValueError: no integers, or of another shape.
    """
    expect_tensors(candidates=candidates)
    odd = candidates.is_floating_point() or candidates.is_complex() or candidates.dtype == torch.bool
    if odd or candidates.shape[:-1] != targets.shape or not candidates.dim() or not candidates.shape[-1]:
        raise ValueError(
            f"candidates are {candidates.dtype} of shape {tuple(candidates.shape)}, expected integers of "
            f"{(*targets.shape, 'k')}".replace("'", "")
        )
    values = candidates.reshape(-1, candidates.shape[-1]).to(hidden.device)
    sentence = f"candidates {{value}} of a token in the loss, expected 0 to {vocabulary - 1} (the vocabulary)"
    return [Condition(((values >= 0) & (values < vocabulary)).all(-1), values, sentence)]


def _check_reference(
    reference: Tensor | HeadInput, hidden: Tensor, weight: Tensor, bias: Tensor | None, scaling: LogitScaling
) -> HeadInput:
    if isinstance(reference, Tensor):
        reference = HeadInput(reference, weight, bias, scaling)
    if not isinstance(reference, HeadInput):
        raise ValueError(
            f"reference is of type {type(reference).__name__}, expected hidden states (a tensor) or a HeadInput"
        )
    check_head_input(reference, hidden, "the reference's ")
    if reference.weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"the reference's head has {reference.weight.shape[0]} rows, expected the same vocabulary, "
            f"{weight.shape[0]}"
        )
    return reference


def check_head_input(head: HeadInput, hidden: Tensor, whose: str) -> None:
    """Refuse another model's states and head that are not of the same tokens as ``hidden`` ``[..., D]``.

    Raises:
        ValueError: a sentence that begins with ``whose``, such as ``"the teacher's "``.
    """
    expect_head(head.hidden, head.weight, head.bias, whose)
    if head.hidden.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"{whose}hidden states have shape {tuple(head.hidden.shape)}, expected one per token, "
            f"{(*hidden.shape[:-1], 'D')}".replace("'D'", "D")
        )


def _log_probs_under(
    reference: HeadInput, call: HeadCall, targets: Tensor, divisors: Tensor | None, rule: TileRule
) -> Tensor:
    """Log-probability of each target that counts under a frozen model."""
    aim = Objective(reference.scaling, call.plan.objective.ignore_index)
    with torch.no_grad():
        reference_call = HeadCall(reference.hidden, reference.weight, reference.bias, targets, aim, rule, call.kept)
        return -reference_call.per_token(temperature=divisors).loss
