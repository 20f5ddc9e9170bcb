"""SkyRL: log-probabilities and entropies of its model wrapper.

Put them in the place of those of ``skyrl.backends.skyrl_train.utils.torch_utils``, as ``workers.model_wrapper`` imports
them, and run the wrapper's forward inside ``seqtile.deferred_logits(model)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqtile.integrations.rl.logits import entropy_of, scores_of
from seqtile.lm_loss.deferred_logits import DeferredLogits


def logprobs_from_logits(logits: Tensor | DeferredLogits, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-probability of each label, ``[batch, length]``; ``inplace_backward`` is a setting of another kernel's."""
    return scores_of(logits, labels).log_probs


def chunked_entropy_from_logits(
    logits: Tensor | DeferredLogits, requires_grad: bool = False, attention_mask: Tensor | None = None,
    chunk_size: int = 1024,
) -> Tensor:  # fmt: skip
    """Entropy of each position, ``[batch, length]``, 0 where ``attention_mask`` is; ``chunk_size`` is not looked at."""
    with torch.set_grad_enabled(requires_grad and torch.is_grad_enabled()):
        entropy = entropy_of(logits)
        return entropy if attention_mask is None else entropy * attention_mask
