"""Plots of a grid: time ratio and peak memory over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqtile.bench.grid import with_ratios

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "untiled": "#222222", "fused": "#d1495b", "generic": "#edae49", "tile-checkpoint": "#30638e",
    "liger": "#5f9e6e", "deepspeed": "#8e6c8a", "deepspeed-compute": "#b79ab5",
}  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P")
DPI = 130


def plot_grid(rows: Sequence[dict[str, Any]], directory: Path, stem: str) -> list[Path]:
    """One figure for each (train, checkpoint): time ratio to untiled, and peak memory, over tokens.

    An out-of-memory is a cross at the top of the memory axis.

    Returns:
        The files, ``STEM-TRAIN-alone.png`` or ``STEM-TRAIN-checkpoint.png``.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    rows, files = with_ratios(rows), []
    for train, checkpoint in dict.fromkeys((row["train"], row["checkpoint"]) for row in rows):
        mine = [row for row in rows if (row["train"], row["checkpoint"]) == (train, checkpoint)]
        figure = Figure(figsize=(10.5, 4.0), layout="constrained")
        left, right = figure.subplots(1, 2)
        crosses = False
        for number, (method, tile) in enumerate(dict.fromkeys(_name(row) for row in mine)):
            line = sorted((row for row in mine if _name(row) == (method, tile)), key=lambda row: row["tokens"])
            style = {
                "color": COLOURS[method], "marker": MARKERS[number % len(MARKERS)], "markersize": 4.5,
                "linewidth": 2.2 if method == "fused" else 1.4, "label": _label(method, tile, mine),
                "zorder": 3 if method == "fused" else 2,
            }  # fmt: skip
            _line(left, line, "time_ratio", 1.0, style)
            _line(right, line, "peak_allocated_bytes", 2**20, style)
            lost = [row["tokens"] for row in line if row.get("error") == "out of memory"]
            crosses |= bool(lost)
            right.plot(lost, [0.98] * len(lost), "x", color=style["color"], transform=right.get_xaxis_transform())
        first = mine[0]
        around = "under an activation checkpoint" if checkpoint else "alone"
        figure.suptitle(
            f"One MLP, {first['hidden']} x {first['intermediate']}, {first['dtype']}, {train}, {around}, "
            f"on {first['device_name']}", fontsize=10,
        )  # fmt: skip
        left.set_ylabel("time, forward and backward / untiled")
        left.set_ylim(0, 1.08 * max((row["time_ratio"] for row in mine if "time_ratio" in row), default=1.0))
        right.set_ylabel("peak memory beyond input and weights")
        right.set_yscale("log", base=2)
        if crosses:
            right.set_title("x: out of memory", fontsize=8, loc="right")
        right.yaxis.set_major_formatter(
            FuncFormatter(lambda mib, _: f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib:g} MiB")
        )
        for axes in (left, right):
            _dress(axes, sorted({row["tokens"] for row in mine}))
        right.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        path = directory / f"{stem}-{train}-{'checkpoint' if checkpoint else 'alone'}.png"
        figure.savefig(path, dpi=DPI)
        files.append(path)
    return files


def _name(row: dict[str, Any]) -> tuple[str, str]:
    """What a line stands for; no tile rule changes untiled."""
    return row["method"], "" if row["method"] == "untiled" else row["tile"]


def _label(method: str, tile: str, rows: Sequence[dict[str, Any]]) -> str:
    several = len({row["tile"] for row in rows}) > 1
    return f"{method}, {tile}" if several and method != "untiled" else method


def _line(axes: Axes, rows: Sequence[dict[str, Any]], key: str, scale: float, style: dict[str, Any]) -> None:
    points = [(row["tokens"], row[key] / scale) for row in rows if key in row]
    if points:
        tokens, values = zip(*points, strict=True)
        axes.plot(tokens, values, **style)


def _dress(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in lengths])
    axes.xaxis.minorticks_off()
    axes.set_xlabel("tokens")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
