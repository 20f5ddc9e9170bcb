"""``seqtile plan``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from seqtile._errors import RUN_ERROR, RunError, UserError
from seqtile.cli.flags import flag, option_flags, options_of, takes

if TYPE_CHECKING:
    from seqtile.planner.explain import NextSetting
    from seqtile.planner.memory_plan import Planner
    from seqtile.planner.request import Request
    from seqtile.planner.step_config import Lora


@dataclass(frozen=True)
class PlanFlags:
    """The flags of ``seqtile plan``."""

    model: str = flag(..., "config.json, model directory, Hub id, or a shape such as llama-8b or qwen3-8b", "PATH")
    device: str = flag("h100", "h200, h100, a100-80, rtx4090, ..., or its memory such as 141GiB", "NAME")
    gpus: int = flag(1, "Number of devices, over all nodes", "N")
    nodes: int = flag(1, "Number of nodes", "N")
    max_length: int = flag(None, "Tokens per sequence (default: the longest that fits)", "TOKENS")
    engine: str = flag("single", "single, ddp, fsdp2, zero2 or zero3", "NAME")
    sp_size: int = flag(1, "Ranks per sequence with Ulysses (zero3)", "N")
    cp_size: int = flag(1, "Ranks per sequence with ring attention (fsdp2)", "N")
    full: bool = flag(False, "Train every weight (default)")
    lora: str = flag(None, "LoRA rank, or r=16,target_modules=q_proj+v_proj", "R")
    qlora: bool = flag(False, "LoRA on 4-bit weights (default rank 16)")
    optimizer: str = flag("adamw", "adamw, adamw-8bit, lion, sgd, sgd-momentum or adafactor", "NAME")
    dtype: str = flag("mixed", "mixed (fp32 weights, bf16 products), bfloat16 or float32", "NAME")
    offload: str = flag("", "To the host: checkpoints (or 64GB of them), optimizer, weights", "WHAT,..")
    host_memory: str = flag(None, "Host memory per node, such as 1TiB", "SIZE")
    attention: str = flag("flash", "flash, flash3, sdpa or eager", "NAME")
    scans: str = flag("kernels", "Layers with a state run in kernels, pytorch or what is installed", "NAME")
    liger: bool = flag(False, "Liger's norm and SwiGLU kernels (use_liger_kernel)")
    images: int = flag(None, "Images per sequence, for vision-language models", "N")
    image_size: str = flag(None, "Height and width of each image in pixels, 1024x768", "HxW")
    image_tokens: int = flag(None, "Image tokens per sequence, instead of --images", "N")
    frames: int = flag(None, "Frames of the video in each sequence", "N")
    frame_size: str = flag(None, "Height and width of each frame in pixels, 448x448", "HxW")
    options: dict[str, Any] = field(default_factory=dict)
    batch_size: int = flag(1, "Sequences per rank and micro-batch", "N")
    gradient_accumulation: int = flag(None, "Micro-batches per optimizer step (default 1; GRPO: a whole group)", "N")
    group_size: int = flag(None, "GRPO: completions per prompt (default 8)", "N")
    shared_prompt: int = flag(None, "GRPO: tokens of a prompt that is computed once for its group", "TOKENS")
    reference: bool = flag(False, "GRPO: with a reference model (beta above 0)")
    generator: str = flag(None, "GRPO: server (default), model, colocate or sleep (vLLM on the device)", "NAME")
    generator_memory: str = flag(None, "vLLM's share of the device: 0.3, or 24GiB", "M")
    explain: bool = flag(False, "Print the reason for each setting")
    json: bool = flag(False, "Print one JSON object")
    recipe: str = flag(None, "Write a recipe for seqtile train", "FILE")


@takes(
    PlanFlags,
    options=option_flags(
        "plan",
        defaults={"loss": "tiled", "checkpoint": "auto"},
        suffixes={"tile": ", none", "checkpoint": "; auto: what fits", "loss": "; grpo: a GRPO step, tiled"},
    ),
)
def command(flags: PlanFlags) -> None:
    """Estimate a step's memory and the longest sequence that fits. Needs no GPU and no weights."""
    # Names, numbers and paths are checked first: importing what runs the step takes seconds.
    _check_flags(flags)
    policy = _policy_of(flags)
    settings = _checked_settings(flags, policy)
    refuse_unreachable(flags.model)
    with status(flags.json, "reading the model's configuration") as progress:
        request = _request(flags, settings, policy)
        progress("running the step on shapes")
        from seqtile.cli import plan_show as show
        from seqtile.planner.explain import next_step
        from seqtile.planner.memory_plan import longest_by_split, why_nothing_fits
        from seqtile.planner.memory_plan import plan as make_plan
        from seqtile.planner.model_errors import in_one_sentence

        with in_one_sentence(request.config):
            request, like, why = _with_choice(request, flags.max_length)
            planned = make_plan(request, flags.max_length, like=like)
        planner, estimate, longest, limit, _ = planned
        nothing_fits = flags.max_length is None and not longest
        if nothing_fits and not flags.json:
            raise RunError(why_nothing_fits(planner.request, estimate, limit))
        fits = flags.max_length is None or planner.fits(estimate)

    def by_split() -> dict[int, int]:
        if flags.nodes == 1:
            return {}
        with status(flags.json, "planning other numbers of ranks per sequence"), in_one_sentence(request.config):
            return longest_by_split(planner)

    def better() -> NextSetting | None:
        if not (flags.json or flags.max_length is None or not fits or not longest):
            return None
        with status(flags.json, "planning settings for longer sequences"):
            return next_step(planner, longest, flags.max_length or 0, settings["options"])

    if nothing_fits:
        show.print_object(planned, None, better(), by_split())
        raise RunError(why_nothing_fits(planner.request, estimate, limit))
    show.show_plan(
        planned, flags.max_length, as_json=flags.json, reasons=flags.explain, recipe_file=flags.recipe,
        better=better, by_split=by_split, why=why,
    )  # fmt: skip
    if not fits:
        raise typer.Exit(RUN_ERROR)


