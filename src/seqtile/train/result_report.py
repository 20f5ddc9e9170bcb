"""The outcome of a run, and its report."""

from __future__ import annotations

import json
import platform
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqtile.devices import device_name, package_version
from seqtile.train.atomic_files import write_whole
from seqtile.train.resume import PACKAGES

if TYPE_CHECKING:
    from seqtile.install.report import Report
    from seqtile.train.compare_untiled import Comparison
    from seqtile.train.data_summary import DataSummary
    from seqtile.train.recipe import Recipe


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
        comparison: tiled against untiled on one batch; the demo's only.
        report: directory of ``report.json``, if the recipe asked for it.
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


def write_report(outcome: Outcome, folder: Path) -> Outcome:
    """Write all measurements to ``report.json``, with versions, device, command and date; return it with its folder."""
    values = {
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
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "report.json", json.dumps(values, indent=1) + "\n")
    return replace(outcome, report=folder)


def _comparison(comparison: Comparison) -> dict[str, Any]:
    sides = {"tiled": comparison.tiled, "untiled": comparison.untiled}
    values: dict[str, Any] = {
        item.name: getattr(comparison, item.name) for item in fields(comparison) if item.name not in sides
    }
    for name, side in sides.items():
        values[name] = {item.name: getattr(side, item.name) for item in fields(side)}
        values[name]["phases"] = {str(phase): peak for phase, peak in side.phases.items()}
    return values
