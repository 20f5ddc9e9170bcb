"""Each number that a plan assumes, its source, and how far the answer moves when it is doubled; no GPU is needed.

python benchmarks/plan_constants.py       # writes the table into docs/planning-reference.md
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from environment import environment, stamp
from pages import write_between
from seqtile.devices import GIB
from seqtile.options import changed
from seqtile.planner.accelerators import find_device
from seqtile.planner.memory_plan import Planner
from seqtile.planner.model_shapes import read_config
from seqtile.planner.request import Request
from seqtile.planner.sharding_terms import CONSTANTS, Constant

PAGE = Path(__file__).parents[1] / "docs" / "planning-reference.md"
BEGIN, END = "<!-- plan-constants: begin -->", "<!-- plan-constants: end -->"

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


def shown(constant: Constant) -> str:
    """Its bounds, in GiB where they are bytes."""
    unit = GIB if constant.high > 2**20 else 1
    numbers = [f"{getattr(constant, bound) / unit:g}" for bound in ("low", "expected", "high")]
    return " / ".join(numbers) + (" GiB" if unit == GIB else "")


def table() -> list[str]:
    """Markdown."""
    request = Request(
        "llama-8b", read_config("llama-8b"), find_device("h100"), gpus=8, host_memory=2 * 2**40, engine="zero3",
        sp_size=8, engine_offload=("optimizer",),
    )  # fmt: skip
    planner = Planner(changed(request, checkpoint="layer", offload=True))
    longest, _ = planner.longest()
    high_length = planner.sure()
    lines = [
        f"`{ASKED}`: {longest:,} tokens, {high_length:,} at the high estimate.", "",
        "| constant | low / expected / high | doubled: longest | at the high estimate | source |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, constant in list(CONSTANTS.items()):
        with doubled(name):
            other, _ = planner.longest()
            high = planner.sure()
        moved = f"{other / longest - 1:+.1%} | {high / high_length - 1:+.1%}"
        lines.append(f"| {name} | {shown(constant)} | {moved} | {constant.source} |")
    return lines


def main() -> int:
    """Plan, and write the table."""
    warnings.simplefilter("ignore")
    about = stamp(environment(), ["python", *sys.argv])
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "transformers"))
    rows = [f"{about['date'][:10]}, {versions}; `{about['command']}`.", "", *table()]
    print("\n".join(rows))
    write_between(PAGE, BEGIN, END, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
