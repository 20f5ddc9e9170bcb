"""The directory of a run: locks, and which of its checkpoints are complete.

Transformers writes a checkpoint in place, file by file, and takes the one of the highest number for the newest. Killed
while it writes, it would resume from a partial checkpoint, or crash. So every checkpoint gets a mark as its last file,
which lists all others, of every rank; what carries none, or does not hold what its mark lists, is never resumed from
unasked. A run keeps a file in it locked, which the kernel frees when the run ends or is killed.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from seqtile._errors import RunError, UserError
from seqtile._log import first_rank_logger
from seqtile.devices import cpu_cores
from seqtile.train.atomic_files import write_whole
from seqtile.train.recipe import DEMO, RECIPE_FILE, Recipe, read_recipe

logger = first_rank_logger(__name__)

MARK = "complete.json"
"""The completeness mark: written last, and the first thing to go when a checkpoint is removed."""

LOCK = "run.lock"
"""File in the output directory that a run keeps locked while it writes there."""

TRAINER_STATE = "trainer_state.json"
FSDP_SHARDS = "pytorch_model_fsdp_0"
"""Directory of the weights that FSDP2 has saved in shards: accelerate's ``FSDP_MODEL_NAME`` with the model's number."""

RUNS = Path("runs")
SET_ASIDE = "set-aside-"
SAVE_TRIAL = "save-trial-"
"""Begin of the name of a directory that lives for a moment before the first step."""

RESULT = ("*.safetensors", "*.safetensors.index.json", "*.bin", "config.json", "adapter_config.json", "tokenizer*")
"""Files of the trained model, which lie beside the checkpoints and the report."""

LEFT_BY_A_RUN = (
    "checkpoint-*", f"{SET_ASIDE}*", f"{SAVE_TRIAL}*", "report", "*.safetensors", "*.safetensors.index.json", "*.bin",
    "*.json", "*.jinja", "*.txt", "README.md", "metrics.jsonl", RECIPE_FILE,
)  # fmt: skip
"""Files that ``--overwrite`` removes; the recipe, which allows it, last."""

_NAME = re.compile(r"checkpoint-([0-9]+)")
_GB = 10**9


# ---- Whole checkpoints


@dataclass(frozen=True)
class CheckpointMark:
    """The contents of a complete checkpoint.

    Attributes:
        step: optimizer steps done.
        processes: how many ranks wrote it.
        run: what the run depended on that its recipe does not show; see ``seqtile.train.resume``.
        files: size and XXH3 digest, of 128 bits, of every file, by its path inside the checkpoint. It tells damage, and
            not tampering: who can change a file can change the mark.
    """

    step: int
    processes: int = 1
    run: dict[str, Any] = field(default_factory=dict)
    files: dict[str, list[Any]] = field(default_factory=dict)


def write_mark(folder: Path, mark: CheckpointMark, *, only: tuple[str, ...] = ("**/*",)) -> None:
    """Mark ``folder`` as whole, after every file of it has reached the disk.

    Cost:
        One read of every file, while it is flushed and so from memory: 0.1 to 0.4 seconds per GB and thread
        (``benchmarks/checkpoint_digests.py``), several files at a time.

    Args:
        folder: a checkpoint to which every rank has written.
        mark: what to write besides the files.
        only: patterns of the files that belong to it.

    Raises:
        OSError: a file cannot be read, or the mark cannot be written.
    """
    names = {path.relative_to(folder).as_posix() for pattern in only for path in folder.glob(pattern) if path.is_file()}
    paths = [folder / name for name in sorted(names - {MARK})]
    with ThreadPoolExecutor(2 * min(cpu_cores(), 8)) as pool:
        flushes = [pool.submit(_flush, path) for path in paths]
        files = {
            path.relative_to(folder).as_posix(): [path.stat().st_size, digest]
            for path, digest in zip(paths, pool.map(digest_of_file, paths), strict=True)
        }
        for flush in flushes:
            flush.result()
    write_whole(folder / MARK, json.dumps(asdict(mark) | {"files": files}, indent=1))


def read_mark(folder: Path) -> CheckpointMark | None:
    """The mark of a checkpoint, or None where it is missing or unreadable."""
    try:
        mark = CheckpointMark(**json.loads((folder / MARK).read_text(encoding="utf-8")))
        return mark if mark.files and all(len(entry) == 2 for entry in mark.files.values()) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def why_not_whole(folder: Path, *, digests: bool = True) -> str:
    """Why this checkpoint cannot be resumed from; empty if it is complete.

    Args:
        folder: the checkpoint.
        digests: read every file to its end; without, only the sizes are compared.
    """
    mark = read_mark(folder)
    if mark is None:
        return "its completeness mark is unreadable" if (folder / MARK).exists() else "it has no completeness mark"
    for name, (size, _) in mark.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} of {size:,} bytes"

    def digest_or_none(path: Path) -> str | None:
        with suppress(OSError):
            return digest_of_file(path)
        return None

    with ThreadPoolExecutor(min(cpu_cores(), 8)) as pool:
        paths = [folder / name for name in mark.files] if digests else []
        for path, digest in zip(paths, pool.map(digest_or_none, paths), strict=True):
            name = path.relative_to(folder).as_posix()
            if digest != mark.files[name][1]:
                return f"{name} {'cannot be read' if digest is None else 'is not what was written'}"
    return ""


def why_not_readable(folder: Path) -> str:
    """Check a checkpoint without a mark: whether each file ends where its format says."""
    import safetensors

    if not (folder / TRAINER_STATE).is_file():
        return f"{TRAINER_STATE} is missing"
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".safetensors":
                with safetensors.safe_open(path, framework="pt"):
                    pass
            elif path.suffix in (".pt", ".pth", ".bin"):
                with zipfile.ZipFile(path) as archive:
                    if archive.testzip():
                        return f"{path.name} is damaged"
        except (OSError, ValueError, zipfile.BadZipFile, safetensors.SafetensorError):
            return f"{path.name} is truncated or corrupt"
    return ""


def numbered(output: Path) -> list[tuple[int, Path]]:
    """Step and path of every checkpoint directory of a run, whole or not, the oldest first."""
    matches = ((_NAME.fullmatch(path.name), path) for path in output.glob("checkpoint-*") if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def newest_whole(output: Path, *, digests: bool = False) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, and what is wrong with each newer one.

    Args:
        output: the run's directory.
        digests: as in :func:`why_not_whole`; not needed for what this process itself has just written.
    """
    skipped: list[str] = []
    for _, path in reversed(numbered(output)):
        problem = why_not_whole(path, digests=digests)
        if not problem:
            return path, skipped
        skipped.append(f"{path.name}: {problem}")
    return None, skipped


