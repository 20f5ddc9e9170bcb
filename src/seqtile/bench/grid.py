"""``seqtile bench mlp``: the cells of a grid, one after another, and what came out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from seqtile._errors import UserError
from seqtile.bench.cell import DTYPES, METHODS, OURS, SHAPES, TRAIN, Cell, run_cell, run_child, run_pairs
from seqtile.bench.environment import append_rows, stamp
from seqtile.options import DEFAULTS, TilingOptions
from seqtile.tiling import LIVE_WIDTHS, BlockShape, parse_tile

CPU_SHAPE = (512, 1408)
CPU_TOKENS = (2048, 8192)
TOKENS = (8192, 32768, 131072)
AROUND = {"no": (False,), "yes": (True,), "both": (False, True)}

Row = dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """What ``seqtile bench mlp`` was asked for; every field is checked before anything runs.

    Attributes:
        shape: hidden and intermediate width, None for the default of the device.
        tokens: lengths, empty for the default of the device.
        tiles: tile rules.
        methods: ways to run the block.
        checkpoint: alone, under an activation checkpoint.
        train: what trains.
        dtype: "" for bfloat16 on an accelerator and float32 on the CPU.
        device: "" for the accelerator if there is one, else the CPU.
        repeats: timed runs per cell.
        pairs: interleaved pairs with untiled instead of a process per cell; 0 for none.
        options: of the fused operator, beside its tile rule.
    """

    shape: tuple[int, int] | None
    tokens: tuple[int, ...]
    tiles: tuple[str, ...]
    methods: tuple[str, ...]
    checkpoint: tuple[bool, ...]
    train: tuple[str, ...]
    dtype: str
    device: str
    repeats: int
    pairs: int
    options: TilingOptions


def build_grid(
    *, shape: str | None, hidden: int | None, intermediate: int | None, tokens: str | None, tiles: str, methods: str,
    checkpoint: str, train: str, dtype: str | None, device: str | None, repeats: int, pairs: int,
    options: TilingOptions,
) -> Grid:  # fmt: skip
    """A grid from the words of the command line.

    Raises:
        UserError: a word is wrong, in one sentence.
    """
    if (hidden is None) != (intermediate is None):
        raise UserError("--hidden and --intermediate belong together: give both, or --shape")
    if shape is not None and hidden is not None:
        raise UserError("--shape names a block and --hidden with --intermediate describe one: give one of the two")
    if shape is not None and shape not in SHAPES:
        raise UserError(
            f"--shape {shape!r} is unknown: expected one of {', '.join(SHAPES)}, or --hidden --intermediate"
        )
    if repeats < 5 and not pairs:
        raise UserError(f"--repeats {repeats}: a median wants at least 5")
    if checkpoint not in AROUND:
        raise UserError(f"--checkpoint {checkpoint!r}: expected one of {', '.join(AROUND)}")
    if pairs < 0:
        raise UserError(f"--pairs {pairs}: expected at least 1, or leave it out")
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r} is unknown: expected one of {', '.join(DTYPES)}")
    rules = parse_words("--tiles", tiles)
    for rule in rules:
        try:
            parse_tile(rule)
        except ValueError as error:
            raise UserError(f"--tiles: {error}") from None
    wide = SHAPES[shape] if shape else (hidden, intermediate) if hidden and intermediate else None
    if hidden is not None and wide is None:
        raise UserError(f"--hidden {hidden} --intermediate {intermediate}: expected at least 1 each")
    return Grid(
        wide, parse_counts("--tokens", tokens) if tokens else (), rules,
        parse_words("--methods", methods, METHODS), AROUND[checkpoint], parse_words("--train", train, TRAIN),
        dtype or "", device or "", repeats, pairs, options,
    )  # fmt: skip


def parse_words(option: str, text: str, allowed: Sequence[str] | None = None) -> tuple[str, ...]:
    """``"a,b"`` as words without repeats, each one of ``allowed``."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise UserError(f"{option} is empty: give one or several, separated by commas")
    for word in words:
        if allowed is not None and word not in allowed:
            raise UserError(f"{option} {word!r} is unknown: expected {', '.join(allowed)}, separated by commas")
    return words


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """``"8192,32768"`` as numbers of at least 1."""
    words = parse_words(option, text.replace("_", ""))
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise UserError(f"{option} {word!r} is no number of tokens: give whole numbers from 1, as in 8192,32768")
    return tuple(int(word) for word in words)


