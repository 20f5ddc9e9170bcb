"""What one measurement is, and how it runs in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from seqtile._errors import UserError

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
        tile: tile rule, as :func:`seqtile.apply` takes it.
        method: one of :data:`METHODS`.
        checkpoint: the block stands in a residual layer behind an RMSNorm, all under one activation checkpoint;
            else it runs alone.
        train: ``"full"``, ``"frozen"`` (only the input's gradient) or ``"lora"`` (adapters of rank 16 on all three).
        dtype: of input, weights and gradients.
        device: ``torch.device`` type.
        repeats: timed runs after the warm-up.
        keep: fraction of the tiles whose gate and up the fused operator keeps, or ``"auto"`` or ``"memory:4GiB"``.
        blocks: ``"mlp"`` or ``"mlp+norm"``: whether ours runs the norm of the layer in the tile too.
        hold_output: the caller holds the block's output until the backward ends; else it is dropped at once, as
            behind a residual add.
        seed: of weights and input.
    """

    hidden: int
    intermediate: int
    tokens: int
    tile: str = "auto"
    method: str = "fused"
    checkpoint: bool = False
    train: str = "full"
    dtype: str = "bfloat16"
    device: str = "cpu"
    repeats: int = 5
    keep: float | str = 0.0
    blocks: str = "auto"
    hold_output: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "tokens", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: expected at least 1")
        for name, allowed in (("method", METHODS), ("train", TRAIN), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} {getattr(self, name)!r} is unknown: expected one of {', '.join(allowed)}")
        if self.keep != 0.0 and self.method != "fused":
            raise UserError(f"keep is of the fused operator only, got method {self.method!r}: drop one of the two")

    @property
    def ours(self) -> bool:
        """Whether the method is ours."""
        return self.method in OURS

    def __str__(self) -> str:
        around = "under a checkpoint" if self.checkpoint else "alone"
        kept = f", keep {self.keep}" if self.keep != 0.0 else ""
        return f"{self.method} {self.hidden}x{self.intermediate} {self.tokens:,} tokens, {self.train}, {around}{kept}"


def run_cell(cell: Cell, *, timeout_s: float = 3600.0) -> dict[str, Any]:
    """Measure one cell in a process of its own.

    Args:
        cell: what to measure.
        timeout_s: after this the process is ended, which is a result too.

    Returns:
        The cell's fields and what was measured; where it failed, ``error`` says why and the numbers are missing.
    """
    return {**asdict(cell), **run_child("cell", asdict(cell), timeout_s=timeout_s)}


def run_pairs(cell: Cell, methods: Sequence[str], pairs: int, *, timeout_s: float = 7200.0) -> list[dict[str, Any]]:
    """Measure ``methods`` against untiled in interleaved pairs, all in one process.

    Returns:
        One row per method, untiled first; see :func:`seqtile.bench.measure_block.measure_pairs`.
    """
    arguments = {"cell": asdict(cell), "methods": list(methods), "pairs": pairs}
    found = run_child("pairs", arguments, timeout_s=timeout_s)
    if "error" in found:
        return [{**asdict(replace(cell, method=method, keep=0.0)), **found} for method in ("untiled", *methods)]
    keeps = {"fused": cell.keep}
    rows = found["rows"]
    return [{**asdict(cell), **row, "keep": keeps.get(row["method"], 0.0), "repeats": pairs} for row in rows]


def run_child(job: str, arguments: dict[str, Any], *, timeout_s: float = 3600.0) -> dict[str, Any]:
    """Run ``seqtile.bench.child`` on one job, which it describes; the last line of output, or ``{"error": ...}``."""
    with Child(job, arguments) as child:
        return child.result(timeout_s)


class Child:
    """A process of ``seqtile.bench.child``; its arguments and its output are files, so no pipe fills up."""

    def __init__(self, job: str, arguments: dict[str, Any], variables: dict[str, str] | None = None) -> None:
        self._out, self._err = (tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2))
        with tempfile.TemporaryFile("w+", encoding="utf-8") as given:
            json.dump(arguments, given)
            given.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "seqtile.bench.child", job], stdin=given, stdout=self._out, stderr=self._err,
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


def _why(code: int, err: str) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        memory = " (the system ran out of memory?)" if name == "SIGKILL" else ""
        return f"ended by {name}{memory}"
    said = [line for line in err.splitlines() if line.strip()]
    return said[-1].strip() if said else f"ended with exit code {code}"
