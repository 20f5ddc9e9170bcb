"""Write the tables of docs/planning.md from the rows in ``benchmarks/results``.

``python docs/tables.py`` fills what is between two marks that name a table. ``tests/unit/test_pictures.py`` compares
the page with what this makes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "planning.md"
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- ([\w.-]+): begin -->\n).*?(\n<!-- \2: end -->)", re.S)

ACCURACY = {
    "plan-cpu": "decoders, experts",
    "plan-cpu-hybrid": "layers with a state",
    "plan-cpu-pictures": "vision-language models",
    "plan-engines": "DDP, FSDP2, ZeRO, two processes",
}


def read_rows(name: str) -> list[dict[str, Any]]:
    """The rows of one file of results."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def source(row: dict[str, Any]) -> str:
    """The command that made a row, its date and its versions."""
    versions = ", ".join(f"{name} {row['versions'][name].partition('+')[0]}" for name in ("torch", "transformers"))
    return f"`{row['command']}`, {row['date'][:10]}, {versions}"


def ladder(name: str) -> Iterator[str]:
    """One line a rung; times are estimates of the plan."""
    rungs = read_rows(name)
    common = f"µs/token at {rungs[0]['common']['tokens']:,}"
    yield f"| rung | longest | at the high estimate | a step | {common} | limited by |"
    yield "|---|---|---|---|---|---|"
    for row in rungs:
        if "skipped" in row:
            yield f"| {row['rung']} | | | | | not with sp-size {row['sp_size']} |"
            continue
        limit, each = row["limited_by"].rpartition(": ")[2], row["common"]["device_us_per_token"]
        lengths = f"{row['max_length']:,} | {row['sure_length']:,}"
        yield f"| {row['rung']} | {lengths} | {row['step_seconds']:,.0f} s | {each:,.0f} | {limit} |"
    yield ""
    yield f"{source(rungs[0])}."


def accuracy() -> Iterator[str]:
    """One line a grid of cells: how far the plan was off."""
    yield "| what | cells | error, lowest to highest | command, date |"
    yield "|---|---|---|---|"
    for name, title in ACCURACY.items():
        rows = read_rows(name)
        errors = [row["error"] for row in rows]
        bounds = f"{min(errors):+.2%} to {max(errors):+.2%}"
        yield f"| {title} | {len(rows)} | {bounds} | `{rows[0]['command']}`, {rows[0]['date'][:10]} |"


SHOWN = (("expected", "error"), ("sure", "sure_error"))


def published() -> Iterator[str]:
    """The published runs whose settings ``seqtile plan`` can take."""
    rows = read_rows("plan-published")
    yield "| run | published | plan | plan, high |"
    yield "|---|---|---|---|"
    for row in rows:
        if row["lacks"]:
            continue
        unit, digits = ("", ",.0f") if row["unit"] == "tokens" else (" GiB", ".1f")
        planned = " | ".join(f"{row[key]:{digits}}{unit} ({row[error]:+.1%})" for key, error in SHOWN)
        yield f"| {row['run']} | {row['published']:{digits}}{unit} | {planned} |"
    yield ""
    yield f"{source(rows[0])}."


def constants() -> Iterator[str]:
    """Each assumed number, and how the longest sequence at the high estimate moves when it is doubled."""
    rows = read_rows("plan-constants")
    yield "| assumed | low / expected / high | length if doubled |"
    yield "|---|---|---|"
    for row in rows:
        unit, name = (2**30, " GiB") if row["high"] > 2**20 else (1, "")
        bounds = " / ".join(f"{row[bound] / unit:g}" for bound in ("low", "expected", "high"))
        yield f"| {row['constant']} | {bounds}{name} | {row['doubled_sure_length'] / row['sure_length'] - 1:+.1%} |"
    yield ""
    yield f"{source(rows[0])}: the length at the high estimate of `{rows[0]['asked']}`."


def frames() -> Iterator[str]:
    """One line for each number of frames: the peak of a tower, whole and in groups."""
    rows = read_rows("frames")
    peaks = {(row["frames"], row["trained"], row["group"] is not None): row["peak_bytes"] / 2**30 for row in rows}
    yield "| frames | tokens | features | trained, whole | trained, groups of 4 | frozen, whole | frozen, groups of 4 |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        if row["trained"] and row["group"] is None:
            kinds = ((True, False), (True, True), (False, False), (False, True))
            shown = [f"{peaks[row['frames'], *kind]:.2f}" for kind in kinds]
            yield f"| {row['frames']} | {row['tokens']:,} | {row['feature_bytes'] / 2**30:.3f} | {' | '.join(shown)} |"
    yield ""
    yield f"GiB. {source(rows[0])}."


def choices() -> Iterator[str]:
    """One line a case: what is chosen, its time, and that of the first settings that fit in a fixed order."""
    rows = read_rows("choices")
    yield "| model | device | tokens | host GiB | chosen | a step | fixed order | processor seconds |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        times = [f"{row[key]:,.3g} s" if row[key] else "none fits" for key in ("seconds", "fixed_seconds")]
        cells = [row["model"], row["device"], f"{row['tokens']:,}", str(row["host_gib"]), row["chosen"], *times]
        yield f"| {' | '.join([*cells, format(row['processor_seconds'], '.0f')])} |"
    yield ""
    yield f"{source(rows[0])}."


def choice_times() -> Iterator[str]:
    """One line a setting, fastest first by estimate: expected and measured times, as shares of the fastest."""
    rows = sorted(read_rows("choice-times"), key=lambda row: float(row["expected_seconds"]))
    yield "| setting | expected | measured |"
    yield "|---|---|---|"
    for row in rows:
        shares = (row[key] / rows[0][key] for key in ("expected_seconds", "seconds"))
        words = ", ".join(f"{name} {value if value is not None else 'none'}" for name, value in row["choice"].items())
        yield f"| {' | '.join([f'`{words}`', *(f'{share:.2f}' for share in shares)])} |"
    yield ""
    yield f"{rows[0]['tokens']:,} tokens, {rows[0]['seconds']:.1f} s the fastest. {source(rows[0])}."


def table(name: str) -> str:
    """Markdown of the table ``name``."""
    kinds = {
        "plan-accuracy": accuracy, "plan-published": published, "plan-constants": constants, "frames": frames,
        "choices": choices, "choice-times": choice_times,
    }  # fmt: skip
    return "\n".join(kinds[name]() if name in kinds else ladder(name))


def page() -> str:
    """The page with every table made again."""
    text = PAGE.read_text(encoding="utf-8")
    return MARKED.sub(lambda marked: f"{marked[1]}\n{table(marked[2])}\n{marked[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
