"""Check that a resumed run is the same run: recipe, data, weights, versions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqtile._errors import UserError
from seqtile.devices import package_version
from seqtile.train.media import media_paths
from seqtile.train.recipe import RECIPE_FILE, OptionKeys, Recipe, build_recipe, read_recipe, resolve
from seqtile.train.run_directory import FSDP_SHARDS, TRAINER_STATE, read_mark

if TYPE_CHECKING:
    from torch import nn

    from seqtile.install.report import Report

SAMPLED_ROWS, END_BYTES = 64, 4096
TILING = tuple(key for key in OptionKeys.model_fields if key not in ("checkpoint", "offload"))
"""The recipe's keys that decide which dropout masks are drawn: not what checkpoints keep, and where."""

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft")
FLAT_SCHEDULES = ("constant", "constant_with_warmup")

MAY_CHANGE = (
    "output",
    "save_steps",
    "eval_dataset",
    "eval_config",
    "eval_split",
    "eval_steps",
    "report",
    "steps",
    *OptionKeys.model_fields,
    "fit",
    "on_oom",
)
"""Keys that a resumed run may change: the length, outputs, and how it is computed, but not what is learned."""

PROCESSES = ("nproc", "cp_size", "gradient_accumulation")
"""Keys that may change together, under :data:`ANY_NUMBER`, if a step keeps its number of rows."""

ANY_NUMBER = ("ddp", "fsdp2")
"""Engines whose checkpoints any number of processes can read: all of it on each, or shards that know their place."""

BY_PROCESSES = ("train_sampling_strategy", "group_by_length", "dataloader_drop_last")
"""Arguments of the trainer by which rows are dealt otherwise to another number of processes or micro-batches."""


def resumed_recipe(file_values: dict[str, Any], flag_values: dict[str, Any]) -> tuple[Recipe, list[str]]:
    """The recipe of the run to continue: its saved one, with what may change taken from flags and recipe.

    Raises:
        UserError: no output named, no earlier run there, or a setting that would make it another run.
    """
    directory = flag_values.get("output") or file_values.get("output")
    if not directory:
        raise UserError("resume.without-output", "--resume needs the directory of the run; set --output")
    path = Path(directory).expanduser() / RECIPE_FILE
    if not path.is_file():
        raise UserError(
            "resume.no-earlier-run",
            f"output {str(directory)!r} has no earlier run (no {RECIPE_FILE}); start without --resume",
        )
    saved, _ = build_recipe(read_recipe(path), {})
    if saved.trust_remote_code and not (flag_values.get("trust_remote_code") or file_values.get("trust_remote_code")):
        raise UserError(
            "resume.untrusted-code",
            f"{str(path)!r} sets trust_remote_code: true, which a saved recipe may not do; review the model's code "
            "and pass --trust-remote-code again",
        )
    started = saved.model_dump(mode="json")
    changes = {key: value for key, value in {**file_values, **flag_values}.items() if value is not None}
    changes_tiles = any("tile" in key for key in changes)
    base = {key: value for key, value in started.items() if not (changes_tiles and key in ("tile", "tiled_mlp"))}
    recipe, notes = build_recipe(base, changes)
    if recipe.fit:
        recipe = recipe.model_copy(update={"fit": False})
        notes.append("fit applies to new runs; --resume keeps the settings of this one")
    may_change = MAY_CHANGE
    if recipe.engine == saved.engine and (recipe.nproc, recipe.cp_size) != (saved.nproc, saved.cp_size):
        recipe, may_change = _on_other_processes(recipe, saved, changes), (*MAY_CHANGE, *PROCESSES)
    for key, value in resolve(recipe).model_dump(mode="json").items():
        if key not in may_change and value != started[key]:
            raise UserError(
                "resume.key-changed",
                f"--resume cannot change {key} from {started[key]!r} to {value!r}; drop it, or start a new run with "
                "another --output",
            )
    return recipe, notes


