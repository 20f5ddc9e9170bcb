"""What ``seqtile bench`` shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seqtile._errors import UserError

GIB = 2**30
Row = dict[str, Any]


def free_stem(out: str | Path, kind: str) -> tuple[Path, str]:
    """The directory of the results, made, and a file stem in it that is not taken.

    Raises:
        UserError: it cannot be written.
    """
    directory = Path(out)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        stem = f"{kind}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        number = 1
        while any(directory.glob(f"{stem}*")):
            number += 1
            stem = f"{stem.rsplit('_', 1)[0]}_{number}"
        probe = directory / f"{stem}.jsonl"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out {str(out)!r} cannot be written ({error.strerror}): name another directory") from None
    return directory, stem


class Status:
    """A line that says what runs; on a terminal it is replaced by the next one."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("starting")

    def __enter__(self) -> Status:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def say(self, text: str) -> None:
        """Say what runs next."""
        if self._console.is_terminal:
            self._status.update(text)
        else:
            self._console.print(text, highlight=False, soft_wrap=True)


def print_grid(rows: Sequence[Row]) -> None:
    """One table for each (train, checkpoint)."""
    from seqtile.bench.grid import with_ratios

    console = console_for_tables()
    rows = with_ratios(rows)
    for train, checkpoint in dict.fromkeys((row["train"], row["checkpoint"]) for row in rows):
        mine = [row for row in rows if (row["train"], row["checkpoint"]) == (train, checkpoint)]
        first = mine[0]
        around = "in a layer under an activation checkpoint" if checkpoint else "alone"
        table = Table(
            box=box.SIMPLE_HEAVY, pad_edge=False, title_justify="left",
            title=f"MLP {first['hidden']} x {first['intermediate']}, {first['dtype']}, {train}, {around}, "
            f"on {first['device_name']}",
        )  # fmt: skip
        for name in ("tokens", "tile", "method"):
            table.add_column(name, justify="right" if name == "tokens" else "left", no_wrap=True)
        for name in ("tiles", "ms", "/ untiled", "peak GiB", "/ untiled", "units", "gradient error"):
            table.add_column(name, justify="right", no_wrap=True)
        before = None
        for row in mine:
            if before not in (None, row["tokens"]):
                table.add_section()
            before = row["tokens"]
            table.add_row(*(Text(cell) for cell in _cells(row)))
        console.print(table)
        print_failures(console, mine)
    paired = [row for row in rows if "pairs_ms" in row]
    for row in paired:
        pairs = ", ".join(f"{untiled:.0f}/{ours:.0f}" for untiled, ours in row["pairs_ms"])
        console.print(
            f"{row['method']}, {row['tokens']:,} tokens, {row['tile']}, untiled/{row['method']} ms: {pairs}; "
            f"median ratio {row['ratio']:.3f}", highlight=False, soft_wrap=True,
        )  # fmt: skip


def print_steps(rows: Sequence[Row]) -> None:
    """One line per method."""
    ran = next((row for row in rows if "error" not in row), rows[0])
    where = f"{ran.get('engine', '')}, ranks: {ran.get('ranks', 1)}, on {ran['device_name']}"
    title = f"training step, {ran['tokens']:,} tokens, {where}"
    table = Table(box=box.SIMPLE_HEAVY, pad_edge=False, title_justify="left", title=title)
    table.add_column("method", no_wrap=True)
    for name in ("ms", "tokens/s", "peak GiB", "loss first", "loss last", "gradient norm"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if "error" in row:
            table.add_row(row["method"], "failed")
            continue
        norm = row["gradient_norm"]
        table.add_row(
            row["method"], f"{row['step_ms']:.0f}", f"{row['tokens_per_s']:,.0f}",
            f"{row['peak_allocated_bytes'] / GIB:.3f}", f"{row['loss_first']:.6f}", f"{row['loss_last']:.6f}",
            "" if norm is None else f"{norm:.6f}",
        )  # fmt: skip
    console = console_for_tables()
    console.print(table)
    print_failures(console, rows)


def print_ladder(rows: Sequence[Row]) -> None:
    """One line a rung."""
    from seqtile.bench import technique_ladder

    heads, cells = technique_ladder.table(rows)
    table = Table(box=box.SIMPLE_HEAVY, pad_edge=False, title_justify="left", title=technique_ladder.title(rows))
    for number, name in enumerate(heads):
        table.add_column(name, justify="left" if number in (0, 3) else "right", no_wrap=number != 3)
    for line in cells:
        table.add_row(*(Text(cell) for cell in line))
    console = console_for_tables(140)
    console.print(table)
    console.print(technique_ladder.footnote(rows), highlight=False, soft_wrap=True)


def print_failures(console: Console, rows: Sequence[Row]) -> None:
    """One line for each row that has no numbers."""
    for row in rows:
        if "error" in row:
            console.print(f"{row['method']}, {row['tokens']:,} tokens: {row['error']}", highlight=False, soft_wrap=True)


def console_for_tables(width: int = 120) -> Console:
    """Wide enough for a table where the output goes to a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def _cells(row: Row) -> list[str]:
    keep = f", keep {row['keep']}" if row.get("keep") else ""
    head = [f"{row['tokens']:,}", "" if row["method"] == "untiled" else row["tile"], row["method"] + keep]
    if "error" in row:
        return [*head, "", "failed"]
    time_ratio, peak_ratio = row.get("time_ratio"), row.get("peak_ratio")
    return [
        *head, str(row["tiles"] or ""), f"{row['step_ms']:.1f}", "" if time_ratio is None else f"{time_ratio:.2f}",
        f"{row['peak_allocated_bytes'] / GIB:.3f}", "" if peak_ratio is None else f"{peak_ratio:.0%}",
        f"{row['units']:.2f}", f"{row['gradient_error']:.1e}",
    ]  # fmt: skip


def print_files(files: Iterable[Path]) -> None:
    """Where the results are."""
    console = Console()
    for file in files:
        console.print(f"written  {file}", highlight=False, soft_wrap=True)


def print_summary(lines: Iterable[str]) -> None:
    """A few lines last."""
    console = Console()
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
