"""The language-model head in tiles of tokens, for the trainer's loss.

TRL never builds the whole logits, but scores 4,096 tokens by up to 32,768 vocabulary entries at a time. Where the
model is small against that (a small hidden size on a CPU), this one buffer is the step's peak and hides
everything else. The head is position-wise like an MLP, so the same operator runs it over smaller tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from seqtile._errors import UserError
from seqtile.ops.generic import run_in_tiles
from seqtile.tiling import sizes_within

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORE_INDEX = -100

_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling", "final_logit_softcapping")
"""What some models do to their logits after the head; TRL's own head knows them, this one does not."""


def check_plain_head(config: Any) -> None:
    """Refuse models whose logits are more than the head's product.

    Raises:
        UserError: the model scales or caps its logits, or adds a router loss to the objective.
    """
    text = config.get_text_config()
    for name in _SCALES:
        if getattr(text, name, None) not in (None, 1.0):
            raise UserError(f"loss_tile does not know this model's {name} ({getattr(text, name)}); leave loss_tile out")
    if hasattr(text, "output_router_logits"):
        raise UserError("loss_tile does not add a mixture of experts' router loss; leave loss_tile out")


class TiledHead:
    """Stands in for ``forward`` on one model instance that carries TRL's fused head.

    Calls with ``fused_lm_head=True`` run the backbone and then head, softmax and log-probability of one tile of
    tokens after another; every other call goes to the forward that was there.

    Shapes: log-probabilities, entropy and top-1 hits are ``[B, T]``, zero where the shifted label is ignored.
    Cost: the head's product once in forward, once recomputed and twice in backward, as TRL's; memory: about five
    ``[tile, V]`` fp32 tensors.
    """

    def __init__(self, model: PreTrainedModel, tile: int) -> None:
        self.model, self.tile, self.before = model, tile, model.forward

    def install(self) -> None:
        """Put the tiled head on the model instance."""
        self.model.__dict__["forward"] = self

    def __call__(self, *args: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if not fused_lm_head or labels is None:
            if fused_lm_head:
                kwargs["fused_lm_head"] = True
            return self.before(*args, labels=labels, **kwargs)
        count = kwargs.pop("num_items_in_batch", None)
        hidden = self.model.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
        return self._score(hidden, labels, count)

    def _score(self, hidden: Tensor, labels: Tensor, count: Tensor | int | None) -> Any:
        from trl.trainer.utils import FusedCausalLMOutput

        head = self.model.get_output_embeddings()
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).to(hidden.device)
        mask = targets != IGNORE_INDEX

        def weights() -> Mapping[str, Tensor]:
            return {name: weight for name, weight in head.named_parameters() if weight.requires_grad}

        def run(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits = functional_call(head, dict(aliases), (tiles[0],)) if aliases else head(tiles[0])
            return score_tokens(logits, tiles[1].squeeze(-1))

        sizes = sizes_within(targets.numel(), self.tile)
        parts = run_in_tiles(run, (hidden, targets.unsqueeze(-1)), sizes, weights)
        log_probs, entropy, is_top1 = (part.squeeze(-1) for part in parts)
        tokens = mask.sum().clamp(min=1) if count is None else count
        return FusedCausalLMOutput(
            loss=-log_probs.sum() / tokens, log_probs=log_probs, entropy=entropy, is_top1=is_top1, label_mask=mask
        )


def score_tokens(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target, entropy and top-1 hit, each ``[..., 1]``; zero where the target is ignored."""
    log_softmax = logits.float().log_softmax(-1)
    scored = targets != IGNORE_INDEX
    log_probs = log_softmax.gather(-1, targets.clamp(min=0).unsqueeze(-1)) * scored.unsqueeze(-1)
    with torch.no_grad():
        entropy = -(log_softmax.exp() * log_softmax).sum(-1) * scored
        is_top1 = (log_softmax.argmax(-1) == targets) & scored
    return log_probs, entropy.unsqueeze(-1), is_top1.unsqueeze(-1)
