"""Sequence parallelism of layers with a state: what is refused.

Ulysses and ring attention exchange what *attention* needs. A layer that carries a state along the sequence, or a
convolution, begins on every rank with an empty state instead of the one that the rank before it left. Nothing fails:
the first rank's outputs are right, and all gradients are wrong.

Source: https://github.com/huggingface/accelerate/pull/4177 measured it, and accelerate refuses it from 1.15 on where a
configuration's ``layer_types`` say ``linear_attention``; https://github.com/deepspeedai/DeepSpeed/pull/8114 would
exchange the state of Gated DeltaNet with flash-linear-attention's kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from seqtile._compat import supports_sdpa
from seqtile._errors import UserError

if TYPE_CHECKING:
    from torch import nn

_ACCELERATE = "https://github.com/huggingface/accelerate/pull/4177"
_DEEPSPEED = "https://github.com/deepspeedai/DeepSpeed/pull/8114"
_THREADS = {"Gated DeltaNet": _DEEPSPEED, "KDA": _DEEPSPEED}
"""The upstream thread by kind of state; accelerate's for all others."""


def refuse_split_states(model: str, states: Mapping[str, Sequence[str]], ranks: int, setting: str = "sp_size") -> None:
    """Refuse to split sequences over ranks for a model with layers that carry a state along them.

    Args:
        model: what to call it.
        states: names of its layers with a state, by kind of state.
        ranks: ranks that share one sequence.
        setting: what set that number.

    Raises:
        UserError: the model has such a layer; as of accelerate 1.15 and DeepSpeed 0.19.8 (2026-11-22) no library
            exchanges the state between ranks.
    """
    if ranks <= 1 or not states:
        return
    state, layers = next(iter(states.items()))
    first = f"{layers[0]}{f' and {len(layers) - 1} more' if len(layers) > 1 else ''}"
    raise UserError(
        "sp-size.model-with-state",
        f"{setting} {ranks} would train {model} with wrong gradients: {first} carries a state along the sequence "
        f"({state}), which every rank would start from zero ({_THREADS.get(state, _ACCELERATE)}); use {setting} 1",
    )


def why_no_ring(model: nn.Module) -> str:
    """Why ring attention cannot compute this model's attention, in a few words; empty where it can.

    Under context parallelism accelerate replaces the masks of modules called ``self_attn`` by ``is_causal``
    (``_attach_context_parallel_hooks``), refuses windows of any size, and needs SDPA.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if config is not None else None
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or (["sliding_attention"] if window else []))
    if "sliding_attention" in kinds:
        return (
            f"ring attention would drop the mask of its sliding window of {window} tokens; use sp-size with flash "
            "attention instead"
        )
    if unsupported := sorted(kinds - {"full_attention"}):
        return f"its layers have {', '.join(unsupported)}, but ring attention is causal over whole sequences"
    if not supports_sdpa(model):
        return "ring attention needs PyTorch's attention (sdpa), which Transformers does not have for this model"
    if not any(name.endswith("self_attn") for name, _ in model.named_modules()):
        return "ring attention sets the masks of modules named self_attn, and it has none"
    return ""