def _on_other_processes(recipe: Recipe, saved: Recipe, changes: dict[str, Any]) -> Recipe:
    """A resumed run's recipe, with as many micro-batches as make a step of the rows that it had."""
    # Transformers finds the place in the data by the number of steps: with other rows per step it would skip some rows
    # and train others twice.
    resolve(recipe)
    change = ", ".join(
        f"{key} from {getattr(saved, key)} to {getattr(recipe, key)}"
        for key in ("nproc", "cp_size")
        if getattr(recipe, key) != getattr(saved, key)
    )
    if recipe.engine not in ANY_NUMBER:
        raise UserError(
            "resume.other-processes",
            f"--resume cannot change {change} under engine {recipe.engine!r}, whose checkpoints need the same "
            "number of processes; drop it",
        )
    orders = {"streaming": recipe.streaming, **{key: recipe.trainer.get(key) for key in BY_PROCESSES}}
    for key, order in orders.items():
        if order and order not in ("random", "sequential"):
            raise UserError(
                "resume.other-order",
                f"--resume cannot change {change} with {key} {order!r}, which determines the order of the rows; drop "
                "it",
            )
    rows, at_once = saved.rows_of_a_step, recipe.changed(gradient_accumulation=1).rows_of_a_step
    if "gradient_accumulation" not in changes and at_once and rows % at_once == 0:
        recipe = recipe.changed(gradient_accumulation=rows // at_once)
    if recipe.rows_of_a_step != rows:
        advice = (
            f"use --gradient-accumulation {rows // at_once}"
            if at_once and rows % at_once == 0
            else f"choose processes (--nproc, --cp-size) that divide {rows} rows"
        )
        raise UserError(
            "resume.other-batch",
            f"--resume cannot change {change}: a step would have {recipe.rows_of_a_step} rows instead of {rows}; "
            f"{advice}",
        )
    return recipe


def describe_run(recipe: Recipe, trainer: Any) -> dict[str, Any]:
    """Describe what a checkpoint's mark keeps of a run: data, frozen weights, versions, tiles.

    Cost: a digest of 64 rows evenly spaced, 8 KiB of each of their pictures, and 16 elements of each frozen weight.
    """
    return {
        "data": None if recipe.streaming else digest_rows(trainer.train_dataset),
        # Trained weights are in the checkpoint. Ranks with shards have no whole weight to compare.
        "frozen": digest_frozen(trainer.model) if trainer.args.world_size == 1 else None,
        "tiling": {key: recipe.model_dump(mode="json")[key] for key in TILING},
        "rows_of_a_step": recipe.rows_of_a_step,
        "versions": {name: package_version(name) for name in PACKAGES},
    }


def check_same_run(
    run: dict[str, Any], checkpoint: Path, recipe: Recipe, trainer: Any, tiling: Report | None
) -> list[str]:
    """Compare ``run``, of :func:`describe_run`, with the run that wrote ``checkpoint``.

    Returns:
        Sentences on what this run computes differently.

    Raises:
        UserError: other data, other frozen weights or another number of processes: it would be another run.
    """
    from torch import nn

    mark = read_mark(checkpoint)
    state = json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
    notes, steps = [], trainer.args.max_steps
    if steps > 0 and steps != state["max_steps"] and trainer.args.lr_scheduler_type not in FLAT_SCHEDULES:
        notes.append(
            f"the learning rate schedule now ends at step {steps} instead of {state['max_steps']}; losses will "
            "differ from the uninterrupted run"
        )
    if mark is None:
        return notes
    marked, name = mark.run, checkpoint.name
    end = "--resume must keep the run as it was; start a new one with another --output"
    if mark.processes != trainer.args.world_size:
        writers = f"{name} was written by {mark.processes} processes, this run has {trainer.args.world_size}"
        # DDP's checkpoints are complete for every rank, and PyTorch redistributes FSDP2's shards.
        if not (recipe.engine == "ddp" or (recipe.engine == "fsdp2" and (checkpoint / FSDP_SHARDS).is_dir())):
            raise UserError("resume.other-processes", f"{writers}; {end}")
        if marked.get("rows_of_a_step") != run["rows_of_a_step"]:
            raise UserError(
                "resume.other-batch",
                f"{writers}, and a step would have {run['rows_of_a_step']} rows instead of "
                f"{marked.get('rows_of_a_step', 'an unknown number')}; {end}",
            )
        notes.append(
            f"{writers}: a step still has {run['rows_of_a_step']} rows, but random numbers (dropout) and the rows "
            "that fill the last step of an epoch differ"
        )
    if marked.get("data") not in (None, run["data"]):
        raise UserError(
            "resume.other-rows", f"dataset {recipe.dataset!r} no longer has the rows that {name} was trained on; {end}"
        )
    if None not in (marked.get("frozen"), run["frozen"]) and marked["frozen"] != run["frozen"]:
        raise UserError(
            "resume.other-weights",
            f"model {recipe.model!r} no longer has the frozen weights that {name} was trained with; {end}",
        )
    changed = [
        f"{package} {old} is now {run['versions'].get(package)}"
        for package, old in marked.get("versions", {}).items()
        if old != run["versions"].get(package)
    ]
    if changed:
        notes.append(f"{', '.join(changed)} since {name}; results may differ where these versions do")
    has_other_tiles = marked.get("tiling") not in (None, run["tiling"]) and tiling is not None
    if has_other_tiles and any(isinstance(m, nn.Dropout) and m.p > 0 for m in trainer.model.modules()):
        notes.append("other tiles draw other dropout masks inside the blocks: same distribution, not the same run")
    return notes


def digest_rows(rows: Any) -> str:
    """A digest of the prepared rows: their number, and the values and picture files of evenly spaced rows."""
    count = len(rows)
    digest = hashlib.blake2b(repr((count, sorted(rows.column_names))).encode(), digest_size=16)
    plain = rows.with_format("arrow")
    for index in sorted({count * part // SAMPLED_ROWS for part in range(SAMPLED_ROWS)} | {count - 1}):
        for name in sorted(rows.column_names):
            column = plain[index : index + 1].column(name).combine_chunks()
            digest.update(_column_bytes(column))
        files = plain[index : index + 1].select([name for name in ("images", "videos") if name in rows.column_names])
        for path in media_paths({name: values[0] for name, values in files.to_pydict().items()}):
            digest.update(_ends_of_file(Path(path)))
    return digest.hexdigest()


def _ends_of_file(path: Path) -> bytes:
    """Size, beginning and end of a file; unlike the modification time they are the same for a copy."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(END_BYTES)
        file.seek(max(0, size - END_BYTES))
        return str(size).encode() + start + file.read()


def _column_bytes(column: Any) -> bytes:
    """The value of a one-row column; lists of numbers without a detour over Python's."""
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
