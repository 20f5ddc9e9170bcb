"""OpenRLHF: log-probabilities and entropies of its actor.

Put them in the place of those of ``openrlhf.models.utils``, as ``openrlhf.models.actor`` imports them, and run the
actor's forward inside ``seqtile.deferred_logits(actor.model)``.
"""

from __future__ import annotations

from torch import Tensor

from seqtile.integrations.rl.logits import entropy_of, scores_of
from seqtile.lm_loss.deferred_logits import DeferredLogits


def log_probs_from_logits(logits: Tensor | DeferredLogits, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each label, ``[batch, length]``."""
    return scores_of(logits, labels, temperature).log_probs


def compute_entropy(logits: Tensor | DeferredLogits) -> Tensor:
    """Entropy of each position, ``[batch, length]``."""
    return entropy_of(logits)
