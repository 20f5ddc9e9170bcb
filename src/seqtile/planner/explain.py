"""Explain a plan's settings, propose the next one, and write the recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from seqtile._errors import UserError
from seqtile.checkpointing.keep_attention import wide_heads
from seqtile.install.checkpoints import recomputed
from seqtile.models.configs import named_scaling
from seqtile.models.rope_scaling import scaling_for
from seqtile.ops.attention.backends import recommended
from seqtile.options import DEFAULTS, WRITTEN, offload_of
from seqtile.planner.estimate import Estimate
from seqtile.planner.kinds import step_kinds_of
from seqtile.planner.live_at_peaks import CHECKPOINTS, KEPT, KEPT_TILES
from seqtile.planner.memory_plan import LONGEST, Planner
from seqtile.planner.model_errors import in_one_sentence
from seqtile.planner.request import Request
from seqtile.planner.step_config import Grpo, Lora
from seqtile.planner.techniques import (
    CHECKPOINTS_ON_HOST,
    CHUNKS,
    CHUNKS_OF_SEGMENTS,
    LAYER_CHECKPOINTS,
    MINIMAL_MEMORY,
    SEGMENTS,
    STATE_TILES,
    TILED_LOSS,
    TILED_MLP,
    WEIGHTS_ON_HOST,
    Dial,
    can_stream,
)
from seqtile.state.state_layers import can_carry

NOT_MODELLED = (
    "fragmentation and driver context beyond the stated bounds",
    "model loading, data loading, evaluation and generation",
    "shorter sequences (all are taken to have the full length)",
    "torch.compile and CUDA graphs",
    "audio and video (add their tokens to the length)",
    "images (add their tokens to the length, or use --images)",
)
"""What no plan includes; the last one is for plans without pictures."""


def not_modelled(request: Request, estimate: Estimate) -> list[str]:
    """What this plan does not include."""
    lacks = list(NOT_MODELLED if request.pictures is None else NOT_MODELLED[:-1])
    if estimate.square:
        lacks.append(
            f"anything below the [tokens, tokens] mask that {request.attention} attention builds for this model "
            "(--attention flash builds none)"
        )
    if wide := wide_heads(request.config):
        lacks.append(wide)
    for step_kind in step_kinds_of(request.config, request.setup()):
        lacks += step_kind.not_modelled(request)
    if request.attention == "sdpa" and request.grpo is None:
        lacks.append("the [tokens, tokens] mask that sdpa builds for packed documents (16 GiB at 131,072 tokens)")
    if request.engine == "single" or not request.sharded:
        return lacks
    lacks.append("non-default buffer sizes of the engine")
    return lacks


@dataclass(frozen=True)
class NextSetting:
    """A setting that buys length.

    Attributes:
        flags: what to add to the command.
        length: longest sequence that then fits.
        why: in a few words.
    """

    flags: str
    length: int
    why: str


FLASH_ATTENTION = Dial(
    "flash attention", {"attention": "flash"}, "no mask and no repeated keys and values", "--attention flash"
)
NOTHING_KEPT = Dial("nothing kept", {"keep": 0.0}, "gate and up are recomputed in every tile", "--keep 0")
OPTIMIZER_ON_HOST = Dial("optimizer on the host", {"engine_offload": ("optimizer",)}, "optimizer states in host memory")
ZERO3 = Dial("ZeRO-3", {"engine": "zero3"}, "weights, gradients and states are sharded", "--engine zero3")
EIGHT_BIT_STATES = Dial(
    "8-bit states", {"optimizer": "adamw-8bit"}, "2 bytes of state per weight, not 8", "--optimizer adamw-8bit"
)


def sleeping(grpo: Grpo | None) -> Dial:
    """vLLM's sleep mode, which frees a generator's memory while the policy trains."""
    changes = {} if grpo is None else {"grpo": replace(grpo, generator="sleep")}
    return Dial("sleeping generator", changes, "vLLM frees its memory during the step", "--generator sleep")


SLOW_TO_PLAN = (MINIMAL_MEMORY, CHUNKS, CHUNKS_OF_SEGMENTS, SEGMENTS)


def next_step(planner: Planner, longest: int, asked: int = 0) -> NextSetting | None:
    """The setting that buys most length, or the cheapest that doubles it and reaches what was asked; None if none buys.

    Args:
        planner: of what is planned.
        longest: tokens that fit with it.
        asked: tokens that should fit; 0 where none were named.
    """
    best: NextSetting | None = None
    request = planner.request
    furthest = request.positions or LONGEST
    if asked > furthest:  # with rotary scaling
        furthest = asked
        longest = max(longest, planner.longest_beyond())
    if longest >= furthest:
        return None
    for technique in proposals(planner):
        if technique in SLOW_TO_PLAN and best is not None:
            break  # many small kernels, and fake runs of many operators: for where nothing else is left
        try:
            with in_one_sentence(request.config):
                candidate = Planner(technique.on(request), like=planner)
                if candidate.at_least(longest + 1) > request.device.memory:
                    continue
                length, _ = candidate.longest(furthest=furthest)
        except UserError:  # refused, or a step of the model's code that does not run so
            continue
        if length > longest and (best is None or length > best.length):
            best = NextSetting(technique.flags_for(request), length, technique.why)
            if length >= max(asked, 2 * longest):
                return best
    return best


def proposals(planner: Planner) -> list[Dial]:
    """Techniques that the request does not use, cheapest in time first."""
    request = planner.request
    options = request.options
    untouched = options.blocks == "auto" and options.heads is None and options.chunk is None
    whole = untouched and options.state is None and request.split == 1
    one_by_one = request.sharded or options.weights_on_host  # a layer's weights are freed after it ran
    double = 2 * request.sp_size
    idle_states = "optimizer" in request.engine_offload and planner.host_has_room  # smaller ones would buy nothing
    sequence = Dial(
        "Ulysses",
        {"engine": "zero3", "sp_size": double},
        "each rank has a part of the sequence",
        f"{'' if request.engine == 'zero3' else '--engine zero3 '}--sp-size {double}",
    )
    order = (
        (TILED_LOSS, options.loss is None),
        (sleeping(request.grpo), request.grpo is not None and request.grpo.generator == "colocate"),
        (FLASH_ATTENTION, request.attention in ("sdpa", "eager")),
        (LAYER_CHECKPOINTS, options.checkpoint != "layer"),
        (NOTHING_KEPT, bool(options.keep)),
        (TILED_MLP, not options.tiled),
        (STATE_TILES, options.state is None and can_carry(planner.built.model)),
        (CHECKPOINTS_ON_HOST, not options.offload_room and options.checkpoint is not None),
        (WEIGHTS_ON_HOST, can_stream(request) and not options.weights_on_host),
        (OPTIMIZER_ON_HOST, request.sharded and "optimizer" not in request.engine_offload),
        (ZERO3, request.gpus > 1 and request.engine in ("ddp", "zero2")),
        (sequence, request.gpus > request.split and request.cp_size == 1),
        (EIGHT_BIT_STATES, request.optimizer == "adamw" and request.lora is None and not idle_states),
        (MINIMAL_MEMORY, untouched),
        (CHUNKS, whole),
        (CHUNKS_OF_SEGMENTS, whole and not one_by_one),
        (SEGMENTS, options.chunk is not None and options.segment == 1 and not one_by_one),
    )
    return [technique for technique, is_open in order if is_open]


def explain(planner: Planner, estimate: Estimate) -> list[str]:
    """The reason for each setting, one sentence each."""
    request, setup = planner.request, planner.resolved(estimate.tokens)
    options = request.options
    terms = estimate.terms
    lines = []
    if options.tiled:
        tile = setup.options.tile
        tiles = f"{tile:,} tokens per tile" if isinstance(tile, int) else "no tiles at this length"
        why = "MLP intermediates exist for one tile at a time"
        if request.lora is None:
            why += ", and larger tiles accumulate weight gradients less often"
        lines.append(f"tile {options.tile}: {tiles}; {why}.")
    if options.keep:
        kept_gib, kept_tiles = terms.get(KEPT_TILES, 0.0) / 2**30, float(setup.options.keep)
        lines.append(f"keep {options.keep}: {kept_tiles:.0%} of the tiles keep gate and up, {kept_gib:,.1f} GiB.")
    if options.loss:
        whole = 14 * planner.counts.vocabulary * planner.local(estimate.tokens) / 2**30
        lines.append(f"loss tiled: logits of {setup.loss_tile:,} tokens at a time; all would take {whole:,.0f} GiB.")
    kept = terms.get(CHECKPOINTS, 0.0) / 2**30
    if options.checkpoint is not None:
        location = "in flight, the rest on the host" if options.offload_room else "on the device"
        only = " only" if options.checkpoint == "layer" else ""
        lines.append(f"checkpoint {options.checkpoint}: each layer saves its input{only}, {kept:,.1f} GiB {location}.")
        if options.checkpoint == "attention-saved":
            outputs = terms.get(KEPT, 0.0) / 2**30
            lines.append(
                f"attention-saved: each layer saves attention's output and log-sum-exp, {outputs:,.1f} GiB {location}; "
                f"the recompute skips attention's kernel{recomputed(planner.states)}."
            )
    if request.attention in ("flash", "flash3"):
        lines.append(f"attention {request.attention}: no [tokens, tokens] tensor is built.")
    if fastest := recommended(request.device.capability):
        lines.append(f"fastest attention on this device: {fastest}.")
    if request.sharded:
        what = "" if request.engine == "zero2" else "weights, "
        lines.append(f"engine {request.engine}: {what}gradients and optimizer states in {request.gpus} shards.")
    if request.split > 1:
        setting = "sp_size" if request.sp_size > 1 else "cp_size"
        lines.append(f"{setting} {request.split}: {planner.local(estimate.tokens):,} tokens per rank.")
    return lines


def recipe_lacks(request: Request) -> list[str]:
    """Planned settings without a recipe key."""
    lacks: list[str] = []
    if request.options.loss is None:
        lacks.append("the loss over whole logits (the trainer's own head runs in tiles)")
    return lacks


def planned_offload(planner: Planner, estimate: Estimate) -> bool | str:
    """The recipe's ``offload``: of checkpoints all, what the host has room for, or none; and weights."""
    room, options = planner.host_room(), planner.request.options
    checkpoints = options.checkpoints_on_host
    if not estimate.moved:
        checkpoints = False
    elif estimate.moved < 1.0 and room is not None and room != options.offload_room:
        checkpoints = f"{max(1, int(room // 2**20))}MiB"
    return offload_of(checkpoints, options.weights_on_host)


