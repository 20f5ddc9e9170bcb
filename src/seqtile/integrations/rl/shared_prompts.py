"""Scores of a padded batch whose samples share prompts, each prompt computed once: for any stack's actor.

verl, OpenRLHF, SkyRL and others call a Hugging Face model with ``input_ids`` and ``attention_mask`` ``[B, T]`` and read
one number per token of the responses. Call :func:`score_shared` there instead.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seqtile._errors import UserError
from seqtile.lm_loss.tiled_loss import deferred_logits
from seqtile.ops.lm_loss.kept_tokens import IGNORED
from seqtile.ops.lm_loss.token_logprobs import TokenScores
from seqtile.shared_prompts.model import shares_prompts
from seqtile.shared_prompts.trl_calls import fold_batch


def score_shared(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor, *, temperature: float = 1.0,
    entropy: bool = False,
) -> TokenScores:  # fmt: skip
    """Log-probabilities, and entropies, of each labelled token, ``[B, T - 1]``; 0 where there is no label.

    Args:
        model: after ``seqtile.share_prompts(model)`` and ``seqtile.apply(model, loss="tiled")``.
        input_ids: ``[B, T]``, padded on any side.
        attention_mask: ``[B, T]``, or None for no padding.
        labels: ``[B, T]``, not shifted: the token itself where it is scored, as those of a response, else -100.
        temperature: divides the logits.
        entropy: whether to compute entropies.

    Cost:
        Each different token goes through the model once, and the labelled ones through its head.

    Raises:
        UserError: the model has no tiled loss, or does not share prompts.
    """
    if not shares_prompts(model):
        raise UserError(
            "shared-prompts.not-applied",
            f"score_shared needs seqtile.share_prompts(model) first, got {type(model).__name__} without it",
        )
    fold = fold_batch(input_ids, attention_mask, labels)
    if isinstance(fold, str):
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    else:
        inputs, targets = fold.row.inputs, fold.row.labels
    with deferred_logits(model):
        scores = model(**inputs).logits.scores(targets, temperature=temperature, entropy=entropy)
    log_probs, entropies = (
        None if values is None else values[:, :-1] if isinstance(fold, str) else fold.spread(values)
        for values in (scores.log_probs, scores.entropy)
    )
    assert log_probs is not None
    return TokenScores(log_probs, entropies)
