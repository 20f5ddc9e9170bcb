"""Which process, and whether it still runs: a number alone is given to another process later."""

from __future__ import annotations

import os

CLOCK_SECONDS = 2.0
"""How far two readings of one process's start may lie apart: the clock of the machine may have been set meanwhile."""


def started_at(pid: int) -> float | None:
    """When a process of this machine started, in seconds since 1970; None if it does not run."""
    import psutil  # type: ignore[import-untyped]

    try:
        process = psutil.Process(pid)
        # One that has ended stays in the table until its parent has looked.
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def is_running(pid: int, started: float) -> bool:
    """Whether the process ``pid`` that started at ``started`` still runs."""
    now = started_at(pid)
    return now is not None and abs(now - started) <= CLOCK_SECONDS


def this_process() -> tuple[int, float]:
    """Number and start of this process."""
    return os.getpid(), started_at(os.getpid()) or 0.0
