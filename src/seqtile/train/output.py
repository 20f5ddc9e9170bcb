"""Where a run writes: checked first, never overwritten unasked, continued on request."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from seqtile._errors import UserError
from seqtile.train.checkpoint_files import SET_ASIDE
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
    wanted = resolve(recipe).model_dump(mode="json")
    for key, value in wanted.items():
        if key not in MAY_CHANGE and value != started[key]:
            raise UserError(
                f"--resume cannot change {key} from {started[key]!r} to {value!r}; "
                "drop it to continue that run, or start a new one with another --output"
            )
    return recipe, notes


def _tiling(given: dict[str, Any]) -> bool:
    return any("tile" in key for key in given)
