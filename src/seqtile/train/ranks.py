"""Ranks: identify this one, and check that all train together with the same settings.

A launch that fails to distribute does not fail: every process trains alone, or under another engine than the one asked
for, and the losses look well. So what was asked for is compared with what is there when the engine has taken the model
over.
"""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqtile._errors import UserError
from seqtile._log import process_rank
from seqtile.devices import package_version
from seqtile.train.recipe import DEMO

if TYPE_CHECKING:
    import torch

    from seqtile.train.read_data import Data
    from seqtile.train.recipe import Recipe

PIECES, PIECE_BYTES = 64, 4096
"""How much of a weight file is compared: other weights of a model's shape differ everywhere."""

SHARED_FILE = ".seqtile-shared"
"""Beside the output while several nodes start: a node that reads there what node 0 wrote has the same directory."""


def is_launched() -> bool:
    """Whether a launcher (``torchrun``, ``accelerate launch``) started this process."""
    return "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    """Processes that were launched together."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def launched_nodes() -> int:
    """Nodes that they are on, with equally many on each."""
    return world_size() // int(os.environ.get("LOCAL_WORLD_SIZE") or world_size())


def is_first() -> bool:
    """Whether this process speaks and writes for all."""
    return not is_launched() or process_rank() == 0


def join_launch(recipe: Recipe) -> Recipe:
    """``recipe`` with the number of processes that were launched.

    Raises:
        UserError: they are not what the recipe says, or have no directory in common.
    """
    world = world_size()
    if recipe.engine == "single":
        if world > 1:
            raise UserError(
                "launcher.with-engine-single",
                f"a launcher started {world} processes, but engine is 'single'; use --engine ddp, fsdp2, zero2 or "
                "zero3, or start seqtile train without a launcher",
            )
        return recipe
    if recipe.nproc not in (None, world):
        raise UserError(
            "launcher.process-count",
            f"engine {recipe.engine!r} expects {recipe.nproc} processes, but the launcher started {world}; use "
            "seqtile train --engine, or accelerate launch with the same number",
        )
    if recipe.output is None:
        raise UserError(
            "launcher.without-output", "under a launcher all processes need the same directory; set --output"
        )
    return recipe.model_copy(update={"nproc": world})


def prepare_on_cpu(recipe: Recipe) -> None:
    """Set up what accelerate does on accelerators only; call it between the trainer's arguments and the trainer.

    ``AcceleratorState`` turns several processes into FSDP on accelerators, and on the CPU trains plain DDP without a
    word: so the type that it finds is set to one that it turns. ``PartialState`` starts DeepSpeed's own communication
    there, which Ulysses needs. Nothing changes where there is an accelerator. Read in accelerate 1.12 to 1.15:
    https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/state.py
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state = PartialState()
    if state.distributed_type != DistributedType.MULTI_CPU:
        return
    if recipe.engine == "fsdp2":
        state.distributed_type = DistributedType.MULTI_GPU
    elif recipe.sp_size > 1:
        import deepspeed

        deepspeed.init_distributed(state.backend)


def check_engine(trainer: Any, recipe: Recipe) -> None:
    """Refuse to train a model that another engine has taken over, or with other processes, than ``recipe`` says.

    Raises:
        UserError: with what was asked for and what is there.
    """
    engine, processes = _engine_of(trainer.model_wrapped), trainer.accelerator.num_processes
    if (engine, processes) != (recipe.engine, recipe.nproc or 1):
        raise UserError(
            "launcher.other-engine",
            f"got engine {recipe.engine!r} in {recipe.nproc or 1} processes, but accelerate set up {engine!r} (a "
            f"{type(trainer.model_wrapped).__name__}) in {processes}, so nothing was trained; use seqtile train "
            f"--engine {recipe.engine}, or accelerate launch with that engine's configuration",
        )
    for name in ("sp_size", "cp_size"):
        split = getattr(getattr(trainer.accelerator, "parallelism_config", None), name, 1)
        if split != getattr(recipe, name):
            raise UserError(
                "launcher.other-split",
                f"got {name} {getattr(recipe, name)}, but accelerate splits sequences over {split}",
            )


def _engine_of(model: Any) -> str:
    """The engine that has taken ``model`` over, seen on the model itself."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    stage = getattr(model, "zero_optimization_stage", None)
    if stage is not None:
        return f"zero{stage()}"
    in_units = isinstance(model, FSDPModule)
    if in_units and all(isinstance(weight, DTensor) for weight in model.parameters()):
        return "fsdp2"
    return "ddp" if isinstance(model, DistributedDataParallel) else "single"