def rope_scaling_of(request: Request, tokens: int) -> dict[str, Any] | None:
    """The rotary scaling that ``tokens`` tokens need; None where the model has as many positions."""
    if scaling := named_scaling(request.model, tokens):
        return scaling
    return scaling_for(request.config, tokens) if tokens > (request.own_positions or tokens) else None


def rope_scaling_key(request: Request, tokens: int) -> str:
    """The same as a key of a recipe; "" where none is needed."""
    scaling = rope_scaling_of(request, tokens)
    keys = ", ".join(f"{key}: {value}" for key, value in (scaling or {}).items())
    return f"'rope_scaling: {{{keys}}}'" if keys else ""


def beyond_positions(request: Request, tokens: int) -> list[str]:
    """A note on the rotary scaling that ``tokens`` tokens need."""
    if not (key := rope_scaling_key(request, tokens)):
        return []
    return [f"{tokens:,} tokens exceed the positions of {request.model}: train with {key}, which --recipe writes"]


def recipe(planner: Planner, tokens: int) -> dict[str, Any]:
    """The choices as a recipe that ``seqtile train`` takes."""
    request, setup = planner.request, planner.resolved(tokens)
    keys: dict[str, Any] = {"model": request.model, "max_length": tokens, "batch_size": request.batch}
    if request.accumulation > 1:
        keys["gradient_accumulation"] = request.accumulation
    keys["fit"] = False  # all is chosen; on an accelerator the trainer would choose again
    options = request.options
    keys["tiled_mlp"] = options.tiled
    if options.tiled:
        keys["tile"] = options.tile
    for name, how in WRITTEN.items():
        value = getattr(options, name)
        if how.recipe and value != DEFAULTS[name] and (name, value) != ("blocks", "none"):  # tiled_mlp is that key
            keys[name] = value
    if options.loss:
        keys["loss_tile"] = setup.loss_tile
    keys["checkpoint"] = options.checkpoint or "none"
    if options.offload:
        keys["offload"] = planned_offload(planner, planner.estimate(tokens))
    if request.lora is not None:
        keys["lora"] = _lora(request.lora)
    if request.engine != "single":
        keys["engine"] = request.engine
        keys["nproc"] = request.gpus
    if request.sp_size > 1:
        keys["sp_size"] = request.sp_size
    if request.cp_size > 1:
        keys["cp_size"] = request.cp_size
    if request.engine_offload:
        keys["engine_offload"] = list(request.engine_offload)
    if request.precision != "mixed":
        keys["dtype"] = request.precision
    keys["attention"] = request.attention
    if scaling := rope_scaling_of(request, tokens):
        keys["rope_scaling"] = scaling
    if request.qlora:
        keys["qlora"] = True
    if request.optimizer != "adamw":
        keys["optimizer"] = request.optimizer
    if request.liger:
        keys["trainer"] = {"use_liger_kernel": True}
    return keys


def _lora(lora: Lora) -> dict[str, Any]:
    modules = lora.target_modules
    keys: dict[str, Any] = {"r": lora.r}
    if lora.alpha is not None:
        keys["alpha"] = lora.alpha
    if lora.dropout:
        keys["dropout"] = lora.dropout
    if modules != Lora.target_modules:
        keys["target_modules"] = modules if isinstance(modules, str) else list(modules)
    return keys
