"""A disk that is full, limited, read-only or broken: which one it is, in one sentence."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from seqtile._errors import RunError
from seqtile.train.checkpoint_files import newest_whole, numbered

GB = 10**9

PROBLEMS = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "has no more room for this user (quota)",
    errno.EFBIG: "takes no file as large (ulimit -f)",
    errno.EROFS: "is mounted read-only",
    errno.EIO: "fails to read or write (input/output error)",
}
"""What is wrong with a disk, by the number of the system's error."""

_WRITERS = ("PytorchStreamWriter", "unexpected pos", "iostream error", "Error while serializing")
"""How the writers of PyTorch and safetensors begin an error whose number they may not say."""


def disk_error(error: BaseException, output: Path) -> RunError | None:
    """The error of a run whose disk is at fault, or None where it is not.

    Args:
        error: what the run ended with; what it was raised from is looked at too.
        output: the run's directory.
    """
    for one in _chain(error):
        number = _number_of(one, output)
        if number is not None:
            name = getattr(one, "filename", None)
            path = Path(os.fsdecode(name)) if isinstance(name, str | bytes) else output
            return RunError(f"{disk_of(path)} {PROBLEMS[number]}; {_kept(output)}")
    return None


def disk_of(path: Path) -> str:
    """The disk that a path is on, in words: device, where it is mounted, and what is free."""
    import psutil  # type: ignore[import-untyped]

    there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists()).resolve()
    mounts = {Path(part.mountpoint): part.device for part in psutil.disk_partitions(all=True)}
    mounted = next((one for one in (there, *there.parents) if one in mounts), Path(there.anchor))
    usage = psutil.disk_usage(str(there))
    name = " ".join(["the disk", *filter(None, [mounts.get(mounted)]), "at", str(mounted)])
    return f"{name} ({usage.free / GB:.1f} of {usage.total / GB:.1f} GB free)"


def _kept(output: Path) -> str:
    """What can be gone on with."""
    whole, torn = newest_whole(output)
    if whole is None:
        return "no checkpoint is whole yet: fix that and start again, or give another --output"
    last = numbered(output)[-1][1].name
    aside = f"{last} is torn, and will be set aside; " if torn else ""
    return f"the last whole checkpoint is {whole}; {aside}fix that, then go on with --resume --output {output}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _number_of(error: BaseException, output: Path) -> int | None:
    """The system's number of a disk error; what the writers do not say is looked up on the disk."""
    if isinstance(error, OSError):
        return error.errno if error.errno in PROBLEMS else None
    text = str(error)
    said = next((number for number in PROBLEMS if os.strerror(number) in text), None)
    if said is not None or not any(writer in text for writer in _WRITERS):
        return said
    return _look(output)


def _look(output: Path) -> int:
    import resource

    there = os.statvfs(output)
    if there.f_flag & os.ST_RDONLY:
        return errno.EROFS
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY and there.f_bavail:
        return errno.EFBIG
    return errno.ENOSPC if there.f_bavail * there.f_frsize < GB else errno.EIO
