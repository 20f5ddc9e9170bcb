"""Where a run writes: checked first, never overwritten unasked, continued on request."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from seqtile._errors import UserError
from seqtile.train.checkpoint_files import MARK, SET_ASIDE, numbered, why_not_readable
from seqtile.train.disk import PROBLEMS, disk_of
from seqtile.train.recipe import DEMO, RECIPE_FILE, OptionKeys, Recipe, build_recipe, read_recipe, resolve
from seqtile.train.run_lock import LOCK

RUNS = Path("runs")

WRITTEN = (
    "checkpoint-*", f"{SET_ASIDE}*", "report", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.json",
    "*.jinja", "*.txt", "README.md", "metrics.jsonl", RECIPE_FILE,
)  # fmt: skip
"""What a run leaves in its directory, and so what ``--overwrite`` removes; the recipe, which allows it, at last."""

MAY_CHANGE = (
    "output",
    "save_steps",
    "eval_dataset",
    "eval_split",
    "eval_steps",
    "report",
    "compare",
    "steps",
    *OptionKeys.model_fields,
    "fit",
    "on_oom",
)
"""What a resumed run may set otherwise: the length, what is written, and how it is computed, not what is learnt."""

PROCESSES = ("nproc", "cp_size", "gradient_accumulation")
"""What it may set otherwise together, under :data:`ANY_NUMBER`, as long as a step has as many rows."""

ANY_NUMBER = ("ddp", "fsdp2")
"""Engines whose checkpoints any number of processes can read: all of it on each, or shards that know their place."""


def default_output(recipe: Recipe) -> Path:
    """The first directory under ``runs/`` that is free for this model."""
    name = DEMO if recipe.is_demo else Path(recipe.model.rstrip("/")).name or "model"
    candidates = (RUNS / (name if count == 1 else f"{name}-{count}") for count in range(1, 10_000))
    return next(path for path in candidates if not path.exists())


def check_output(recipe: Recipe, output: Path, *, overwrite: bool) -> None:
    """Make sure that a new run may write into ``output``; creates nothing and removes nothing.

    Raises:
        UserError: not writable, holds something already, or is the model or the dataset itself.
    """
    for what in (recipe.model, recipe.dataset):
        source = Path(what).expanduser()
        if (
            what != DEMO
            and source.exists()
            and (source.resolve() == output.resolve() or output.resolve() in source.resolve().parents)
        ):
            raise UserError(f"output {str(output)!r} holds {what!r}, which this run reads; give another --output")
    dataset = Path(recipe.dataset).expanduser()
    if recipe.dataset != DEMO and dataset.is_dir() and dataset.resolve() in output.resolve().parents:
        raise UserError(
            f"output {str(output)!r} lies inside the dataset {recipe.dataset!r}, and the next run would train on it; "
            "give another --output"
        )
    if output.is_dir() and any(path.name != LOCK for path in output.iterdir()):
        if not overwrite:
            resume = "--resume to continue it, " if (output / RECIPE_FILE).is_file() else ""
            raise UserError(
                f"output {str(output)!r} is not empty; give {resume}--overwrite to replace an earlier run, "
                "or another --output"
            )
        if not (output / RECIPE_FILE).is_file():
            raise UserError(
                f"output {str(output)!r} holds files that no earlier run wrote (no {RECIPE_FILE}); "
                "give another --output"
            )
        _check_own(output)
    check_writable(output)


def _check_own(output: Path) -> None:
    """Whether the recipe there is the run's own, and not one that somebody keeps beside other files."""
    try:
        written = read_recipe(output / RECIPE_FILE).get("output")
    except UserError:
        written = None
    if not isinstance(written, str) or Path(written).name != output.resolve().name:
        raise UserError(
            f"output {str(output)!r} holds a {RECIPE_FILE} of another run, and --overwrite would delete the files "
            "beside it; give another --output"
        )


def check_writable(output: Path, advice: str = "give another --output") -> None:
    """Try to write there, and leave nothing behind; other nodes that share the disk may be doing the same.

    Args:
        output: the directory.
        advice: what to do if it cannot be written.

    Raises:
        UserError: it cannot be created or written.
    """
    try:
        for attempts_left in reversed(range(10)):
            try:
                _write_and_remove(output)
                return
            except FileNotFoundError:  # another node has just removed what it made for its own attempt
                if not attempts_left:
                    raise
    except OSError as error:
        where = f", {disk_of(output)}" if error.errno in PROBLEMS else ""
        raise UserError(f"cannot write to output {str(output)!r} ({error.strerror}{where}); {advice}") from None


def _write_and_remove(output: Path) -> None:
    """Make a file in ``output``, and the directories that are missing; remove what was made and is not used since."""
    created: list[Path] = []
    try:
        missing = [path for path in (output, *output.parents) if not path.exists()]
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                created.append(path)
        with tempfile.TemporaryFile(dir=output):
            pass
    finally:
        for path in reversed(created):
            with contextlib.suppress(OSError):
                path.rmdir()


