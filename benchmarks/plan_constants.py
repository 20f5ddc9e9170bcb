"""Each number that a plan assumes, its source, and how far the answer moves when it is doubled; no GPU is needed.

python benchmarks/plan_constants.py       # into benchmarks/results; then docs/tables.py
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from environment import environment, stamp
from seqtile.models.configs import read_config
from seqtile.options import changed
from seqtile.planner.accelerators import find_device
from seqtile.planner.memory_plan import Planner
from seqtile.planner.request import Request
from seqtile.planner.sharding_terms import CONSTANTS

RESULTS = Path(__file__).parent / "results" / "plan-constants.jsonl"

ASKED = (
    "seqtile plan --model llama-8b --device h100 --gpus 8 --engine zero3 --sp-size 8 --checkpoint layer "
    "--offload checkpoints,optimizer --host-memory 2TiB"
)


@contextmanager
def doubled(name: str) -> Iterator[None]:
    """The constant ``name`` twice as large inside."""
    before = CONSTANTS[name]
    CONSTANTS[name] = replace(before, low=2 * before.low, expected=2 * before.expected, high=2 * before.high)
    try:
        yield
    finally:
        CONSTANTS[name] = before


def judge_constants(about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each constant: the longest sequences with it and with its double."""
    request = Request(
        "llama-8b", read_config("llama-8b"), find_device("h100"), gpus=8, host_memory=2 * 2**40, engine="zero3",
        sp_size=8, engine_offload=("optimizer",),
    )  # fmt: skip
    planner = Planner(changed(request, checkpoint="layer", offload=True))
    before = {"max_length": planner.longest()[0], "sure_length": planner.sure()}
    for name, constant in list(CONSTANTS.items()):
        with doubled(name):
            after = {"doubled_max_length": planner.longest()[0], "doubled_sure_length": planner.sure()}
        yield {**about, "asked": ASKED, "constant": name, **asdict(constant), **before, **after}


def main() -> int:
    """Plan, print and write the rows."""
    warnings.simplefilter("ignore")
    rows = []
    for row in judge_constants(stamp(environment(), ["python", *sys.argv])):
        rows.append(row)
        print(f"{row['constant']:<20} {row['doubled_sure_length'] / row['sure_length'] - 1:+.1%}", flush=True)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
