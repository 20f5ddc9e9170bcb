"""What preference and policy losses make of log-probabilities: sums of sequences, and ratios of two policies."""

from __future__ import annotations

import torch
from torch import Tensor

from seqtile._errors import expect_tensors

LEVELS = ("token", "sequence", "sequence_token")


def sequence_logprobs(
    log_probs: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None, average: bool = False
) -> Tensor:
    """Log-probability of each sequence, the sum over its tokens: what the losses of the DPO family compare.

    Args:
        log_probs: ``[..., T]``, one sequence a row; or packed, ``[T]`` or ``[1, T]``.
        mask: of the same shape, the tokens that count.
        cu_seqlens: ``[sequences + 1]``, where each packed sequence begins, the last one ends; None where not packed.
        average: divide by the sequence's tokens that count, 1 at least (IPO, SimPO, ORPO).

    Returns:
        ``[...]``, or ``[sequences]`` where packed.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(log_probs, mask, cu_seqlens)
    sums = _sums(torch.where(mask.bool(), log_probs, 0), cu_seqlens)
    return sums / _sums(mask.bool().to(sums.dtype), cu_seqlens).clamp(min=1) if average else sums


def importance_ratios(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, *, level: str = "token", cu_seqlens: Tensor | None = None
) -> Tensor:
    """Ratio of the policy to the one that generated the tokens, one for each token, 1 where a token does not count.

    Args:
        log_probs: ``[..., T]``, one sequence a row; or packed, ``[T]`` or ``[1, T]``.
        old_log_probs: of the same shape, a constant.
        mask: of the same shape, the tokens that count.
        level: ``"token"``: each token's own (PPO, GRPO, DAPO, CISPO); ``"sequence"``: the geometric mean over its
            sequence (GSPO, arXiv 2507.18071); ``"sequence_token"``: that value with the gradient of the token's own
            log-probability (GSPO-token).
        cu_seqlens: as in :func:`sequence_logprobs`.

    Raises:
        ValueError: shapes that do not fit, or an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level!r}: expected one of {', '.join(map(repr, LEVELS))}")
    _check(log_probs, mask, cu_seqlens)
    if old_log_probs.shape != log_probs.shape:
        raise ValueError(
            f"old_log_probs have shape {tuple(old_log_probs.shape)}, expected that of the log_probs, "
            f"{tuple(log_probs.shape)}"
        )
    difference = torch.where(mask.bool(), log_probs - old_log_probs.detach(), 0)
    if level == "token":
        return difference.exp()
    means = sequence_logprobs(difference, mask, cu_seqlens=cu_seqlens, average=True)
    if cu_seqlens is None:
        spread = means.unsqueeze(-1).expand(log_probs.shape)
    else:
        spread = means.index_select(0, _sequence_of(log_probs.shape[-1], cu_seqlens)).view(log_probs.shape)
    if level == "sequence_token":
        spread = spread.detach() + log_probs - log_probs.detach()
    return torch.where(mask.bool(), spread, 0).exp()


def _check(log_probs: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> None:
    expect_tensors(log_probs=log_probs, mask=mask)
    if mask.shape != log_probs.shape:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, expected that of the log_probs, {tuple(log_probs.shape)}"
        )
    if cu_seqlens is not None and log_probs.numel() != log_probs.shape[-1]:
        raise ValueError(
            f"log_probs have shape {tuple(log_probs.shape)}, expected one packed row with cu_seqlens, [T] or [1, T]"
        )


def _sequence_of(tokens: int, cu_seqlens: Tensor) -> Tensor:
    """Number of the sequence that each packed token is in."""
    places = torch.arange(tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), places, right=True).clamp(max=len(cu_seqlens) - 2)


def _sums(values: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        return values.sum(-1)
    flat = values.reshape(-1)
    numbers = _sequence_of(flat.shape[0], cu_seqlens.to(flat.device))
    return flat.new_zeros(len(cu_seqlens) - 1).index_add(0, numbers, flat)
