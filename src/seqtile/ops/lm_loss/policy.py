"""Sums over sequences and ratios of two policies, for preference and policy losses."""

from __future__ import annotations

import torch
from torch import Tensor

from seqtile._compat import FakeTensor
from seqtile._errors import expect_tensors

LEVELS = ("token", "sequence", "sequence_token")


def sequence_logprobs(
    log_probs: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None, average: bool = False
) -> Tensor:
    """Log-probability of each sequence, the sum over its tokens: what the losses of the DPO family compare.

    Args:
        log_probs: ``[..., T]``, one sequence a row; or packed, ``[T]`` or ``[1, T]``.
        mask: tokens that count, in the same shape.
        cu_seqlens: ``[sequences + 1]`` integer offsets of packed sequences; None where not packed. Tokens outside, such
            as padding, must be masked. Read on the host, once.
        average: divide by the sequence's unmasked tokens, at least 1 (IPO, SimPO, ORPO).

    Returns:
        ``[...]``, or ``[sequences]`` where packed; in fp32, for float64 in float64.

    Raises:
        ValueError: a wrong type or shape, or ``cu_seqlens`` that descend or leave out an unmasked token.
    """
    _check(log_probs, mask, cu_seqlens)
    return _of_sequences(_wide(log_probs), mask, cu_seqlens, average)


def importance_ratios(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, *, level: str = "token", cu_seqlens: Tensor | None = None
) -> Tensor:
    """Importance ratio of each token: the policy against the one that generated it; 1 where the mask is 0.

    In fp32, for float64 in float64.

    Args:
        log_probs: ``[..., T]``, one sequence a row; or packed, ``[T]`` or ``[1, T]``.
        old_log_probs: a constant of the same shape.
        mask: tokens that count, in the same shape.
        level: ``"token"``: each token's own (PPO, GRPO, DAPO, CISPO); ``"sequence"``: the geometric mean over its
            sequence (GSPO, arXiv 2507.18071); ``"sequence_token"``: that value with the gradient of the token's own
            log-probability (GSPO-token).
        cu_seqlens: as in :func:`sequence_logprobs`.

    Raises:
        ValueError: as :func:`sequence_logprobs`, or an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level!r}: expected one of {', '.join(map(repr, LEVELS))}")
    _check(log_probs, mask, cu_seqlens)
    expect_tensors(old_log_probs=old_log_probs)
    if old_log_probs.shape != log_probs.shape:
        raise ValueError(
            f"old_log_probs have shape {tuple(old_log_probs.shape)}, expected that of the log_probs, "
            f"{tuple(log_probs.shape)}"
        )
    log_probs = _wide(log_probs)
    difference = torch.where(mask.bool(), log_probs - old_log_probs.detach(), 0)
    if level == "token":
        return difference.exp()
    means = _of_sequences(difference, mask, cu_seqlens, average=True)
    if cu_seqlens is None:
        spread = means.unsqueeze(-1).expand(log_probs.shape)
    else:
        numbers = _sequence_of(log_probs.shape[-1], cu_seqlens.to(log_probs.device))
        spread = means.index_select(0, numbers).view(log_probs.shape)
    if level == "sequence_token":
        spread = spread.detach() + log_probs - log_probs.detach()
    return torch.where(mask.bool(), spread, 0).exp()


def _wide(log_probs: Tensor) -> Tensor:
    """In the dtype of sums: fp16 counts to 65,504 tokens, bf16 exactly to 256."""
    return log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))


def _check(log_probs: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> None:
    expect_tensors(log_probs=log_probs, mask=mask)
    if not log_probs.is_floating_point() or not log_probs.dim():
        raise ValueError(
            f"log_probs are {log_probs.dtype} of shape {tuple(log_probs.shape)}, expected floating-point numbers of "
            "[..., T]"
        )
    if mask.shape != log_probs.shape:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, expected that of the log_probs, {tuple(log_probs.shape)}"
        )
    if cu_seqlens is None:
        return
    expect_tensors(cu_seqlens=cu_seqlens)
    if log_probs.numel() != log_probs.shape[-1]:
        raise ValueError(
            f"log_probs have shape {tuple(log_probs.shape)}, expected one packed row with cu_seqlens, [T] or [1, T]"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens are {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}, expected int32 or int64 of "
            "[sequences + 1]"
        )
    if cu_seqlens.is_meta or isinstance(cu_seqlens, FakeTensor):
        return
    places = torch.arange(log_probs.shape[-1], device=cu_seqlens.device)
    outside = (places < cu_seqlens[0]) | (places >= cu_seqlens[-1])
    in_order = (cu_seqlens[1:] >= cu_seqlens[:-1]).all() & (cu_seqlens[0] >= 0) & (cu_seqlens[-1] <= len(places))
    left_out = (outside & mask.reshape(-1).bool().to(outside.device)).any()
    if not (in_order & ~left_out):
        raise ValueError(
            f"cu_seqlens are {cu_seqlens.tolist()}, expected ascending offsets from 0 to {len(places)} that cover "
            "every token of the loss"
        )


def _sequence_of(tokens: int, cu_seqlens: Tensor) -> Tensor:
    """Number of the sequence that each packed token is in."""
    places = torch.arange(tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), places, right=True).clamp(max=len(cu_seqlens) - 2)


def _of_sequences(log_probs: Tensor, mask: Tensor, cu_seqlens: Tensor | None, average: bool) -> Tensor:
    sums = _sums(torch.where(mask.bool(), log_probs, 0), cu_seqlens)
    return sums / _sums(mask.bool().to(sums.dtype), cu_seqlens).clamp(min=1) if average else sums


def _sums(values: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        return values.sum(-1)
    flat = values.reshape(-1)
    numbers = _sequence_of(flat.shape[0], cu_seqlens.to(flat.device))
    return flat.new_zeros(len(cu_seqlens) - 1).index_add(0, numbers, flat)
