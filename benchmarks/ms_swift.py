"""A published benchmark of ms-swift, run here beside the numbers that were published.

python benchmarks/ms_swift.py --engine fsdp2     # or zero3; two ranks, one where there is one device
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from block_on_engine import run_ranks
from seqtile._errors import UserError
from seqtile.bench.cell import SHAPES, Cell, run_child
from seqtile.bench.environment import append_rows, stamp
from seqtile.bench.grid import parse_counts
from seqtile.cli import bench_show as show
from seqtile.options import TilingOptions
from suite import RESULTS, Row

ENGINES = {"fsdp2": "fsdp2", "zero3": "deepspeed_zero3"}
RANKS = 2
TILES = "shards:4"
CPU_SCALE = 16
HARDWARE = "The published numbers are from other hardware ({device}, 2 ranks): compare the ratios, not the times."
COLUMNS = (
    ("untiled", "auto"),
    ("fused", TILES),
    ("fused", "auto"),
)
"""(method, tile rule) of our runs: the published benchmark's 4 tiles, and what we choose ourselves."""

DATA = Path(__file__).parent / "data" / "ms_swift_tiled_mlp.csv"


@dataclass(frozen=True)
class Published:
    """One line of a published table."""

    engine: str
    device: str
    tokens: int
    regular_ms: float
    tiled_ms: float
    regular_mb: float
    tiled_mb: float


def published(engine: str) -> list[Published]:
    """The published lines of one engine, from ms-swift's pull request "Tiled MLP" (December 2025)."""
    text = DATA.read_text(encoding="utf-8")
    lines = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    found = [
        Published(
            line["engine"], line["device"], int(line["tokens"]),
            *(float(line[name]) for name in ("regular_ms", "tiled_ms", "regular_mb", "tiled_mb")),
        )
        for line in lines
    ]  # fmt: skip
    return [line for line in found if line.engine == ENGINES[engine]]


def main() -> int:
    """Run it; 2 where something is asked for that cannot be."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                      allow_abbrev=False)  # fmt: skip
    options.add_argument("--engine", default="fsdp2", help="fsdp2 or zero3")
    options.add_argument("--ranks", type=int, help="processes; without it 2, or 1 with one device")
    options.add_argument("--scale", type=int, help="divides the published widths; without it 1, on the CPU 16")
    options.add_argument("--tokens", default="", help="lengths, such as 2048,4096; without it the published seven")
    options.add_argument("--device", help="leave it out for the accelerator if there is one, else cpu")
    options.add_argument("--repeats", type=int, default=5, help="timed runs per cell, at least 5")
    options.add_argument("--out", type=Path, default=RESULTS)
    given = options.parse_args()
    try:
        run(given)
    except UserError as error:
        print(f"ms_swift.py: {error}", file=sys.stderr)
        return 2
    return 0


def run(given: argparse.Namespace) -> None:
    """Check what is asked for, measure it, and print the tables."""
    check(given.engine, given.scale, given.ranks, given.repeats)
    lengths = parse_counts("--tokens", given.tokens) if given.tokens else ()
    directory, stem = show.free_stem(given.out, f"ms-swift-{given.engine}")
    file = directory / f"{stem}.jsonl"
    with show.Status() as status:
        rows = run_compare(
            given.engine, file, scale=given.scale, tokens=lengths, ranks=given.ranks, repeats=given.repeats,
            device=given.device, on_progress=status.say,
        )  # fmt: skip
    print_published(rows)
    show.print_files([file])
    show.print_summary(summary(rows))


def check(engine: str, scale: int | None, ranks: int | None, repeats: int) -> None:
    """Whether this can run, before anything does.

    Raises:
        UserError: it cannot, in one sentence.
    """
    if engine not in ENGINES:
        raise UserError(f"--engine {engine!r} is unknown: expected one of {', '.join(ENGINES)}")
    if engine == "zero3" and find_spec("deepspeed") is None:
        raise UserError("--engine zero3 needs DeepSpeed, which is not installed: pip install 'seqtile[deepspeed]'")
    if scale is not None and not 1 <= scale <= SHAPES["ms-swift"][0] // 16:
        raise UserError(f"--scale {scale}: expected 1 (the published widths) to {SHAPES['ms-swift'][0] // 16}")
    if ranks is not None and ranks < 1:
        raise UserError(f"--ranks {ranks}: expected at least 1")
    if repeats < 5:
        raise UserError(f"--repeats {repeats}: a median wants at least 5")


def run_compare(
    engine: str, output: Path, *, scale: int | None = None, tokens: Sequence[int] = (), ranks: int | None = None,
    repeats: int = 5, device: str | None = None, on_progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:  # fmt: skip
    """Run every length of the published tables, untiled and tiled, under ``engine``.

    Args:
        engine: ``"fsdp2"`` or ``"zero3"``.
        output: file of JSON lines.
        scale: divides the published widths; None for 1, or 16 on the CPU, where the published ones would take hours.
        tokens: lengths, empty for the published ones.
        ranks: processes; None for 2, or 1 where there is one accelerator only.
        repeats: timed runs.
        device: None for the accelerator if there is one, else the CPU.
        on_progress: called with what runs next.

    Returns:
        The rows, each with ``ranks``.
    """
    found = run_child("environment", {})
    if "error" in found:
        raise UserError(f"cannot start a measurement: {found['error']}")
    device = device or found["device_type"]
    if device not in ("cpu", found["device_type"]):
        raise UserError(f"--device {device!r} is not here: leave --device out to take what there is")
    here = RANKS if device == "cpu" else min(RANKS, found["device_count"])
    if ranks is not None and device != "cpu" and ranks > found["device_count"]:
        raise UserError(f"--ranks {ranks}: found {found['device_count']} of the accelerator, give at most that many")
    world = ranks or here
    scale = scale or (CPU_SCALE if device == "cpu" else 1)
    hidden, intermediate = (width // scale for width in SHAPES["ms-swift"])
    dtype = "float32" if device == "cpu" else "bfloat16"
    lengths = tokens or tuple(dict.fromkeys(line.tokens for line in published(engine)))
    command = ["python", "benchmarks/ms_swift.py", *sys.argv[1:]]
    rows = []
    for length in lengths:
        for method, rule in COLUMNS:
            cell = Cell(
                hidden, intermediate, length, method, dtype=dtype, device=device, repeats=repeats, hold_output=True,
                options=TilingOptions(tile=rule),
            )  # fmt: skip
            on_progress(f"{engine}, {_ranks(world)}: {cell}, tile {rule}")
            result = run_ranks({"engine": engine, "cell": cell.row()}, world)
            row = {
                "kind": "ms-swift",
                **stamp(found, command),
                **cell.row(),
                "engine": engine,
                "ranks": world,
                **result,
            }
            append_rows(output, [row])
            rows.append(row)
    return rows


def _ranks(world: int) -> str:
    return f"{world} rank{'s' if world > 1 else ''}"


def title(device: str, rows: Sequence[Row]) -> str:
    """Head of the table for one published device."""
    first = rows[0]
    return (
        f"{first['engine']}: published on {device} | here on {first['device_name']}, {_ranks(first['ranks'])}, "
        f"{first['hidden']} x {first['intermediate']}, {first['dtype']}"
    )


def table(device: str, rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Lines of the table for one published device: tokens, tile, published ms and MB, ours, each with its change."""
    lines = {line.tokens: line for line in published(rows[0]["engine"]) if line.device == device}
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        regular, *tiled = [row for row in rows if row["tokens"] == tokens]
        for row in tiled:
            yield (f"{tokens:,}", _rule(row), *_theirs(lines.get(tokens)), *_ours(regular, row))