def agree(recipe: Recipe, data: Data, start: Path | None) -> None:
    """Compare what every process would do, in one gather, before any of them loads a weight.

    Where nodes write to directories of their own, each saves there: ``save_on_each_node`` of ``data.arguments`` is set.

    Raises:
        UserError: names what differs, and a rank; or the engine writes its shards to one directory.
    """
    if world_size() == 1:
        return
    import torch.distributed as dist

    from seqtile.train.resume import PACKAGES, digest_rows

    shared = nearest_folder(recipe) / SHARED_FILE
    facts: dict[str, Any] = {name: package_version(name) for name in ("seqtile", *PACKAGES)}
    facts |= recipe.model_dump(mode="json")
    facts["--resume"] = start.name if start else "no checkpoint"
    facts["rows"] = None if recipe.streaming else digest_rows(data.sets["train"].rows)
    if os.environ.get("LOCAL_RANK") == "0":  # the others of its node read the same files
        facts["weights"] = digest_pieces(recipe.model) or hub_revision(recipe)
    token = shared.read_text() if shared.is_file() else ""
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, (facts, token, socket.gethostname()))
    for rank, (settings, _, host) in enumerate(everyone):
        for name, value in everyone[0][0].items():
            if settings.get(name, value) != value:
                raise UserError(
                    "ranks.settings-differ",
                    f"rank {rank} ({host}) has {name} {settings[name]!r}, but rank 0 ({everyone[0][2]}) has "
                    f"{value!r}; use the same settings, versions and files on all ranks (set --fit-memory where "
                    "devices differ)",
                )
    if any(token != everyone[0][1] for _, token, _ in everyone):
        if recipe.engine != "ddp":
            raise UserError(
                "output.differs-by-node",
                f"output {recipe.output!r} is a different directory on each node, but engine {recipe.engine!r} "
                "writes its checkpoints into one; use a shared directory for --output, or --engine ddp",
            )
        data.arguments.save_on_each_node = True


def nearest_folder(recipe: Recipe) -> Path:
    """The output of ``recipe``, or the first directory above it that exists."""
    output = Path(str(recipe.output)).expanduser().absolute()
    return next(folder for folder in (output, *output.parents) if folder.is_dir())


def digest_pieces(source: str) -> str | None:
    """A digest of the weight files in a directory: names, sizes, and 64 evenly spaced pieces of each.

    None for what is no directory, such as a Hub id. Cost: 256 KiB read per file.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return None
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".json")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for number in range(PIECES):
                file.seek(max(0, size - PIECE_BYTES) * number // (PIECES - 1))
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


def hub_revision(recipe: Recipe) -> str | None:
    """The commit of a model's Hub id on this node, whose cache may have an older one.

    None for a directory, for the demo, and where the Hub does not give it.
    """
    if recipe.model == DEMO or Path(recipe.model).expanduser().exists():
        return None
    from transformers.utils import cached_file  # type: ignore[attr-defined]

    with suppress(OSError):
        config = cached_file(recipe.model, "config.json", revision=recipe.model_kwargs.get("revision"))
        return None if config is None else Path(config).parent.name
    return None


def largest_on_any(value: int, device: torch.device) -> int:
    """The largest of every process's ``value``: one collective of one number; ``value`` itself in one process."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return value
    both = torch.tensor([value], device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return int(both.item())


def leave() -> None:
    """End the process group, if there is one, so that nothing warns when the process ends."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
