"""``--fit``: the settings that a recipe's length needs on the devices present, by the plan.

Decided once, before anything is loaded: by the command that starts the processes, or in the one process there is. The
resolved recipe holds the choice, so that a resumed run takes the same and does not choose again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seqtile._errors import UserError
from seqtile.tiling import parse_bytes
from seqtile.train.recipe import TRL_LOSS_TILE, LoraRecipe, Recipe

if TYPE_CHECKING:
    from seqtile.planner.accelerators import Device
    from seqtile.planner.ladder import Settings
    from seqtile.planner.request import Request
    from seqtile.planner.step_config import Lora

OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_bnb_8bit": "adamw-8bit", "adamw_8bit": "adamw-8bit",
    "lion_32bit": "lion", "adafactor": "adafactor", "sgd": "sgd",
}  # fmt: skip
"""The trainer's optimisers that a plan knows."""


@dataclass(frozen=True)
class Fitted:
    """A recipe with its settings chosen, and why, one sentence each."""

    recipe: Recipe
    why: tuple[str, ...]


def fit(recipe: Recipe) -> Fitted:
    """Choose what ``recipe`` leaves open: what is not the default is the user's, and stays.

    Args:
        recipe: resolved, with the number of its processes, and with ``fit``.

    Raises:
        UserError: nothing fits, or a setting that no plan knows.
    """
    from seqtile.planner.explain import offload_of
    from seqtile.planner.ladder import choose

    memory = parse_bytes(recipe.fit[len("memory:") :]) if isinstance(recipe.fit, str) else None
    request = request_of(recipe, memory)
    settings = settings_of(recipe)
    given: dict[str, Any] = {}
    if recipe.tile != "auto" or not recipe.tiled_mlp:
        given["tile"] = settings.tile
    if recipe.loss_tile:
        given["loss_tile"] = settings.loss_tile
    if recipe.keep or not recipe.tiled_mlp:
        given["keep"] = settings.keep
    if recipe.blocks != "auto" or not recipe.tiled_mlp:
        given["blocks"] = settings.blocks
    if recipe.heads is not None:
        given["heads"] = settings.heads
    if recipe.checkpoint or not recipe.activation_checkpointing:
        given["checkpoint"] = settings.checkpoint
    if recipe.offload:
        given["offload"] = True
    found = choose(request, recipe.max_length, given, can_offload=can_offload())
    high, expected = found.estimate.device.high / 2**30, found.estimate.device.expected / 2**30
    count = f"{request.gpus} x " if request.gpus > 1 else ""
    why = [
        f"fit: rows of {recipe.max_length:,} tokens on {count}{request.device.name} with "
        f"{request.device.memory / 2**30:,.2f} GiB: {expected:,.2f} GiB expected, {high:,.2f} GiB at most, at the peak "
        f"in the {found.estimate.peak_at}"
    ]
    if not found.sure:
        why.append("fit: the high estimate does not fit; --on-oom retry goes on with smaller tiles if it comes true")
    if found.estimate.square or (request.attention == "sdpa" and recipe.packing):
        why.append("fit: sdpa attention builds a [tokens, tokens] mask for packed rows, which is not in the plan")
    updates = updates_of(found.settings, recipe)
    if updates.get("offload"):
        updates["offload"] = offload_of(found.planner, found.estimate)
    chosen = recipe.model_copy(update={**updates, "fit": False})
    shown = {
        "tile": chosen.tile if chosen.tiled_mlp else "none", "loss_tile": chosen.loss_tile or "the trainer's",
        "checkpoint": found.settings.checkpoint, "offload": str(chosen.offload).lower(), "keep": chosen.keep,
        "blocks": chosen.blocks, "heads": chosen.heads or "all",
    }  # fmt: skip
    why += [f"fit: {name} {shown[name]}: {found.reasons[name]}" for name in shown if name in found.reasons]
    return Fitted(chosen, tuple(why))


def can_offload() -> bool:
    """Whether there is an accelerator, from which checkpoints can be copied to the host."""
    import torch

    return torch.accelerator.is_available()


