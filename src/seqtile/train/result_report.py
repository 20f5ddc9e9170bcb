"""The outcome of a run, and its report: two plots and their figures."""

from __future__ import annotations

import json
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqtile.devices import MIB, device_name, package_version
from seqtile.planner.phases import ATTENTION, BLOCK, BLOCK_AND_NORMS, HEAD, REST
from seqtile.train.resume import PACKAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from seqtile.install.report import Report
    from seqtile.train.compare_untiled import Comparison, Side
    from seqtile.train.data_summary import DataSummary
    from seqtile.train.recipe import Recipe

PALETTE = {BLOCK: "#d1495b", BLOCK_AND_NORMS: "#d1495b", ATTENTION: "#30638e", HEAD: "#edae49", REST: "#9aa5ab"}
DPI = 120


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        recipe: the resolved recipe, as saved beside the result.
        output: directory of the saved model, or of the checkpoint if the run was stopped.
        tiling: the report of what was tiled; None for an untiled run.
        losses: ``(step, loss)`` of every logged step, those before a resume included.
        step: optimizer steps done.
        step_seconds: median seconds of a step, the first one left out; None below two steps.
        peak_bytes: most bytes the accelerator's allocator held; None without an accelerator.
        stopped_by: the signal that ended the run early, or None.
        comparison: tiled against untiled on one batch, if the recipe asked for it.
        report: directory of plots and numbers, if the recipe asked for it.
        data: what it was trained on, ``"train"``, and evaluated on, ``"eval"``, in numbers.
        best: step and value of the best evaluation of a checkpoint that is kept; None without evaluations.
        best_metric: what it is the best of, ``"loss"`` or a name of TRL's.
        ran: into how many tiles the blocks were cut at the lengths that ran.
        retries: what was gone on with after each out-of-memory.
    """

    recipe: Recipe
    output: Path
    tiling: Report | None
    losses: tuple[tuple[int, float], ...]
    step: int
    step_seconds: float | None
    peak_bytes: int | None
    stopped_by: signal.Signals | None
    comparison: Comparison | None
    report: Path | None = None
    data: Mapping[str, DataSummary] = field(default_factory=dict)
    best: tuple[int, float] | None = None
    best_metric: str = "loss"
    ran: str = ""
    retries: tuple[dict[str, Any], ...] = ()


def write_report(outcome: Outcome, directory: Path) -> Path:
    """Write ``report.json``, ``loss.png`` and, where it was compared, ``memory.png`` into ``directory``.

    Returns:
        ``directory``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "report.json").write_text(json.dumps(numbers(outcome), indent=1) + "\n", encoding="utf-8")
    if outcome.losses:
        plot_loss(outcome.losses, directory / "loss.png")
    if outcome.comparison is not None:
        plot_memory(outcome.comparison, directory / "memory.png")
    return directory


def numbers(outcome: Outcome) -> dict[str, Any]:
    """Everything measured, with versions, device, command and date."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["seqtile", *sys.argv[1:]],
        "device": device_name(),
        "engine": {key: getattr(outcome.recipe, key) for key in ("engine", "nproc", "sp_size", "cp_size")},
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in ("seqtile", *PACKAGES)},
        "tiling": None if outcome.tiling is None else f"{outcome.tiling}; {outcome.ran}",
        "data": {name: asdict(summary) for name, summary in outcome.data.items()},
        "retries": list(outcome.retries),
        "steps": outcome.step,
        "step_seconds": outcome.step_seconds,
        "peak_allocated_bytes": outcome.peak_bytes,
        "losses": [{"step": step, "loss": loss} for step, loss in outcome.losses],
        "best": None
        if outcome.best is None
        else {"step": outcome.best[0], f"eval_{outcome.best_metric}": outcome.best[1]},
        "comparison": None if outcome.comparison is None else _comparison(outcome.comparison),
    }


def plot_loss(losses: Sequence[tuple[int, float]], path: Path) -> None:
    """Training loss over optimizer steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    steps, values = zip(*losses, strict=True)
    axes.plot(
        steps, values, color=PALETTE[ATTENTION], linewidth=1.6, marker="o" if len(losses) <= 50 else "", markersize=3
    )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Training loss", loc="left")
    _plain(axes)
    figure.savefig(path, dpi=DPI)


def plot_memory(comparison: Comparison, path: Path) -> None:
    """Live memory over one step, untiled above tiled, coloured by the part that runs, peaks marked."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(7.6, 5.2), layout="constrained")
    panels = figure.subplots(2, 1, sharey=True)
    for axes, side in zip(panels, (comparison.untiled, comparison.tiled), strict=True):
        _plot_side(axes, side)
    ratio = comparison.tiled.peak_bytes / comparison.untiled.peak_bytes
    panels[0].set_title(
        f"Memory over one step of {comparison.tokens:,} tokens: tiled peak {ratio:.0%} of untiled", loc="left"
    )
    panels[0].set_ylim(0, comparison.untiled.peak_bytes / MIB * 1.28)
    panels[1].set_xlabel("progress through forward and backward (% of operators)")
    parts = [part for part in PALETTE if any(phase.part == part for phase in comparison.untiled.phases)]
    figure.legend(
        handles=[Patch(color=PALETTE[part], label=part) for part in parts],
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.savefig(path, dpi=DPI)


def _plot_side(axes: Axes, side: Side) -> None:
    samples = side.timeline
    end = max(sample.op for sample in samples) or 1
    x = [100 * sample.op / end for sample in samples]
    y = [sample.live / MIB for sample in samples]
    start = 0
    for part, run in groupby(getattr(sample.phase, "part", REST) for sample in samples):
        stop = start + len(list(run))
        # Up to the next phase's first sample, to leave no gap.
        axes.fill_between(
            x[start : stop + 1],
            [*y[start:stop], y[stop - 1]][: len(x[start : stop + 1])],
            step="post",
            color=PALETTE.get(part, PALETTE[REST]),
            linewidth=0.7,  # a peak may last for one operator, less than a pixel
        )
        start = stop
    top = max(range(len(y)), key=lambda index: y[index])
    axes.plot(x[top], y[top], marker="v", color="black", markersize=6, clip_on=False)
    axes.annotate(
        f"{side.peak_bytes / MIB:,.0f} MiB in {side.peak_phase}",
        (x[top], y[top]),
        xytext=(0, 8),
        textcoords="offset points",
        ha="right" if x[top] > 60 else "left" if x[top] < 40 else "center",
        fontsize=9,
    )
    axes.set_ylabel(f"{side.name}\nlive MiB")
    axes.set_xlim(0, 100)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _comparison(comparison: Comparison) -> dict[str, Any]:
    sides = {"tiled": comparison.tiled, "untiled": comparison.untiled}
    values: dict[str, Any] = {
        item.name: getattr(comparison, item.name) for item in fields(comparison) if item.name not in sides
    }
    for name, side in sides.items():
        values[name] = {item.name: getattr(side, item.name) for item in fields(side) if item.name != "timeline"}
        values[name]["phases"] = {str(phase): peak for phase, peak in side.phases.items()}
    return values
