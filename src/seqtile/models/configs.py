"""The configuration of a model, from a file, a Hub id or a name, and what it says; no weights are needed."""

from __future__ import annotations

import difflib
import math
import warnings
from pathlib import Path
from typing import Any

from seqtile._errors import UserError

NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-1b": ("llama", dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                               num_key_value_heads=8, head_dim=64, vocab_size=128256, tie_word_embeddings=True)),
    "llama-7b": ("llama", dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
                               num_key_value_heads=32, vocab_size=32000)),
    "llama-8b": ("llama", dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                               num_key_value_heads=8, vocab_size=128256)),
    "llama-70b": ("llama", dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                                num_key_value_heads=8, vocab_size=128256)),
    "qwen3-8b": ("qwen3", dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                               num_key_value_heads=8, head_dim=128, vocab_size=151936)),
    "qwen3-32b": ("qwen3", dict(hidden_size=5120, intermediate_size=25600, num_hidden_layers=64,
                                num_attention_heads=64, num_key_value_heads=8, head_dim=128, vocab_size=151936)),
    "qwen3-30b-a3b": ("qwen3_moe", dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
                                        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
                                        head_dim=128, num_experts=128, num_experts_per_tok=8, vocab_size=151936)),
    "qwen3.5-9b": ("qwen3_5_text", dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=32,
                                        num_attention_heads=16, num_key_value_heads=4, head_dim=256,
                                        vocab_size=248320)),
}  # fmt: skip
"""Published shapes by name (the models' own config.json), with positions for as long a sequence as is asked for."""

NAMED_POSITIONS = {
    "llama-1b": (131_072, "llama3", 32), "llama-7b": (4_096, "yarn", 1), "llama-8b": (131_072, "llama3", 8),
    "llama-70b": (131_072, "llama3", 8), "qwen3-8b": (40_960, "yarn", 1), "qwen3-32b": (40_960, "yarn", 1),
    "qwen3-30b-a3b": (40_960, "yarn", 1), "qwen3.5-9b": (262_144, "yarn", 1),
}  # fmt: skip
"""Positions of these models, and the rotary scaling that they have or could be given, with its factor today."""


def named_scaling(model: str, tokens: int) -> dict[str, Any] | None:
    """The ``rope_scaling`` for sequences beyond the positions of a named shape, which has no limit itself."""
    positions, rope_type, factor = NAMED_POSITIONS.get(model, (tokens, "", 1))
    return None if tokens <= positions else {"rope_type": rope_type, "factor": math.ceil(tokens * factor / positions)}


def named_positions(model: str) -> int | None:
    """Positions of a named shape's own model; None for another model."""
    return NAMED_POSITIONS[model][0] if model in NAMED_POSITIONS else None


def refuse_missing(model: str) -> None:
    """Refuse a model that is neither a name, nor a path that exists, nor like a Hub id; imports no library.

    Raises:
        UserError: with what would do.
    """
    if model in NAMED:
        return
    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(
            "model.config-missing",
            f"model directory {model!r} has no config.json; expected a directory written by save_pretrained",
        )
    looks_local = model.startswith((".", "/", "~")) or model.count("/") != 1 or path.suffix == ".json"
    if not path.exists() and looks_local:
        close = difflib.get_close_matches(model.lower(), NAMED, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(
            "model.not-found",
            f"model {model!r} does not exist; {hint}expected a config.json, a model directory, a Hub id or one of "
            f"{', '.join(NAMED)}",
        )


def read_config(model: str) -> Any:
    """Transformers' configuration of ``model``: a name of :data:`NAMED`, a config.json, a directory or a Hub id.

    Raises:
        UserError: none of them.
    """
    refuse_missing(model)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = Path(model).expanduser()
    try:
        if model in NAMED:
            kind, sizes = NAMED[model]
            return AutoConfig.for_model(kind, max_position_embeddings=2**24, **sizes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.from_pretrained(str(path) if path.exists() else model, trust_remote_code=False)
            config.get_text_config()  # raises for a composite of several language models, such as MusicGen
            return config
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[-1].strip() if isinstance(error, StrictDataclassError) else lines[0]
        raise UserError(
            "model.config-unreadable",
            f"cannot read the configuration of model {model!r} ({reason}); expected a config.json, a model "
            "directory, or a Hub id and a network",
        ) from None


def towers_of(config: Any) -> list[str]:
    """A model's towers: ``"vision"`` and ``"audio"``."""
    return [name for name in ("vision", "audio") if getattr(config, f"{name}_config", None) is not None]


def is_masked_lm(config: Any) -> bool:
    """Whether the model is an encoder that trains as a masked language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as KNOWN

    decodes = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    return config.model_type in KNOWN and not decodes


def max_positions(config: Any) -> int | None:
    """How many positions a row can have, the model's own RoPE scaling included; None where it has no limit."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    scaled = [0]
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        original = parameters.get("original_max_position_embeddings")
        if parameters.get("rope_type") == "dynamic":  # the configuration has the positions without scaling
            original = limit
        if original and parameters.get("factor"):
            scaled.append(int(original * parameters["factor"]))
    return max(limit, *scaled)


def refuse_encoder(config: Any, model: str) -> None:
    """Refuse an encoder where only causal language models are planned and trained.

    Raises:
        UserError: it is one.
    """
    if is_masked_lm(config):
        raise UserError(
            "model.encoder",
            f"plans and seqtile train are for causal language models, but {model!r} is an encoder "
            f"({config.model_type}); train it with transformers' Trainer after seqtile.apply",
        )
