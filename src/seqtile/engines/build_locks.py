"""Stale build locks: DeepSpeed compiles operators at the first start, and waits forever for a stale lock.

The build is PyTorch's (``torch.utils.cpp_extension``), whose lock up to 2.13 is a file that a build keeps open and
removes at its end. A build that was killed leaves it, and every later start silently waits for it. From 2.14 on
the operating system holds the lock, which ends with its process; the file stays after every build and means nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from seqtile._errors import UserError

ENDING_SECONDS = 0.5
"""A build that ends closes its lock a moment before it removes it."""


def check_build_locks() -> None:
    """Refuse to start where DeepSpeed would wait for a build that no process runs.

    Raises:
        UserError: names the file to remove.
    """
    for lock in stale_locks():
        raise UserError("deepspeed.stale-build-lock", stale_lock_message(lock))


def stale_lock_message(lock: Path) -> str:
    """Return the message about a stale lock."""
    return (
        f"{lock} is a stale lock: no process on this machine is building, and DeepSpeed would wait for it forever; "
        f"unless another machine is building there now, run: rm {lock}"
    )


def stale_locks() -> list[Path]:
    """Locks of operators that no process of this machine has open.

    Cost:
        One directory listing; if there is a lock, a listing of the open files of this user's processes.
    """
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not root:
        from torch.utils.cpp_extension import get_default_build_root

        root = get_default_build_root()
    locks = [path for pattern in ("*/lock", "*/*/lock") for path in Path(root).glob(pattern) if path.is_file()]
    if not locks:
        return []
    from torch.utils import cpp_extension

    if not hasattr(cpp_extension, "FileBaton"):
        return []
    import psutil  # type: ignore[import-untyped]

    processes = psutil.process_iter(["open_files"])
    opened = {Path(file.path) for process in processes for file in process.info["open_files"] or ()}
    unheld = [lock for lock in locks if lock.resolve() not in opened]
    if unheld:
        time.sleep(ENDING_SECONDS)
    return [lock for lock in unheld if lock.is_file()]
