"""What a plan is asked: model, devices, engine and settings, checked before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from seqtile._errors import UserError
from seqtile.planner.accelerators import Device
from seqtile.planner.layer_structure import Counts
from seqtile.planner.model_shapes import max_positions
from seqtile.planner.step_config import OPTIMIZERS, Lora, Setup
from seqtile.tiling import parse_keep, parse_tile

ENGINES = ("single", "ddp", "fsdp2", "zero3")
SHARDED = ("fsdp2", "zero3")
OFFLOADS = ("checkpoints", "optimizer", "weights")
ATTENTIONS = ("flash", "flash3", "sdpa", "eager")
LOSSES = ("tiled", "full")
CHECKPOINTINGS = ("auto", "layer", "attention-saved", "none")
PRECISIONS = ("mixed", "bfloat16", "float32")
WHOLE_LAYER = "mlp+norm+projections"
BLOCKS = ("auto", "mlp", "mlp+norm", WHOLE_LAYER)


@dataclass(frozen=True)
class Request:
    """One training configuration to plan.

    Attributes:
        model: as the user named it.
        config: its configuration.
        device: each accelerator.
        gpus: how many.
        host_memory: bytes of the node's host memory; None if not given.
        engine: one of :data:`ENGINES`.
        sp_size: ranks that share one sequence (Ulysses).
        lora: adapters on a frozen model.
        qlora: the frozen model in 4 bits.
        optimizer: one of the optimisers of :mod:`seqtile.planner.step_config`.
        offload: what lives on the host, of :data:`OFFLOADS`.
        attention: one of :data:`ATTENTIONS`.
        tile: tile rule, or None.
        keep: fraction of the tiles that keep gate and up, or ``"memory:4GiB"``.
        loss: ``"tiled"`` or ``"full"``.
        checkpoint: what activation checkpoints keep, of :data:`CHECKPOINTINGS`: layer inputs, attention's output too,
            or no checkpoints; ``"auto"`` chooses between the first two at the planned length.
        precision: ``"mixed"`` (fp32 weights, bf16 products; a frozen model in bf16), ``"bfloat16"`` or ``"float32"``.
        batch: rows per rank.
        loss_tile: tokens per tile of the head; None is the rule that ``"auto"`` follows.
        blocks: what else of a layer runs in tiles, as :func:`seqtile.apply` takes it.
        heads: key-value heads per pass of attention; None for all at once.
        device_type: of the device, which ``tile="auto"`` asks for.
    """

    model: str
    config: Any = field(repr=False)
    device: Device
    gpus: int = 1
    host_memory: int | None = None
    engine: str = "single"
    sp_size: int = 1
    lora: Lora | None = None
    qlora: bool = False
    optimizer: str = "adamw"
    offload: tuple[str, ...] = ()
    attention: str = "flash"
    tile: int | str | None = "auto"
    keep: float | str = 0.0
    loss: str = "tiled"
    checkpoint: str = "layer"
    precision: str = "mixed"
    batch: int = 1
    loss_tile: int | None = None
    blocks: str = "auto"
    heads: int | str | None = None
    device_type: str = "cuda"

    @property
    def sharded(self) -> bool:
        """Whether the engine cuts weights into shards."""
        return self.engine in SHARDED

    def setup(self) -> Setup:
        """How one rank runs the step; with sharded weights, on the bf16 copies that the engine gathers."""
        frozen = self.lora is not None
        gathered = self.sharded or frozen or self.precision == "bfloat16"
        dtype = torch.float32 if self.precision == "float32" or not gathered else torch.bfloat16
        return Setup(
            dtype=dtype,
            autocast=self.precision == "mixed" and (frozen or not self.sharded),
            checkpoint=self.checkpoint != "none",
            attention_saved=self.checkpoint == "attention-saved",
            tile=self.tile,
            keep=self.keep,
            loss=self.loss,  # type: ignore[arg-type]
            lora=self.lora,
            optimizer=self.optimizer,
            attention=self.attention if self.attention in ("sdpa", "eager") else "flash",
            batch=self.batch,
            blocks=self.blocks,
            heads=self.heads,
            device_type=self.device_type,
        )


def attention_cannot_be_saved(request: Request) -> str | None:
    """Why activation checkpoints cannot keep attention's output, and what to do; None if they can."""
    if request.attention == "eager":
        return "needs an attention kernel, and eager attention is plain products; use --attention flash or sdpa"
    if request.lora is not None and request.engine == "zero3":
        return "needs non-reentrant checkpoints, and TRL makes them reentrant for adapters under zero3; use fsdp2"
    return None