def resolve_grid(grid: Grid, found: Row) -> tuple[Grid, list[list[Cell]]]:
    """The grid with the device's defaults, and its cells in groups that share everything but method and tile.

    Args:
        grid: what was asked for.
        found: :func:`seqtile.bench.environment.environment` of a child process.

    Raises:
        UserError: the device that was named is not here, or a tile rule's budget does not hold one token.
    """
    device = grid.device or found["device_type"]
    if device not in ("cpu", found["device_type"]):
        here = f"found {found['device_type']}" if found["device_type"] != "cpu" else "found no accelerator"
        raise UserError(f"--device {device!r} is not here: {here}; leave --device out to take what there is")
    on_cpu = device == "cpu"
    hidden, intermediate = grid.shape or (CPU_SHAPE if on_cpu else SHAPES["llama-8b"])
    lengths = grid.tokens or (CPU_TOKENS if on_cpu else TOKENS)
    dtype = grid.dtype or ("float32" if on_cpu else "bfloat16")
    itemsize = 4 if dtype == "float32" else 2
    groups = []
    for train in grid.train:
        weights = 3 * hidden * intermediate if train == "full" else 0
        block = BlockShape(hidden, intermediate, itemsize, weights, itemsize, device, LIVE_WIDTHS)
        for rule in grid.tiles:
            try:
                parse_tile(rule).tile_sizes(max(lengths), block)
            except ValueError as error:
                raise UserError(f"--tiles {rule}: {error}") from None
        for checkpoint in grid.checkpoint:
            for tokens in lengths:
                cells = []
                for number, rule in enumerate(grid.tiles):
                    for method in grid.methods:
                        if method == "untiled" and number:
                            continue  # no tile rule changes it
                        keep = grid.options.keep if method == "fused" else DEFAULTS["keep"]
                        options = replace(grid.options, tile=rule, keep=keep)
                        cells.append(Cell(
                            hidden, intermediate, tokens, method, checkpoint, train, dtype, device, grid.repeats,
                            options,
                        ))  # fmt: skip
                groups.append(cells)
    return grid, groups


def look_around() -> Row:
    """What a child process finds here: devices and versions.

    Raises:
        UserError: no child process can run.
    """
    found = run_child("environment", {})
    if "error" in found:
        raise UserError(f"cannot start a measurement: {found['error']}")
    return found


def run_grid(
    grid: Grid, groups: list[list[Cell]], found: Row, output: Path, on_progress: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """Run every cell; each row is written to ``output`` as it comes.

    Args:
        grid, groups: what to measure, by :func:`resolve_grid`.
        found: by :func:`look_around`.
        output: file of JSON lines.
        on_progress: called with what runs next.

    Returns:
        The rows.
    """
    rows: list[Row] = []

    def add(row: Row) -> None:
        row = {"kind": "mlp", **stamp(found), **row}
        append_rows(output, [row])
        rows.append(row)

    for cells in groups:
        if grid.pairs:
            for rule in grid.tiles:
                on_progress(f"pairs with untiled: {cells[0]}, tile {rule}")
                base = next(
                    (c for c in cells if c.options.tile == rule and c.method == "fused"), cells[0].changed(tile=rule)
                )
                others = [c.method for c in cells if c.options.tile == rule and c.method != "untiled"]
                for row in run_pairs(base, others, grid.pairs):
                    add(row)
        else:
            for cell in cells:
                on_progress(str(cell))
                add(run_cell(cell))
    return rows


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows with ``time_ratio`` and ``peak_ratio`` to the untiled row of the same block, where there is one.

    Interleaved pairs have an untiled row for each tile rule; else one serves every rule.
    """
    keys = ("hidden", "intermediate", "tokens", "checkpoint", "train", "dtype", "device")
    ran = [row for row in rows if row["method"] == "untiled" and "error" not in row]
    untiled = {tuple(row[key] for key in (*keys, *more)): row for row in ran for more in ((), ("tile",))}
    result = []
    for row in rows:
        block = tuple(row[key] for key in keys)
        base = untiled.get((*block, row["tile"])) or untiled.get(block)
        row = dict(row)
        if base is not None and "error" not in row:
            row["time_ratio"] = row.get("ratio", row["step_ms"] / base["step_ms"])
            row["peak_ratio"] = row["peak_allocated_bytes"] / base["peak_allocated_bytes"]
        result.append(row)
    return result


def grid_summary(rows: Sequence[Row]) -> list[str]:
    """A few sentences: ours against untiled at the longest length of each kind of block."""
    lines = []
    kinds = dict.fromkeys((row["train"], row["checkpoint"]) for row in rows)
    for train, checkpoint in kinds:
        mine = [row for row in with_ratios(rows) if (row["train"], row["checkpoint"]) == (train, checkpoint)]
        longest = max(row["tokens"] for row in mine)
        around = "under a checkpoint" if checkpoint else "alone"
        for row in mine:
            if row["tokens"] != longest or row["method"] not in OURS:
                continue
            name = f"{row['method']} ({train}, {around}, {longest:,} tokens, tile {row['tile']})"
            if "error" in row:
                lines.append(f"{name}: {row['error']}")
            elif "time_ratio" in row:
                lines.append(
                    f"{name}: {row['time_ratio']:.2f}x the time and {row['peak_ratio']:.0%} of the memory of untiled, "
                    f"gradient error {row['gradient_error']:.1e}"
                )
            else:
                gib = row["peak_allocated_bytes"] / 2**30
                lines.append(f"{name}: {row['step_ms']:.1f} ms, {gib:.2f} GiB; untiled did not run")
    return lines
