"""The CPU claim: 1024 x 2816, fp32, 16,384 tokens, 8 tiles; `make bench-cpu`, about a quarter of an hour on two cores.

Under a layer checkpoint: time of ours against untiled, seven interleaved pairs, every pair printed, others beside it.
Alone and under the checkpoint: peak live bytes, counted.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from cell import Cell, run_pairs
from seqtile._errors import UserError
from seqtile.options import TilingOptions
from suite import RESULTS, Row, Suite, show

OURS = ("fused",)
PEERS = ("tile-checkpoint", "liger", "deepspeed")
COUNTED = (*OURS, *PEERS, "generic", "deepspeed-compute")
MIB = 2**20


def main() -> int:
    """Run the suite."""
    options = argparse.ArgumentParser(description="The CPU claim.", allow_abbrev=False)
    options.add_argument("--pairs", type=int, default=7)
    options.add_argument("--peer-pairs", type=int, default=7)
    options.add_argument("--part", choices=("all", "alone", "counted", "ours", "others"), default="all")
    options.add_argument("--smoke", action="store_true", help="tiny, to see that it runs")
    options.add_argument("--out", type=Path, default=RESULTS)
    given = options.parse_args()
    try:
        run(given.pairs, given.peer_pairs, given.smoke, given.part, given.out)
    except UserError as error:
        print(f"cpu.py: {error}", file=sys.stderr)
        return 2
    return 0


def run(pairs: int, peer_pairs: int, smoke: bool, part: str, out: Path) -> None:
    """Count and time each part."""
    suite = Suite("smoke" if smoke else "cpu", out, minutes=120)
    hidden, intermediate, tokens = (64, 176, 1024) if smoke else (1024, 2816, 16384)
    cell = Cell(hidden, intermediate, tokens, dtype="float32", options=TilingOptions(tile="shards:8"))
    if part in ("all", "alone"):
        alone = _once(suite, "alone, counted", cell, COUNTED, 0)
        show(alone)
        suite.claim("alone: peak live bytes the lowest of all", alone[:2], lambda _: _lowest(alone, strictly=True))
    under = replace(cell, checkpoint=True)
    if part in ("all", "ours"):
        ours = _in_pairs(suite, under, OURS, pairs)
        suite.claim(
            "under a checkpoint: at most 1.05x the untiled time, median of the pairs", ours,
            lambda rows: (f"{rows[1]['ratio']:.3f}x", rows[1]["ratio"] <= 1.05),
        )  # fmt: skip
    if part in ("all", "others"):
        _in_pairs(suite, under, PEERS, peer_pairs)
    if part in ("all", "counted"):
        counted = _once(suite, "under a checkpoint, counted", under, COUNTED, 0)
        show(counted)
        claim = "under a checkpoint: peak live bytes not above any"
        suite.claim(claim, counted[:2], lambda _: _lowest(counted, strictly=False))
    suite.finish()


def _once(suite: Suite, part: str, cell: Cell, methods: tuple[str, ...], pairs: int) -> list[Row]:
    key = {"methods": list(methods), "pairs": pairs}
    return suite.run(part, key, lambda left: run_pairs(cell, methods, pairs, timeout_s=left))


def _in_pairs(suite: Suite, cell: Cell, methods: tuple[str, ...], pairs: int) -> list[Row]:
    rows = _once(suite, "under a checkpoint, interleaved pairs", cell, methods, pairs)
    show(rows)
    for row in rows[1:]:
        if "pairs_ms" in row:
            told = " ".join(f"{untiled:.0f}/{tiled:.0f}" for untiled, tiled in row["pairs_ms"])
            ratios = " ".join(f"{ratio:.3f}" for ratio in row["ratios"])
            print(f"    untiled/{row['method']} ms: {told}; ratios {ratios}", flush=True)
    return rows


def _lowest(rows: list[Row], *, strictly: bool) -> tuple[str, bool]:
    """Ours against the lowest of the others; what could not run is not compared."""
    ours = next(row for row in rows if row["method"] == "fused")["peak_allocated_bytes"]
    others = {
        row["method"]: row["peak_allocated_bytes"]
        for row in rows
        if row["method"] not in ("fused", "generic") and "error" not in row
    }
    name, best = min(others.items(), key=lambda item: item[1])
    return f"{ours / MIB:.2f} MiB, next {name} with {best / MIB:.2f} MiB", ours < best if strictly else ours <= best


if __name__ == "__main__":
    sys.exit(main())