def request_of(recipe: Recipe, memory: int | None = None) -> Request:
    """What a plan is asked of ``recipe``.

    Args:
        recipe: resolved.
        memory: bytes of each device; None reads them.

    Raises:
        UserError: something that no plan knows.
    """
    from seqtile.planner.request import ENGINES, Request
    from seqtile.train.load import load_config

    if recipe.engine not in ENGINES:
        raise UserError(f"no plan knows engine {recipe.engine!r}; use one of {', '.join(ENGINES)}, or leave --fit out")
    optim = str(recipe.trainer.get("optim", "adamw_torch_fused"))
    if optim not in OPTIMIZERS:
        raise UserError(f"no plan knows optimiser {optim!r}; use one of {', '.join(OPTIMIZERS)}, or leave --fit out")
    optimizer = "sgd-momentum" if optim == "sgd" and "momentum" in str(recipe.trainer.get("optim_args")) else (
        OPTIMIZERS[optim])  # fmt: skip
    quantised = recipe.model_kwargs.get("quantization_config") or {}
    four_bit = isinstance(quantised, dict) and bool(quantised.get("load_in_4bit"))
    if quantised and not (four_bit and recipe.lora):
        raise UserError("no plan knows this quantization_config, only 4-bit weights under lora; leave --fit out")
    config = load_config(recipe)
    attention = recipe.attention.replace("flash_attention_2", "flash").replace("flash_attention_3", "flash3")
    settings = settings_of(recipe)
    plain = Request(
        model=recipe.model, config=config, device=find_memory(recipe, memory), gpus=recipe.nproc or 1,
        engine=recipe.engine, sp_size=recipe.sp_size, qlora=four_bit, optimizer=optimizer, attention=attention,
        lora=None if recipe.lora is None else _adapters(recipe.lora), loss="tiled",
        tile="auto" if recipe.tiled_mlp else None, precision=_precision(recipe, config), batch=recipe.batch_size,
        device_type=_device_type(), host_memory=_host_memory() if can_offload() else None,
    )  # fmt: skip
    return settings.on(plain)


def find_memory(recipe: Recipe, given: int | None = None) -> Device:
    """The device that each process trains on: the smallest accelerator, or each process's part of the free host memory.

    Raises:
        UserError: the system does not say.
    """
    import torch

    from seqtile.activation_checkpointing.host_offload import available_bytes
    from seqtile.planner.accelerators import Device

    if given is not None:
        return Device("the memory given", given, None, "as given")
    if not torch.accelerator.is_available():
        free = available_bytes() // (recipe.nproc or 1)
        if not free:
            raise UserError("this system does not say how much memory is free; give it: --fit-memory 16GiB")
        return Device("this host", free, None, "free memory of the host, divided by the processes on it")
    module = torch.get_device_module()
    sizes = [
        (int(module.get_device_properties(number).total_memory), str(module.get_device_properties(number).name))
        for number in range(torch.accelerator.device_count())
    ]
    memory, name = min(sizes)
    return Device(name, memory, None, "the driver")


def settings_of(recipe: Recipe, tile: int | None = None) -> Settings:
    """The settings that ``recipe`` has.

    Args:
        recipe: the recipe.
        tile: tokens of the largest tile that its rule makes; None leaves the rule.
    """
    from seqtile.planner.ladder import Settings

    checkpoint = "none" if not recipe.activation_checkpointing else "layer"
    rule = int(recipe.tile) if str(recipe.tile).isdigit() else None if recipe.tile == "auto" else recipe.tile
    return Settings(
        checkpoint="attention-saved" if recipe.checkpoint == "attention-saved" else checkpoint,
        offload=bool(recipe.offload),
        tile=(tile or rule) if recipe.tiled_mlp else None,
        loss_tile=recipe.loss_tile or TRL_LOSS_TILE,
        keep=0.0 if recipe.keep == "auto" else recipe.keep,
        blocks=recipe.blocks,
        heads=recipe.heads,
    )


def updates_of(settings: Settings, recipe: Recipe) -> dict[str, Any]:
    """The keys of ``recipe`` that ``settings`` change."""
    found: dict[str, Any] = {"activation_checkpointing": settings.checkpoint != "none"}
    found["heads"] = settings.heads
    found["checkpoint"] = "attention-saved" if settings.checkpoint == "attention-saved" else None
    found["loss_tile"] = settings.loss_tile
    if recipe.tiled_mlp:
        found["tile"] = settings.tile if settings.tile is not None else recipe.tile
        found |= {"keep": settings.keep, "blocks": settings.blocks}
    if settings.offload != bool(recipe.offload):
        found["offload"] = settings.offload
    return found


def _adapters(lora: LoraRecipe) -> Lora:
    from seqtile.planner.step_config import Lora

    return Lora(lora.r, lora.target_modules, lora.alpha, lora.dropout)


def _precision(recipe: Recipe, config: Any) -> str:
    import torch

    from seqtile.train.load import weights_dtype

    dtype = weights_dtype(recipe)
    dtype = getattr(config, "dtype", None) or torch.float32 if dtype == "auto" else dtype
    if torch.accelerator.is_available():
        return "bfloat16" if dtype == torch.bfloat16 and recipe.lora is None else "mixed"
    return "bfloat16" if dtype in (torch.bfloat16, torch.float16) else "float32"


def _device_type() -> str:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def _host_memory() -> int | None:
    from seqtile.activation_checkpointing.host_offload import available_bytes

    return available_bytes() or None