def find_checkpoint(output: Path, chosen: str | None = None, *, trusted: bool = False, checked: bool = False) -> Path:
    """The checkpoint to continue from: the newest whole one, or the one that is asked for by name.

    One that is named may carry no mark (a run of an older seqtile or of TRL itself); then every file of it must at
    least be readable to its end.

    Args:
        output: the run's directory.
        chosen: name of a checkpoint there.
        trusted: load its pickles without checks.
        checked: another process has just read the chosen one to its end and found it right.

    Raises:
        UserError: no complete checkpoint, or the chosen one is missing, damaged or would run code.
    """
    if chosen is not None and checked:
        return output / chosen
    checkpoint = _newest(output) if chosen is None else _chosen(output, chosen)
    if not trusted:
        check_pickles(checkpoint)
    return checkpoint


def _newest(output: Path) -> Path:
    newest, skipped = newest_whole(output, digests=True)
    if newest is not None:
        for problem in skipped:
            logger.warning("skipped %s", problem)
        return newest
    if not skipped:
        raise UserError(
            "resume.no-checkpoint",
            f"output {str(output)!r} has no checkpoint to resume from; use --overwrite instead of --resume",
        )
    raise UserError(
        "resume.no-complete-checkpoint",
        f"no checkpoint in {str(output)!r} is complete ({'; '.join(skipped)}); to use one without a mark, from an "
        f"older seqtile or another trainer, name it: --resume --from-checkpoint {numbered(output)[-1][1].name}",
    )


