"""``seqtile plan``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from seqtile._errors import UserError
from seqtile.cli.option_flags import options_of, takes_options

if TYPE_CHECKING:
    from seqtile.planner.step_config import Lora


@takes_options(
    "plan",
    defaults={"loss": "tiled", "checkpoint": "auto"},
    more={"tile": ", or none", "checkpoint": "; auto: what fits"},
)
def command(
    model: str = typer.Option(..., help="config.json, model directory, Hub id, or a shape: llama-8b, qwen3-8b, ..."),
    device: str = typer.Option("h100", help="h200, h100, a100-80, a100-40, rtx4090, ... or its memory, 141GiB."),
    gpus: int = typer.Option(1, help="Devices of the node.", metavar="N"),
    max_length: int = typer.Option(None, help="Does this fit? Without it: the longest that does.", metavar="TOKENS"),
    engine: str = typer.Option("single", help="single, ddp, fsdp2 or zero3."),
    sp_size: int = typer.Option(1, help="Ranks that share one sequence.", metavar="N"),
    full: bool = typer.Option(False, "--full", help="Train every weight (the default)."),
    lora: str = typer.Option(None, help="Train adapters: a rank, or r=16.", metavar="R"),
    qlora: bool = typer.Option(False, "--qlora", help="Adapters on a model in 4 bits (rank 16 without --lora)."),
    optimizer: str = typer.Option("adamw", help="adamw, adamw-8bit, lion, adafactor, sgd, sgd-momentum."),
    precision: str = typer.Option("mixed", help="mixed, bfloat16 or float32."),
    offload: str = typer.Option("", help="To the host: checkpoints, optimizer, weights.", metavar="WHAT,.."),
    host_memory: str = typer.Option(None, help="Host memory of the node, 1TiB.", metavar="SIZE"),
    attention: str = typer.Option("flash", help="flash, flash3, sdpa or eager."),
    scans: str = typer.Option("kernels", help="Layers with a state: kernels, pytorch or installed."),
    options: Any = None,
    batch_size: int = typer.Option(1, help="Rows per rank.", metavar="N"),
    explain: bool = typer.Option(False, "--explain", help="Why each setting."),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
    recipe: str = typer.Option(None, help="Write the recipe that seqtile train takes.", metavar="FILE"),
    plot: str = typer.Option(None, help="Write a plot, length against memory.", metavar="FILE.png"),
) -> None:
    """Will it fit? Memory of a training step, term by term, before anything is rented; needs no GPU and no weights."""
    import logging
    from pathlib import Path

    from seqtile.planner.accelerators import find_device
    from seqtile.planner.model_shapes import read_config
    from seqtile.planner.request import Request, split_offload
    from seqtile.planner.step_config import Lora

    if full and (lora is not None or qlora):
        raise UserError("--full trains every weight and --lora and --qlora do not; give one of them")
    _check_trains(engine, gpus, sp_size, max_length)
    for name, file in (("--recipe", recipe), ("--plot", plot)):
        if file is not None and not Path(file).expanduser().parent.is_dir():
            raise UserError(f"{name} {file!r}: its directory does not exist; make it first")
        if file is not None and Path(file).expanduser().is_dir():
            raise UserError(f"{name} {file!r} is a directory; give the name of a file")
    if plot is not None and not plot.endswith(".png"):
        raise UserError(f"--plot {plot!r}: expected a name that ends with .png")
    asked, (on_host, moved) = options_of(options), split_offload(offload)
    adapters = parse_adapters(lora) if lora is not None else Lora() if qlora else None
    target = find_device(device)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    request = Request(
        model=model, config=read_config(model), device=target, gpus=gpus, host_memory=host_bytes(host_memory),
        engine=engine, sp_size=sp_size, lora=adapters, qlora=qlora, optimizer=optimizer, precision=precision,
        engine_offload=moved, attention=attention, scans=scans, batch=batch_size,
        options=replace(asked, offload=on_host),
    )  # fmt: skip
    from seqtile.cli import plan_show as show
    from seqtile.planner.memory_plan import plan as make_plan

    with show.status(json, "running the step on shapes"):
        planner, estimate, longest, limit, saving = make_plan(request, max_length)
    show.show_plan(
        planner, estimate, longest, limit, as_json=json, reasons=explain, recipe_file=recipe, plot_file=plot,
        asked=max_length, saving=saving,
    )  # fmt: skip


def _check_trains(engine: str, gpus: int, sp_size: int, max_length: int | None) -> None:
    """Refuse what could be planned, but ``seqtile train`` would not take as a recipe."""
    if engine == "ddp" and gpus == 1:
        raise UserError("engine 'ddp' needs at least 2 GPUs; add --gpus 2 or more, or use --engine single")
    if sp_size > 1 and engine in ("ddp", "fsdp2"):
        raise UserError(f"sp-size {sp_size} splits sequences by DeepSpeed, got engine {engine!r}; use --engine zero3")
    if sp_size > 1 and max_length is not None and max_length % sp_size:
        nearest = max_length // sp_size * sp_size or sp_size
        raise UserError(f"max length {max_length} is not a multiple of sp-size {sp_size}; use --max-length {nearest}")


def parse_adapters(text: str) -> Lora:
    """The adapters that ``--lora`` gives, as ``seqtile train`` takes them."""
    from pydantic import ValidationError

    from seqtile.planner.step_config import Lora
    from seqtile.train.recipe import LoraRecipe, parse_lora

    try:
        found = LoraRecipe(**parse_lora(text))
    except (ValidationError, ValueError):
        raise UserError(f"got --lora {text!r}, expected a rank such as 16 or 'r=16,alpha=32,dropout=0.05'") from None
    return Lora(found.r, found.target_modules, found.alpha, found.dropout)


def read_adapters(*, full: bool, lora: str | None) -> Lora | None:
    """What ``--full`` and ``--lora`` ask for: adapters, or None to train every weight."""
    if full and lora is not None:
        raise UserError("--full trains every weight and --lora does not; give one of them")
    return None if lora is None else parse_adapters(lora)


def host_bytes(text: str | None) -> int | None:
    """The bytes that ``--host-memory`` gives."""
    from seqtile.tiling import parse_bytes

    if text is None:
        return None
    size = parse_bytes(text)
    if not size:
        raise UserError(f"got --host-memory {text!r}, expected a size such as 512GiB or 1TiB")
    return size