def nothing_saved(output: Path) -> bool:
    """Whether a run was begun in ``output`` and left nothing to go on from.

    Its recipe is there, and no trained model; nothing was set aside; and of checkpoints there is at most what was cut
    off while it was written, which carries no mark.
    """
    if not (output / RECIPE_FILE).is_file() or (output / MARK).exists():
        return False
    if any(True for pattern in ("*.safetensors", "*.bin", f"{SET_ASIDE}*") for _ in output.glob(pattern)):
        return False
    return all(not (path / MARK).exists() and bool(why_not_readable(path)) for _, path in numbered(output))


def clear_output(output: Path) -> None:
    """Remove what an earlier run left in ``output``; other files stay."""
    for pattern in WRITTEN:
        for path in output.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def resumed_recipe(file_values: dict[str, Any], flag_values: dict[str, Any]) -> tuple[Recipe, list[str]]:
    """The recipe of the run to continue: its saved one, with what may change taken from flags and recipe.

    Raises:
        UserError: no output named, no earlier run there, or a setting that would make it another run.
    """
    directory = flag_values.get("output") or file_values.get("output")
    if not directory:
        raise UserError("--resume needs the run to continue; give its directory with --output")
    path = Path(directory).expanduser() / RECIPE_FILE
    if not path.is_file():
        raise UserError(f"output {str(directory)!r} holds no earlier run (no {RECIPE_FILE}); start it without --resume")
    saved, _ = build_recipe(read_recipe(path), {})
    if saved.trust_remote_code and not (flag_values.get("trust_remote_code") or file_values.get("trust_remote_code")):
        raise UserError(
            f"{str(path)!r} says trust_remote_code: true, which a folder does not allow by itself; read the model's "
            "code, then give --trust-remote-code again"
        )
    started = saved.model_dump(mode="json")
    given = {key: value for key, value in {**file_values, **flag_values}.items() if value is not None}
    base = {key: value for key, value in started.items() if key not in ("tile", "tiled_mlp") or not _tiling(given)}
    recipe, notes = build_recipe(base, given)
    if recipe.fit:
        recipe = recipe.model_copy(update={"fit": False})
        notes.append("fit chooses for a new run; --resume goes on with the settings that this one has")
    recipe = _on_other_processes(recipe, saved, given)
    may_change = (*MAY_CHANGE, *PROCESSES) if _moved(recipe, saved) else MAY_CHANGE
    wanted = resolve(recipe).model_dump(mode="json")
    for key, value in wanted.items():
        if key not in may_change and value != started[key]:
            raise UserError(
                f"--resume cannot change {key} from {started[key]!r} to {value!r}; "
                "drop it to continue that run, or start a new one with another --output"
            )
    return recipe, notes


def _moved(recipe: Recipe, saved: Recipe) -> bool:
    """Whether the rows of a step are on other processes than before."""
    return recipe.engine == saved.engine and (recipe.nproc, recipe.cp_size) != (saved.nproc, saved.cp_size)


def _on_other_processes(recipe: Recipe, saved: Recipe, given: dict[str, Any]) -> Recipe:
    """A resumed run's recipe, with as many micro-batches as make a step of the rows that it had.

    Transformers finds the place in the data by the number of steps, so that with other rows a step some would be left
    out and others trained on twice.

    Raises:
        UserError: the engine reads its checkpoints with as many processes only, or no number of micro-batches does it.
    """
    if not _moved(recipe, saved):
        return recipe
    resolve(recipe)
    change = ", ".join(
        f"{key} from {getattr(saved, key)} to {getattr(recipe, key)}"
        for key in ("nproc", "cp_size")
        if getattr(recipe, key) != getattr(saved, key)
    )
    if recipe.engine not in ANY_NUMBER:
        raise UserError(
            f"--resume cannot change {change} under engine {recipe.engine!r}: its checkpoints are read by as many "
            "processes as wrote them; drop it to continue that run"
        )
    for key, found in (("streaming", recipe.streaming), *((key, recipe.trainer.get(key)) for key in _BY_PROCESSES)):
        if found and found not in ("random", "sequential"):
            raise UserError(
                f"--resume cannot change {change} with {key} {found!r}: the order of the rows depends on it; "
                "drop it to continue that run"
            )
    rows, at_once = saved.rows_of_a_step, recipe.changed(gradient_accumulation=1).rows_of_a_step
    if "gradient_accumulation" not in given and at_once and rows % at_once == 0:
        recipe = recipe.changed(gradient_accumulation=rows // at_once)
    if recipe.rows_of_a_step != rows:
        advice = (
            f"give --grad-accumulation {rows // at_once}"
            if at_once and rows % at_once == 0
            else f"give processes (--nproc, --cp-size) that take at most {rows} at once, and a part of them"
        )
        raise UserError(
            f"--resume cannot change {change}: a step would have {recipe.rows_of_a_step} rows and had {rows}; {advice}"
        )
    return recipe


_BY_PROCESSES = ("train_sampling_strategy", "group_by_length", "dataloader_drop_last")
"""Arguments of the trainer by which rows are dealt otherwise to another number of processes or micro-batches."""


def _tiling(given: dict[str, Any]) -> bool:
    return any("tile" in key for key in given)
