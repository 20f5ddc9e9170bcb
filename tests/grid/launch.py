"""Start two ranks, watch them, and tell for every case what became of it. Nothing waits for ever."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import extension_builds

LAUNCHES = {
    "torch": ("ddp", "fsdp1", "fsdp2", "vocabulary", "callback", "context", "chunks"),
    "deepspeed": ("zero12", "zero3", "vocabulary_zero3", "chunks_zero", "ulysses"),
}
"""Modules whose cases share a process group, by the package they need: a launch costs more than its cases.

Ulysses is last, as DeepSpeed keeps its group of sequences for the process."""

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent

START_SECONDS = 900.0
"""For imports, and for compiling an operator the first time."""
CASE_SECONDS = 400.0
"""A guard against a hang: a second or two on a machine that does nothing else."""
MAX_FAILURES = 6
"""After so many, the rest is not tried: each costs a launch."""
GRACE_SECONDS = 5.0
"""How long the other rank may go on after one has failed."""


@dataclass(frozen=True)
class Result:
    """What became of one case: ``problem`` is empty, or the traceback of the rank that failed first."""

    problem: str
    seconds: float


def run_cases(
    names: Sequence[str],
    folder: Path,
    *,
    case_seconds: float = CASE_SECONDS,
    max_failures: int = MAX_FAILURES,
) -> dict[str, Result]:
    """Run the cases in one process group; after a failure the remaining ones in a new group, a few times.

    Args:
        names: "engine:case", the modules and cases of ``grid``; also the keys of what is returned.
        folder: for logs; made here.
        case_seconds: how long a case may take.
        max_failures: after so many, the rest is not tried.
    """
    results: dict[str, Result] = {}
    left = list(names)
    while left:
        if sum(bool(result.problem) for result in results.values()) >= max_failures:
            results.update({name: Result(f"not run: {max_failures} cases before it failed", 0.0) for name in left})
            break
        here = folder / f"from-{len(results)}"
        here.mkdir(parents=True)
        results.update(_launch(left, here, case_seconds))
        left = [name for name in left if name not in results]
    return results


def _launch(names: list[str], folder: Path, case_seconds: float) -> dict[str, Result]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        # A compiler's helper (ninja) is beside the interpreter.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT / "src")]),
        extension_builds.NAME: str(extension_builds.folder()),
        "DS_ACCELERATOR": "cpu",
        # Two ranks with two threads each wait for each other at every product: Ulysses' cases take five times as long.
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    start = time.time()
    extension_builds.unlock(0.0, start - extension_builds.BUILD_SECONDS)
    ranks = []
    for rank in range(2):
        with Path(folder, f"{rank}.log").open("wb") as log:
            command = [sys.executable, "-m", "grid.worker", str(rank), str(port), str(folder), ",".join(names)]
            ranks.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True)
            )
    try:
        why = _watch(ranks, folder, case_seconds)
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if any(process.returncode for process in ranks):
            extension_builds.unlock(start, time.time(), extension_builds.folder())
    return _read(names, folder, why)


def _watch(ranks: list[subprocess.Popen[bytes]], folder: Path, case_seconds: float) -> str:
    """Wait until both ranks have ended; or say why they were not waited for any longer."""
    heard, size, allowed = time.monotonic(), 0, START_SECONDS
    failed_at = 0.0
    while any(process.poll() is None for process in ranks):
        time.sleep(0.05)
        now = time.monotonic()
        written = sum(file.stat().st_size for file in folder.glob("*.jsonl"))
        if written != size:
            heard, size, allowed = now, written, case_seconds
        if any(process.poll() not in (None, 0) for process in ranks):
            failed_at = failed_at or now
        if failed_at and now - failed_at > GRACE_SECONDS:
            return "the other rank had failed"
        if now - heard > allowed:
            for process in ranks:
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGUSR1)  # every thread's stack into the log
            time.sleep(1)
            return f"no rank finished anything for {allowed:.0f} s"
    return ""


def _read(names: list[str], folder: Path, why: str) -> dict[str, Result]:
    lines: list[dict[str, object]] = []
    for rank in range(2):
        file = Path(folder, f"{rank}.jsonl")
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        lines += [{**json.loads(line), "rank": rank} for line in text.splitlines() if line.endswith("}")]
    results = {}
    for name in names:
        done = [line for line in lines if line.get("case") == name]
        failed = sorted((line for line in done if line["problem"]), key=lambda line: line["time"])
        seconds = max((line["time"] - line["start"] for line in done), default=0.0)
        if failed:
            dead = [rank for rank in range(2) if rank not in {line["rank"] for line in done}]
            log = "".join(
                f"--- end of the log of rank {rank}, which said nothing\n{_log(folder, rank)}" for rank in dead
            )
            results[name] = Result(f"rank {failed[0]['rank']} failed first:\n{failed[0]['problem']}{log}", seconds)
        elif len(done) == 2:
            results[name] = Result("", seconds)
        else:  # the first one that did not end; those after it get a process group of their own
            logs = "".join(f"--- end of the log of rank {rank}\n{_log(folder, rank)}" for rank in range(2))
            results[name] = Result(f"ended without a result ({why or 'a rank died'})\n{logs}", seconds)
        if results[name].problem:
            break
    return results


def _log(folder: Path, rank: int) -> str:
    return Path(folder, f"{rank}.log").read_text(errors="replace")[-6000:]
