"""``seqtile probe``."""

from __future__ import annotations

import typer

from seqtile._errors import UserError


def command(
    model: str = typer.Option(..., help="config.json, model directory, Hub id or a named shape; weights are random."),
    max_length: int = typer.Option(8192, help="Tokens of the row.", metavar="TOKENS"),
    lora: int = typer.Option(None, help="Train adapters of this rank.", metavar="R", min=1),
    optimizer: str = typer.Option("adamw", help="As for seqtile plan."),
    attention: str = typer.Option("sdpa", help="sdpa or eager."),
    tile: str = typer.Option("auto", help="Tile rule of the MLP."),
    loss: str = typer.Option("tiled", help="tiled or full."),
    loss_tile: int = typer.Option(512, help="Tokens per tile of the head.", metavar="N", min=1),
    checkpoint: bool = typer.Option(True, help="Activation checkpointing."),
    dtype: str = typer.Option("float32", help="float32 or bfloat16."),
    out: str = typer.Option("runs/probe", help="Directory of the plot and of the snapshot.", metavar="DIR"),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """One real training step on this machine: peaks per phase beside what the plan says, and a timeline."""
    import json as writer
    import logging
    from pathlib import Path

    from seqtile.memory.request import LOSSES
    from seqtile.memory.setup import OPTIMIZERS
    from seqtile.memory.shapes import max_positions, read_config
    from seqtile.tiling import parse_tile

    for name, value, known in (
        ("optimizer", optimizer, tuple(OPTIMIZERS)), ("attention", attention, ("sdpa", "eager")),
        ("loss", loss, LOSSES), ("dtype", dtype, ("float32", "bfloat16")),
    ):  # fmt: skip
        if value not in known:
            raise UserError(f"--{name} {value!r} is not known here; use one of {', '.join(known)}")
    try:
        parse_tile(tile)
    except ValueError as error:
        raise UserError(str(error)) from None
    if max_length < 64:
        raise UserError(f"got --max-length {max_length}, expected at least 64 tokens")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = read_config(model)
    positions = max_positions(config)
    if positions is not None and max_length > positions:
        raise UserError(f"{max_length:,} tokens are beyond the {positions:,} positions of {model!r}; use at most those")

    import torch

    from seqtile.memory.probe import PHASES, plot_timeline, probe
    from seqtile.memory.setup import Lora, Setup

    setup = Setup(
        dtype=getattr(torch, dtype), checkpoint=checkpoint, tile=tile, loss=loss, loss_tile=loss_tile,  # type: ignore[arg-type]
        lora=None if lora is None else Lora(lora), optimizer=optimizer, attention=attention,
    )  # fmt: skip
    directory = Path(out).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    snapshot = directory / "snapshot.pickle"
    found = probe(config, setup, max_length, snapshot if torch.cuda.is_available() else None)
    plot_timeline(found, directory / "timeline.png")
    if json:
        sides = {
            side.name: {
                "peak_gib": side.peak / 2**30, "standing_gib": side.standing / 2**30, "plan_error": side.error,
                "phases": {
                    name: {"measured_gib": side.peaks[name] / 2**30, "planned_gib": side.planned[name] / 2**30}
                    for name in PHASES
                },
            }
            for side in found.sides
        }  # fmt: skip
        about = {"tokens": found.tokens, "asked": found.asked, "device": found.device_type, "notes": found.notes}
        print(writer.dumps({**about, **sides, "timeline": str(directory / "timeline.png")}))
        return
    _show(found, str(directory / "timeline.png"))


def _show(found: object, plot: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from seqtile.memory.probe import PHASES, Probe

    assert isinstance(found, Probe)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    how = "live bytes, counted" if found.device_type == "cpu" else "the allocator's peaks"
    table = Table(box=box.SIMPLE_HEAD, title=f"One step of {found.tokens:,} tokens on {found.device_type}, {how}")
    table.title_justify = "left"
    table.add_column("MiB at the peak")
    for side in found.sides:
        for word in (side.name, "planned", "off"):
            table.add_column(word, justify="right")
    for name in PHASES:
        cells = []
        for side in found.sides:
            measured, planned = side.peaks[name], side.planned[name]
            cells += [f"{measured / 2**20:,.1f}", f"{planned / 2**20:,.1f}", f"{planned / measured - 1:+.1%}"]
        table.add_row(name, *cells)
    console.print(table)
    first = found.sides[0]
    if len(found.sides) == 2:
        untiled = found.sides[1].peak
        console.print(f"Tiled peak {first.peak / 2**20:,.1f} MiB, {first.peak / untiled:.0%} of untiled.")
    if abs(first.error) <= 0.01:
        console.print("The plan's peak is within 1 %.")
    else:
        worst = max(PHASES, key=lambda name: abs(first.planned[name] - first.peaks[name]))
        gap = first.planned[worst] - first.peaks[worst]
        console.print(f"The plan's peak is {first.error:+.1%} off, most of it in the {worst}: {gap / 2**20:+,.1f} MiB.")
    for note in found.notes:
        console.print(f"Note: {note}.")
    console.print(f"timeline: {plot}")
