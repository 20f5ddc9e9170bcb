"""``seqtile train``."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import typer

from seqtile._errors import UserError
from seqtile._log import log_to_stderr
from seqtile.cli.option_flags import takes_options
from seqtile.options import from_flag

WORKER = "seqtile.cli.worker"
"""The module that each process of an engine runs."""


def _help_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


def rare(default: Any, *names: str, **how: Any) -> Any:
    """A flag that ``--help-all`` alone shows."""
    return typer.Option(default, *names, hidden=True, **how)


@takes_options("train", show_default=False, hidden=True, defaults={"loss": "tiled", "checkpoint": "layer"})
def command(
    model: str = typer.Option(None, help="Model directory or Hub id (default: a demo).", metavar="PATH"),
    dataset: str = typer.Option(None, help="JSONL, CSV, Parquet or text; directory, Hub id.", metavar="PATH"),
    max_length: int = typer.Option(None, help="Tokens per sequence (default 8192).", metavar="TOKENS"),
    lora: str = typer.Option(None, help="LoRA rank, or r=16,alpha=32,dropout=0.05.", metavar="R"),
    qlora: bool = typer.Option(None, "--qlora", help="LoRA on 4-bit weights (default rank 16)."),
    offload: str = typer.Option(None, help="To the host: checkpoints, weights, optimizer.", metavar="WHAT,.."),
    engine: str = typer.Option(None, help="single (default), ddp, fsdp2, zero2 or zero3.", metavar="NAME"),
    nproc: int = typer.Option(None, help="Number of processes, over all nodes.", metavar="N"),
    learning_rate: float = typer.Option(None, help="Peak rate (default 2e-5; LoRA 2e-4).", metavar="RATE"),
    output: str = typer.Option(None, help="Output directory (default runs/NAME).", metavar="DIR"),
    recipe: str = typer.Option(None, help="YAML file of settings; flags override it.", metavar="FILE"),
    resume: bool = typer.Option(False, "--resume", help="Resume the run in --output."),
    dry: bool = typer.Option(False, "--dry-run", help="Print settings, a sample and the plan; exit."),
    help_all: bool = typer.Option(False, "--help-all", help="Show every flag.", is_eager=True, callback=_help_all),
    options: Any = None,
    attention: str = rare(None, help="flash, flash3, sdpa, eager or a kernel on the Hub.", metavar="NAME"),
    optimizer: str = rare(
        None,
        help="adamw (default), adamw-8bit, lion, sgd, adafactor, sgd-momentum, or one of Transformers'.",
        metavar="NAME",
    ),
    dtype: str = rare(
        None, help="mixed (default), bfloat16, float16, float32, or auto: the checkpoint's.", metavar="NAME"
    ),
    sp_size: int = rare(None, help="Processes per sequence with Ulysses (zero3).", metavar="N"),
    cp_size: int = rare(None, help="Processes per sequence with ring attention (fsdp2).", metavar="N"),
    nodes: int = rare(
        None,
        min=1,
        help="Number of nodes (detected under Slurm and torchrun). Run the same command on each.",
        metavar="N",
    ),
    node_rank: int = rare(None, min=0, help="Rank of this node, from 0.", metavar="R"),
    rendezvous: str = rare(None, help="Address of node 0 and a free port.", metavar="HOST:PORT"),
    wait_nodes: float = rare(None, min=1, help="Seconds to wait for the other nodes (default 600).", metavar="SECONDS"),
    fit: bool = rare(None, "--fit/--no-fit", help="Choose memory settings by the plan (default: on accelerators)."),
    fit_memory: str = rare(None, help="As --fit, for devices of this size.", metavar="SIZE"),
    on_oom: str = rare(None, help="Out of memory: stop (default), or retry with smaller tiles.", metavar="WHAT"),
    eval_dataset: str = rare(None, help="Dataset to evaluate on; keeps the best checkpoint.", metavar="PATH"),
    eval_steps: int = rare(None, help="Steps between evaluations (default 500).", metavar="N"),
    skip_bad_rows: bool = rare(None, "--skip-bad-rows", help="Skip and count dataset rows without trainable tokens."),
    streaming: bool = rare(None, "--streaming", help="Read the dataset while training; needs --steps."),
    batch_size: int = rare(None, help="Sequences per process and micro-batch (default 1).", metavar="N"),
    packing: str = rare(None, help="Pack documents: true (bfd), bfd_split, wrapped or false.", metavar="HOW"),
    steps: int = rare(None, help="Optimizer steps (default: one epoch).", metavar="N"),
    epochs: float = rare(None, help="Passes over the dataset (default 1).", metavar="N"),
    gradient_accumulation: int = rare(None, help="Micro-batches per optimizer step (default 1).", metavar="N"),
    warmup_steps: float = rare(None, help="Warm-up steps, or a fraction of all steps below 1.", metavar="N"),
    lr_scheduler_type: str = rare(None, help="linear (default), cosine, constant, ...", metavar="NAME"),
    save_steps: int = rare(None, help="Steps between checkpoints (default 500).", metavar="N"),
    report_to: str = rare(None, help="Trackers: wandb, tensorboard, mlflow, ...", metavar="NAME,.."),
    seed: int = rare(None, help="Seed of weights, data order and dropout (default 0).", metavar="N"),
    trust_remote_code: bool = rare(None, "--trust-remote-code", help="Run code from the model's repository."),
    resume_from: str = rare(
        None, "--from-checkpoint", help="With --resume: checkpoint-N, even if marked incomplete.", metavar="NAME"
    ),
    trust_checkpoint: bool = rare(
        False, "--trust-checkpoint", help="With --resume: unpickle the checkpoint without checks."
    ),
    overwrite: bool = rare(False, "--overwrite", help="Replace an earlier run."),
    tiled_mlp: str = rare(None, help="Tile the MLP (default true); axolotl's name.", metavar="BOOL"),
    use_tiled_mlp: str = rare(None, help="Same as --tiled-mlp; ms-swift's name.", metavar="BOOL"),
    tiled_mlp_num_shards: str = rare(None, help="Same as --tile shards:N.", metavar="N"),
    tiled_mlp_use_original_mlp: str = rare(
        None, help="No effect: tiles always run the model's own MLP.", metavar="BOOL"
    ),
) -> None:
    """Train a causal language model on long sequences, in tiles."""
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
                raise UserError(f"got {flag} under a launcher, which sets the nodes itself; drop {flag}")
    of_nodes = None if launched else find_nodes(nodes, node_rank, rendezvous)
    if of_nodes is not None:  # before torch is imported: its store prints stack traces of a lost connection
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    elif wait_nodes:
        raise UserError(f"got --wait-nodes {wait_nodes:g} with a single node; drop it")
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
        "qlora": qlora,
        "attention": attention,
        "optimizer": optimizer,
        "dtype": dtype,
        **({} if offload is None else offload_keys(offload, engine)),
        **recipe_options(options),
        "engine": engine,
        "nproc": nproc,
        "sp_size": sp_size,
        "cp_size": cp_size,
        "fit": fit if fit_memory is None else fit_memory,
        "on_oom": on_oom,
        "batch_size": batch_size,
        "packing": {"true": True, "false": False}.get(packing.lower(), packing) if packing else None,
        "epochs": epochs,
        "steps": steps,
        "gradient_accumulation": gradient_accumulation,
        "learning_rate": learning_rate,
        "save_steps": save_steps,
        "trainer": {name: value for name, value in trainer_flags.items() if value is not None} or None,
        "seed": seed,
        "trust_remote_code": trust_remote_code,
        **({} if tiled_mlp is None else {"tiled_mlp": tiled_mlp}),
        "use_tiled_mlp": use_tiled_mlp,
        "tiled_mlp_num_shards": tiled_mlp_num_shards,
        "tiled_mlp_use_original_mlp": tiled_mlp_use_original_mlp,
    }
    flags: dict[str, Any] = {key: value for key, value in settings.items() if value is not None}
    values = recipes.read_recipe(recipe) if recipe else {}
    if resume and overwrite:
        raise UserError("got both --resume and --overwrite; use one")
    if resume_from and not resume:
        raise UserError(f"--from-checkpoint {resume_from!r} needs --resume")
    if trust_checkpoint and not resume:
        raise UserError("--trust-checkpoint needs --resume")
    chosen, notes = resumed_recipe(values, flags) if resume else recipes.build_recipe(values, flags)
    require_packages()
    how: dict[str, Any] = {"resume": resume, "resume_from": resume_from, "overwrite": overwrite,
                           "trust_checkpoint": trust_checkpoint}  # fmt: skip
    if of_nodes is not None and chosen.engine == "single":
        raise UserError(
            f"engine 'single' is one process, got {of_nodes.count} nodes; use --engine ddp, fsdp2, zero2 or zero3"
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
            with progress:
                dry_run(recipes.resolve(chosen), progress, 1 if of_nodes is None else of_nodes.count)
        return
    if launched and chosen.on_oom == "retry" and chosen.engine != "single":
        raise UserError(
            "--on-oom retry restarts the processes, which an external launcher does not allow; use seqtile train "
            f"--engine {chosen.engine}, or drop it"
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
            # A launcher treats any other code as a crash: it prints a traceback, and ends ranks that still write.


def offload_keys(text: str, engine: str | None = None) -> dict[str, Any]:
    """The recipe's keys for ``--offload``: checkpoints, a size that bounds them, weights, the engine's parts."""
    from seqtile.planner.names import split_offload

    if text.strip().lower() == "false":
        return {"offload": False}
    offload, engine_offload = split_offload(text, engine or "single")
    return {
        **({"offload": offload} if offload else {}),
        **({"engine_offload": list(engine_offload)} if engine_offload else {}),
    }


def recipe_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's keys that the flags of options give; ``--tile none`` tiles nothing, as for ``seqtile plan``."""
    keys = {name: from_flag(name, value) for name, value in flags.items()}
    if keys.get("loss", "tiled") is None:
        raise UserError("got --loss full, but seqtile train always computes the loss in tiles; drop it")
    if "checkpoint" in keys:
        keys["checkpoint"] = keys["checkpoint"] or "none"
    if keys.get("tile") == "none":
        del keys["tile"]
        keys["tiled_mlp"] = False
    return keys


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
    with progress:
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
    # Our own messages replace these libraries' about a bad dataset or a slow import.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    for name in ("torchao", "bitsandbytes", "torch.utils._pytree"):  # of kernels that PEFT imports and no run asked for
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # PyTorch reads it at import; expandable segments exist on Linux only. Child processes inherit it.
    if sys.platform == "linux" and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    import datasets
    import huggingface_hub
    import torch
    from transformers.utils.logging import disable_progress_bar

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, where it is installed, warns that it looked for one
    # Their bars would be drawn into ours; each stage has a line of its own.
    disable_progress_bar()
    datasets.disable_progress_bars()
    huggingface_hub.utils.disable_progress_bars()  # type: ignore[attr-defined]
