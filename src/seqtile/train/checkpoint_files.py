"""Checkpoints that are known to be whole.

Transformers writes a checkpoint in place, file by file, and takes the one of the highest number for the newest. Killed
while it writes, it would resume from a partial checkpoint, or crash. So every checkpoint gets a mark as its last file,
which lists all others, of every rank; what carries none, or does not hold what its mark lists, is never resumed from
unasked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.devices import cpu_cores
from seqtile.train.atomic_files import write_whole
from seqtile.train.checkpoint_pickles import check_pickles

logger = first_rank_logger(__name__)

MARK = "complete.json"
"""The completeness mark: written last, and the first thing to go when a checkpoint is removed."""

TRAINER_STATE = "trainer_state.json"
FSDP_SHARDS = "pytorch_model_fsdp_0"
"""Directory of the weights that FSDP2 has saved in shards: accelerate's ``FSDP_MODEL_NAME`` with the model's number."""

SET_ASIDE = "set-aside-"
RESULT = ("*.safetensors", "*.safetensors.index.json", "*.bin", "config.json", "adapter_config.json", "tokenizer*")
"""Files of the trained model, which lie beside the checkpoints and the report."""
_NAME = re.compile(r"checkpoint-([0-9]+)")
_PIECE = 1 << 20
_READERS = 8


@dataclass(frozen=True)
class CheckpointMark:
    """What a checkpoint was when it was whole.

    Attributes:
        step: optimiser steps done.
        processes: how many ranks wrote it.
        run: what the run depended on that its recipe does not show; see ``seqtile.train.same_run``.
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
        mark: what to say besides the files.
        only: patterns of the files that belong to it.

    Raises:
        OSError: a file cannot be read, or the mark cannot be written.
    """
    names = {path.relative_to(folder).as_posix() for pattern in only for path in folder.glob(pattern) if path.is_file()}
    paths = [folder / name for name in sorted(names - {MARK})]
    with ThreadPoolExecutor(2 * _readers()) as pool:
        flushed = [pool.submit(_flush, path) for path in paths]
        files = {
            path.relative_to(folder).as_posix(): [path.stat().st_size, digest]
            for path, digest in zip(paths, pool.map(digest_of_file, paths), strict=True)
        }
        for one in flushed:
            one.result()
    write_whole(folder / MARK, json.dumps(asdict(mark) | {"files": files}, indent=1))


def read_mark(folder: Path) -> CheckpointMark | None:
    """The mark of a checkpoint, or None where there is none that can be read."""
    try:
        values = json.loads((folder / MARK).read_text(encoding="utf-8"))
        mark = CheckpointMark(**values)
        sound = isinstance(mark.step, int) and isinstance(mark.run, dict) and bool(mark.files)
        return mark if sound and all(len(entry) == 2 for entry in mark.files.values()) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def why_not_whole(folder: Path, *, digests: bool = True) -> str:
    """What speaks against resuming from this checkpoint, in a few words; empty if it is whole.

    Args:
        folder: the checkpoint.
        digests: read every file to its end; without, only the sizes are compared.
    """
    mark = read_mark(folder)
    if mark is None:
        return "its completeness mark cannot be read" if (folder / MARK).exists() else "it carries no completeness mark"
    for name, (size, _) in mark.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} holds {path.stat().st_size:,} of {size:,} bytes"
    if digests:
        with ThreadPoolExecutor(_readers()) as pool:
            found = pool.map(_digest_or_none, (folder / name for name in mark.files))
            for (name, (_, digest)), there in zip(mark.files.items(), found, strict=True):
                if there is None:
                    return f"{name} cannot be read"
                if there != digest:
                    return f"{name} is not what was written"
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
        trusted: run what its pickles ask for, whatever it is.
        checked: another process has just read the chosen one to its end and found it right.

    Raises:
        UserError: there is none, none is whole, or the chosen one is not there or damaged; or it would run code.
    """
    if chosen is not None and checked:
        return output / chosen
    found = _newest(output) if chosen is None else _chosen(output, chosen)
    if not trusted:
        check_pickles(found)
    return found


def _newest(output: Path) -> Path:
    found, skipped = newest_whole(output, digests=True)
    if found is not None:
        for problem in skipped:
            logger.warning("skipped %s", problem)
        return found
    if not skipped:
        raise UserError(
            f"output {str(output)!r} holds no checkpoint to resume from; "
            "start the run again: --overwrite in place of --resume"
        )
    raise UserError(
        f"no checkpoint in {str(output)!r} is known to be whole ({'; '.join(skipped)}); one that was interrupted while "
        "it was written is lost; one without a mark that an older seqtile or another trainer wrote can be named: "
        f"--resume --from-checkpoint {numbered(output)[-1][1].name}"
    )


def _chosen(output: Path, name: str) -> Path:
    path = output / name
    if not _NAME.fullmatch(name) or not path.is_dir():
        there = ", ".join(path.name for _, path in numbered(output)) or "none"
        raise UserError(f"got --from-checkpoint {name!r}, expected one of those in {str(output)!r}: {there}")
    if (path / MARK).exists():
        problem = why_not_whole(path)
    else:
        problem = why_not_readable(path)
        if not problem:
            logger.warning(
                "%s carries no completeness mark; every file of it can be read, but whether one is missing, or the "
                "data are those it was trained on, is not known",
                name,
            )
    if problem:
        raise UserError(f"cannot resume from {name!r}: {problem}; name another checkpoint, or start a new run")
    return path


def why_not_readable(folder: Path) -> str:
    """What speaks against a checkpoint without a mark: whether each file ends where its own format says."""
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
                    broken = archive.testzip()
                if broken:
                    return f"{path.name} is damaged"
        except (OSError, ValueError, zipfile.BadZipFile, safetensors.SafetensorError):
            return f"{path.name} is cut off or damaged"
    return ""


def set_aside(output: Path, step: int) -> None:
    """Rename every checkpoint numbered ``step`` or higher, so that none is written into or taken for newer.

    They are there when a run goes on from an earlier one: partial checkpoints, damaged ones, or those of the steps that
    it was told to do again.
    """
    for number, path in numbered(output):
        if number >= step:
            target = next(new for new in _free_names(output, path.name) if not new.exists())
            path.rename(target)
            logger.warning("%s is from before this resume; renamed to %s, delete it when you like", path, target.name)


def rotate(output: Path, limit: int | None, protected: str | None = None) -> None:
    """Keep the ``limit`` newest marked checkpoints; call it when the newest has its mark.

    Unmarked ones are not counted and not touched. Nothing is deleted where ``limit`` is None or below 1.
    """
    marked = [path for _, path in numbered(output) if (path / MARK).is_file()]
    for path in marked[:-limit] if limit and limit > 0 else []:
        if protected is None or path.resolve() != Path(protected).resolve():
            (path / MARK).unlink()
            shutil.rmtree(path, ignore_errors=True)


def _free_names(output: Path, name: str) -> Iterator[Path]:
    yield output / f"{SET_ASIDE}{name}"
    for count in range(2, 10_000):
        yield output / f"{SET_ASIDE}{name}-{count}"


def _readers() -> int:
    return min(cpu_cores(), _READERS)


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def digest_of_file(path: Path) -> str:
    """XXH3 of 128 bits, of the whole file."""
    import xxhash

    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _digest_or_none(path: Path) -> str | None:
    try:
        return digest_of_file(path)
    except OSError:
        return None
