"""Deferred logits of hidden states and a weight, and scores of deferred or materialised logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seqtile._errors import expect_tensors
from seqtile.lm_loss.deferred_logits import DeferredLogits
from seqtile.ops.lm_loss.kept_tokens import IGNORED, KeptTokens
from seqtile.ops.lm_loss.logits_tile import LogitScaling
from seqtile.ops.lm_loss.token_logprobs import HeadInput, TokenScores, token_logprobs

if TYPE_CHECKING:
    import torch.distributed as dist


def logits_of(
    source: HeadInput, *, vocabulary_group: dist.ProcessGroup | None = None, tile: int | str = "auto"
) -> DeferredLogits:
    """Deferred logits ``[..., V]`` of ``source.hidden`` ``[..., D]``: to be scaled, sliced and scored, never made.

    Args:
        source: hidden states and head; with a group, this rank's rows of it.
        vocabulary_group: as :func:`seqtile.token_logprobs` takes it.
        tile: as there.
    """

    def make(hidden: Tensor, why: str) -> Tensor:
        return F.linear(hidden, source.weight, source.bias)

    scaling = source.scaling
    made = DeferredLogits(
        source.hidden, source.weight.shape[0], make, source=_Plain(source, vocabulary_group, tile)
    )  # fmt: skip
    if scaling != LogitScaling():
        made = made * scaling.before
        made = made.tanh() * scaling.after if scaling.softcap else made
    return made


@dataclass(frozen=True, eq=False)
class _Plain:
    source: HeadInput
    group: Any
    tile: int | str

    def scores(self, logits: DeferredLogits, targets: Tensor, temperature: float, **options: Any) -> TokenScores:
        return token_logprobs(
            logits.hidden, self.source.weight, targets, bias=self.source.bias, scaling=logits.scaling,
            temperature=temperature, tile=self.tile, vocabulary_group=self.group, **options,
        )  # fmt: skip


def scores_of(
    logits: Tensor | DeferredLogits, targets: Tensor, temperature: float = 1.0, entropy: bool = False
) -> TokenScores:
    """Log-probabilities, and entropies, of deferred logits in tiles and of real ones as they are, ``[...]``.

    Raises:
        ValueError: shapes that do not fit, targets outside the vocabulary, or a temperature that is not above 0.
    """
    LogitScaling(temperature=temperature)  # refuses what is not above 0
    if isinstance(logits, DeferredLogits):
        if logits.written is None:
            return logits.scores(targets, temperature=temperature, entropy=entropy)
        logits = logits.written
    expect_tensors(logits=logits, targets=targets)
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"got targets of shape {tuple(targets.shape)}, expected one per token, {tuple(logits.shape[:-1])}"
        )
    KeptTokens.of(targets.reshape(-1).to(logits.device), IGNORED, logits.shape[-1])  # refuses targets outside
    kept = targets != IGNORED
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_p = scaled.log_softmax(-1)
    log_probs = log_p.gather(-1, torch.where(kept, targets, 0).long().unsqueeze(-1)).squeeze(-1)
    entropies = torch.where(kept, -(log_p.exp() * log_p).sum(-1), 0) if entropy else None
    return TokenScores(torch.where(kept, log_probs, 0), entropies)


def entropy_of(logits: Tensor | DeferredLogits) -> Tensor:
    """Entropy of each position, ``[...]``, whatever the target."""
    targets = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    entropies = scores_of(logits, targets, entropy=True).entropy
    assert entropies is not None
    return entropies