def _chosen(output: Path, name: str) -> Path:
    path = output / name
    if not _NAME.fullmatch(name) or not path.is_dir():
        names = ", ".join(path.name for _, path in numbered(output)) or "none"
        raise UserError(
            "resume.checkpoint-unknown",
            f"got --from-checkpoint {name!r}, expected one of those in {str(output)!r}: {names}",
        )
    is_marked = (path / MARK).exists()
    if problem := why_not_whole(path) if is_marked else why_not_readable(path):
        raise UserError(
            "resume.checkpoint-broken",
            f"cannot resume from {name!r}: {problem}; name another checkpoint, or start a new run",
        )
    if not is_marked:
        logger.warning(
            "%s has no completeness mark; its files are readable, but missing files or changed data cannot be detected",
            name,
        )
    return path


def set_aside(output: Path, step: int) -> None:
    """Rename every checkpoint numbered ``step`` or higher, so that none is written into or taken for newer.

    They are there when a run goes on from an earlier one: partial checkpoints, damaged ones, or those of the steps that
    it was told to do again.
    """
    for number, path in numbered(output):
        if number >= step:
            names = (f"{SET_ASIDE}{path.name}{'' if count == 1 else f'-{count}'}" for count in range(1, 10_000))
            target = next(output / name for name in names if not (output / name).exists())
            path.rename(target)
            logger.warning("%s is from before this resume; renamed to %s, safe to delete", path, target.name)


def rotate(output: Path, limit: int | None, protected: str | None = None) -> None:
    """Keep the ``limit`` newest marked checkpoints; call it when the newest has its mark.

    Unmarked ones are not counted and not touched. Nothing is deleted where ``limit`` is None or below 1.
    """
    marked = [path for _, path in numbered(output) if (path / MARK).is_file()]
    for path in marked[:-limit] if limit and limit > 0 else []:
        if protected is None or path.resolve() != Path(protected).resolve():
            (path / MARK).unlink()
            shutil.rmtree(path, ignore_errors=True)


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def digest_of_file(path: Path) -> str:
    """XXH3 of 128 bits, of the whole file."""
    import xxhash

    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


# ---- Pickles: DeepSpeed unpickles its files, which runs whatever code they name


TAGS = ("latest", "latest_universal")
"""Files in which DeepSpeed keeps the name of the directory to load, which it joins to its path as it stands."""

PICKLED = (".pt", ".pth", ".bin", ".pkl", ".ckpt", ".metadata")
"""Endings of files that a trainer loads as pickles; a ``.metadata`` describes what is in ``.distcp``."""


def check_pickles(folder: Path) -> None:
    """Refuse a checkpoint whose pickles reference more than tensors, numbers and DeepSpeed's settings.

    torch lists what each would call, and calls nothing. Links, and a tag that leads out of the checkpoint, are refused
    too: what is loaded would not be what is looked at.

    Cost:
        Reads the pickles and not the tensors beside them: milliseconds.

    Raises:
        UserError: names the file, and what it would call.
    """
    for path, is_link, is_file in [(path, path.is_symlink(), path.is_file()) for path in sorted(folder.rglob("*"))]:
        problem = ""
        if is_link:
            problem = "is a link, so other files may be loaded"
        elif path.name in TAGS and is_file:
            tag = path.read_text(encoding="utf-8", errors="replace").strip()
            if tag in ("", ".", "..") or Path(tag).name != tag or not (path.parent / tag).is_dir():
                problem = "points outside its directory, so DeepSpeed would load other files"
        # Transformers writes training_args.bin but never loads it: its many classes are no reason to refuse it.
        elif path.name.endswith(PICKLED) and path.name != "training_args.bin" and is_file:
            problem = _problem_of_pickle(path)
        if problem:
            raise UserError(
                "resume.unsafe-checkpoint",
                f"{path.relative_to(folder.parent)} {problem}; loading it could run arbitrary code: use "
                "--trust-checkpoint if you trust its author, or another --from-checkpoint",
            )


