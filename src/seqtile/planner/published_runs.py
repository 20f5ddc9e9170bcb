"""Published runs on real devices, predicted without a constant fitted to the row that is predicted.

The counted part comes from fake runs. What a device reports beyond it (driver context, what the engine gathers and
buffers, the allocator's cache) is one constant per row: what was reported less what was counted. A row is predicted
with the mean constant of the *other* comparable rows; the tables are made by ``benchmarks/plan_anchors.py``.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from seqtile.planner.accelerators import GIB
from seqtile.planner.extrapolate import predict
from seqtile.planner.kernel_workspace import flash3_workspace
from seqtile.planner.live_at_peaks import GRADIENTS, OPTIMIZER, WEIGHTS
from seqtile.planner.model_shapes import read_config
from seqtile.planner.sharding_terms import CONSTANTS, offload_checkpoints
from seqtile.planner.step_config import PLANNED, Setup

TILES = 8192
"""Tokens a tile of our tiled rows: the published ones use another library's tiles, whose MLP is not the peak either."""


@dataclass(frozen=True)
class Anchor:
    """One published run and what was counted for it.

    Attributes:
        tokens, fused_loss, offload, tiled: the run.
        used: GiB that the device reported.
        counted: GiB of live tensors and kernel buffers at the counted peak, without weights, gradients and states:
            the published runs keep those on the host.
        peak_at: where in the step.
    """

    tokens: int
    fused_loss: bool
    offload: bool
    tiled: bool
    used: float
    counted: float
    peak_at: str

    @property
    def constant(self) -> float:
        """GiB reported beyond what was counted."""
        return self.used - self.counted

    @property
    def comparable(self) -> bool:
        """Whether the run's own kernels are known here: Liger's norm, SwiGLU and loss, an untiled MLP."""
        return self.fused_loss and not self.tiled


def read_anchors() -> list[dict[str, str]]:
    """The published rows, with their source in the file's first line."""
    text = files("seqtile.planner").joinpath("data/alst_memory.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO("\n".join(line for line in text.splitlines() if line[:1] != "#"))))


def count_anchor(row: dict[str, str]) -> Anchor:
    """Count one published row's step on fake tensors: Llama 8B, bf16, FlashAttention-3."""
    fused, offload, tiled = (row[name] == "yes" for name in ("fused_loss", "checkpoint_offload", "tiled_mlp"))
    options = replace(PLANNED, tile=TILES, loss="tiled" if fused else None)
    setup = Setup(
        options=options if tiled else options.without_blocks(),
        optimizer="sgd", attention="flash", liger=fused, device_type="cuda",
    )  # fmt: skip
    tokens = int(row["tokens"])
    found = predict(read_config("llama-8b"), setup, tokens, workspace=flash3_workspace, device_type="cuda")
    best, place = 0.0, ""
    for phase, terms in found.parts.items():
        live = {name: value for name, value in terms.items() if name not in (WEIGHTS, GRADIENTS, OPTIMIZER)}
        if offload:
            offload_checkpoints(live, found.depths.layers, CONSTANTS["in flight"].expected)
        if sum(live.values()) > best:
            best, place = sum(live.values()), phase
    return Anchor(tokens, fused, offload, tiled, float(row["used_gib"]), best / GIB, place)


def leave_one_out(anchors: Sequence[Anchor], row: Anchor) -> float:
    """GiB predicted for ``row`` with the constant of the other comparable rows."""
    others = [one.constant for one in anchors if one.comparable and one is not row]
    return row.counted + sum(others) / len(others)
