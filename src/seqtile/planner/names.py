"""What a plan can be asked, by name: checked before torch or a model library is imported."""

from __future__ import annotations

import re
from collections.abc import Iterable

from seqtile._errors import UserError
from seqtile.devices import package_version

ENGINES = ("single", "ddp", "fsdp2", "zero2", "zero3")
SHARDED = ("fsdp2", "zero2", "zero3")
DEEPSPEED = ("zero2", "zero3")
CHECKPOINTS = "checkpoints"
ENGINE_OFFLOADS = ("optimizer", "weights")
ATTENTIONS = ("flash", "flash3", "sdpa", "eager")
PRECISIONS = ("mixed", "bfloat16", "float32")
SCANS = ("kernels", "pytorch", "installed")
"""Layers with a state run in fast kernels, in transformers' PyTorch paths, or in the kernels installed here."""

GENERATORS = ("server", "model", "colocate", "sleep")
"""Completions come from elsewhere, from the trained model itself, or from vLLM on the device, awake or asleep."""

STATE_BYTES = {"adamw": 8.0, "adamw-8bit": 2 + 8 / 256, "lion": 4.0, "adafactor": 0.0, "sgd": 0.0, "sgd-momentum": 4.0}
"""The optimisers, each with its bytes of state per element of an fp32 master weight."""

FROZEN_WEIGHTS_STAY = (0, 19, 4)
"""From this version on DeepSpeed keeps frozen weights whole until a recompute is over (its pull request 8130)."""


def adapters_need_reentrant(engine: str) -> bool:
    """Whether activation checkpoints have to be reentrant with adapters under ``engine``.

    ZeRO-3 of older DeepSpeed takes frozen weights away during a recompute: PyTorch's non-reentrant checkpoint raises
    (https://github.com/deepspeedai/DeepSpeed/pull/8130). Without DeepSpeed here, the newest is assumed.
    """
    version = package_version("deepspeed") if engine == "zero3" else None
    return version is not None and tuple(map(int, re.findall(r"\d+", version)[:3])) < FROZEN_WEIGHTS_STAY


def split_offload(words: str) -> tuple[bool, tuple[str, ...]]:
    """``--offload``: whether checkpoints wait on the host, and what the engine keeps there."""
    names = [word.strip() for word in words.split(",") if word.strip()]
    return CHECKPOINTS in names, tuple(name for name in names if name != CHECKPOINTS)


def check_names(
    *, engine: str, attention: str, precision: str, optimizer: str, engine_offload: Iterable[str], gpus: int,
    sp_size: int, batch: int, accumulation: int, nodes: int, scans: str, cp_size: int = 1,
) -> None:  # fmt: skip
    """Refuse a name that no plan knows, and a number that is none.

    Raises:
        UserError: with the names that are known.
    """
    for name, value, known in (
        ("engine", engine, ENGINES), ("attention", attention, ATTENTIONS), ("precision", precision, PRECISIONS),
        ("optimizer", optimizer, tuple(STATE_BYTES)), ("scans", scans, SCANS),
    ):  # fmt: skip
        if value not in known:
            raise UserError(f"{name} {value!r} is not known here; use one of {', '.join(known)}")
    engine_offload = tuple(engine_offload)
    for name in engine_offload:
        if name not in ENGINE_OFFLOADS:
            known = (CHECKPOINTS, *ENGINE_OFFLOADS)
            raise UserError(f"offload {name!r} is not known here; use some of {', '.join(known)}")
    numbers = (("gpus", gpus), ("sp-size", sp_size), ("batch size", batch), ("grad-accumulation", accumulation),
               ("nodes", nodes), ("cp-size", cp_size))  # fmt: skip
    for name, number in numbers:
        if number < 1:
            raise UserError(f"got {name} {number}, expected at least 1")
    if engine == "single" and gpus > 1:
        raise UserError(f"{gpus} GPUs need an engine; add --engine ddp, fsdp2, zero2 or zero3, or use --gpus 1")
    if gpus % nodes:
        raise UserError(
            f"{gpus} GPUs are not {nodes} nodes of equally many; give the number of all of them with --gpus"
        )
    if gpus % sp_size:
        raise UserError(f"sp-size {sp_size} does not divide {gpus} GPUs; every sequence needs that many ranks")
    if gpus % cp_size:
        raise UserError(f"cp-size {cp_size} does not divide {gpus} GPUs; every sequence needs that many ranks")
    if cp_size > 1 and sp_size > 1:
        raise UserError(f"cp-size {cp_size} and sp-size {sp_size} both split sequences, by different engines; keep one")
    if cp_size > 1 and engine != "fsdp2":
        raise UserError(f"cp-size {cp_size} splits sequences by FSDP2, got engine {engine!r}; use --engine fsdp2")
    if cp_size > 1 and attention not in ("flash", "sdpa"):
        raise UserError(f"cp-size {cp_size} needs PyTorch's own flash kernel, got {attention!r}; use --attention sdpa")
    check_engine_offload(engine, engine_offload)


def check_engine_offload(engine: str, engine_offload: Iterable[str]) -> None:
    """Refuse what ``engine`` cannot keep on the host.

    Args:
        engine: of :data:`ENGINES`.
        engine_offload: of :data:`ENGINE_OFFLOADS`.

    Raises:
        UserError: with what it can.
    """
    asked = tuple(engine_offload)
    moved = [name for name in ENGINE_OFFLOADS if name in asked]
    if moved and engine not in SHARDED:
        raise UserError(
            f"offload of {' and '.join(moved)} is the engine's, and engine {engine!r} has none; add --engine zero3 or "
            "fsdp2"
        )
    if engine == "zero2" and "weights" in moved:
        raise UserError("offload of weights needs an engine that shards them, got engine 'zero2'; use zero3 or fsdp2")
    if engine == "fsdp2" and len(moved) == 1:
        raise UserError(
            f"engine 'fsdp2' moves weights and optimiser together, got offload of {moved[0]} alone; give both, or use "
            "zero3"
        )
