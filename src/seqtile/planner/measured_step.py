"""Measure one real step, phase by phase, and compare it with its plan."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from seqtile._compat import dump_memory, record_memory
from seqtile._errors import UserError
from seqtile.counting import LiveSample
from seqtile.install.runs import what_ran
from seqtile.ops.attention.backends import attention_sentences
from seqtile.ops.attention.kernel_calls import names_of_kernels
from seqtile.options import changed
from seqtile.planner.accelerators import this_device
from seqtile.planner.extrapolate import Prediction, predict
from seqtile.planner.fake_step import build, build_bare, tracked_step
from seqtile.planner.kernel_workspace import cpu_workspace, flash2_workspace
from seqtile.planner.layer_structure import find_depths
from seqtile.planner.live_at_peaks import OPTIMIZER, WEIGHTS, track
from seqtile.planner.phases import HEAD, OPTIMIZER_STEP, REST, Phase
from seqtile.planner.plan_plot import require_matplotlib
from seqtile.planner.step_config import Setup
from seqtile.planner.tile_choice import head_tile

PHASES = ("forward", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class MeasuredSide:
    """The memory of the tiled or the untiled step.

    Attributes:
        name: ``"tiled"`` or ``"untiled"``.
        standing: bytes of weights and optimizer states, there before the step.
        peaks: bytes at the peak of forward, loss, backward and optimizer, standing ones included.
        planned: the same as the plan has them.
        peak_at: the part of the step where the plan has its peak.
        terms: bytes there by what they are for, as (measured, planned).
        timeline: live bytes after each operator; on an accelerator as counted, where the peaks are the allocator's.
        ran: what the tiled blocks did, from :class:`seqtile.install.runs.Runs`.
    """

    name: str
    standing: int
    peaks: Mapping[str, int]
    planned: Mapping[str, float]
    peak_at: Phase
    terms: Mapping[str, tuple[int, float]]
    timeline: tuple[LiveSample, ...]
    ran: str

    @property
    def peak(self) -> int:
        """Most bytes at once."""
        return max(self.peaks.values())

    @property
    def error(self) -> float:
        """How far the planned peak is off, relative to the measured one."""
        return max(self.planned.values()) / self.peak - 1

    @property
    def worst(self) -> str:
        """The term that is furthest off."""
        return max(self.terms, key=lambda name: abs(self.terms[name][1] - self.terms[name][0]))


@dataclass(frozen=True)
class Probe:
    """Both sides of one real step.

    Attributes:
        tokens: of the row that ran.
        asked: tokens that were asked for.
        device_type: where it ran.
        layers: of the model.
        sides: tiled first; untiled unless it did not fit.
        notes: what the reader should know.
    """

    tokens: int
    asked: int
    device_type: str
    layers: int
    sides: tuple[MeasuredSide, ...]
    notes: tuple[str, ...]


def probe(config: Any, setup: Setup, tokens: int, snapshot: Path | None = None, loss_tile: int | str = "auto") -> Probe:
    """Run one real step of ``tokens`` tokens, tiled and untiled, with random weights, and compare with the plan.

    Where ``tokens`` do not fit, half of them run, or a quarter: on the CPU by the plan, on an accelerator once the step
    has run out of memory.

    Args:
        config: Transformers' configuration.
        setup: how the step runs.
        tokens: tokens of the row.
        snapshot: where PyTorch's memory snapshot of the tiled step goes; accelerators only.
        loss_tile: tokens per tile of the head, or ``"auto"``.

    Raises:
        UserError: not even the smallest length fits.
    """
    device = this_device()
    device_type = device.name
    setup = replace(setup, device_type=device_type)
    depths = find_depths(config, build_bare(config, setup, "meta"), setup.options.segment)
    head = loss_tile
    if not isinstance(head, int):
        head = head_tile(build(config, setup, "meta", depths.samples[0]), setup, tokens, device_type)
    setup = changed(setup, loss_tile=head)
    notes = []
    if device_type == "cpu":
        run_at = _within_memory(config, setup, tokens, device.memory)
        if snapshot is not None:
            notes.append("no memory snapshot on a CPU")
    with names_of_kernels() as operators:
        if device_type == "cpu":
            tiled = _measure("tiled", config, setup, run_at, device_type, None)
        else:
            run_at, tiled = _halving(config, setup, tokens, device_type, snapshot)
    notes += attention_sentences(operators)
    if run_at < tokens:
        notes.append(f"{tokens:,} tokens do not fit here; measured {run_at:,}")
    sides = [tiled]
    untiled = replace(setup, options=setup.options.without_blocks())
    try:
        sides.append(_measure("untiled", config, untiled, run_at, device_type, None))
    except torch.OutOfMemoryError:
        notes.append("untiled ran out of memory")
    return Probe(run_at, tokens, device_type, depths.layers, tuple(sides), tuple(notes))


def _within_memory(config: Any, setup: Setup, tokens: int, free: int) -> int:
    """The longest of ``tokens``, half of it, ... that this machine's free memory holds untiled by the plan."""
    length = tokens
    while length >= 64:
        untiled = replace(setup, options=setup.options.without_blocks())
        planned = predict(config, untiled, length, workspace=cpu_workspace, device_type="cpu").peak
        if planned < 0.8 * free:
            return length
        length //= 2
    raise UserError(
        f"this model does not fit in {free / 2**30:.1f} GiB of free memory with 64 tokens; probe a smaller one"
    )


