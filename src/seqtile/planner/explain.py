"""Explain a plan's settings, propose the next one, and write the recipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from seqtile._errors import UserError
from seqtile.checkpointing.keep_attention import wide_heads
from seqtile.install.checkpoints import recomputed
from seqtile.models.configs import named_scaling
from seqtile.models.rope_scaling import scaling_for
from seqtile.ops.attention.backends import recommended
from seqtile.options import DEFAULTS, WRITTEN, TilingOptions, changed, offload_of, to_flag
from seqtile.planner.chooser import CHOSEN, DoesNotFit, choose_settings
from seqtile.planner.estimate import Estimate
from seqtile.planner.kinds import step_kinds_of
from seqtile.planner.live_at_peaks import CHECKPOINTS, KEPT, KEPT_TILES
from seqtile.planner.memory_plan import LONGEST, Planner
from seqtile.planner.model_errors import in_one_sentence
from seqtile.planner.request import Request
from seqtile.planner.step_config import Grpo, Lora
from seqtile.planner.step_time import spoken
from seqtile.planner.techniques import TILED_LOSS, TILED_MLP, Dial, offload_flag

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
    """A change that allows longer sequences.

    Attributes:
        flags: what to change in the command.
        length: longest sequence that then fits.
        why: reason in a few words.
    """

    flags: str
    length: int
    why: str


FLASH_ATTENTION = Dial(
    "flash attention", {"attention": "flash"}, "no mask and no repeated keys and values", "--attention flash"
)
OPTIMIZER_ON_HOST = Dial("optimizer on the host", {"engine_offload": ("optimizer",)}, "optimizer states in host memory")
ZERO3 = Dial("ZeRO-3", {"engine": "zero3"}, "weights, gradients and states are sharded", "--engine zero3")
EIGHT_BIT_STATES = Dial(
    "8-bit states", {"optimizer": "adamw-8bit"}, "2 bytes of state per weight, not 8", "--optimizer adamw-8bit"
)


def sleeping(grpo: Grpo | None) -> Dial:
    """vLLM's sleep mode, which frees a generator's memory while the policy trains."""
    changes = {} if grpo is None else {"grpo": replace(grpo, generator="sleep")}
    return Dial("sleeping generator", changes, "vLLM frees its memory during the step", "--generator sleep")


def next_step(planner: Planner, longest: int, asked: int = 0, given: TilingOptions | None = None) -> NextSetting | None:
    """The change that allows the longest sequence, or the first that reaches twice the length and what was asked.

    What costs no time comes first, then the fastest settings for twice the length, then other engines and optimizers.

    Args:
        planner: the planner of the planned request.
        longest: tokens that fit with it.
        asked: tokens that should fit; 0 where none were named.
        given: the options of the command to which flags are added; by default those of the plan.
    """
    request = planner.request
    furthest = request.positions or LONGEST
    if asked > furthest:  # with rotary scaling
        furthest = asked
        longest = max(longest, planner.longest_beyond())
    if longest >= furthest:
        return None
    target = max(asked, min(2 * longest, furthest))
    free, costly = proposals(planner)
    best: NextSetting | None = None
    for step in chain(
        _longer(planner, free, longest, furthest), _other_settings(planner, longest, target, given or request.options),
        _longer(planner, costly, longest, furthest),
    ):  # fmt: skip
        if best is None or step.length > best.length:
            best = step
        if best.length >= target:
            break
    return best


def other_step(planner: Planner, longest: int) -> NextSetting | None:
    """The engine, optimizer or free change that allows the longest sequence with these settings; None if none does."""
    furthest = planner.request.positions or LONGEST
    free, costly = proposals(planner)
    return max(_longer(planner, (*free, *costly), longest, furthest), key=lambda step: step.length, default=None)


def _longer(planner: Planner, dials: Iterable[Dial], longest: int, furthest: int) -> Iterator[NextSetting]:
    """Those of ``dials`` with which more than ``longest`` tokens fit."""
    request = planner.request
    for dial in dials:
        # Skip what is refused, and steps that the model's code cannot run.
        with suppress(UserError), in_one_sentence(request.config):
            candidate = Planner(dial.on(request), like=planner)
            if candidate.at_least(longest + 1) > request.device.memory:
                continue
            length, _ = candidate.longest(furthest=furthest)
            if length > longest:
                yield NextSetting(dial.flags_for(request), length, dial.why)


def _other_settings(planner: Planner, longest: int, target: int, given: TilingOptions) -> Iterator[NextSetting]:
    """The fastest settings with which ``target`` tokens fit, or those with which most do."""
    request = planner.request
    with suppress(UserError), in_one_sentence(request.config):
        try:
            chosen = choose_settings(request, target, {}, can_offload=True, like=planner, outlook=True)
            found, length, why = chosen.planner, target, f"the fastest settings for it: {spoken(chosen.seconds)} a step"
        except DoesNotFit as error:
            found, length, why = error.planner, error.longest, "the settings that hold least"
        if length > longest:
            yield NextSetting(_flags(found, given, length), length, why)


def _flags(target: Planner, given: TilingOptions, tokens: int) -> str:
    """The command-line flags that make the settings ``given`` those of ``target``."""
    request, flags = target.request, []
    by_length = {name: getattr(given, name) for name in ("tile", "loss_tile", "keep")}  # rules, resolved for a length
    resolved_given = Planner(changed(request, **by_length), like=target).resolved(tokens).options
    resolved = target.resolved(tokens).options
    for name in CHOSEN:
        before, after = (resolved_given, resolved) if name in by_length else (given, request.options)
        value, flag = getattr(after, name), f"--{name.replace('_', '-')}"
        if value == getattr(before, name):
            continue
        if name == "offload":
            flags.append(offload_flag(request))
        else:
            word = to_flag(name, value)
            flags.append(f"without {flag}" if word is None else f"{flag} {word}")
    return " ".join(flags)


def proposals(planner: Planner) -> tuple[list[Dial], list[Dial]]:
    """Changes that cost no time, and other engines and optimizers, both cheapest first."""
    request = planner.request
    options = request.options
    double = 2 * request.sp_size
    idle_states = "optimizer" in request.engine_offload and planner.host_has_room  # smaller ones would buy nothing
    sequence = Dial(
        "Ulysses",
        {"engine": "zero3", "sp_size": double},
        "each rank has a part of the sequence",
        f"{'' if request.engine == 'zero3' else '--engine zero3 '}--sp-size {double}",
    )
    free = (
        (TILED_LOSS, options.loss is None),
        (TILED_MLP, not options.tiled),
        (sleeping(request.grpo), request.grpo is not None and request.grpo.generator == "colocate"),
        (FLASH_ATTENTION, request.attention in ("sdpa", "eager")),
    )
    costly = (
        (OPTIMIZER_ON_HOST, request.sharded and "optimizer" not in request.engine_offload),
        (ZERO3, request.gpus > 1 and request.engine in ("ddp", "zero2")),
        (sequence, request.gpus > request.split and request.cp_size == 1),
        (EIGHT_BIT_STATES, request.optimizer == "adamw" and request.lora is None and not idle_states),
    )
    return [dial for dial, is_open in free if is_open], [dial for dial, is_open in costly if is_open]


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
    return scaling_for(request.config, tokens) if tokens > (request.positions or tokens) else None


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