HEAD = ("tokens", "tiles", "published ms", "change", "published MB", "change", "ms here", "change", "MB here", "change",
        "gradient error")  # fmt: skip


def _rule(row: Row) -> str:
    chosen = row.get("tiles")
    return "4" if row["tile"] == TILES else "auto" if chosen is None else f"auto: {chosen or 'untiled'}"


def _theirs(line: Published | None) -> tuple[str, ...]:
    if line is None:
        return ("", "", "", "")
    return _change(line.regular_ms, line.tiled_ms) + _change(line.regular_mb, line.tiled_mb, digits=0)


def _ours(regular: Row, row: Row) -> tuple[str, ...]:
    if "error" in row:
        return ("failed",)
    error = f"{row['gradient_error']:.1e}"
    if "error" in regular:
        return (f"- > {row['step_ms']:.1f}", "", f"- > {row['peak_total_bytes'] / 2**20:,.1f}", "", error)
    time = _change(regular["step_ms"], row["step_ms"])
    digits = 0 if row["peak_total_bytes"] > 2**30 else 1
    return (*time, *_change(regular["peak_total_bytes"] / 2**20, row["peak_total_bytes"] / 2**20, digits), error)


def _change(before: float, after: float, digits: int = 1) -> tuple[str, str]:
    return f"{before:,.{digits}f} > {after:,.{digits}f}", f"{after / before - 1:+.0%}"


def summary(rows: Sequence[Row]) -> list[str]:
    """The last lines: what tiling cost and saved at the shortest and at the longest length, theirs and ours."""
    lines = []
    lengths = sorted({row["tokens"] for row in rows})
    for tokens in dict.fromkeys((lengths[0], lengths[-1])):
        regular, *tiled = [row for row in rows if row["tokens"] == tokens]
        for row in tiled:
            if "error" in row or "error" in regular:
                lines.append(f"{tokens:,} tokens, {_rule(row)}: {row.get('error') or regular['error']}")
                continue
            time = row["step_ms"] / regular["step_ms"] - 1
            size = row["peak_total_bytes"] / regular["peak_total_bytes"] - 1
            same = [line for line in published(row["engine"]) if line.tokens == tokens]
            theirs = ", ".join(
                f"{line.device} {_change(line.regular_ms, line.tiled_ms)[1]} time "
                f"{_change(line.regular_mb, line.tiled_mb)[1]} memory"
                for line in same
            )
            mine = (
                f"{tokens:,} tokens, tiles {_rule(row)}, {_ranks(row['ranks'])}: {time:+.0%} time, {size:+.0%} memory"
            )
            lines.append(f"{mine} (published: {theirs or 'no such length'})")
    return lines


def print_published(rows: Sequence[Row]) -> None:
    """One table for each published device, and the line that says that the hardware differs."""
    console = show.console_for_tables(150)
    for device in dict.fromkeys(line.device for line in published(rows[0]["engine"])):
        shown = Table(box=box.SIMPLE_HEAVY, pad_edge=False, title_justify="left", title=title(device, rows))
        for name in HEAD:
            shown.add_column(name, justify="right", no_wrap=True)
        for line in table(device, rows):
            shown.add_row(*(Text(cell) for cell in line))
        console.print(shown)
        show.print_failures(console, rows)
        console.print(HARDWARE.format(device=device), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
