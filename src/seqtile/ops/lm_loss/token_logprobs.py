"""Log-probabilities of given tokens, with entropy and accuracy from the same pass over tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqtile.ops.lm_loss.cross_entropy import HeadCall
from seqtile.ops.lm_loss.logits_tile import LogitScaling, Objective, Wanted
from seqtile.tiling import TileRule, parse_tile


@dataclass(frozen=True)
class TokenScores:
    """What :func:`token_logprobs` found, each of the targets' shape; None where it was not asked for.

    Attributes:
        log_probs: log-probability of each target; 0 where it is ignored, as in every other field.
        entropy: entropy of the next-token distribution.
        argmax: the most likely token.
        top_k: whether the target is among the ``k`` most likely tokens (a tie counts for it).
        log_sum_squares: ``log(sum(p**2))``.
        mean_logit: mean of the logits over the vocabulary.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    argmax: Tensor | None = None
    top_k: Tensor | None = None
    log_sum_squares: Tensor | None = None
    mean_logit: Tensor | None = None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    scaling: LogitScaling | None = None,
    ignore_index: int = -100,
    entropy: bool = False,
    argmax: bool = False,
    top_k: int | None = None,
    log_sum_squares: bool = False,
    mean_logit: bool = False,
    tile: int | str | TileRule = "auto",
) -> TokenScores:
    """Score given tokens under a linear head: what DPO, GRPO, distillation and evaluation need.

    Replaces ``scaling.on(F.linear(hidden, weight, bias)).float().log_softmax(-1).gather(-1, targets)``. Targets are
    those of their own positions: shift them before.

    Args:
        hidden: ``[..., D]``, ``N`` tokens.
        weight: ``[V, D]``.
        targets: ``[...]``.
        bias: ``[V]``.
        scaling: what the model does to the product; a temperature goes here.
        ignore_index: target of tokens that are not scored.
        entropy: find the entropy too; it has a gradient, like the log-probabilities. The rest has none.
        argmax: find the most likely token.
        top_k: find whether the target is among this many most likely tokens.
        log_sum_squares: find ``log(sum(p**2))``.
        mean_logit: find the mean logit.
        tile: tokens per tile, or a rule of :func:`seqtile.apply`.

    Cost:
        Matrix products in units of ``2 * N * D * V``: 4 with a gradient (the backward computes the logits again, since
        each token has an upstream gradient of its own), 1 without. Memory: as
        :func:`seqtile.ops.lm_loss.cross_entropy.linear_cross_entropy`, and one number per token and result.

    Raises:
        ValueError: shapes that do not fit, or ``top_k`` below 1.
    """
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: expected at least 1")
    call = HeadCall(hidden, weight, bias, targets, Objective(scaling or LogitScaling(), ignore_index), parse_tile(tile))
    numbers = {"log_sum_squares": log_sum_squares, "mean_logit": mean_logit}
    wide = torch.promote_types(call.cut.dtype, torch.float32)
    made = {name: call.hidden.new_empty(call.hidden.shape[0], dtype=wide) for name, asked in numbers.items() if asked}
    if argmax:
        made["argmax"] = torch.empty_like(call.target)
    if top_k is not None:
        made["hit"] = torch.empty_like(call.valid)
    scores = call.per_token(entropy, Wanted(**made, top_k=top_k or 1))
    shape = targets.shape
    found = {("top_k" if name == "hit" else name): tensor.view(shape) for name, tensor in made.items()}
    if scores.entropy is not None:
        found["entropy"] = scores.entropy.view(shape)
    return TokenScores(log_probs=-scores.loss.view(shape), **found)
