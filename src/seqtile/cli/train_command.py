"""``seqtile train``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from seqtile._errors import UserError
from seqtile._log import log_to_stderr, quiet_libraries
from seqtile.cli.flags import flag, option_flags, recipe_flags, takes
from seqtile.options import from_flag
from seqtile.train.recipe import Recipe, build_recipe, parse_lora, read_recipe, resolve

if TYPE_CHECKING:
    from seqtile.train.nodes import Nodes

WORKER = "seqtile.cli.worker"
"""The module that each process of an engine runs."""


def _help_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


_rare = partial(flag, hidden=True)
"""A flag that ``--help-all`` alone shows."""


@dataclass(frozen=True)
class TrainFlags:
    """The flags of ``seqtile train`` that are not keys of its recipe as they are, with those that are in ``keys``."""

    keys: dict[str, Any] = field(default_factory=dict)
    offload: str = flag(None, "To the host: checkpoints, weights, optimizer", "WHAT,..")
    recipe: str = flag(None, "YAML file of settings; flags override it", "FILE")
    resume: bool = flag(False, "Resume the run in --output")
    dry_run: bool = flag(False, "Print settings, a sample and the plan; exit")
    help_all: bool = flag(False, "Show every flag", is_eager=True, callback=_help_all)
    options: dict[str, Any] = field(default_factory=dict)
    nodes: int = _rare(
        None, "Number of nodes (detected under Slurm and torchrun). Run the same command on each", "N", min=1
    )
    node_rank: int = _rare(None, "Rank of this node, from 0", "R", min=0)
    rendezvous: str = _rare(None, "Address of node 0 and a free port", "HOST:PORT")
    wait_nodes: float = _rare(None, "Seconds to wait for the other nodes (default 600)", "SECONDS", min=1)
    fit: bool = _rare(None, "Choose memory settings by the plan (default: on accelerators)", names=("--fit/--no-fit",))
    fit_memory: str = _rare(None, "As --fit, for devices of this size", "SIZE")
    warmup_steps: float = _rare(None, "Warm-up steps, or a fraction of all steps below 1", "N")
    lr_scheduler_type: str = _rare(
        None, "Schedule: linear (default), cosine, constant or another of Transformers'", "NAME"
    )
    report_to: str = _rare(None, "Trackers, such as wandb, tensorboard or mlflow", "NAME,..")
    resume_from: str = _rare(
        None, "With --resume: checkpoint-N, even if marked incomplete", "NAME", names=("--from-checkpoint",)
    )
    trust_checkpoint: bool = _rare(False, "With --resume: unpickle the checkpoint without checks")
    overwrite: bool = _rare(False, "Replace an earlier run")
    tiled_mlp: str = _rare(None, "Tile the MLP (default true); axolotl's name", "BOOL")
    use_tiled_mlp: str = _rare(None, "Same as --tiled-mlp; ms-swift's name", "BOOL")
    tiled_mlp_num_shards: str = _rare(None, "Same as --tile shards:N", "N")
    tiled_mlp_use_original_mlp: str = _rare(None, "No effect: tiles always run the model's own MLP", "BOOL")

    def settings(self) -> dict[str, Any]:
        """The keys of a recipe that the flags set, unchecked."""
        trainer = {name: getattr(self, name) for name in ("warmup_steps", "lr_scheduler_type")}
        trainer["report_to"] = None if self.report_to is None else self.report_to.split(",")
        trainer = {name: value for name, value in trainer.items() if value is not None}
        peers = ("tiled_mlp", "use_tiled_mlp", "tiled_mlp_num_shards", "tiled_mlp_use_original_mlp")
        values = {
            **self.keys,
            **recipe_options(self.options),
            **{name: value for name in peers if (value := getattr(self, name)) is not None},
        }
        if "lora" in values:
            values["lora"] = parse_lora(values["lora"])
        if self.offload is not None:
            values |= offload_keys(self.offload, values.get("engine"))
        if (fit := self.fit if self.fit_memory is None else self.fit_memory) is not None:
            values["fit"] = fit
        return {**values, "trainer": trainer} if trainer else values


@takes(
    TrainFlags,
    keys=recipe_flags(),
    options=option_flags(
        "train", show_default=False, hidden=True, defaults={"loss": "tiled", "checkpoint": "layer"}
    ),
)  # fmt: skip
def command(flags: TrainFlags) -> None:
    """Train a causal language model on long sequences, in tiles."""
    from seqtile.cli import show
    from seqtile.train.check_early import check_early
    from seqtile.train.ranks import is_first, is_launched
    from seqtile.train.resume import resumed_recipe
    from seqtile.train.run import locate, require_packages

    launched = is_launched()
    nodes = _find_nodes(flags, launched)
    given, values = flags.settings(), read_recipe(flags.recipe) if flags.recipe else {}
    if flags.resume and flags.overwrite:
        raise UserError("resume.with-overwrite", "got both --resume and --overwrite; use one")
    if flags.resume_from and not flags.resume:
        raise UserError(
            "resume.from-checkpoint-without-resume", f"--from-checkpoint {flags.resume_from!r} needs --resume"
        )
    if flags.trust_checkpoint and not flags.resume:
        raise UserError("resume.trust-without-resume", "--trust-checkpoint needs --resume")
    recipe, notes = resumed_recipe(values, given) if flags.resume else build_recipe(values, given)
    require_packages()
    if nodes is not None and recipe.engine == "single":
        raise UserError(
            "engine.single-on-several-nodes",
            f"engine 'single' is one process, got {nodes.count} nodes; use --engine ddp, fsdp2, zero2 or zero3",
        )
    check_early(resolve(recipe))
    how: dict[str, Any] = {name: getattr(flags, name) for name in
                           ("resume", "resume_from", "overwrite", "trust_checkpoint")}  # fmt: skip
    if not flags.resume and not flags.dry_run:
        locate(recipe, **how)
    progress = show.Progress(enabled=is_first())
    progress.stage("loading PyTorch and Transformers")
    with progress:
        quiet()
    for note in notes:
        logging.getLogger("seqtile").warning(note)
    if not flags.dry_run:
        _start(recipe, how, launched, nodes, flags.wait_nodes)
    elif is_first():
        from seqtile.cli.dry_run import dry_run

        with progress:
            dry_run(resolve(recipe), progress, 1 if nodes is None else nodes.count)


def _find_nodes(flags: TrainFlags, launched: bool) -> Nodes | None:
    """The nodes of this launch; None for one, or under a launcher, which sets them."""
    from seqtile.train.nodes import find_nodes

    if launched:
        for name in ("nodes", "node_rank", "rendezvous", "wait_nodes"):
            if getattr(flags, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(
                    "nodes.flag-under-launcher",
                    f"got {flag} under a launcher, which sets the nodes itself; drop {flag}",
                )
    nodes = None if launched else find_nodes(flags.nodes, flags.node_rank, flags.rendezvous)
    if nodes is not None:  # before torch is imported: its store prints stack traces of a lost connection
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    elif flags.wait_nodes:
        raise UserError(
            "nodes.wait-on-single-node", f"got --wait-nodes {flags.wait_nodes:g} with a single node; drop it"
        )
    return nodes


def _start(
    recipe: Recipe, how: dict[str, Any], launched: bool, nodes: Nodes | None, wait_seconds: float | None
) -> None:
    """Train here, or in the processes of an engine."""
    from seqtile.train.nodes import WAIT_SECONDS
    from seqtile.train.ranks import leave
    from seqtile.train.signals import handle_signals, stop_at_once, stop_signals

    if launched and recipe.on_oom == "retry" and recipe.engine != "single":
        raise UserError(
            "on-oom.retry-under-launcher",
            "--on-oom retry restarts the processes, which an external launcher does not allow; use seqtile train "
            f"--engine {recipe.engine}, or drop it",
        )
    with handle_signals(stop_signals(), stop_at_once):
        if recipe.engine != "single" and not launched:
            from seqtile.train.launch import launch

            code = launch(recipe, **how, worker=WORKER, say=partial(print, file=sys.stderr, flush=True), nodes=nodes,
                          wait_seconds=WAIT_SECONDS if wait_seconds is None else wait_seconds)  # fmt: skip
            raise typer.Exit(code)
        try:
            run(recipe, **how)
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
        raise UserError(
            "loss.full-in-train", "got --loss full, but seqtile train always computes the loss in tiles; drop it"
        )
    if "checkpoint" in keys:
        keys["checkpoint"] = keys["checkpoint"] or "none"
    if keys.get("tile") == "none":
        del keys["tile"]
        keys["tiled_mlp"] = False
    return keys


def run(recipe: Recipe, **how: Any) -> None:
    """Train in this process, alone or as one of several that a launcher started, and show what comes of it.

    ``how`` is what :func:`seqtile.train.run.train` takes besides.
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
    quiet_libraries()
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
