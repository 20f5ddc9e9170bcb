"""Published runs on H200 devices against ``seqtile plan``'s counting, leaving one row out; no GPU is needed.

python benchmarks/plan_anchors.py       # writes the table into docs/planning.md
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from seqtile.bench.environment import environment, stamp
from seqtile.planner.memory_plan import name_phase
from seqtile.planner.published_runs import Anchor, count_anchor, leave_one_out, read_anchors

PAGE = Path(__file__).parents[1] / "docs" / "planning.md"
BEGIN, END = "<!-- plan-anchors: begin -->", "<!-- plan-anchors: end -->"
LAYERS = 32


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
            f"({name_phase(one.peak_at, LAYERS)}) | {one.constant:.2f} | {predicted:.2f} "
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
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text("\n".join([before + BEGIN, "", *rows, "", END + rest.partition(END)[2]]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
