"""Published runs on H200 devices against ``seqtile plan``'s counting; no GPU is needed.

The counted part comes from fake runs. What a device reports beyond it (driver context, what the engine gathers and
buffers, the allocator's cache) is one constant per row: what was reported less what was counted. A row is predicted
with the mean constant of the *other* comparable rows, never its own.

python benchmarks/plan_anchors.py       # writes the table into docs/planning-reference.md
"""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pages import write_between
from seqtile.bench.environment import environment, stamp
from seqtile.planner.accelerators import GIB
from seqtile.planner.extrapolate import predict
from seqtile.planner.kernel_workspace import flash3_workspace
from seqtile.planner.live_at_peaks import GRADIENTS, OPTIMIZER, WEIGHTS
from seqtile.planner.model_shapes import read_config
from seqtile.planner.phases import Phase
from seqtile.planner.sharding_terms import CONSTANTS, offload_checkpoints
from seqtile.planner.step_config import PLANNED, Setup

PAGE = Path(__file__).parents[1] / "docs" / "planning-reference.md"
BEGIN, END = "<!-- plan-anchors: begin -->", "<!-- plan-anchors: end -->"
LAYERS = 32
DATA = Path(__file__).parent / "data" / "alst_memory.csv"

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
    lines = DATA.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if line[:1] != "#"))


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


def table(anchors: list[Anchor]) -> list[str]:
    """Markdown; a row that is not comparable is calibration."""
    lines = [
        "| tokens | loss | checkpoints | MLP | reported GiB | counted GiB | beyond | predicted GiB | error | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in anchors:
        predicted = leave_one_out(anchors, one)
        lines.append(
            f"| {one.tokens:,} | {'fused' if one.fused_loss else 'full'} | {'host' if one.offload else 'device'} "
            f"| {'tiled' if one.tiled else 'untiled'} | {one.used:.2f} | {one.counted:.2f} "
            f"({Phase.read(one.peak_at).named(LAYERS)}) | {one.constant:.2f} | {predicted:.2f} "
            f"| {predicted / one.used - 1:+.1%} | {'accuracy' if one.comparable else 'calibration'} |"
        )
    return lines


def main() -> int:
    """Count every row and write the table."""
    warnings.simplefilter("ignore")
    about = stamp(environment(), ["python", *sys.argv])
    anchors = [count_anchor(row) for row in read_anchors()]
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "transformers"))
    rows = [f"{about['date'][:10]}, {versions}; `{about['command']}`.", "", *table(anchors)]
    print("\n".join(rows))
    write_between(PAGE, BEGIN, END, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