def _problem_of_pickle(path: Path) -> str:
    from torch.serialization import get_unsafe_globals_in_checkpoint

    from seqtile._compat import PICKLED_NAMES

    try:
        pickles = _pickles_of_shards(path) if path.name.endswith(".metadata") else [str(path)]
        names = {name for pickled in pickles for name in get_unsafe_globals_in_checkpoint(pickled)} - PICKLED_NAMES
    except Exception as error:  # noqa: BLE001 - a hostile pickle can end in any of them
        return f"has a pickle that cannot be checked ({type(error).__name__}: {error})"[:200]
    return f"needs {min(names)[:120]}, which no checkpoint of Transformers or DeepSpeed uses" if names else ""


def _pickles_of_shards(path: Path) -> Iterator[io.BytesIO]:
    """The pickles of PyTorch's distributed checkpoints: everything but tensors."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with path.open("rb") as file:
        metadata = _ReadMetadata(file).load()
    for index, place in metadata.storage_data.items():
        if not isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            if getattr(place, "transform_descriptors", None):
                raise pickle.UnpicklingError("it is compressed")
            with (path.parent / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                yield io.BytesIO(file.read(place.length))


class _ReadMetadata(pickle.Unpickler):
    """Creates objects of the classes that the list of PyTorch's shards consists of, and no others.

    A pickle can set attributes of a class too: classes that could keep them are replaced by subclasses of their own.
    """

    def find_class(self, module: str, name: str) -> Any:
        import torch

        from seqtile._compat import METADATA_NAMES

        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and f"{module}.{name}" not in METADATA_NAMES:
            raise pickle.UnpicklingError(f"needs {module}.{name}")
        found = super().find_class(module, name)
        if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, Path)):
            return type(name, (found if dataclasses.is_dataclass(found) else _AnyPath,), {})
        return found


class _AnyPath:
    """In place of a path of another machine, which nothing reads."""

    def __init__(self, *_: str) -> None: ...


# ---- One run at a time


def take_lock(lock: BaseFileLock) -> None:
    """Take the lock of a run's directory, which the kernel frees when this process ends.

    Raises:
        UserError: another run has it, or it cannot be locked.
    """
    output = str(Path(lock.lock_file).parent)
    try:
        lock.acquire(timeout=1)  # another process may hold it for a check alone
    except Timeout:
        raise UserError(
            "output.in-use", f"output {output!r} is in use by another run; wait for it, end it, or use another --output"
        ) from None
    except OSError as error:
        if error.errno in PROBLEMS:
            raise
        raise UserError(
            "output.cannot-lock", f"cannot lock output {output!r} ({error.strerror}); use another --output"
        ) from None


def check_unlocked(output: Path) -> None:
    """Refuse a directory that another run writes to; creates nothing.

    Raises:
        UserError: another run has the lock, or it cannot be locked.
    """
    if (output / LOCK).exists():
        lock = FileLock(output / LOCK)
        with suppress(OSError):  # check_writable reports a disk that takes no writes
            take_lock(lock)
            lock.release()


# ---- Where a run writes


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
    target = output.resolve()
    for name in (recipe.model, recipe.dataset):
        source = Path(name).expanduser()
        if name != DEMO and source.exists() and target in (source.resolve(), *source.resolve().parents):
            raise UserError(
                "output.contains-input",
                f"output {str(output)!r} contains {name!r}, which this run reads; use another --output",
            )
    dataset = Path(recipe.dataset).expanduser()
    if recipe.dataset != DEMO and dataset.is_dir() and dataset.resolve() in target.parents:
        raise UserError(
            "output.inside-dataset",
            f"output {str(output)!r} lies inside the dataset {recipe.dataset!r}, so the next run would train on it; "
            "use another --output",
        )
    if output.is_dir() and any(path.name != LOCK for path in output.iterdir()):
        has_recipe = (output / RECIPE_FILE).is_file()
        if not overwrite:
            resume = "--resume to continue it, " if has_recipe else ""
            raise UserError(
                "output.not-empty",
                f"output {str(output)!r} is not empty; use {resume}--overwrite to replace an earlier run, or "
                "another --output",
            )
        written = None
        with suppress(UserError):
            written = read_recipe(output / RECIPE_FILE).get("output")
        if not isinstance(written, str) or Path(written).name != target.name:
            holds = f"a {RECIPE_FILE} of another run" if has_recipe else f"no {RECIPE_FILE} of a run"
            raise UserError(
                "output.holds-other-files",
                f"output {str(output)!r} has {holds}, and --overwrite would delete the files beside it; use another "
                "--output",
            )
    check_writable(output)


def check_writable(output: Path, advice: str = "use another --output") -> None:
    """Try to write there, or in the nearest directory above that exists, and leave nothing behind.

    Args:
        output: the directory.
        advice: what to do if it cannot be written.

    Raises:
        UserError: it cannot be written.
    """
    try:
        with tempfile.TemporaryFile(dir=next(path for path in (output, *output.parents) if path.exists())):
            pass
    except OSError as error:
        where = f", {disk_of(output)}" if error.errno in PROBLEMS else ""
        raise UserError(
            "output.not-writable", f"cannot write to output {str(output)!r} ({error.strerror}{where}); {advice}"
        ) from None


def saved_names(folder: Path) -> set[str]:
    """Names of the weights of a whole model in a checkpoint; none of adapters or of an engine's shards."""
    import safetensors

    names = set[str]()
    for path in folder.glob("model*.safetensors"):
        with safetensors.safe_open(path, framework="pt") as file:
            names |= {*file.keys()}
    return names


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
    for path in (path for pattern in LEFT_BY_A_RUN for path in output.glob(pattern)):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


