"""Packed documents must not see each other: the model itself is asked, before it is trained.

Packing (TRL's "bfd") puts documents side by side in one row, and ``position_ids`` start again at each. Whether the
attention keeps them apart is decided in Transformers' code of each architecture: most masks are made from
``position_ids``; OPT, Falcon and gpt-oss (transformers 5.0 to 5.23) leave them out and let documents mix in silence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seqtile._compat import attention_kind
from seqtile._errors import UserError
from seqtile._log import first_rank_logger

if TYPE_CHECKING:
    from torch import Tensor

logger = first_rank_logger(__name__)

_DOCUMENT = 4
"""Tokens of each of the two documents that the question is asked with."""
_LEAK = 0.1
"""Of the effect that the first document has when the two are one text. Rounding (in bf16, and by experts whose tokens
are grouped otherwise) stays far below it; a mask without the boundary gives about the whole effect."""


def check_packing(model: Any, arguments: Any) -> None:
    """Refuse to pack documents for a model whose attention lets them mix.

    Args:
        model: as loaded, before tiling, adapters and engines.
        arguments: the trainer's (``SFTConfig``).

    Cost:
        Four forwards of eight tokens, and only if documents are packed.

    Raises:
        UserError: documents would mix.
    """
    if not (arguments.padding_free or (arguments.packing and arguments.packing_strategy != "wrapped")):
        return  # "wrapped" joins documents to one text on purpose
    attention = attention_kind(model) or "eager"
    if "flash" in attention:
        return  # its kernels take the boundaries (cu_seq_lens), and run on an accelerator only
    if any(p.is_meta or hasattr(p, "ds_shape") for p in model.parameters()):
        logger.warning("the weights are not in this process yet: not checked that packed documents stay apart")
        return
    if _mixes(model):
        raise UserError(
            f"packing with {type(model).__name__} and {attention} attention: packed documents would attend to each "
            "other (Transformers makes this model's mask without position_ids); turn packing off, give packing "
            "'wrapped' to join documents on purpose, or try another attn_implementation in model_kwargs"
        )


def _mixes(model: Any) -> bool:
    """Whether the second of two packed documents changes when the first one does."""
    import torch

    device = model.get_input_embeddings().weight.device
    one = torch.arange(2 * _DOCUMENT, device=device)[None]
    other = torch.cat([one[:, :_DOCUMENT].flip(1), one[:, _DOCUMENT:]], dim=1)
    packed = one % _DOCUMENT

    def change(position_ids: Tensor) -> float:
        second = [
            model(input_ids=ids, position_ids=position_ids, use_cache=False).logits[:, _DOCUMENT:].float()
            for ids in (one, other)
        ]
        return (second[0] - second[1]).abs().max().item()  # type: ignore[no-any-return]

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return change(packed) > _LEAK * change(one)
    except (TypeError, ValueError):  # it takes no position_ids
        return True
    finally:
        model.train(training)
