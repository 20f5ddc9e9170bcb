"""``seqtile bench``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer

from seqtile._errors import UserError
from seqtile._log import process_rank
from seqtile.cli.option_flags import options_of, takes_options

app = typer.Typer(help="Measure time, memory and gradient error. Tiled and untiled, with others beside.")


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure time, memory and gradient error. Tiled and untiled, with others beside."""
    if context.invoked_subcommand is None:
        raise UserError("seqtile bench: say what to measure: mlp, step or ladder; see seqtile bench --help")


@app.command()
@takes_options("bench mlp", more={"keep": ", of the fused operator"})
def mlp(
    shape: str = typer.Option(None, help="llama-8b, qwen3-8b or ms-swift. [default: llama-8b; on the CPU 512x1408]"),
    hidden: int = typer.Option(None, help="Hidden width, with --intermediate instead of --shape.", metavar="D"),
    intermediate: int = typer.Option(None, help="Width of the MLP.", metavar="F"),
    tokens: str = typer.Option(None, help="[default: 8192,32768,131072; on the CPU 2048,8192]", metavar="N,N"),
    tiles: str = typer.Option("auto", help="Tile rules: auto, 8192, shards:4, arctic, memory:1GiB.", metavar="RULE,.."),
    methods: str = typer.Option(
        "untiled,generic,fused,tile-checkpoint,liger,deepspeed",
        help="Ways to run the block; there is deepspeed-compute too.", metavar="NAME,..",
    ),
    checkpoint: str = typer.Option("both", help="In a layer under an activation checkpoint: no, yes, both."),
    train: str = typer.Option("full", help="What trains: full, frozen, lora.", metavar="WHAT,.."),
    dtype: str = typer.Option(None, help="[default: bfloat16; on the CPU float32]"),
    device: str = typer.Option(None, help="[default: the accelerator if there is one, else cpu]"),
    repeats: int = typer.Option(5, help="Timed runs per cell, at least 5.", metavar="N"),
    pairs: int = typer.Option(0, help="Interleaved pairs with untiled in one process instead.", metavar="N"),
    options: Any = None,
    out: str = typer.Option("runs/bench", help="Directory of the results.", metavar="DIR"),
) -> None:  # fmt: skip
    """One MLP block, forward and backward. Methods x tokens x tile rules, every cell in a process of its own."""
    from seqtile.bench.grid import build_grid, grid_summary, look_around, resolve_grid, run_grid
    from seqtile.bench.plots import plot_grid
    from seqtile.cli import bench_show as show

    grid = build_grid(
        shape=shape, hidden=hidden, intermediate=intermediate, tokens=tokens, tiles=tiles, methods=methods,
        checkpoint=checkpoint, train=train, dtype=dtype, device=device, repeats=repeats, pairs=pairs,
        options=options_of(options),
    )  # fmt: skip
    found = look_around()
    grid, groups = resolve_grid(grid, found)
    directory, stem = show.free_stem(out, "mlp")
    with show.Status() as status:
        rows = run_grid(grid, groups, found, directory / f"{stem}.jsonl", status.say)
    show.print_grid(rows)
    show.print_files([directory / f"{stem}.jsonl", *plot_grid(rows, directory, stem)])
    show.print_summary(grid_summary(rows))


@app.command()
@takes_options("bench step")
def step(
    model: str = typer.Option(..., help="Model directory, config file or Hub id.", metavar="PATH_OR_ID"),
    tokens: int = typer.Option(8192, help="Length of the one row.", metavar="N"),
    options: Any = None,
    methods: str = typer.Option("untiled,fused,tile-checkpoint", help="As for `bench mlp`.", metavar="NAME,.."),
    checkpoint: bool = typer.Option(True, help="Activation checkpointing."),
    dtype: str = typer.Option(None, help="[default: bfloat16; on the CPU float32]"),
    loss_tokens: int = typer.Option(1024, help="Last tokens that the loss is taken on.", metavar="N"),
    repeats: int = typer.Option(5, help="Timed steps, at least 5.", metavar="N"),
    out: str = typer.Option("runs/bench", help="Directory of the results.", metavar="DIR"),
) -> None:
    """A whole training step of a model. Under accelerate launch or torchrun on that engine."""

    from seqtile.bench import training_step as steps
    from seqtile.bench.cell import DTYPES, METHODS
    from seqtile.bench.grid import parse_words
    from seqtile.cli import bench_show as show

    if dtype is not None:
        parse_words("--dtype", dtype, DTYPES)
    chosen = parse_words("--methods", methods, METHODS)
    wanted = steps.TrainingStep(model, tokens, options_of(options), checkpoint, dtype or "", loss_tokens, repeats)
    if process_rank() != 0:
        steps.run_steps(wanted, chosen, None)
        return
    directory, stem = show.free_stem(out, "step")
    file = directory / f"{stem}.jsonl"
    with show.Status() as status:
        rows = steps.run_steps(wanted, chosen, file, status.say)
    wrong = next((row["error"] for row in rows if row.get("user_error")), None)
    if wrong is not None:
        raise UserError(wrong)
    show.print_steps(rows)
    show.print_files([file])
    show.print_summary(steps.step_summary(rows))


