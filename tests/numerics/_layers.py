"""A decoder layer's frame around a block, and the ways to checkpoint it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HOW: dict[str, dict[str, Any]] = {
    "none": {},
    "checkpoint": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "no early stop": {"use_reentrant": False, "early_stop": False},
}
"""Keywords of ``torch.utils.checkpoint.checkpoint`` around the layer; none at all means no checkpoint."""


class Layer(nn.Module):
    """Norm, block and residual, as in Llama; ``how`` is one of ``HOW``."""

    def __init__(self, inner: nn.Module, hidden: int, how: dict[str, Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.block = inner
        self.how = how

    def _layer(self, x: Tensor) -> Tensor:
        return x + self.block(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._layer, x, **self.how) if self.how else self._layer(x)
