"""Notes of a report: what a model's steps so far did, and what in its settings costs time or memory."""

from __future__ import annotations

from torch import nn

from seqtile._compat import CHECKPOINT_FUNCTION, attention_kind, early_stop
from seqtile._effects import find_checkpointed, split_frozen
from seqtile.blocks.instance import Installed, refusals, rotary_by_kernel
from seqtile.checkpointing.keep_attention import kept_per_token, wide_heads
from seqtile.checkpointing.policies import installed_checkpointing, is_on
from seqtile.checkpointing.reentrant import is_reentrant, shares_keys
from seqtile.install.techniques import known_techniques
from seqtile.install.tile_effects import tile_effects
from seqtile.ops.attention.backends import FLEX, attention_sentences, rotary_sentences
from seqtile.recognise.decoder_layers import decoder_layers

ATTENTION_COUNTS = 8192
"""Tokens from which a second attention forward is a few percent of a step; the report is silent below."""


def notes_on(model: nn.Module) -> list[str]:
    """Sentences for the user on ``model`` as it is now."""
    notes = []
    if any(is_reentrant(module) for module in model.modules()):
        notes.append(
            "reentrant activation checkpointing runs each block once more (14 GEMM units for a gated MLP "
            "instead of 11, untiled 12); use use_reentrant=False"
        )
        if shares_keys(model):
            notes.append(
                "layers of this model share keys and values; under reentrant checkpointing the layers that "
                "compute them lose part of their gradient, tiled or not"
            )
    if attention_kind(model) == "sdpa" and (wide_heads_note := wide_heads(model.config)):
        notes.append(wide_heads_note)
    if early_stop() is False:
        notes.append(
            "early stop of activation checkpointing is off, so each block runs once more (14 GEMM units for a "
            "gated MLP, untiled 12)"
        )
    forwards = [forward for m in model.modules() if isinstance(forward := m.__dict__.get("forward"), Installed)]
    notes += dict.fromkeys(forward.left_out_compiled for forward in forwards if forward.compiled)
    for technique in known_techniques():
        notes += technique.notes(model)
    notes += [note for effects in tile_effects(model) for note in effects.notes()]
    ran = [seen for forward in forwards if (seen := getattr(forward, "attention_ran", None)) is not None]
    if ran and not any(note.startswith("attention ran on") for note in notes):
        notes += attention_sentences(frozenset().union(*ran))
    notes += refusals(model)
    if not rotary_by_kernel(model):
        notes += rotary_sentences(model)
    most = max((forward.most_tokens for forward in forwards), default=0)
    in_chunks = any(forward.technique == "chunk" for forward in forwards)  # which save no attention
    again = "" if in_chunks else attention_runs_twice(model, most)
    if again and (not most or most >= ATTENTION_COUNTS):
        notes.append(again)
    return notes


def attention_runs_twice(model: nn.Module, tokens: int) -> str:
    """Describe the cost and benefit of ``checkpoint="attention-saved"``; "" where it does not apply.

    It is not chosen here: whether it fits depends on the whole step, which a plan counts.

    Args:
        model: as it is now.
        tokens: tokens of the longest batch that ran, 0 before the first.
    """
    if installed_checkpointing(model) or any(is_reentrant(module) for module in model.modules()):
        return ""
    for _, module in split_frozen(find_checkpointed(model))[0]:
        functions = [inner.__dict__.get(CHECKPOINT_FUNCTION) for inner in module.modules()]
        selective = any("context_fn" in getattr(function, "keywords", {}) for function in functions)
        if selective or not is_on(module) or attention_kind(module) in (None, "eager", FLEX):
            continue
        mixers = [layer.mixers for layer in decoder_layers(module)]
        layers = sum(not all(mixer.has_state for mixer in layer) for layer in mixers if layer)
        if not layers:
            continue
        text_config = module.config.get_text_config()  # type: ignore[union-attr, operator]
        kept = layers * kept_per_token(text_config, 2)
        of_batch = f", {kept * tokens / 2**30:,.2f} GiB for the {tokens:,} tokens that ran" if tokens else ""
        return (
            "activation checkpoints recompute attention; checkpoint='attention-saved' saves its output instead, "
            f"for {kept // layers:,} bytes per token (bf16) in each of {layers} layers{of_batch}"
        )
    return ""
