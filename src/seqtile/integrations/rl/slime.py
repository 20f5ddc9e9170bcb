"""slime: log-probabilities of its Megatron backend.

Put it in the place of ``slime.utils.ppo_utils.calculate_log_probs_and_entropy``, as
``slime.backends.megatron_utils.loss`` imports it, and have the model's output layer return
``logits_of(HeadInput(hidden, weight), vocabulary_group=tp_group).float()``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seqtile.integrations.rl.logits import scores_of
from seqtile.lm_loss.deferred_logits import DeferredLogits


def calculate_log_probs_and_entropy(
    logits: DeferredLogits, tokens: Tensor, tp_group: Any, with_entropy: bool = False, chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None, with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Log-probabilities ``[T, 1]`` and entropies ``[T]`` (or None) of deferred logits ``[T, V]``.

    ``tp_group`` and ``chunk_size`` are settings of the deferred logits' own and not looked at.

    Raises:
        ValueError: materialised logits, or a ``log_prob_keep_mask``.
    """
    if not isinstance(logits, DeferredLogits):
        raise ValueError(
            f"got materialized logits of shape {tuple(logits.shape)}, expected deferred ones; return "
            "seqtile.integrations.rl.logits.logits_of(...) from the output layer"
        )
    if log_prob_keep_mask is not None:
        raise ValueError("log_prob_keep_mask is not supported; use rollout_top_p=1.0")
    scores = scores_of(logits, tokens, entropy=with_entropy)
    entropy = scores.entropy
    if entropy is not None and not with_entropy_grad:
        entropy = entropy.detach()
    return scores.log_probs.unsqueeze(-1), entropy
