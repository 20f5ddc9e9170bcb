"""Check, on the model itself, that packed documents do not attend to each other.

Packing (TRL's "bfd") puts documents side by side in one row, and ``position_ids`` start again at each. Whether the
attention keeps them apart is decided in Transformers' code of each architecture: most masks are made from
``position_ids``; OPT and gpt-oss (transformers 5.0 to 5.24) and Falcon (to 5.23) leave them out and let documents mix
in silence. Layers with a state know nothing of ``position_ids``. Transformers' kernels for some of them take the
boundaries that TRL's collator hands over (``cu_seq_lens_q``, ``seq_idx``), its PyTorch paths do not
(https://github.com/huggingface/transformers/issues/46093).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seqtile._compat import attention_kind, compute_attention_plainly
from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.recognise.decoder_layers import states_of

if TYPE_CHECKING:
    from torch import Tensor

logger = first_rank_logger(__name__)

DOCUMENT_TOKENS = 4
"""Tokens of each of the two documents that the model is run on."""
LEAK = 0.1
"""Of the effect that the first document has when the two are one text. Rounding (in bf16, and by experts whose tokens
are grouped otherwise) stays far below it; a mask without the boundary gives about the whole effect."""


def check_packing(model: Any, arguments: Any) -> None:
    """Refuse to pack documents for a model whose attention lets them mix.

    Args:
        model: the model as loaded, before tiling, adapters and engines.
        arguments: the trainer's (``SFTConfig``).

    Cost:
        Four forwards of eight tokens, and only if documents are packed; for a model with layers that carry a state,
        and attention or kernels that do not run on the CPU, of a model with few layers on the accelerator.

    Raises:
        UserError: documents would mix.
    """
    import torch

    if not (arguments.padding_free or (arguments.packing and arguments.packing_strategy != "wrapped")):
        return  # "wrapped" joins documents to one text on purpose
    attention = attention_kind(model) or "eager"
    states = states_of(model)
    if "flash" in attention and not states:
        return  # its kernels take the boundaries (cu_seq_lens), and run on an accelerator only
    if any(p.is_meta or hasattr(p, "ds_shape") for p in model.parameters()):
        logger.warning("weights are not in this process yet; did not check that packed documents stay separate")
        return
    # Layers with a state run other kernels on an accelerator, to which the trainer moves the model later.
    moves = torch.accelerator.is_available() and model.get_input_embeddings().weight.device.type == "cpu"
    if not _mixes(_shallow_copy(model) if states and ("flash" in attention or moves) else model):
        return
    if states:
        state, layers = next(iter(states.items()))
        raise UserError(
            "packing.shared-state",
            f"packing with {type(model).__name__}: packed documents would share state ({state}, in {layers[0]} and "
            "others), which is not reset between documents; turn packing off, or set packing 'wrapped' to join "
            "documents on purpose",
        )
    raise UserError(
        "packing.no-document-mask",
        f"packing with {type(model).__name__} and {attention} attention: packed documents would attend to each "
        "other (Transformers builds this model's mask without position_ids); turn packing off, set packing "
        "'wrapped' to join documents on purpose, or use another attention",
    )


def _shallow_copy(model: Any) -> Any:
    """A model of the same kinds of layers, as few as hold them all, with plain attention, where training will run."""
    import torch

    from seqtile.models.layer_fields import first_layers, layer_kinds

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    on_cpu = device.type == "cpu"
    kinds = layer_kinds(model.config, model)[1]
    config = first_layers(model.config, 1 + max(kinds.index(kind) for kind in kinds))
    devices = [] if on_cpu else [torch.accelerator.current_device_index()]
    with torch.device(device), torch.random.fork_rng(devices, device_type="cuda" if on_cpu else device.type):
        compute_attention_plainly(config)
        return type(model)(config).to(model.dtype)


def _mixes(model: Any) -> bool:
    """Whether the second of two packed documents changes when the first one does."""
    import torch
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    device = model.get_input_embeddings().weight.device
    tokens = torch.arange(2 * DOCUMENT_TOKENS, device=device)
    changed_tokens = torch.cat([tokens[:DOCUMENT_TOKENS].flip(0), tokens[DOCUMENT_TOKENS:]])
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)  # as SFTTrainer's, packing or not

    def second_logits(ids: Tensor, *, packed: bool) -> Tensor:
        """Logits of the second document, of two that are packed as TRL's collator does, or that are one text."""
        batch: dict[str, Any] = {"input_ids": ids[None], "position_ids": tokens[None]}
        if packed:
            batch = collate([{"input_ids": ids.tolist(), "seq_lengths": [DOCUMENT_TOKENS, DOCUMENT_TOKENS]}])
            del batch["labels"]
        batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        return model(**batch, use_cache=False).logits[:, DOCUMENT_TOKENS:].float()  # type: ignore[no-any-return]

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            packed_change, joined_change = (
                (second_logits(tokens, packed=packed) - second_logits(changed_tokens, packed=packed)).abs().max().item()
                for packed in (True, False)
            )
        return packed_change > LEAK * joined_change
    except (TypeError, ValueError):  # it takes no position_ids, or no boundaries without a kernel of its own
        return True
    finally:
        model.train(training)