# ---- A disk that is full, limited, read-only or broken


PROBLEMS = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "has no space left for this user (quota)",
    errno.EFBIG: "does not allow files of this size (ulimit -f)",
    errno.EROFS: "is mounted read-only",
    errno.EIO: "fails to read or write (input/output error)",
}
"""Disk problems by errno."""

_WRITERS = ("PytorchStreamWriter", "unexpected pos", "iostream error", "Error while serializing")
"""How the writers of PyTorch and safetensors begin an error whose number they may not give."""


def disk_error(error: BaseException, output: Path) -> RunError | None:
    """The error of a run whose disk is at fault, or None where it is not.

    Args:
        error: what the run ended with; what it was raised from is looked at too.
        output: the run's directory.
    """
    cause: BaseException | None = error
    seen: list[BaseException] = []
    while cause is not None and cause not in seen:
        number = _number_of(cause, output)
        if number is not None:
            name = getattr(cause, "filename", None)
            path = Path(os.fsdecode(name)) if isinstance(name, str | bytes) else output
            whole, torn = newest_whole(output)
            kept = "no checkpoint is complete yet: fix that and start again, or use another --output"
            if whole is not None:
                aside = f"{numbered(output)[-1][1].name} is incomplete and will be set aside; " if torn else ""
                kept = (
                    f"the last complete checkpoint is {whole}; {aside}fix that, then run with --resume --output "
                    f"{output}"
                )
            return RunError(f"{disk_of(path)} {PROBLEMS[number]}; {kept}")
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def disk_of(path: Path) -> str:
    """The disk that a path is on, and what is free."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists()).resolve()
    usage = shutil.disk_usage(existing)
    return f"the disk of {existing} ({usage.free / _GB:.1f} of {usage.total / _GB:.1f} GB free)"


def _number_of(error: BaseException, output: Path) -> int | None:
    """The system's number of a disk error; where the writers do not give it, the disk is looked at."""
    import resource

    if isinstance(error, OSError):
        return error.errno if error.errno in PROBLEMS else None
    text = str(error)
    number = next((number for number in PROBLEMS if os.strerror(number) in text), None)
    if number is not None or not any(writer in text for writer in _WRITERS):
        return number
    disk = os.statvfs(output)
    if disk.f_flag & os.ST_RDONLY:
        return errno.EROFS
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY and disk.f_bavail:
        return errno.EFBIG
    return errno.ENOSPC if disk.f_bavail * disk.f_frsize < _GB else errno.EIO
