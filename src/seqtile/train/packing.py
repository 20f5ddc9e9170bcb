"""Packed documents must not see each other: the model itself is asked, before it is trained.

Packing (TRL's "bfd") puts documents side by side in one row, and ``position_ids`` start again at each. Whether the
attention keeps them apart is decided in Transformers' code of each architecture: most masks are made from
``position_ids``; OPT, Falcon and gpt-oss (transformers 5.0 to 5.23) leave them out and let documents mix in silence.
Layers with a state know nothing of ``position_ids``. Transformers' kernels for some of them take the boundaries that
TRL's collator hands over (``cu_seq_lens_q``, ``seq_idx``), its PyTorch paths do not
(https://github.com/huggingface/transformers/issues/46093).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from seqtile._compat import attention_kind, compute_attention_plainly
from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.models.discover.decoder_layers import states_of

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
        Four forwards of eight tokens, and only if documents are packed; for a model with layers that carry a state,
        and attention or kernels that do not run on the CPU, of a model with few layers on the accelerator.

    Raises:
        UserError: documents would mix.
    """
    if not (arguments.padding_free or (arguments.packing and arguments.packing_strategy != "wrapped")):
        return  # "wrapped" joins documents to one text on purpose
    attention = attention_kind(model) or "eager"
    states = states_of(model)
    if "flash" in attention and not states:
        return  # its kernels take the boundaries (cu_seq_lens), and run on an accelerator only
    if any(p.is_meta or hasattr(p, "ds_shape") for p in model.parameters()):
        logger.warning("the weights are not in this process yet: not checked that packed documents stay apart")
        return
    asked = _shallow(model) if states and ("flash" in attention or _on_cpu_for_now(model)) else model
    mixes = _mixes(asked)
    if mixes and states:
        kind, layers = next(iter(states.items()))
        raise UserError(
            f"packing with {type(model).__name__}: packed documents would read each other's state ({kind}, in "
            f"{layers[0]} and others), for it does not start again at a document here; turn packing off, or give "
            "packing 'wrapped' to join documents on purpose"
        )
    if mixes:
        raise UserError(
            f"packing with {type(model).__name__} and {attention} attention: packed documents would attend to each "
            "other (Transformers makes this model's mask without position_ids); turn packing off, give packing "
            "'wrapped' to join documents on purpose, or try another attn_implementation in model_kwargs"
        )


def _on_cpu_for_now(model: Any) -> bool:
    """Whether the trainer will move the model to an accelerator, where layers with a state run other kernels."""
    import torch

    return torch.accelerator.is_available() and model.get_input_embeddings().weight.device.type == "cpu"


def _shallow(model: Any) -> Any:
    """A model of the same kinds of layers, as few as hold them all, with plain attention, where training will run."""
    import torch

    from seqtile.planner.layer_structure import find_depths, first_layers

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    config = first_layers(model.config, find_depths(model.config, model).shallow)
    own = [] if device.type == "cpu" else [torch.accelerator.current_device_index()]
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.device(device), torch.random.fork_rng(own, device_type=kind):
        compute_attention_plainly(config)
        return type(model)(config).to(model.dtype)


def _packed(ids: Tensor) -> dict[str, Any]:
    """A row of two documents, ``[1, 2 * _DOCUMENT]``, as TRL's collator hands it to the model."""
    import torch
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)  # as SFTTrainer's, packing or not
    batch = collate([{"input_ids": ids[0].tolist(), "seq_lengths": [_DOCUMENT, _DOCUMENT]}])
    del batch["labels"]
    return {name: value.to(ids.device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _mixes(model: Any) -> bool:
    """Whether the second of two packed documents changes when the first one does."""
    import torch

    device = model.get_input_embeddings().weight.device
    one = torch.arange(2 * _DOCUMENT, device=device)[None]
    other = torch.cat([one[:, :_DOCUMENT].flip(1), one[:, _DOCUMENT:]], dim=1)

    def change(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
        """The largest change of the second document's logits between two batches."""
        logits = [model(**batch, use_cache=False).logits[:, _DOCUMENT:].float() for batch in (first, second)]
        return (logits[0] - logits[1]).abs().max().item()  # type: ignore[no-any-return]

    def whole(ids: Tensor) -> dict[str, Any]:
        return {"input_ids": ids, "position_ids": torch.arange(2 * _DOCUMENT, device=device)[None]}

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return change(_packed(one), _packed(other)) > _LEAK * change(whole(one), whole(other))
    except (TypeError, ValueError):  # it takes no position_ids, or no boundaries without a kernel of its own
        return True
    finally:
        model.train(training)