def _with_choice(request: Request, max_length: int | None) -> tuple[Request, Planner | None, tuple[str, ...]]:
    """``request`` with chosen settings (the tightest if none fit), their plan and why; unchanged if any are given."""
    from seqtile.fitting import choose
    from seqtile.planner.chooser import DoesNotFit, fixed_settings

    fixed = fixed_settings(request.options, checkpoint="auto")
    if max_length is None or fixed or not request.has_recipe or request.options.loss is None:  # what no fit plans
        return request, None, ()
    try:
        choice = choose(request, max_length, fixed)
    except DoesNotFit as error:
        return error.planner.request, error.planner, (str(error),)
    return replace(request, options=choice.options), choice.planner, choice.why


def _check_flags(flags: PlanFlags) -> None:
    """Refuse flags that exclude each other, and a recipe that cannot be written."""
    if flags.full and (flags.lora is not None or flags.qlora):
        raise UserError("plan.full-with-lora", "got --full with --lora or --qlora; use one")
    if flags.max_length is not None and flags.max_length < 2:
        raise UserError("max-length.too-small", f"got --max-length {flags.max_length}, expected at least 2 tokens")
    if flags.recipe is not None and not Path(flags.recipe).expanduser().parent.is_dir():
        raise UserError(
            "plan.recipe-directory-missing", f"--recipe {flags.recipe!r}: its directory does not exist; create it first"
        )
    if flags.recipe is not None and Path(flags.recipe).expanduser().is_dir():
        raise UserError("plan.recipe-is-directory", f"--recipe {flags.recipe!r} is a directory, expected a file name")
    _size_of(flags)


