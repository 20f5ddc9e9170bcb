"""``seqtile plan``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any

import typer

from seqtile._errors import RUN_ERROR, RunError, UserError
from seqtile.cli.option_flags import options_of, takes_options

if TYPE_CHECKING:
    from seqtile.planner.explain import NextSetting
    from seqtile.planner.step_config import Lora


@takes_options(
    "plan",
    defaults={"loss": "tiled", "checkpoint": "auto"},
    suffixes={"tile": ", none", "checkpoint": "; auto: what fits", "loss": "; grpo: a GRPO step, tiled"},
)
def command(
    model: str = typer.Option(
        ..., help="config.json, model directory, Hub id, or a shape: llama-8b, qwen3-8b, ...", metavar="PATH"
    ),
    device: str = typer.Option(
        "h100", help="h200, h100, a100-80, rtx4090, ..., or its memory such as 141GiB.", metavar="NAME"
    ),
    gpus: int = typer.Option(1, help="Number of devices, over all nodes.", metavar="N"),
    nodes: int = typer.Option(1, help="Number of nodes.", metavar="N"),
    max_length: int = typer.Option(
        None, help="Tokens per sequence (default: the longest that fits).", metavar="TOKENS"
    ),
    engine: str = typer.Option("single", help="single, ddp, fsdp2, zero2 or zero3.", metavar="NAME"),
    sp_size: int = typer.Option(1, help="Ranks per sequence with Ulysses (zero3).", metavar="N"),
    cp_size: int = typer.Option(1, help="Ranks per sequence with ring attention (fsdp2).", metavar="N"),
    full: bool = typer.Option(False, "--full", help="Train every weight (default)."),
    lora: str = typer.Option(None, help="LoRA rank, or r=16,target_modules=q_proj+v_proj.", metavar="R"),
    qlora: bool = typer.Option(False, "--qlora", help="LoRA on 4-bit weights (default rank 16)."),
    optimizer: str = typer.Option(
        "adamw", help="adamw, adamw-8bit, lion, sgd, sgd-momentum or adafactor.", metavar="NAME"
    ),
    dtype: str = typer.Option(
        "mixed", help="mixed (fp32 weights, bf16 products), bfloat16 or float32.", metavar="NAME"
    ),
    offload: str = typer.Option(
        "", help="To the host: checkpoints (or 64GB of them), optimizer, weights.", metavar="WHAT,.."
    ),
    host_memory: str = typer.Option(None, help="Host memory per node, such as 1TiB.", metavar="SIZE"),
    attention: str = typer.Option("flash", help="flash, flash3, sdpa or eager.", metavar="NAME"),
    scans: str = typer.Option(
        "kernels", help="Layers with a state run in kernels, pytorch or what is installed.", metavar="NAME"
    ),
    liger: bool = typer.Option(False, "--liger", help="Liger's norm and SwiGLU kernels (use_liger_kernel)."),
    images: int = typer.Option(None, help="Images per sequence, for vision-language models.", metavar="N"),
    image_size: str = typer.Option(None, help="Height and width of each image in pixels, 1024x768.", metavar="HxW"),
    image_tokens: int = typer.Option(None, help="Image tokens per sequence, instead of --images.", metavar="N"),
    options: Any = None,
    batch_size: int = typer.Option(1, help="Sequences per rank and micro-batch.", metavar="N"),
    gradient_accumulation: int = typer.Option(
        None, help="Micro-batches per optimizer step (default 1; GRPO: a whole group).", metavar="N"
    ),
    group_size: int = typer.Option(None, help="GRPO: completions per prompt (default 8).", metavar="N"),
    reference: bool = typer.Option(False, "--reference", help="GRPO: with a reference model (beta above 0)."),
    generator: str = typer.Option(
        None, help="GRPO: server (default), model, colocate or sleep (vLLM on the device).", metavar="NAME"
    ),
    generator_memory: str = typer.Option(None, help="vLLM's share of the device: 0.3, or 24GiB.", metavar="M"),
    explain: bool = typer.Option(False, "--explain", help="Print the reason for each setting."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    recipe: str = typer.Option(None, help="Write a recipe for seqtile train.", metavar="FILE"),
) -> None:
    """Estimate a step's memory and the longest sequence that fits. Needs no GPU and no weights."""
    import logging
    from pathlib import Path

    from seqtile.models.configs import max_positions, named_positions, read_config
    from seqtile.planner.accelerators import find_device
    from seqtile.planner.names import check_names, split_offload

    # Names, numbers and paths are checked first: importing what runs the step takes seconds.
    if full and (lora is not None or qlora):
        raise UserError("got --full with --lora or --qlora; use one")
    if max_length is not None and max_length < 2:
        raise UserError(f"got --max-length {max_length}, expected at least 2 tokens")
    if recipe is not None and not Path(recipe).expanduser().parent.is_dir():
        raise UserError(f"--recipe {recipe!r}: its directory does not exist; create it first")
    if recipe is not None and Path(recipe).expanduser().is_dir():
        raise UserError(f"--recipe {recipe!r} is a directory, expected a file name")
    size = _size_of(images, image_size, image_tokens)
    has_pictures = images is not None or image_tokens is not None
    policy = _policy_of(options, group_size, reference, generator, generator_memory)
    if policy is not None:
        options = {**options, "loss": "tiled"}
    if gradient_accumulation is None:  # as many as make whole groups
        gradient_accumulation = (
            1 if policy is None else max(1, policy["group"] // gcd(policy["group"], batch_size * gpus))
        )
    tiling, (on_host, moved) = options_of(options), split_offload(offload, engine)
    check_names(
        engine=engine, attention=attention, precision=dtype, optimizer=optimizer, engine_offload=moved, gpus=gpus,
        sp_size=sp_size, batch=batch_size, accumulation=gradient_accumulation, nodes=nodes, scans=scans,
        cp_size=cp_size, max_length=max_length,
    )  # fmt: skip
    target, of_the_host = find_device(device), host_bytes(host_memory)
    refuse_unreachable(model)
    with status(json, "reading the model's configuration") as progress:
        adapters = parse_adapters(lora) if lora is not None else parse_adapters("16") if qlora else None
        from seqtile.models.rope_scaling import scale_positions, scaling_for
        from seqtile.planner.pictures import read_pictures
        from seqtile.planner.request import Request, refuse_encoder
        from seqtile.planner.step_config import Grpo

        logging.getLogger("transformers").setLevel(logging.ERROR)
        config = read_config(model)
        refuse_encoder(config, model)
        rope_scaling, own_positions = None, named_positions(model) or max_positions(config)
        if max_length is not None and max_length > (max_positions(config) or max_length):
            rope_scaling = scaling_for(config, max_length)
            if rope_scaling is not None:
                scale_positions(config, rope_scaling, model)
        request = Request(
            model=model, config=config, device=target, gpus=gpus, host_memory=of_the_host, engine=engine,
            sp_size=sp_size, cp_size=cp_size, lora=adapters, qlora=qlora, optimizer=optimizer, precision=dtype,
            engine_offload=moved, attention=attention, options=replace(tiling, offload=on_host), batch=batch_size,
            accumulation=gradient_accumulation, nodes=nodes, liger=liger, scans=scans,
            grpo=None if policy is None else Grpo(**policy),
            pictures=read_pictures(config, images, size, image_tokens) if has_pictures else None,
            rope_scaling=rope_scaling, own_positions=own_positions,
        )  # fmt: skip
        if recipe is not None and not request.has_recipe:
            raise UserError(
                "--recipe writes a recipe for seqtile train, which trains causal language models on text; drop it, and "
                "use the settings with seqtile.apply and a trainer of Transformers or TRL"
            )
        progress("running the step on shapes")
        from seqtile.cli import plan_show as show
        from seqtile.planner.explain import next_step
        from seqtile.planner.memory_plan import longest_by_split, why_nothing_fits
        from seqtile.planner.memory_plan import plan as make_plan
        from seqtile.planner.model_errors import in_one_sentence

        with in_one_sentence(config):
            planner, estimate, longest, limit, saving = make_plan(request, max_length)
        nothing_fits = max_length is None and not longest
        if nothing_fits and not json:
            raise RunError(why_nothing_fits(planner.request, estimate, limit))
        fits = max_length is None or planner.fits(estimate)

    def by_split() -> dict[int, int]:
        if nodes == 1:
            return {}
        with status(json, "planning other numbers of ranks per sequence"), in_one_sentence(config):
            return longest_by_split(planner)

    def better() -> NextSetting | None:
        if not (json or max_length is None or not fits or not longest):
            return None
        with status(json, "planning settings for longer sequences"):
            return next_step(planner, longest, max_length or 0)

    if nothing_fits:
        show.print_object(planner, estimate, 0, limit, None, saving, better(), by_split())
        raise RunError(why_nothing_fits(planner.request, estimate, limit))
    show.show_plan(
        planner, estimate, longest, limit, as_json=json, reasons=explain, recipe_file=recipe,
        max_length=max_length, saving=saving, better=better, by_split=by_split,
    )  # fmt: skip
    if not fits:
        raise typer.Exit(RUN_ERROR)


@contextmanager
def status(quiet: bool, message: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr, where it is a terminal; yields a function that updates its text."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(message) as line:
        yield lambda text: line.update(text)


def _size_of(count: int | None, size: str | None, tokens: int | None) -> tuple[int, int] | None:
    """(height, width) from ``--image-size``."""
    if tokens is not None and (count is not None or size is not None):
        raise UserError("got --image-tokens with --images or --image-size; use either")
    for name, number in (("--images", count), ("--image-tokens", tokens)):
        if number is not None and not 0 < number < 2**27:
            raise UserError(f"got {name} {number}, expected at least 1 and fewer than {2**27:,}")
    if size is None:
        return None
    if count is None:
        raise UserError("--image-size needs the number of images per sequence; add --images N")
    sizes = re.fullmatch(r"([1-9][0-9]{0,4})[xX]([1-9][0-9]{0,4})", size, re.ASCII)
    if sizes is None:
        raise UserError(f"got --image-size {size!r}, expected height and width in pixels, such as 1024x768")
    return int(sizes[1]), int(sizes[2])


def _policy_of(
    options: Mapping[str, Any], group: int | None, reference: bool, generator: str | None, memory: str | None
) -> dict[str, Any] | None:
    """Parse the flags of GRPO; None for a supervised step."""
    from seqtile.planner.names import GENERATORS

    grpo_flags = {"--group-size": group, "--reference": reference or None, "--generator": generator,
             "--generator-memory": memory}  # fmt: skip
    if options.get("loss") != "grpo":
        if idle := [name for name, value in grpo_flags.items() if value is not None]:
            raise UserError(f"{idle[0]} is for GRPO; add --loss grpo or drop it")
        return None
    where = "server" if generator is None else generator
    if where not in GENERATORS:
        raise UserError(f"got generator {where!r}, expected one of {', '.join(GENERATORS)}")
    if memory is not None and where not in ("colocate", "sleep"):
        raise UserError(
            f"--generator-memory needs a generator on the device, got generator {where!r}; add --generator colocate "
            "or sleep"
        )
    group = 8 if group is None else group
    if group < 2:
        raise UserError(f"got group size {group}, expected at least 2 completions per prompt")
    return {"group": group, "reference": reference, "generator": where, "memory": generator_fraction(memory)}


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
            f"got --generator-memory {text!r}, expected a fraction of the device's memory such as 0.3, or a size such "
            "as 24GiB"
        )
    return fraction


def parse_adapters(text: str) -> Lora:
    """Parse ``--lora`` as ``seqtile train`` does."""
    from pydantic import ValidationError

    from seqtile.train.recipe import LoraRecipe, parse_lora

    try:
        adapters = LoraRecipe(**parse_lora(text))
    except (ValidationError, ValueError):
        raise UserError(f"got --lora {text!r}, expected a rank such as 16 or 'r=16,alpha=32,dropout=0.05'") from None
    from seqtile.planner.step_config import Lora

    return Lora(adapters.r, adapters.target_modules, adapters.alpha, adapters.dropout)


def refuse_unreachable(model: str) -> None:
    """Refuse a model that is neither local nor reachable on the Hub, before libraries retry many times.

    Raises:
        UserError: with what would do.
    """
    from pathlib import Path

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
        raise UserError(f"got --host-memory {text!r}, expected a size such as 512GiB or 1TiB")
    return size
