"""What one measurement is, and how it runs in a process of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from seqtile._errors import UserError
from seqtile.options import DEFAULTS, TilingOptions, changed

SHAPES = {
    "llama-8b": (4096, 14336),
    "qwen3-8b": (4096, 12288),
    "ms-swift": (4096, 12288),
}
"""Hidden and intermediate width of the blocks that have a name; ms-swift's is that of its published benchmark."""

METHODS = ("untiled", "generic", "fused", "tile-checkpoint", "liger", "deepspeed", "deepspeed-compute")
"""The ways to run a block. The last four are others': PyTorch's checkpoint per tile, ``apply_tiled_mlp`` of Liger,
``TiledMLP`` and ``sequence_tiled_compute`` of DeepSpeed."""

OURS = ("generic", "fused")
SHOWN = ("tile", "keep", "blocks")
"""Options that every row shows. The method says what ``path`` is, and ``checkpoint`` is the benchmark's own."""

SET_HERE = ("only", "path", "loss", "loss_tile", "loss_impl", "checkpoint", "offload")
"""Options that a benchmark sets itself, or that what it measures does not heed."""

CHILD = str(Path(__file__).with_name("child.py"))
TRAIN = ("full", "frozen", "lora")
DTYPES = ("float32", "bfloat16", "float16", "float64")
LORA_RANK = 16
TIMED_OUT = "no result within"
"""How the error of a measurement begins that was given too little time."""


