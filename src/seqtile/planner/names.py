"""The names that a plan accepts: checked before torch or a model library is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seqtile._errors import UserError
from seqtile.options import offload_of
from seqtile.rules import SHARDED, Combination, check_combination
from seqtile.tiling import parse_bytes

ENGINES = ("single", "ddp", "fsdp2", "zero2", "zero3")
DEEPSPEED = ("zero2", "zero3")
CHECKPOINT_OFFLOAD = "checkpoints"
ENGINE_OFFLOADS = ("optimizer", "weights")
ATTENTIONS = ("flash", "flash3", "sdpa", "eager")
PRECISIONS = ("mixed", "bfloat16", "float32")
SCANS = ("kernels", "pytorch", "installed")
"""Layers with a state run in fast kernels, in transformers' PyTorch paths, or in the kernels installed here."""

GENERATORS = ("server", "model", "colocate", "sleep")
"""Completions come from elsewhere, from the trained model itself, or from vLLM on the device, awake or asleep."""

STATE_BYTES = {"adamw": 8.0, "adamw-8bit": 2 + 8 / 256, "lion": 4.0, "adafactor": 0.0, "sgd": 0.0, "sgd-momentum": 4.0}
"""The optimizers, each with its bytes of state per element of an fp32 master weight."""


def split_offload(words: str, engine: str) -> tuple[bool | str, tuple[str, ...]]:
    """``--offload``: the option ``offload``, and what the engine keeps on the host.

    Weights are the engine's where it shards them; else they are frozen ones of decoder layers.

    Raises:
        UserError: another name, or two bounds.
    """
    names = [word.strip() for word in words.replace("+", ",").split(",") if word.strip()]
    sizes = [name for name in names if name[-1].isalpha() and parse_bytes(name)]
    checkpoints = [name for name in names if name in (CHECKPOINT_OFFLOAD, "true")]
    engine_offload = tuple(name for name in names if name not in (*checkpoints, *sizes))
    if len(sizes) + bool(checkpoints) > 1 or not {*engine_offload} <= {*ENGINE_OFFLOADS}:
        raise UserError(
            "plan.offload-malformed",
            f"got --offload {words!r}, expected checkpoints (or a size for them, such as 64GB), weights and optimizer, "
            "joined by commas",
        )
    weights = "weights" in engine_offload and engine not in SHARDED
    if weights:
        engine_offload = tuple(name for name in engine_offload if name != "weights")
    return offload_of(sizes[0] if sizes else bool(checkpoints), weights), engine_offload


KNOWN_NAMES = {
    "engine": ENGINES, "attention": ATTENTIONS, "precision": PRECISIONS, "optimizer": (*STATE_BYTES,), "scans": SCANS,
}  # fmt: skip
"""Fields of a request that hold one of several names."""

POSITIVE_FIELDS = ("gpus", "sp_size", "batch", "accumulation", "nodes", "cp_size")
"""Fields of a request that hold a number of at least 1."""

FLAG_NAMES = {
    "precision": "dtype", "sp_size": "sp-size", "cp_size": "cp-size", "batch": "batch size",
    "accumulation": "gradient-accumulation",
}  # fmt: skip
"""How a user writes the fields that have another name in a request."""


def check_names(fields: Mapping[str, Any], max_length: int | None = None) -> None:
    """Refuse an unknown name, a number below 1, and ranks that exclude each other.

    Args:
        fields: those of a :class:`seqtile.planner.request.Request`, by name.
        max_length: tokens of a sequence; None does not check them.

    Raises:
        UserError: with the valid names.
    """
    for name in (*KNOWN_NAMES, *POSITIVE_FIELDS):
        value, word = fields[name], FLAG_NAMES.get(name, name)
        if name in KNOWN_NAMES and value not in KNOWN_NAMES[name]:
            raise UserError(
                "option.unknown-choice", f"got {word} {value!r}, expected one of {', '.join(KNOWN_NAMES[name])}"
            )
        if name in POSITIVE_FIELDS and value < 1:
            raise UserError("option.not-positive", f"got {word} {value}, expected at least 1")
    same = ("engine", "nodes", "sp_size", "cp_size", "engine_offload", "attention")
    check_combination(
        Combination(processes=fields["gpus"], max_length=max_length, **{name: fields[name] for name in same})
    )