@app.command()
def ladder(
    model: str = typer.Option(..., help="As for `seqtile plan`: a shape such as llama-8b, config.json, ..."),
    device: str = typer.Option("h200", help="h200, h100, ... or its memory, 141GiB."),
    host_memory: str = typer.Option(None, help="Host memory of the node, 128GiB.", metavar="SIZE"),
    gpus: int = typer.Option(1, help="Devices of the node.", metavar="N"),
    engine: str = typer.Option("single", help="single, ddp, fsdp2 or zero3."),
    sp_size: int = typer.Option(1, help="Ranks that share one sequence.", metavar="N"),
    lora: str = typer.Option(None, help="Train adapters: a rank, or r=16.", metavar="R"),
    full: bool = typer.Option(False, "--full", help="Train every weight (the default)."),
    optimizer: str = typer.Option("adamw", help="adamw, adamw-8bit, lion, sgd, sgd-momentum, adafactor."),
    precision: str = typer.Option("mixed", help="mixed, bfloat16 or float32."),
    offload: str = typer.Option("", help="On the host from the first rung on: optimizer, weights.", metavar="WHAT,.."),
    attention: str = typer.Option("flash", help="flash, flash3, sdpa or eager."),
    efficiency: float = typer.Option(0.4, help="Share of the speed on paper that times assume."),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
    out: str = typer.Option("runs/bench", help="Directory of the results.", metavar="DIR"),
) -> None:  # fmt: skip
    """The longest sequence, technique by technique. What each costs in time too, by the plan; needs no GPU."""
    import json as text
    import logging

    from seqtile.cli.plan_command import host_bytes, read_adapters, refuse_unreachable
    from seqtile.planner.accelerators import find_device
    from seqtile.planner.names import SCANS, check_names, split_offload

    adapters = read_adapters(full=full, lora=lora)
    if not 0 < efficiency <= 1:
        raise UserError(f"got --efficiency {efficiency}, expected a share above 0 and at most 1")
    on_host, moved = split_offload(offload)
    check_names(
        engine=engine, attention=attention, precision=precision, optimizer=optimizer, engine_offload=moved, gpus=gpus,
        sp_size=sp_size, batch=1, accumulation=1, nodes=1, scans=SCANS[0],
    )  # fmt: skip
    target = find_device(device)
    refuse_unreachable(model)
    from seqtile.bench import technique_ladder as ladders
    from seqtile.bench.environment import environment, stamp
    from seqtile.cli import bench_show as show
    from seqtile.planner.model_shapes import read_config
    from seqtile.planner.request import Request, refuse_encoder

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = read_config(model)
    refuse_encoder(config, model, "seqtile bench ladder adds techniques to steps of")
    request = Request(
        model=model, config=config, device=target, gpus=gpus, host_memory=host_bytes(host_memory),
        engine=engine, sp_size=sp_size, lora=adapters, optimizer=optimizer,
        precision=precision, engine_offload=moved, attention=attention,
        options=replace(Request.options, offload=on_host),
    )  # fmt: skip
    directory, stem = show.free_stem(out, "ladder")
    file, plot = directory / f"{stem}.jsonl", directory / f"{stem}.png"
    with show.Status() as status:
        rows = ladders.run_ladder(request, efficiency, stamp(environment()), file, status.say)
    ladders.plot_ladder(rows, plot)
    if json:
        print(text.dumps({"rows": rows, "files": [str(file), str(plot)]}))
        return
    show.print_ladder(rows)
    show.print_files([file, plot])
