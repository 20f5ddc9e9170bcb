"""FlashAttention's shapes without FlashAttention: no mask, keys and values never repeated."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from seqtile.chunks.layer_cache import SHAPES

NAME = SHAPES


def register_flash_shapes() -> str:
    """Make the stand-in known to Transformers under a name of its own, which is returned; nothing else changes."""
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    return NAME


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
    dropout: float = 0.0, scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """PyTorch's own flash kernel on the CPU, which saves what the others save: q, k, v, output, log-sum-exp."""
    width = value.shape[-1]
    if width < query.shape[-1]:  # latent attention: values are padded to the keys' width and cut afterwards
        value = nn.functional.pad(value, (0, query.shape[-1] - width))
    output = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout,
        scale=scaling,
        is_causal=getattr(module, "is_causal", True),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[..., :width].transpose(1, 2).contiguous(), None
