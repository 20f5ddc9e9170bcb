"""One process among several: which one it is, whether it really trains with the others, and what all agree on.

A launch that fails to distribute does not fail: every process trains alone, or under another engine than the one asked
for, and the losses look well. So what was asked for is compared with what is there, twice: when the trainer has been
built, and when the engine has taken the model over.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from seqtile._errors import UserError
from seqtile._log import process_rank

if TYPE_CHECKING:
    import torch

    from seqtile.train.recipe import Recipe

LAUNCH_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
"""What a launcher says in the environment, in whole numbers."""


def check_launch() -> None:
    """Refuse an environment in which no launcher can have started this process.

    Raises:
        UserError: names the variable.
    """
    for name in LAUNCH_NUMBERS:
        value = os.environ.get(name)
        if value and not (value.isascii() and value.isdigit()):
            raise UserError(
                f"the environment says {name}={value!r}, expected a whole number as torchrun sets it; unset {name}"
            )


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


def is_first_writer(recipe: Recipe) -> bool:
    """Whether this process writes the run's own files: one process, or one on each node that has its own directory."""
    each_node = bool(recipe.trainer.get("save_on_each_node"))
    return is_first() or (each_node and os.environ.get("LOCAL_RANK") == "0")


def join_launch(recipe: Recipe) -> Recipe:
    """``recipe`` with the number of processes that were launched.

    Raises:
        UserError: they are not what the recipe says, or have no directory in common.
    """
    check_launch()
    world = world_size()
    if recipe.engine == "single":
        if world > 1:
            raise UserError(
                f"a launcher started {world} processes, but the recipe's engine is 'single'; "
                "give --engine ddp, fsdp2, zero2 or zero3, or start seqtile train without a launcher"
            )
        return recipe
    if recipe.nproc not in (None, world):
        raise UserError(
            f"engine {recipe.engine!r} was to run in {recipe.nproc} processes, but {world} started; "
            "start it with seqtile train --engine, or through accelerate launch with as many processes"
        )
    if recipe.output is None:
        raise UserError("under a launcher every process needs the same directory; give --output")
    return recipe.model_copy(update={"nproc": world})


def prepare_on_cpu(recipe: Recipe) -> None:
    """What accelerate arranges on accelerators only; call it between the trainer's arguments and the trainer.

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


def check_engine(accelerator: Any, recipe: Recipe) -> None:
    """Refuse to train under another engine, or with fewer processes, than ``recipe`` says.

    Args:
        accelerator: the trainer's ``accelerate.Accelerator``.
        recipe: with ``nproc`` filled in.

    Raises:
        UserError: with what was asked for and what is there.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    got = {
        "NO": "single",
        "FSDP": "fsdp2" if getattr(accelerator, "is_fsdp2", False) else "fsdp1",
        "DEEPSPEED": f"zero{getattr(plugin, 'zero_stage', '?')}",
    }.get(kind, "ddp" if kind.startswith("MULTI_") else kind)
    # One launched process is plain to accelerate under every engine but DeepSpeed.
    processes = accelerator.num_processes
    if got != recipe.engine or processes != (recipe.nproc or 1):
        raise UserError(
            f"asked for engine {recipe.engine!r} in {_count(recipe.nproc or 1)}, but accelerate set up "
            f"{got!r} ({kind}) in {_count(processes)}; nothing was trained: start it with seqtile train --engine "
            f"{recipe.engine}, or with accelerate launch and the configuration of that engine"
        )
    for name in ("sp_size", "cp_size"):
        split = getattr(getattr(accelerator, "parallelism_config", None), name, 1)
        if split != getattr(recipe, name):
            raise UserError(f"asked for {name} {getattr(recipe, name)}, but accelerate splits sequences over {split}")


def check_same_recipe(accelerator: Any, recipe: Recipe, data: str) -> None:
    """Refuse ranks with different settings; under a launcher of the user's each has read, or chosen, its own.

    ``data`` is the digest of the prepared rows.

    Raises:
        UserError: names the setting and the rank.
    """
    if accelerator.num_processes == 1:
        return
    from accelerate.utils import gather_object

    from seqtile.train.nodes import digest_pieces, hub_revision

    mine = recipe.model_dump(mode="json") | {"data": data}
    if os.environ.get("LOCAL_RANK") == "0":  # the others of its node read the same files
        mine["weights"] = digest_pieces(recipe.model) or hub_revision(recipe)
    for rank, other in enumerate(gather_object([mine])):
        for key in (key for key in mine if key in other and other[key] != mine[key]):
            raise UserError(
                f"rank {rank} would train with {key} {other[key]!r} and rank {accelerator.process_index} with "
                f"{mine[key]!r}; start all with the same settings (a fit needs --fit-memory where devices differ)"
            )


def _count(processes: int) -> str:
    return f"{processes} process" + ("es" if processes > 1 else "")


def is_wrapped_by(engine: str, model: Any) -> bool:
    """Whether ``engine`` has taken ``model`` over; ZeRO's stage is read from DeepSpeed itself."""
    if engine in ("zero2", "zero3"):
        stage = getattr(model, "zero_optimization_stage", None)
        return stage is not None and stage() == int(engine[-1])
    if engine == "fsdp2":
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        sharded = isinstance(model, FSDPModule)
        return sharded and all(isinstance(p, DTensor) for p in model.parameters())
    from torch.nn.parallel import DistributedDataParallel

    return isinstance(model, DistributedDataParallel)


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
