"""prime-rl: its head that returns log-probabilities, with a gradient of the entropy too.

Put it in the place of ``prime_rl.trainer.models.layers.lm_head.FusedOutputLinear``.
"""

from __future__ import annotations

from torch import Tensor, nn

from seqtile.ops.lm_loss.token_logprobs import token_logprobs


class FusedOutputLinear(nn.Linear):
    """A head without bias that returns ``{"logprobs": [B, T], "entropy": [B, T]}``.

    Args:
        in_features: ``D``.
        out_features: ``V``.
        chunk_size: tokens per tile.
    """

    def __init__(self, in_features: int, out_features: int, chunk_size: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size = chunk_size

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, labels: Tensor | None = None, temperature: Tensor | None = None
    ) -> dict[str, Tensor]:
        """``hidden_states`` ``[B, T, D]``, ``labels`` and ``temperature`` ``[B, T]``.

        Raises:
            ValueError: labels or temperatures are missing, or do not fit.
        """
        if labels is None or temperature is None:
            raise ValueError("got None for labels or temperatures, expected one per token")
        scores = token_logprobs(
            hidden_states, self.weight, labels, temperature=temperature, entropy=True, tile=self.chunk_size
        )
        assert scores.entropy is not None
        return {"logprobs": scores.log_probs, "entropy": scores.entropy}
