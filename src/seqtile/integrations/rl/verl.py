"""verl: the two functions behind ``use_fused_kernels``.

Put them in the place of ``verl.utils.kernel.linear_cross_entropy.linear_cross_entropy`` (``impl_backend: triton``) and
``verl.utils.experimental.torch_functional.FusedLinearForPPO`` (``impl_backend: torch``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from seqtile.ops.lm_loss.token_logprobs import token_logprobs

if TYPE_CHECKING:
    import torch.distributed as dist


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probabilities and entropies, ``[N]`` each, of ``hidden`` ``[..., D]``, under a head ``[V, D]`` or its rows.

    Raises:
        ValueError: ``reduction`` is another than ``"none"``, or what :func:`seqtile.token_logprobs` refuses.
    """
    if reduction.lower() != "none":
        raise ValueError(f"got reduction={reduction!r}, expected 'none'")
    scores = token_logprobs(
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), temperature=temperature, entropy=True,
        vocabulary_group=dist_process_group,
    )  # fmt: skip
    assert scores.entropy is not None
    return scores.log_probs, scores.entropy


class FusedLinearForPPO(nn.Module):
    """Log-probabilities and entropies, each of the shape of ``input_ids``.

    Args:
        chunk_size: tokens per tile.
    """

    def __init__(self, chunk_size: int = 512) -> None:
        super().__init__()
        self.chunk_size = chunk_size

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        scores = token_logprobs(
            hidden_states, vocab_weights, input_ids, temperature=temperature, entropy=True, tile=self.chunk_size
        )
        assert scores.entropy is not None
        return scores.log_probs, scores.entropy
