"""Whether a resumed run is still the run that it continues: what its recipe does not show."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqtile._errors import UserError
from seqtile.devices import package_version
from seqtile.train.checkpoint_files import FSDP_SHARDS, TRAINER_STATE, read_mark
from seqtile.train.recipe import OptionKeys, Recipe

if TYPE_CHECKING:
    from torch import nn

    from seqtile.models.report import Report

SAMPLED_ROWS = 64
TILING = tuple(key for key in OptionKeys.model_fields if key not in ("checkpoint", "offload"))
"""The recipe's keys that decide which dropout masks are drawn: not what checkpoints keep, and where."""

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft")
FLAT_SCHEDULES = ("constant", "constant_with_warmup")


def describe_run(recipe: Recipe, trainer: Any) -> dict[str, Any]:
    """What a checkpoint's mark says of its run: the data, the frozen weights, the versions, the tiles.

    Cost: a digest of 64 rows evenly spaced, and of 16 elements of each frozen weight.
    """
    return {
        "data": None if recipe.streaming else digest_rows(trainer.train_dataset),
        # What trains is in the checkpoint itself. Ranks that hold a shard have no whole weight to look at.
        "frozen": digest_frozen(trainer.model) if trainer.args.world_size == 1 else None,
        "tiling": {key: recipe.model_dump(mode="json")[key] for key in TILING},
        "rows_of_a_step": recipe.rows_of_a_step,
        "versions": {name: package_version(name) for name in PACKAGES},
    }


def check_same_run(
    run: dict[str, Any], checkpoint: Path, recipe: Recipe, trainer: Any, tiling: Report | None
) -> list[str]:
    """Compare a run with the one that wrote ``checkpoint``.

    Args:
        run: this run, from :func:`describe_run`.
        checkpoint: what it is to continue from.
        recipe: this run's recipe, already compared with the saved one.
        trainer: this run's trainer.
        tiling: what was tiled in this run.

    Returns:
        Sentences on what will be computed otherwise.

    Raises:
        UserError: other data, other frozen weights or another number of processes: it would be another run.
    """
    mark = read_mark(checkpoint)
    state = json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
    notes = []
    steps = trainer.args.max_steps
    if steps > 0 and steps != state["max_steps"] and trainer.args.lr_scheduler_type not in FLAT_SCHEDULES:
        notes.append(
            f"the learning rate's schedule now ends at step {steps}, before at step {state['max_steps']}: "
            "from here on other losses than without the interruption"
        )
    if mark is None:
        return notes
    before, name = mark.run, checkpoint.name
    end = "--resume continues a run only as it was; start a new one with another --output"
    if mark.processes != trainer.args.world_size:
        told = f"{name} was written by {mark.processes} processes and this run has {trainer.args.world_size}"
        if not _readable_by_any_number(checkpoint, recipe):
            raise UserError(f"{told}; {end}")
        if before.get("rows_of_a_step") != run["rows_of_a_step"]:
            raise UserError(
                f"{told}, and a step had {before.get('rows_of_a_step', 'an unknown number of')} rows and would have "
                f"{run['rows_of_a_step']}; {end}"
            )
        notes.append(
            f"{told}: a step has the same {run['rows_of_a_step']} rows; the processes' random numbers (dropout) are "
            "others, and so are the rows that fill up the last step of an epoch"
        )
    if before.get("data") not in (None, run["data"]):
        raise UserError(f"dataset {recipe.dataset!r} no longer holds the rows that {name} was trained on; {end}")
    if None not in (before.get("frozen"), run["frozen"]) and before["frozen"] != run["frozen"]:
        raise UserError(f"model {recipe.model!r} no longer has the frozen weights that {name} was trained over; {end}")
    changed = [
        f"{package} {old} is now {run['versions'].get(package)}"
        for package, old in before.get("versions", {}).items()
        if old != run["versions"].get(package)
    ]
    if changed:
        notes.append(f"{', '.join(changed)} since {name}: the same run up to what changed between these versions")
    if before.get("tiling") not in (None, run["tiling"]) and tiling is not None and _drops_inside(trainer.model):
        notes.append("other tiles draw other dropout masks inside the blocks: the same distribution, not the same run")
    return notes


def _readable_by_any_number(checkpoint: Path, recipe: Recipe) -> bool:
    """Whether the checkpoint holds everything for every rank, or shards that PyTorch deals out again."""
    return recipe.engine == "ddp" or (recipe.engine == "fsdp2" and (checkpoint / FSDP_SHARDS).is_dir())


def digest_rows(rows: Any) -> str:
    """A digest of the prepared rows: how many, and what evenly spaced ones hold."""
    count = len(rows)
    digest = hashlib.blake2b(repr((count, sorted(rows.column_names))).encode(), digest_size=16)
    plain = rows.with_format("arrow")
    for index in sorted({count * part // SAMPLED_ROWS for part in range(SAMPLED_ROWS)} | {count - 1}):
        for name in sorted(rows.column_names):
            column = plain[index : index + 1].column(name).combine_chunks()
            digest.update(_bytes(column))
    return digest.hexdigest()


def _bytes(column: Any) -> bytes:
    """What a one-row column holds; lists of numbers without a detour over Python's."""
    import pyarrow  # type: ignore[import-untyped]

    if pyarrow.types.is_list(column.type) and pyarrow.types.is_integer(column.type.value_type):
        values = column.flatten()
        if not values.null_count:
            return values.cast(pyarrow.int64()).to_numpy().tobytes()  # type: ignore[no-any-return]
    return repr(column.to_pylist()).encode()


def digest_frozen(model: nn.Module) -> str:
    """A digest of the weights that do not train, which no checkpoint of adapters holds."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            flat = weight.detach().reshape(-1)
            ends = torch.cat([flat[:8], flat[-8:]]).to("cpu")
            digest.update(f"{name} {tuple(weight.shape)} {ends.tolist()!r}".encode())
    return digest.hexdigest()


def _drops_inside(model: nn.Module) -> bool:
    """Whether anything in the model drops in training; which of it runs inside a tile is not looked at."""
    from torch import nn

    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