def _halving(
    config: Any, setup: Setup, tokens: int, device_type: str, snapshot: Path | None
) -> tuple[int, MeasuredSide]:
    length = tokens
    while length >= 64:
        try:
            return length, _measure("tiled", config, setup, length, device_type, snapshot)
        except torch.OutOfMemoryError:
            length //= 2
    raise UserError(f"{2 * length:,} tokens do not fit on this device; `seqtile plan` shows what does")


def _measure(
    name: str, config: Any, setup: Setup, tokens: int, device_type: str, snapshot: Path | None
) -> MeasuredSide:
    workspace = cpu_workspace if device_type == "cpu" else flash2_workspace
    planned = predict(config, setup, tokens, workspace=workspace, device_type=device_type)
    if snapshot is not None:
        record_memory(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            side = _track_side(name, config, setup, tokens, device_type, planned)
        if snapshot is not None:
            dump_memory(snapshot)
        return side
    finally:
        if snapshot is not None:
            record_memory(False)


def _track_side(
    name: str, config: Any, setup: Setup, tokens: int, device_type: str, planned: Prediction
) -> MeasuredSide:
    with track(device_type) as live:
        with live.phase(Phase(WEIGHTS)):
            built = build(config, setup, device_type)  # the weights are made and drawn there, never on the host
        run = tracked_step(built, setup, tokens, live)
    peaks: dict[str, int] = dict.fromkeys(PHASES, 0)
    for phase, measured in live.phases.items():
        if phase not in _OUTSIDE:
            stage = _stage(phase)
            peaks[stage] = max(peaks[stage], measured.peak)
    expected: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for phase, terms in planned.parts.items():
        stage = _stage(phase)
        expected[stage] = max(expected[stage], sum(terms.values()))
    peak = run.peaks.get(replace(planned.peak_at, in_kernel=False))  # real kernels show nothing of their inside
    measured_terms = {} if peak is None else peak.terms
    planned_terms = planned.parts[planned.peak_at]
    both = {
        name: (measured_terms.get(name, 0), planned_terms.get(name, 0.0))
        for name in dict.fromkeys([*planned_terms, *measured_terms])
    }
    standing = run.peaks[Phase(OPTIMIZER_STEP)].terms
    return MeasuredSide(
        name, standing[WEIGHTS] + standing.get(OPTIMIZER, 0), peaks, expected, planned.peak_at, both,
        tuple(sample for sample in live.timeline() if sample.phase not in _OUTSIDE),
        str(what_ran(built.model)),
    )  # fmt: skip


_OUTSIDE = (Phase(REST), Phase(WEIGHTS), Phase(OPTIMIZER))
"""Phases before and after the step."""


def _stage(phase: Phase) -> str:
    """Which of :data:`PHASES` a part of the step belongs to."""
    if phase.part == OPTIMIZER_STEP:
        return "optimizer"
    if phase.direction != "forward":
        return "backward"
    return "loss" if phase.part == HEAD else "forward"


def plot_timeline(probed: Probe, path: Path) -> None:
    """Draw live bytes over the operators of the step, tiled and untiled."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axes = figure.subplots()
    colours = {"untiled": "#222222", "tiled": "#d1495b"}
    unit, word = (2**30, "GiB") if max(side.peak for side in probed.sides) >= 2**30 else (2**20, "MiB")
    for side in sorted(probed.sides, key=lambda side: side.name, reverse=True):
        first, last = side.timeline[0].op, side.timeline[-1].op
        where = [(sample.op - first) / max(1, last - first) for sample in side.timeline]
        live_sizes = [sample.live / unit for sample in side.timeline]
        label = f"{side.name}, peak {side.peak / unit:,.1f} {word}"
        axes.plot(where, live_sizes, color=colours[side.name], linewidth=1.3, label=label)
    standing = probed.sides[0].standing / unit
    axes.axhline(standing, color="#999999", linewidth=0.9, linestyle=":", label="weights and optimizer state")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("share of the step's operators")
    axes.set_ylabel(f"{word} live")
    axes.set_title(f"One step of {probed.tokens:,} tokens on {probed.device_type}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=9, frameon=False, loc="outside lower left")
    figure.savefig(path, dpi=180)
