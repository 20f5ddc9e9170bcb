"""``seqtile train``."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

import typer

from seqtile._errors import UserError
from seqtile._log import log_to_stderr
from seqtile.cli.option_flags import takes_options

WORKER = "seqtile.cli.worker"
"""The module that each process of an engine runs."""


@takes_options("train", show_default=False)
def command(
    model: str = typer.Option(None, help="Model directory or Hub id. Without model and dataset: the embedded demo."),
    dataset: str = typer.Option(None, help="JSONL, CSV, Parquet or text file, a directory of them, or a Hub id."),
    eval_dataset: str = typer.Option(None, help="The same, to evaluate on; the best checkpoint is kept."),
    eval_steps: int = typer.Option(None, help="Steps between evaluations (default 500).", metavar="N"),
    skip_bad_rows: bool = typer.Option(
        None, "--skip-bad-rows", help="Leave out rows that nothing can be trained on, and count them."
    ),
    streaming: bool = typer.Option(None, "--streaming", help="Read and check the rows while training; needs --steps."),
    max_length: int = typer.Option(None, help="Tokens per row (default 8192).", metavar="TOKENS"),
    output: str = typer.Option(None, help="Directory of the result (default runs/NAME).", metavar="DIR"),
    lora: str = typer.Option(None, help="Train adapters: a rank, or r=16,alpha=32,dropout=0.05.", metavar="R"),
    options: Any = None,
    engine: str = typer.Option(None, help="single (default), ddp, fsdp2, zero2 or zero3.", metavar="NAME"),
    nproc: int = typer.Option(
        None, help="Processes of the engine, on all nodes (default one per accelerator).", metavar="N"
    ),
    sp_size: int = typer.Option(None, help="Processes that share one sequence (zero3).", metavar="N"),
    cp_size: int = typer.Option(None, help="The same by ring attention (fsdp2).", metavar="N"),
    nodes: int = typer.Option(
        None,
        min=1,
        help="Number of nodes (detected under Slurm and torchrun). Run the same command on each.",
        metavar="N",
    ),
    node_rank: int = typer.Option(None, min=0, help="Which of them this is, from 0.", metavar="R"),
    rendezvous: str = typer.Option(None, help="Where they meet: node 0 and a free port.", metavar="HOST:PORT"),
    wait_nodes: float = typer.Option(
        None, min=1, help="Seconds to wait for the others (default 600).", metavar="SECONDS"
    ),
    fit: bool = typer.Option(
        None, "--fit/--no-fit", help="Choose what the length needs on these devices (default: on accelerators)."
    ),
    fit_memory: str = typer.Option(None, help="The same for devices of this size.", metavar="SIZE"),
    on_oom: str = typer.Option(
        None, help="Out of memory: stop (default) or retry, with smaller tiles.", metavar="WHAT"
    ),
    batch_size: int = typer.Option(None, help="Rows per process and micro-batch (default 1).", metavar="N"),
    packing: str = typer.Option(None, help="Join rows: true (bfd), bfd_split, wrapped or false.", metavar="HOW"),
    epochs: float = typer.Option(None, help="Passes over the data (default 1).", metavar="N"),
    steps: int = typer.Option(None, help="Optimiser steps (default one pass over the data).", metavar="N"),
    grad_accumulation: int = typer.Option(None, help="Micro-batches per update (default 1).", metavar="N"),
    learning_rate: float = typer.Option(
        None, help="Peak learning rate (default 2e-5, with --lora 2e-4).", metavar="RATE"
    ),
    warmup_steps: float = typer.Option(None, help="Steps of warm-up; below 1 a part of all.", metavar="N"),
    lr_scheduler_type: str = typer.Option(None, help="linear (default), cosine, constant, ...", metavar="NAME"),
    save_steps: int = typer.Option(None, help="Steps between checkpoints (default 500).", metavar="N"),
    report_to: str = typer.Option(None, help="Trackers: wandb, tensorboard, mlflow, ...", metavar="NAME,.."),
    seed: int = typer.Option(None, help="Seed of weights, data order and dropout (default 0).", metavar="N"),
    recipe: str = typer.Option(None, help="YAML file with these and all other settings; flags win.", metavar="FILE"),
    trust_remote_code: bool = typer.Option(None, "--trust-remote-code", help="Run the code that comes with the model."),
    resume: bool = typer.Option(False, "--resume", help="Continue the run in --output."),
    resume_from: str = typer.Option(
        None,
        "--from-checkpoint",
        help="With --resume: this one (checkpoint-N), marked whole or not.",
        metavar="NAME",
    ),  # fmt: skip
    trust_checkpoint: bool = typer.Option(
        False, "--trust-checkpoint", help="With --resume: load its pickles whatever they would run."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an earlier run."),
    dry: bool = typer.Option(
        False, "--dry-run", help="Show the settings, the first row with what counts in the loss, and the plan; stop."
    ),
    compare: bool = typer.Option(None, "--compare/--no-compare", help="End with tiled against untiled on one batch."),
    tiled_mlp: str = typer.Option(None, help="Tile at all (default true), as axolotl spells it.", metavar="BOOL"),
    use_tiled_mlp: str = typer.Option(None, help="The same, as ms-swift spells it.", metavar="BOOL"),
    tiled_mlp_num_shards: str = typer.Option(None, help="The same as --tile shards:N.", metavar="N"),
    tiled_mlp_use_original_mlp: str = typer.Option(
        None, help="Changes nothing: tiles run the model's own MLP.", metavar="BOOL"
    ),
) -> None:
    """Train a causal language model on long sequences. Every position-wise block runs in tiles."""
    from seqtile.cli import show
    from seqtile.train import recipe as recipes
    from seqtile.train.check_early import check_early
    from seqtile.train.nodes import WAIT_SECONDS, find_nodes
    from seqtile.train.ranks import is_first, leave
    from seqtile.train.resume import resumed_recipe
    from seqtile.train.run import locate, require_packages
    from seqtile.train.signals import handle_signals, stop_at_once, stop_signals

    launched = {"LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()
    if launched:
        for flag, value in (("--nodes", nodes), ("--node-rank", node_rank), ("--rendezvous", rendezvous)):
            if value is not None:
                raise UserError(f"a launcher started this process, and says itself which nodes there are; drop {flag}")
    of_nodes = None if launched else find_nodes(nodes, node_rank, rendezvous)
    if of_nodes is not None:  # before torch is imported: of a lost connection its store writes stacks
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    elif wait_nodes:
        raise UserError(f"got --wait-nodes {wait_nodes:g} of one node, which waits for none; drop it")
    trainer_flags = {
        "warmup_steps": warmup_steps,
        "lr_scheduler_type": lr_scheduler_type,
        "report_to": None if report_to is None else report_to.split(","),
    }
    settings = {
        "model": model,
        "dataset": dataset,
        "eval_dataset": eval_dataset,
        "eval_steps": eval_steps,
        "skip_bad_rows": skip_bad_rows,
        "streaming": streaming,
        "max_length": max_length,
        "output": output,
        "lora": None if lora is None else recipes.parse_lora(lora),
        **options,
        "engine": engine,
        "nproc": nproc,
        "sp_size": sp_size,
        "cp_size": cp_size,
        "fit": fit if fit_memory is None else f"memory:{fit_memory}",
        "on_oom": on_oom,
        "batch_size": batch_size,
        "packing": {"true": True, "false": False}.get(packing.lower(), packing) if packing else None,
        "epochs": epochs,
        "steps": steps,
        "gradient_accumulation": grad_accumulation,
        "learning_rate": learning_rate,
        "save_steps": save_steps,
        "trainer": {name: value for name, value in trainer_flags.items() if value is not None} or None,
        "seed": seed,
        "compare": compare,
        "trust_remote_code": trust_remote_code,
        "tiled_mlp": tiled_mlp,
        "use_tiled_mlp": use_tiled_mlp,
        "tiled_mlp_num_shards": tiled_mlp_num_shards,
        "tiled_mlp_use_original_mlp": tiled_mlp_use_original_mlp,
    }
    flags: dict[str, Any] = {key: value for key, value in settings.items() if value is not None}
    values = recipes.read_recipe(recipe) if recipe else {}
    if resume and overwrite:
        raise UserError("--resume continues a run and --overwrite replaces it; give one of the two")
    if resume_from and not resume:
        raise UserError(f"--from-checkpoint {resume_from!r} is where --resume continues; give --resume too")
    if trust_checkpoint and not resume:
        raise UserError("--trust-checkpoint is about the checkpoint that --resume continues; give --resume too")
    chosen, notes = resumed_recipe(values, flags) if resume else recipes.build_recipe(values, flags)
    require_packages()
    how: dict[str, Any] = {"resume": resume, "resume_from": resume_from, "overwrite": overwrite,
                           "trust_checkpoint": trust_checkpoint}  # fmt: skip
    if of_nodes is not None and chosen.engine == "single":
        raise UserError(
            f"engine 'single' is one process, got {of_nodes.count} nodes; give --engine ddp, fsdp2, zero2 or zero3"
        )
    check_early(recipes.resolve(chosen))
    if not resume and not dry:
        locate(chosen, **how)
    progress = show.Progress(enabled=is_first())
    progress.stage("loading PyTorch and Transformers")
    with progress:
        quiet()
    for note in notes:
        logging.getLogger("seqtile").warning(note)
    if dry:
        from seqtile.cli.dry_run import dry_run

        if is_first():
            with progress, show.folded_bars(progress):
                dry_run(recipes.resolve(chosen), progress, 1 if of_nodes is None else of_nodes.count)
        return
    if launched and chosen.on_oom == "retry" and chosen.engine != "single":
        raise UserError(
            "--on-oom retry starts the processes again, which a launcher of your own does not let it; start them with "
            f"seqtile train --engine {chosen.engine}, or drop it"
        )
    with handle_signals(stop_signals(), stop_at_once):
        if chosen.engine != "single" and not launched:
            from seqtile.train.launch import launch

            code = launch(chosen, **how, worker=WORKER, say=show.print_plain, nodes=of_nodes,
                          wait_seconds=WAIT_SECONDS if wait_nodes is None else wait_nodes)  # fmt: skip
            raise typer.Exit(code)
        try:
            run(chosen, **how)
        except typer.Exit:
            leave()
            if not launched:
                raise
            # A launcher takes any other code for a crash: it shows a traceback, and ends the ranks that still write.


def run(recipe: Any, **how: Any) -> None:
    """Train in this process, alone or as one of several that a launcher started, and show what comes of it.

    ``how`` is what :func:`seqtile.train.run.train` takes: ``resume``, ``resume_from``, ``overwrite``, ``retries``
    and ``trust_checkpoint`` or ``checked``.
    """
    from seqtile.cli import show
    from seqtile.train.ranks import is_first
    from seqtile.train.run import train
    from seqtile.train.signals import exit_code

    progress = show.Progress(enabled=is_first())
    with progress, show.folded_bars(progress):
        outcome = train(recipe, **how, display=progress)
    if outcome.stopped_by is not None:
        if is_first():
            show.print_stopped(outcome)
        raise typer.Exit(exit_code(outcome.stopped_by))
    if is_first():
        show.print_outcome(outcome)


def quiet() -> None:
    """Our own messages on stderr; of the libraries below only what the user can act on."""
    log_to_stderr()
    # What these say about a bad dataset or a slow import, our own sentence says better.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # PyTorch reads it when it is imported; segments that grow are on Linux only. Started processes inherit it.
    if sys.platform == "linux" and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    import torch
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, where it is installed, warns that it looked for one
    disable_progress_bars()