def _checked_settings(flags: PlanFlags, policy: dict[str, Any] | None) -> dict[str, Any]:
    """The fields of a request that the flags give without the model's configuration."""
    from seqtile.planner.accelerators import find_device
    from seqtile.planner.names import check_names, split_offload

    options = options_of(flags.options if policy is None else {**flags.options, "loss": "tiled"})
    offload, engine_offload = split_offload(flags.offload, flags.engine)
    accumulation = flags.gradient_accumulation
    if accumulation is None:  # as many as make whole groups
        group = 1 if policy is None or policy["prompt"] else policy["group"]
        accumulation = max(1, group // gcd(group, flags.batch_size * flags.gpus))
    same = ("engine", "attention", "optimizer", "gpus", "sp_size", "cp_size", "nodes", "scans")
    named = {
        **{name: getattr(flags, name) for name in same},
        "precision": flags.dtype, "batch": flags.batch_size, "accumulation": accumulation,
        "engine_offload": engine_offload,
    }  # fmt: skip
    check_names(named, flags.max_length)
    return {
        **named, "options": replace(options, offload=offload), "device": find_device(flags.device),
        "host_memory": host_bytes(flags.host_memory), "liger": flags.liger, "qlora": flags.qlora,
    }  # fmt: skip


def _request(flags: PlanFlags, settings: dict[str, Any], policy: dict[str, Any] | None) -> Request:
    """Read the model's configuration, and scale its positions to the planned length."""
    import logging

    from seqtile.models.configs import max_positions, named_positions, read_config, refuse_encoder

    adapters = "16" if flags.lora is None and flags.qlora else flags.lora
    lora = None if adapters is None else parse_adapters(adapters)
    from seqtile.models.rope_scaling import scale_positions, scaling_for
    from seqtile.planner.pictures import read_pictures
    from seqtile.planner.request import Request
    from seqtile.planner.step_config import Grpo

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = read_config(flags.model)
    refuse_encoder(config, flags.model)
    rope_scaling, own_positions = None, named_positions(flags.model) or max_positions(config)
    if flags.max_length is not None and flags.max_length > (max_positions(config) or flags.max_length):
        rope_scaling = scaling_for(config, flags.max_length)
        if rope_scaling is not None:
            scale_positions(config, rope_scaling, flags.model)
    pictures = None
    if any(number is not None for number in (flags.images, flags.image_tokens, flags.frames)):
        pictures = read_pictures(config, flags.images, _size_of(flags), flags.image_tokens, flags.frames)
    elif settings["options"].vision is not None:
        raise UserError(
            "vision.without-images", "--vision cuts pictures or frames into groups; add --images N or --frames N"
        )
    request = Request(
        model=flags.model, config=config, **settings, lora=lora, grpo=None if policy is None else Grpo(**policy),
        pictures=pictures, rope_scaling=rope_scaling, own_positions=own_positions,
    )  # fmt: skip
    if flags.recipe is not None and not request.has_recipe:
        raise UserError(
            "plan.recipe-with-grpo",
            "--recipe writes a recipe for seqtile train, which trains no policy; drop it, and use the settings with "
            "seqtile.apply and TRL's trainer",
        )
    return request


@contextmanager
def status(quiet: bool, message: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr, where it is a terminal; yields a function that updates its text."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(message) as line:
        yield lambda text: line.update(text)


def _size_of(flags: PlanFlags) -> tuple[int, int] | None:
    """(height, width) from ``--image-size`` or ``--frame-size``."""
    if flags.image_tokens is not None and (flags.images is not None or flags.image_size is not None):
        raise UserError("images.tokens-with-images", "got --image-tokens with --images or --image-size; use either")
    if flags.frames is not None and (flags.images is not None or flags.image_tokens is not None):
        raise UserError("frames.with-images", "got --frames with --images or --image-tokens; use either")
    numbers = {"--images": flags.images, "--image-tokens": flags.image_tokens, "--frames": flags.frames}
    for name, number in numbers.items():
        if number is not None and not 0 < number < 2**27:
            raise UserError(
                "images.count-out-of-range", f"got {name} {number}, expected at least 1 and fewer than {2**27:,}"
            )
    sizes = ("--image-size", flags.image_size, "--images"), ("--frame-size", flags.frame_size, "--frames")
    result = None
    for name, size, count in sizes:
        if size is None:
            continue
        if numbers[count] is None:
            raise UserError(
                "images.size-without-count",
                f"{name} needs the number of {count.removeprefix('--')} per sequence; add {count} N",
            )
        sides = re.fullmatch(r"([1-9][0-9]{0,4})[xX]([1-9][0-9]{0,4})", size, re.ASCII)
        if sides is None:
            raise UserError(
                "images.size-malformed", f"got {name} {size!r}, expected height and width in pixels, such as 1024x768"
            )
        result = int(sides[1]), int(sides[2])
    return result


def _policy_of(flags: PlanFlags) -> dict[str, Any] | None:
    """Parse the flags of GRPO; None for a supervised step."""
    from seqtile.planner.names import GENERATORS

    if flags.options.get("loss") != "grpo":
        for name in ("group_size", "shared_prompt", "reference", "generator", "generator_memory"):
            if getattr(flags, name) not in (None, False):
                raise UserError(
                    "grpo.flag-without-grpo", f"--{name.replace('_', '-')} is for GRPO; add --loss grpo or drop it"
                )
        return None
    where = "server" if flags.generator is None else flags.generator
    if where not in GENERATORS:
        raise UserError("generator.unknown", f"got generator {where!r}, expected one of {', '.join(GENERATORS)}")
    if flags.generator_memory is not None and where not in ("colocate", "sleep"):
        raise UserError(
            "generator.memory-without-generator",
            f"--generator-memory needs a generator on the device, got generator {where!r}; add --generator colocate "
            "or sleep",
        )
    group = 8 if flags.group_size is None else flags.group_size
    if group < 2:
        raise UserError("grpo.group-too-small", f"got group size {group}, expected at least 2 completions per prompt")
    prompt = 0 if flags.shared_prompt is None else flags.shared_prompt
    if flags.shared_prompt is not None and not 0 < prompt < 2**27:
        raise UserError(
            "grpo.shared-prompt-out-of-range",
            f"got --shared-prompt {prompt}, expected at least 1 and fewer than {2**27:,} tokens",
        )
    memory = generator_fraction(flags.generator_memory)
    return {"group": group, "prompt": prompt, "reference": flags.reference, "generator": where, "memory": memory}


def generator_fraction(text: str | None) -> float | None:
    """Parse ``--generator-memory``: a fraction of the device's memory, or bytes above 1."""
    from seqtile.tiling import parse_bytes

    if text is None:
        return None
    try:
        fraction = float(text)
        good = 0 < fraction <= 1
    except ValueError:
        fraction = float(parse_bytes(text))
        good = fraction > 1
    if not good:
        raise UserError(
            "generator.memory-malformed",
            f"got --generator-memory {text!r}, expected a fraction of the device's memory such as 0.3, or a size such "
            "as 24GiB",
        )
    return fraction


def parse_adapters(text: str) -> Lora:
    """Parse ``--lora`` as ``seqtile train`` does."""
    from pydantic import ValidationError

    from seqtile.train.recipe import LoraRecipe, parse_lora

    try:
        adapters = LoraRecipe(**parse_lora(text))
    except (ValidationError, ValueError):
        raise UserError(
            "lora.malformed", f"got --lora {text!r}, expected a rank such as 16 or 'r=16,alpha=32,dropout=0.05'"
        ) from None
    from seqtile.planner.step_config import Lora

    return Lora(adapters.r, adapters.target_modules, adapters.alpha, adapters.dropout)


def refuse_unreachable(model: str) -> None:
    """Refuse a model that is neither local nor reachable on the Hub, before libraries retry many times.

    Raises:
        UserError: with what would do.
    """
    from seqtile.models.configs import NAMED, refuse_missing
    from seqtile.train.check_early import check_hub_name

    refuse_missing(model)
    if model not in NAMED and not Path(model).expanduser().exists():
        check_hub_name(model, "model")


def host_bytes(text: str | None) -> int | None:
    """Parse ``--host-memory`` into bytes."""
    from seqtile.tiling import parse_bytes

    if text is None:
        return None
    size = parse_bytes(text)
    if not size or not text.strip()[-1].isalpha():
        raise UserError(
            "plan.host-memory-malformed", f"got --host-memory {text!r}, expected a size such as 512GiB or 1TiB"
        )
    return size