@dataclass(frozen=True)
class Cell:
    """One measurement of one MLP block, forward and backward.

    Attributes:
        hidden: width ``D`` of the input.
        intermediate: width ``F`` of the MLP.
        tokens: rows of the input.
        method: one of :data:`METHODS`.
        checkpoint: the block stands in a residual layer behind an RMSNorm, all under one activation checkpoint;
            else it runs alone.
        train: ``"full"``, ``"frozen"`` (only the input's gradient) or ``"lora"`` (adapters of rank 16 on all three).
        dtype: of input, weights and gradients.
        device: ``torch.device`` type.
        repeats: timed runs after the warm-up.
        options: of ours; the others get as many tiles as its ``tile`` cuts. ``keep`` is of the fused operator, and
            ``blocks`` says whether the norm of a checkpointed layer runs in the tile too.
        hold_output: the caller holds the block's output until the backward ends; else it is dropped at once, as
            behind a residual add.
        seed: of weights and input.
    """

    hidden: int
    intermediate: int
    tokens: int
    method: str = "fused"
    checkpoint: bool = False
    train: str = "full"
    dtype: str = "bfloat16"
    device: str = "cpu"
    repeats: int = 5
    options: TilingOptions = TilingOptions()
    hold_output: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "tokens", "repeats"):
            if getattr(self, name) < 1:
                raise UserError("benchmark.not-positive", f"{name} is {getattr(self, name)}: expected at least 1")
        for name, allowed in (("method", METHODS), ("train", TRAIN), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise UserError(
                    "benchmark.unknown-choice",
                    f"{name} {getattr(self, name)!r} is unknown: expected one of {', '.join(allowed)}",
                )
        refuse_options(self.options, (*SET_HERE, "heads", "state"))
        if self.options.keep != 0.0 and self.method != "fused":
            raise UserError(
                "benchmark.keep-without-fused",
                f"keep is of the fused operator only, got method {self.method!r}: drop one of the two",
            )

    @property
    def ours(self) -> bool:
        """Whether the method is ours."""
        return self.method in OURS

    def changed(self, **changes: Any) -> Cell:
        """The same with fields, or options, changed."""
        return changed(self, **changes)

    def row(self) -> dict[str, Any]:
        """Its fields and options as a row of results has them."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "options"}
        options = {name: getattr(self.options, name) for name in DEFAULTS}
        changed_or_shown = {
            name: value
            for name, value in options.items()
            if name in SHOWN or (value != DEFAULTS[name] and name not in own)
        }
        return own | changed_or_shown

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Cell:
        """The cell that a row is of."""
        own = {field.name for field in fields(cls)} - {"options"}
        options = {name: row[name] for name in DEFAULTS if name in row and name not in own}
        return cls(options=TilingOptions(**options), **{name: row[name] for name in own if name in row})

    def __str__(self) -> str:
        around = "under a checkpoint" if self.checkpoint else "alone"
        kept = f", keep {self.options.keep}" if self.options.keep != 0.0 else ""
        return f"{self.method} {self.hidden}x{self.intermediate} {self.tokens:,} tokens, {self.train}, {around}{kept}"


class RunJob(Protocol):
    """How a job is run: :func:`run_child` or :meth:`Worker.run`."""

    def __call__(self, job: str, arguments: dict[str, Any], *, timeout_s: float) -> dict[str, Any]: ...


def refuse_options(options: TilingOptions, names: Sequence[str]) -> None:
    """Refuse options that would be ignored.

    Raises:
        UserError: one of ``names`` is not at its default, or no block is tiled.
    """
    if not options.tiled:
        raise UserError("benchmark.nothing-tiled", "blocks='none' tiles nothing: method untiled measures that")
    for name in names:
        if getattr(options, name) != DEFAULTS[name]:
            raise UserError(
                "benchmark.option-without-effect",
                f"{name}={getattr(options, name)!r} has no effect on what is measured here: leave it out",
            )


def run_cell(cell: Cell, *, timeout_s: float = 3600.0, run: RunJob | None = None) -> dict[str, Any]:
    """Measure one cell in a process of its own, or as ``run`` runs it.

    Args:
        cell: what to measure.
        timeout_s: after this the process is ended, which is a result too.
        run: :func:`run_child`, or :meth:`Worker.run`.

    Returns:
        The cell's fields and what was measured; where it failed, ``error`` says why and the numbers are missing.
    """
    return {**cell.row(), **(run or run_child)("cell", cell.row(), timeout_s=timeout_s)}


def run_pairs(
    cell: Cell, methods: Sequence[str], pairs: int, *, timeout_s: float = 7200.0, run: RunJob | None = None
) -> list[dict[str, Any]]:
    """Measure ``methods`` against untiled in interleaved pairs, all in one process.

    Returns:
        One row per method, untiled first; see :func:`measure_block.measure_pairs`.
    """
    arguments = {"cell": cell.row(), "methods": list(methods), "pairs": pairs}
    result = (run or run_child)("pairs", arguments, timeout_s=timeout_s)
    if "error" in result:
        return [{**cell.changed(method=method, keep=0.0).row(), **result} for method in ("untiled", *methods)]
    keeps = {"fused": cell.options.keep}
    rows = result["rows"]
    return [{**cell.row(), **row, "keep": keeps.get(row["method"], 0.0), "repeats": pairs} for row in rows]


def run_child(job: str, arguments: dict[str, Any], *, timeout_s: float = 3600.0) -> dict[str, Any]:
    """Run ``child.py`` on one job, which it describes; the last line of output, or ``{"error": ...}``."""
    with Child(job, arguments) as child:
        return child.result(timeout_s)


class Child:
    """A process of ``child.py``; its arguments and its output are files, so no pipe fills up."""

    def __init__(self, job: str, arguments: dict[str, Any], variables: dict[str, str] | None = None) -> None:
        self._out, self._err = (tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2))
        with tempfile.TemporaryFile("w+", encoding="utf-8") as stdin:
            json.dump(arguments, stdin)
            stdin.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, CHILD, job], stdin=stdin, stdout=self._out, stderr=self._err,
                env={**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", **(variables or {})},
            )  # fmt: skip

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._out.close()
        self._err.close()

    def result(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the result; a timeout or a crash is one."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return {"error": f"{TIMED_OUT} {timeout_s:.0f} s"}
        self._out.seek(0)
        self._err.seek(0)
        lines = self._out.read().strip().splitlines()
        if self.process.returncode == 0 and lines:
            return json.loads(lines[-1])  # type: ignore[no-any-return]
        return {"error": _why(self.process.returncode, self._err.read())}


class Worker:
    """One process of ``child.py`` for many jobs, of which each would import torch for ten seconds.

    After a job that failed, took too long or ended the process, the next one gets a new process.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._err: Any = None

    def run(self, job: str, arguments: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """The job's result; a timeout or a crash is one."""
        if self._process is None:
            self._err = tempfile.TemporaryFile("w+", encoding="utf-8")
            self._process = subprocess.Popen(
                [sys.executable, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self._err, text=True, env={**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1"},
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        self._err.seek(0)
        self._err.truncate()  # its last line says why the process ended: that is the job's, not one before
        process.stdin.write(json.dumps({"job": job, "arguments": arguments}) + "\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            self.close()
            return {"error": f"{TIMED_OUT} {timeout_s:.0f} s"}
        line = process.stdout.readline()
        if not line:
            process.wait()
            self._err.seek(0)
            why = _why(process.returncode, self._err.read())
            self.close()
            return {"error": why}
        result: dict[str, Any] = json.loads(line)
        if "error" in result and "user_error" not in result:  # a peer that is missing leaves nothing behind
            self.close()
        return result

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._err):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self._process = None


def _why(code: int, err: str) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        memory = " (the system ran out of memory?)" if name == "SIGKILL" else ""
        return f"ended by {name}{memory}"
    lines = [line for line in err.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"ended with exit code {code}"