def check_request(request: Request, max_length: int | None) -> None:
    """Refuse what cannot run.

    Raises:
        UserError: with what to do instead.
    """
    for name, value, known in (
        ("engine", request.engine, ENGINES), ("attention", request.attention, ATTENTIONS),
        ("loss", request.loss, LOSSES), ("precision", request.precision, PRECISIONS),
        ("optimizer", request.optimizer, tuple(OPTIMIZERS)), ("checkpoint", request.checkpoint, CHECKPOINTINGS),
        ("blocks", request.blocks, BLOCKS),
    ):  # fmt: skip
        if value not in known:
            raise UserError(f"{name} {value!r} is not known here; use one of {', '.join(known)}")
    for name in request.offload:
        if name not in OFFLOADS:
            raise UserError(f"offload {name!r} is not known here; use some of {', '.join(OFFLOADS)}")
    for name, number in (("gpus", request.gpus), ("sp-size", request.sp_size), ("batch size", request.batch)):
        if number < 1:
            raise UserError(f"got {name} {number}, expected at least 1")
    if request.tile is not None:
        try:
            parse_tile(request.tile)
        except (TypeError, ValueError) as error:
            raise UserError(str(error)) from None
    check_keep(request.keep, request.tile)
    if request.blocks != "auto" and request.tile is None:
        raise UserError("blocks says what runs in tiles, and without tiling nothing does; drop --blocks or --tile none")
    moved = [name for name in request.offload if name != "checkpoints"]
    if moved and not request.sharded:
        raise UserError(
            f"offload of {' and '.join(moved)} is the engine's, and engine {request.engine!r} has none; "
            "add --engine zero3 or fsdp2"
        )
    refusal = attention_cannot_be_saved(request) if request.checkpoint == "attention-saved" else None
    if refusal is not None:
        raise UserError(f"checkpoint 'attention-saved' {refusal}")
    if "checkpoints" in request.offload and request.checkpoint == "none":
        raise UserError("offload of checkpoints without activation checkpointing has nothing to move; drop one")
    if request.qlora and request.lora is None:
        raise UserError("qlora trains adapters; give their rank too, such as --lora r=16")
    if request.qlora and request.sharded:
        raise UserError(f"4-bit weights under {request.engine} are not modelled; use --engine ddp or one GPU")
    positions = max_positions(request.config)
    if max_length is not None and max_length < 2:
        raise UserError(f"got max length {max_length}, expected at least 2 tokens")
    if max_length is not None and positions is not None and max_length > positions:
        raise UserError(
            f"{max_length:,} tokens are beyond the {positions:,} positions of {request.model!r}; use at most those, "
            "or a configuration whose rotary scaling reaches further"
        )


def check_keep(keep: float | str, tile: int | str | None) -> None:
    """Refuse a ``keep`` that is no rule, or that nothing would heed.

    Raises:
        UserError: with what to give instead.
    """
    try:
        rule = parse_keep(keep, 1)
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from None
    if rule.kind == "auto":
        raise UserError("keep 'auto' asks a device what is free, and a plan has none; give a share or 'memory:4GiB'")
    if keep and tile is None:
        raise UserError("keep says what tiles keep, and without tiling there are none; drop --keep or --tile none")


def check_split(request: Request, counts: Counts) -> None:
    """Refuse a number of ranks that the model cannot be divided over.

    Raises:
        UserError: with numbers that would do.
    """
    if request.engine == "single" and request.gpus > 1:
        raise UserError(f"{request.gpus} GPUs need an engine; add --engine ddp, fsdp2 or zero3, or use --gpus 1")
    if request.gpus % request.sp_size:
        raise UserError(
            f"sp-size {request.sp_size} does not divide {request.gpus} GPUs; every sequence needs that many ranks"
        )
    if request.sp_size > 1 and counts.heads % request.sp_size:
        raise UserError(
            f"sp-size {request.sp_size} does not divide the {counts.heads} attention heads of {request.model!r}; use "
            f"one of {', '.join(str(n) for n in range(2, counts.heads + 1) if counts.heads % n == 0)}"
        )
