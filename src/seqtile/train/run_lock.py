"""One run at a time in a directory: a lock file that says whose it is, and is no lock once that process has ended."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.devices import process_space
from seqtile.train.processes import is_running, this_process

logger = first_rank_logger(__name__)

LOCK = "run.lock"
"""In the output directory while a run writes there: host, process and the start of the process."""

WRITTEN_SECONDS = 10.0
"""A lock that cannot be read is one that is being written, for this long."""


class RunLock:
    """The lock of a run on its output directory: :meth:`take` it before anything is written; the ``with`` frees it."""

    def __init__(self, output: Path) -> None:
        self._file = output / LOCK
        self._taken = False
        self._before = _checkpoints(output)

    def __enter__(self) -> RunLock:
        return self

    def take(self) -> None:
        """Take it, once; the directory is there.

        Raises:
            UserError: another run has it, or has had it since this object was made, and saved there.
        """
        if self._taken:
            return
        while not self._taken:
            try:
                # Created or not in one act, on network file systems too.
                with self._file.open("x", encoding="utf-8") as file:
                    json.dump(_me(), file)
                    file.flush()
                    os.fsync(file.fileno())
                self._taken = True
            except FileExistsError:
                check_unlocked(self._file.parent)
                self._remove_stale()
        if _checkpoints(self._file.parent) != self._before:
            raise UserError(
                f"another run has saved in output {str(self._file.parent)!r} while this one was starting; "
                "start it again"
            )

    def _remove_stale(self) -> None:
        """Of two runs that find the same stale lock, the second may meet the first one's new lock here."""
        aside = self._file.with_name(f"{LOCK}.{os.getpid()}")
        with suppress(FileNotFoundError):
            self._file.rename(aside)
            try:
                _check(aside, self._file)
            except UserError:
                aside.rename(self._file)
                raise
            aside.unlink()
            logger.info("removed %s of a run that has ended", self._file)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._taken:
            self._file.unlink(missing_ok=True)


def _checkpoints(output: Path) -> list[str]:
    return sorted(path.name for path in output.glob("checkpoint-*"))


def check_unlocked(output: Path) -> None:
    """Refuse a directory that another run writes to; changes nothing.

    Raises:
        UserError: with the host and the process of that run.
    """
    _check(output / LOCK, output / LOCK)


def _check(file: Path, shown: Path) -> None:
    output = str(shown.parent)
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        host, space, pid, started = held["host"], held["space"], int(held["process"]), float(held["started"])
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UserError(f"cannot read {str(shown)!r} ({error.strerror}); give another --output") from None
    except (ValueError, KeyError, TypeError):
        if time.time() - file.stat().st_mtime > WRITTEN_SECONDS:
            return  # its run was killed while it wrote this
        raise UserError(f"output {output!r} is being taken by another run right now; give another --output") from None
    me = _me()
    if (host, space) != (me["host"], me["space"]):
        raise UserError(
            f"output {output!r} is locked by a run on host {host!r} (process {pid}), and from here it cannot be "
            f"seen whether that still runs; if it has ended, remove {str(shown)!r}; if not, give another --output"
        )
    if is_running(pid, started):
        raise UserError(
            f"output {output!r} is being written by another run (process {pid} on this machine); "
            "wait for it, end it, or give another --output"
        )


def _me() -> dict[str, str | int | float]:
    """This process; containers of one host name number their processes each for itself."""
    pid, started = this_process()
    return {"host": socket.gethostname(), "space": process_space(), "process": pid, "started": started}
