"""Encoders that train as masked language models: what they are given, and which attention they have."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import attention_is_exchangeable, buffers_of
from seqtile._errors import UserError, in_its_words, is_ours
from seqtile.planner.model_shapes import is_masked_lm

_POSITIONS = ("position_ids", "token_type_ids")
"""Names of the buffers, as long as the model has positions, that encoders take a row's part of."""


def check_attention(config: Any) -> None:
    """Refuse an encoder whose attention is code of its own: DeBERTa's came out 7 % under the CPU's allocator in bf16.

    Raises:
        UserError: with encoders that are planned.
    """
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    kind: Any = MODEL_FOR_MASKED_LM_MAPPING[type(config)]
    if not attention_is_exchangeable(kind):
        raise UserError(
            f"{kind.__name__} of the installed transformers computes attention in code of its own, and a plan is of "
            "encoders that call the attention function they are told (BERT, RoBERTa, ModernBERT, ELECTRA, ...); plan "
            "one of those, or use a newer transformers"
        )


@contextmanager
def in_one_sentence(config: Any) -> Iterator[None]:
    """Say in one sentence what a model's own code raises when it is run on shapes: of many kinds only some are tried.

    Raises:
        UserError: in place of an exception that is not seqtile's own, and of any for an encoder.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_ours(error) and not is_masked_lm(config):
            raise
        what = "plan another encoder" if is_masked_lm(config) else "try another --attention, or plan another model"
        raise UserError(
            f"a step of model type {config.model_type!r} cannot be run on shapes, and without that there is no plan "
            f"({in_its_words(error)}); {what}"
        ) from error


def add_masks(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """What ``DataCollatorForLanguageModeling`` gives an encoder beside ids ``[B, T]`` and labels, of full rows.

    Token types come with the tokenizers of models that know more than one.
    """
    given = {"attention_mask": torch.ones_like(ids)}
    takes = inspect.signature(type(model).forward).parameters
    if "token_type_ids" in takes and (getattr(model.config, "type_vocab_size", None) or 0) > 1:
        given["token_type_ids"] = torch.zeros_like(ids)
    return given


def lengthen_positions(model: nn.Module, tokens: int) -> None:
    """Have the positions that a fake model keeps reach as far as a row of ``tokens`` tokens.

    Fake rows may be longer than the model can read. Nothing is made: a row's part of such a buffer is a view.
    """
    for module in model.modules():
        own = buffers_of(module)
        for name in _POSITIONS:
            held = own.get(name)
            if held is not None and held.dim() == 2 and held.shape[1] < tokens:
                own[name] = held[:, :1].expand(held.shape[0], tokens)


def encoder_notes(config: Any) -> list[str]:
    """What is to be said of a plan of an encoder, in sentences."""
    notes = [
        "an encoder trains as a masked language model: its loss takes the logits of every token at once (the tiled "
        "loss is of causal language models), and attention reads the whole row"
    ]
    if getattr(config, "sparse_prediction", False):
        notes.append("sparse_prediction: counted as if every token were masked; logits of fewer take less")
    return notes
