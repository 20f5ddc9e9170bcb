"""``seqtile probe``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from seqtile._errors import UserError
from seqtile.cli.option_flags import options_of, takes_options

if TYPE_CHECKING:
    from seqtile.planner.measured_step import Probe


@takes_options("probe", defaults={"loss": "tiled", "checkpoint": "layer"})
def command(
    model: str = typer.Option(
        ..., help="config.json, model directory, Hub id or a shape; weights are random.", metavar="PATH"
    ),
    max_length: int = typer.Option(8192, help="Tokens per sequence.", metavar="TOKENS"),
    full: bool = typer.Option(False, "--full", help="Train every weight (default)."),
    lora: str = typer.Option(None, help="LoRA rank, or r=16.", metavar="R"),
    optimizer: str = typer.Option("adamw", help="An optimizer of seqtile plan.", metavar="NAME"),
    dtype: str = typer.Option(
        "mixed", help="mixed (fp32 weights, bf16 products), bfloat16 or float32.", metavar="NAME"
    ),
    attention: str = typer.Option("flash", help="flash (PyTorch's kernel), sdpa or eager.", metavar="NAME"),
    options: Any = None,
    batch_size: int = typer.Option(1, help="Sequences per step.", metavar="N"),
    out: str = typer.Option("runs/probe", help="Directory for the plot and the memory snapshot.", metavar="DIR"),
    json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Measure one training step here and compare it with its plan."""
    import json as writer
    import logging
    from pathlib import Path

    from seqtile.cli.plan_command import read_adapters, refuse_unreachable
    from seqtile.planner.names import check_names

    adapters = read_adapters(full=full, lora=lora)
    tiling = options_of(options)
    if tiling.checkpoint == "auto":
        raise UserError("checkpoint 'auto' is for seqtile plan; probe layer, attention-saved or none")
    if attention == "flash3":
        raise UserError("got attention 'flash3', expected flash (PyTorch's kernel), sdpa or eager")
    if not tiling.tiled:
        raise UserError("got --tile none, but a probe compares tiled with untiled; use another tile rule")
    if max_length < 64:
        raise UserError(f"got --max-length {max_length}, expected at least 64 tokens")
    check_names(
        engine="single", attention=attention, precision=dtype, optimizer=optimizer, engine_offload=(), gpus=1,
        sp_size=1, batch=batch_size, accumulation=1, nodes=1, scans="installed",
    )  # fmt: skip
    refuse_unreachable(model)
    from seqtile.planner.accelerators import this_device
    from seqtile.planner.model_shapes import read_config
    from seqtile.planner.request import Request, check_request, check_request_combination, refuse_encoder

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = read_config(model)
    device = this_device()
    request = Request(
        model=model, config=config, device=device, lora=adapters,
        optimizer=optimizer, precision=dtype, attention=attention, options=tiling, batch=batch_size,
        device_type=device.name, scans="installed",
    )  # fmt: skip
    refuse_encoder(config, model, "seqtile probe measures steps of")
    check_request(request, max_length)
    check_request_combination(request, max_length)

    from seqtile.planner.measured_step import PHASES, plot_timeline, probe

    directory = Path(out).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create --out {out!r} ({error.strerror}); use another directory") from None
    snapshot = None if device.name == "cpu" else directory / "snapshot.pickle"
    probed = probe(config, request.setup(), max_length, snapshot, tiling.loss_tile)
    plot_timeline(probed, directory / "timeline.png")
    if json:
        sides = {
            side.name: {
                "peak_gib": side.peak / 2**30, "standing_gib": side.standing / 2**30, "plan_error": side.error,
                "phases": {
                    name: {"measured_gib": side.peaks[name] / 2**30, "planned_gib": side.planned[name] / 2**30}
                    for name in PHASES
                },
                "peak_at": str(side.peak_at), "blocks": side.ran if side.name == "tiled" else "untiled",
                "terms": {
                    name: {"measured_gib": measured / 2**30, "planned_gib": planned / 2**30}
                    for name, (measured, planned) in side.terms.items()
                },
                "most_off": side.worst,
            }
            for side in probed.sides
        }  # fmt: skip
        about = {"tokens": probed.tokens, "asked": probed.asked, "device": probed.device_type, "notes": probed.notes}
        files = {"timeline": str(directory / "timeline.png"), "snapshot": None if snapshot is None else str(snapshot)}
        print(writer.dumps({**about, **sides, **files}))
        return
    _show(probed, str(directory / "timeline.png"))
    if snapshot is not None:
        print(f"snapshot: {snapshot}")


def _show(probed: Probe, plot: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from seqtile.planner.measured_step import PHASES

    console = Console(highlight=False, soft_wrap=True, markup=False)
    how = "live bytes, counted" if probed.device_type == "cpu" else "the allocator's peaks"

    def table(title: str, first: str) -> Table:
        made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
        made.add_column(first)
        for word in ("measured", "planned", "off"):
            made.add_column(word, justify="right")
        return made

    for side in probed.sides:
        title = f"One {side.name} step of {probed.tokens:,} tokens on {probed.device_type} ({how})"
        phases = table(title, "MiB at the peak")
        for name in PHASES:
            phases.add_row(name, *_row(side.peaks[name], side.planned[name]))
        console.print(phases)
    first = probed.sides[0]
    peak_phase = first.peak_at.named(probed.layers)
    terms = table(f"Tiled: tensors at the plan's peak ({peak_phase})", "MiB")
    for name, (measured, planned) in sorted(first.terms.items(), key=lambda item: -item[1][1]):
        if max(measured, planned) >= 2**10:
            terms.add_row(name, *_row(measured, planned))
    console.print(terms)
    if len(probed.sides) == 2:
        untiled = probed.sides[1].peak
        console.print(f"Tiled peak {first.peak / 2**20:,.1f} MiB, {first.peak / untiled:.0%} of untiled.")
    console.print(f"Blocks: {first.ran}.")
    measured, planned = first.terms[first.worst]
    off = f"largest difference at the peak: {first.worst}, {(planned - measured) / 2**20:+,.2f} MiB"
    if abs(planned - measured) < 2**13:
        off = "no term differs at the peak"
    if abs(first.error) <= 0.01:
        console.print(f"The planned peak is within 1% ({first.error:+.2%}); {off}.")
    else:
        worst = max(PHASES, key=lambda name: abs(first.planned[name] - first.peaks[name]))
        gap = first.planned[worst] - first.peaks[worst]
        console.print(
            f"The planned peak is off by {first.error:+.1%}, most of it in the {worst}: {gap / 2**20:+,.1f} MiB; {off}."
        )
    for note in probed.notes:
        console.print(f"Note: {note}.")
    console.print(f"timeline: {plot}")


def _row(measured: float, planned: float) -> tuple[str, str, str]:
    off = f"{planned / measured - 1:+.1%}" if measured else "not there"
    return f"{measured / 2**20:,.1f}", f"{planned / 2**20:,.1f}", off
