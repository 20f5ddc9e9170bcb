"""``--fit``: the settings that a recipe's length needs on the devices present, by the plan.

Decided once, before anything is loaded: by the command that starts the processes, or in the one process there is. The
resolved recipe holds the choice, so that a resumed run takes the same and does not choose again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from seqtile._errors import UserError
from seqtile._log import log_level
from seqtile.devices import accelerator, available_host_bytes, device_type
from seqtile.fitting import (
    choose,
    host_as_device,
    planned_attention,
    planned_optimizer,
    planned_options,
    planned_precision,
)
from seqtile.models.configs import towers_of
from seqtile.options import TilingOptions
from seqtile.planner.accelerators import Device, device_here
from seqtile.planner.chooser import fixed_settings
from seqtile.planner.pictures import pictures_like
from seqtile.planner.request import Request
from seqtile.planner.step_config import Lora, Pictures
from seqtile.tiling import parse_bytes
from seqtile.train.load import load_config, weights_dtype
from seqtile.train.read_data import Data, has_media, read_data
from seqtile.train.recipe import OptionKeys, Recipe


@dataclass(frozen=True)
class Fitted:
    """A recipe with its settings chosen, and why, one sentence each."""

    recipe: Recipe
    why: tuple[str, ...]


def fit_recipe(recipe: Recipe, nodes: int = 1) -> Fitted:
    """Choose what ``recipe`` leaves open: what is not the default is the user's, and stays.

    Args:
        recipe: resolved, with the number of its processes, and with ``fit``.
        nodes: that they are on.

    Raises:
        UserError: a setting, or a vision tower of rows with pictures, that no plan knows.
        RunError: nothing fits.
    """
    config, max_length = load_config(recipe), recipe.max_length
    pictures: Pictures | None = None
    if "vision" in towers_of(config) and has_media(recipe):
        with log_level("seqtile.train", logging.CRITICAL + 1):  # the run itself reads the rows again, and reports
            data = read_data(recipe, Path(str(recipe.output)), lambda _: None, decodes=False)
        pictures = largest_pictures(config, data)
        max_length = with_pictures(max_length, pictures)
    memory = parse_bytes(recipe.fit) if isinstance(recipe.fit, str) else None
    fixed = fixed_settings(recipe.options, checkpoint=OptionKeys.model_fields["checkpoint"].default)
    request = replace(request_of(recipe, memory, nodes), pictures=pictures)
    choice = choose(request, max_length, fixed, packed=bool(recipe.packing)).with_notes()
    chosen = recipe.changed(**updates_of(choice.options, recipe), fit=False)
    return Fitted(chosen, tuple(f"fit: {sentence}" for sentence in choice.why))


def largest_pictures(config: Any, data: Data) -> Pictures:
    """Pictures to plan with: the tokens of the row with most, each picture as large as the largest of ``data``."""
    summaries = [row_set.summary for row_set in data.sets.values() if row_set.summary is not None]
    return pictures_like(
        config,
        max(summary.visual[1] for summary in summaries if summary.visual),
        max(summary.largest_picture for summary in summaries),
        max(summary.largest_frame for summary in summaries),
    )


def with_pictures(max_length: int, pictures: Pictures) -> int:
    """The length to plan: whole pictures of the largest size may exceed the row."""
    return max(max_length, pictures.tokens + 1)


def request_of(recipe: Recipe, memory: int | None = None, nodes: int = 1) -> Request:
    """Build the plan's request for ``recipe``.

    Args:
        recipe: resolved.
        memory: bytes of each device; None reads them.
        nodes: that the processes are on.

    Raises:
        UserError: something that no plan knows.
    """
    quantised = recipe.model_kwargs.get("quantization_config") or {}
    four_bit = recipe.qlora or (isinstance(quantised, dict) and bool(quantised.get("load_in_4bit")))
    if quantised and not (four_bit and recipe.lora):
        raise UserError(
            "fit.quantization-unsupported",
            "--fit supports no other quantization than 4-bit weights with lora; drop --fit",
        )
    config = load_config(recipe)
    lora = None
    if (adapters := recipe.lora) is not None:
        lora = Lora(adapters.r, adapters.target_modules, adapters.alpha, adapters.dropout)
    return Request(
        model=recipe.model, config=config, device=find_memory(recipe, memory, nodes), gpus=recipe.nproc or 1,
        nodes=nodes, engine=recipe.engine, sp_size=recipe.sp_size, cp_size=recipe.cp_size,
        engine_offload=recipe.engine_offload, qlora=four_bit,
        optimizer=planned_optimizer(recipe.optimizer, recipe.trainer.get("optim_args")),
        lora=lora, options=settings_of(recipe),
        precision=_precision(recipe, config), batch=recipe.batch_size, accumulation=recipe.gradient_accumulation,
        liger=bool(recipe.trainer.get("use_liger_kernel")), scans="installed",
        attention=planned_attention(recipe.attn_implementation), device_type=device_type(),
        host_memory=(available_host_bytes() or None) if accelerator() else None,
    )  # fmt: skip


def find_memory(recipe: Recipe, memory: int | None = None, nodes: int = 1) -> Device:
    """The device that each process trains on: the smallest accelerator, or each process's part of the free host memory.

    Raises:
        UserError: the system does not say.
    """
    if memory is not None:
        return Device("the memory given", memory, None, "as given")
    if accelerator() is None:
        return host_as_device(-(-(recipe.nproc or 1) // nodes))
    return min(map(device_here, range(torch.accelerator.device_count())), key=lambda device: device.memory)


def settings_of(recipe: Recipe, tile: int | None = None) -> TilingOptions:
    """The options of ``recipe`` for a plan, with TRL's defaults where it has none.

    Args:
        recipe: the recipe.
        tile: tokens of the largest tile that its rule makes; None leaves the rule.
    """
    options = recipe.options if recipe.tiled_mlp else recipe.options.without_blocks()
    if tile is not None and options.tiled:
        options = replace(options, tile=tile)
    return replace(planned_options(options), checkpoint=recipe.options.checkpoint)


def updates_of(settings: TilingOptions, recipe: Recipe) -> dict[str, Any]:
    """The keys of ``recipe`` that ``settings`` change."""
    always = ("heads", "state", "chunk", "segment", "loss_tile", "vision")
    updates: dict[str, Any] = {name: getattr(settings, name) for name in always}
    updates["checkpoint"] = settings.checkpoint or "none"
    if recipe.tiled_mlp:
        updates["tile"] = settings.tile if settings.tile != "auto" else recipe.options.tile
        updates |= {"keep": settings.keep, "blocks": settings.blocks}
    if settings.offload != recipe.options.offload:
        updates["offload"] = settings.offload
    return updates


def _precision(recipe: Recipe, config: Any) -> str:
    dtype = weights_dtype(recipe)
    dtype = getattr(config, "dtype", None) or torch.float32 if dtype == "auto" else dtype
    autocast = recipe.dtype != "float32" and recipe.trainer.get("bf16") is not False
    return planned_precision(dtype, device_type(), recipe.lora is not None, autocast=autocast)
