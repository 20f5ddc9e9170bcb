"""Write the tables of longest.md from rows of ``benchmarks/technique_ladder.py``.

``python docs/ladders.py`` reads ``benchmarks/results/ladder-*.jsonl``; each table stands between two marks that name
its file. ``tests/unit/test_pictures.py`` compares the page with what this makes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "longest.md"
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- (ladder-[\w.-]+): begin -->\n).*?(\n<!-- \2: end -->)", re.S)


def rows(name: str) -> list[dict[str, Any]]:
    """The rungs of one ladder."""
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def table(name: str) -> str:
    """Markdown of one ladder: the command, its date and versions, and a line for each rung."""
    rungs = rows(name)
    first = rungs[0]
    # Rows keep the command that made them, which was part of `seqtile` then.
    command = first["command"].replace("seqtile bench ladder", "python benchmarks/technique_ladder.py")
    versions = ", ".join(f"{one} {first['versions'][one].partition('+')[0]}" for one in ("torch", "transformers"))
    lines = [
        f"`{command}`, {first['date'][:10]}, {versions}; rows in "
        f"`benchmarks/results/{name}.jsonl`:", "",
        "| rung | longest sequence | of the checkpoints, on the host | limited by | TFLOP/token | us/token "
        f"| us/token at {first['common']['tokens']:,} |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rungs:
        if "skipped" in row:
            lines.append(f"| {row['rung']} | | | left out: {row['skipped']} | | | |")
            continue
        hosted = f"{row['on_host']:.0%}" if row["on_host"] else ""
        numbers = f"{row['tflop_per_token']:.3f} | {row['device_us_per_token']:,.0f}"
        lines.append(
            f"| {row['rung']} | {row['max_length']:,} | {hosted} | {row['limited_by'].partition(': ')[2]} | {numbers} "
            f"| {row['common']['device_us_per_token']:,.0f} |"
        )
    return "\n".join(lines)


def page() -> str:
    """The page with every table made again."""
    text = PAGE.read_text(encoding="utf-8")
    return MARKED.sub(lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
