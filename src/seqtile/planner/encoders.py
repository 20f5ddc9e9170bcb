"""Encoders that train as masked language models: their inputs, and their attention."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from seqtile._compat import FAKE_TENSOR_LOGGER, attention_is_exchangeable, buffers_of
from seqtile._errors import UserError, in_its_words, passed_other_code
from seqtile._log import log_level
from seqtile.planner.layer_structure import Counts
from seqtile.planner.model_shapes import is_masked_lm
from seqtile.planner.request import Request
from seqtile.planner.step_config import Setup
from seqtile.planner.step_kind import StepKind

_POSITIONS = ("position_ids", "token_type_ids")
"""Names of the buffers, as long as the model has positions, that models take a row's part of."""


def check_attention(config: Any) -> None:
    """Refuse an encoder whose attention is code of its own: DeBERTa's came out 7 % under the CPU's allocator in bf16.

    Raises:
        UserError: with encoders that are planned.
    """
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    model_class: Any = MODEL_FOR_MASKED_LM_MAPPING[type(config)]
    if not attention_is_exchangeable(model_class):
        raise UserError(
            f"{model_class.__name__} of the installed transformers computes attention in its own code, which cannot "
            "be planned; use an encoder with pluggable attention (BERT, RoBERTa, ModernBERT, ELECTRA, ...), or a "
            "newer transformers"
        )


@contextmanager
def in_one_sentence(config: Any) -> Iterator[None]:
    """Say in one sentence what a model's own code raises when it is run on shapes: of many kinds only some are tried.

    Raises:
        UserError: in place of an exception inside the model's code, and of any for an encoder.
    """
    try:
        with log_level(FAKE_TENSOR_LOGGER, logging.CRITICAL):
            yield
    except UserError:
        raise
    except Exception as error:
        if not passed_other_code(error) and not is_masked_lm(config):
            raise
        instead = "plan another encoder" if is_masked_lm(config) else "try another attention, or use seqtile.apply"
        raise UserError(
            f"cannot plan model type {config.model_type!r}: a step does not run on fake tensors "
            f"({in_its_words(error)}); {instead}"
        ) from error


def add_masks(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Inputs of ``DataCollatorForLanguageModeling`` besides ids ``[B, T]`` and labels, for full sequences.

    Token types come with the tokenizers of models that know more than one.
    """
    masks = {"attention_mask": torch.ones_like(ids)}
    takes = inspect.signature(type(model).forward).parameters
    if "token_type_ids" in takes and (getattr(model.config, "type_vocab_size", None) or 0) > 1:
        masks["token_type_ids"] = torch.zeros_like(ids)
    return masks


def lengthen_positions(model: Any, tokens: int) -> None:
    """Have the positions that a fake model keeps reach as far as a row of ``tokens`` tokens.

    Fake rows may be longer than the model can read. Nothing is made: a row's part of such a buffer is a view. Those
    of a vision tower number its patches, and stay.
    """
    embeddings = model.get_input_embeddings()
    for module in model.modules():
        if embeddings not in module.children():
            continue
        buffers = buffers_of(module)
        for name in _POSITIONS:
            positions = buffers.get(name)
            if positions is not None and positions.dim() == 2 and positions.shape[1] < tokens:
                buffers[name] = positions[:, :1].expand(positions.shape[0], tokens)


class EncoderStep(StepKind):
    """A step of an encoder as a masked language model."""

    def applies(self, config: Any, setup: Setup) -> bool:
        return is_masked_lm(config)

    def auto_class(self, config: Any) -> Any:
        from transformers import AutoModelForMaskedLM

        check_attention(config)
        return AutoModelForMaskedLM

    def change_batch(self, model: Any, setup: Setup, batch: dict[str, Tensor]) -> None:
        ids = batch["input_ids"]
        batch |= {"labels": ids.clone(), **add_masks(model, ids)}

    def check(self, request: Request, max_length: int | None) -> None:
        options, model_type = request.options, request.config.model_type
        if request.grpo is not None:
            raise UserError(f"GRPO trains causal language models, but {model_type!r} is an encoder; drop --loss grpo")
        if request.split > 1:
            setting = f"sp-size {request.sp_size}" if request.sp_size > 1 else f"cp-size {request.cp_size}"
            raise UserError(f"{setting} is for causal language models, but {model_type!r} is an encoder; drop it")
        if options.loss is not None or options.loss_tile != "auto":
            raise UserError(
                f"loss='tiled' is for causal language models, but {model_type!r} is an encoder; use loss full, "
                "without a loss tile"
            )

    def notes(self, request: Request, counts: Counts, states: Mapping[str, Sequence[str]]) -> list[str]:
        notes = [
            "encoders are planned as masked language models, with the logits of every token at once (loss='tiled' is "
            "for causal language models)"
        ]
        if getattr(request.config, "sparse_prediction", False):
            notes.append("sparse_prediction is counted as if every token were masked, the upper bound")
        return notes

    def not_modelled(self, request: Request) -> list[str]:
        if request.attention != "sdpa":
            return []
        return ["the [tokens, tokens] mask that sdpa builds for padded sequences"]
