"""Refuse a model whose weights an engine gathers inside the tile loop, and name the module to wrap instead."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from seqtile._compat import ZERO3_MARKS
from seqtile._errors import UserError


def wrapper() -> Any:
    """FSDP1's class for ``isinstance``, or () if it was not imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())


def refuse_gathering_inside(inner: Iterable[tuple[str, nn.Module]], *, block: str, layer: str) -> None:
    """Raise if an engine gathers the weights of a module that runs inside a tile.

    This reads classes and attributes only, so all ranks reach the same result, before the block's first collective.

    Args:
        inner: (name, module) of everything that runs inside the tile, without the block itself.
        block: qualified name of the tiled block.
        layer: qualified name of the decoder layer around it, or "".

    Cost:
        Two type checks and a look for two attributes per module.

    Raises:
        UserError: FSDP shards one of them on its own, or DeepSpeed ZeRO-3 has registered one on its own.
    """
    fsdp1, fsdp2 = wrapper(), getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    whole = layer or block
    for name, module in inner:
        if isinstance(module, fsdp2):
            raise UserError(
                "engine.fsdp2-shards-inside-block",
                f"{block}: FSDP shards {name} separately, so its weight would be gathered for every tile; call "
                f"fully_shard on {whole}, not on {name}",
            )
        if isinstance(module, fsdp1):
            raise UserError(
                "engine.fsdp-wraps-inside-block",
                f"{block}: FSDP wraps {name} separately, so its weight would be gathered for every tile; let the "
                f"auto_wrap_policy wrap {whole}, not {name}",
            )
        if not ZERO3_MARKS.isdisjoint(module.__dict__):
            raise UserError(
                "engine.zero3-gathers-inside-block",
                f"{block}: DeepSpeed ZeRO-3 gathers {name} separately, because {whole} was not marked when it "
                "wrapped the model; call seqtile.apply(model) before deepspeed.initialize or Accelerator.prepare",
            )


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if FSDP1 has wrapped the model: blocks inside hold flat shards, in which nothing can be recognised.

    DataParallel is refused too: its replicas would all run the forward of the original. DDP, ``fully_shard`` and ZeRO-1
    and 2 keep the modules, so a model may be tiled after them.

    Raises:
        UserError: a module is a ``FullyShardedDataParallel`` or a ``DataParallel``.
    """
    if isinstance(model, nn.DataParallel):
        raise UserError(
            "engine.data-parallel",
            "the model is wrapped in DataParallel, which does not support tiled models; use one process per device "
            "with DistributedDataParallel, and call seqtile.apply(model) before wrapping",
        )
    for name, module in model.named_modules():
        if isinstance(module, wrapper()):  # calling it gathers its weights, without any hook that shows it
            raise UserError(
                "engine.wrapped-before-apply",
                f"{name or 'the model'} is already wrapped in FullyShardedDataParallel, which flattens the weights; "
                "call seqtile.apply(model) before FSDP wraps the model",
            )
