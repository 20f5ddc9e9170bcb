"""Compare tiled with untiled: one forward and backward of the same model on the same batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from seqtile._log import log_level
from seqtile.counting.live import LiveBytes, count_live_bytes
from seqtile.install.apply import apply_options, undo
from seqtile.planner.phases import Phase, label_phases, run_step
from seqtile.verification import Run, verify

if TYPE_CHECKING:
    from torch import nn

    from seqtile.blocks.install_blocks import Block
    from seqtile.train.recipe import Recipe

TIMED_PAIRS = 3
RATIO_ERROR = 0.05
"""Ratios of pairs that lie this near to each other are one, whatever it is."""


@dataclass(frozen=True)
class Side:
    """One of the two ways of running the step.

    Attributes:
        name: ``"tiled"`` or ``"untiled"``.
        step_seconds: median of the timed runs of forward and backward, without counters.
        peak_bytes: most bytes live at once above what was live before the step (the model's weights are not in it).
        peak_phase: which part of the step holds them, such as ``"MLP, backward"``.
        units: matrix products per block, in ``2 * tokens * hidden * intermediate``; None where another product of
            the model has the same sizes.
        phases: peak bytes of each part.
    """

    name: str
    step_seconds: float
    peak_bytes: int
    peak_phase: str
    units: float | None
    phases: dict[Phase, int]


@dataclass(frozen=True)
class Comparison:
    """Both sides, and how far their gradients are apart.

    Attributes:
        tiled, untiled: the two sides.
        tokens: tokens of the batch.
        gradient_error: largest over all parameters of ``norm(tiled - untiled) / norm(untiled)``.
        gradient_name: the parameter that has it.
        how: one sentence on how it was measured.
        pair_ratios: tiled seconds by untiled ones, of each timed pair.
        notes: what :func:`seqtile.verify` has to say, such as that this batch was too short to be cut.
    """

    tiled: Side
    untiled: Side
    tokens: int
    gradient_error: float
    gradient_name: str
    how: str
    pair_ratios: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def time_ratio(self) -> float | None:
        """Median of the pairs' ratios; None if they lie further apart than the difference that it claims."""
        ratio = median(self.pair_ratios)
        spread = max(self.pair_ratios) - min(self.pair_ratios)
        return ratio if spread <= max(abs(ratio - 1), RATIO_ERROR) else None


def compare(
    model: nn.Module, batch: Mapping[str, Any], recipe: Recipe, stage: Callable[[str], None] = lambda _: None
) -> Comparison:
    """Measure ``model`` tiled as ``recipe`` says and untiled; it is left tiled, without gradients.

    Runs five forwards and backwards of each kind: one that :func:`seqtile.verify` counts and compares, one that
    says which part of the step holds the memory, three that are timed, in turn: every second pair begins tiled.

    Args:
        model: a tiled causal language model in training mode, PEFT's wrapper or not.
        batch: keyword arguments of its forward, labels included.
        recipe: recipe that gives the tile rule.
        stage: called with a description of each step.

    Raises:
        UserError: nothing to tile.
    """
    inputs = dict(batch)
    tokens = inputs["input_ids"].numel()
    with log_level("seqtile", logging.WARNING):  # the tiling was reported when training began
        blocks = apply_options(model, recipe.tiling).blocks
        stage("comparing one step: gradients, tiled and untiled")
        verdict = verify(model, inputs, reference=None)
        stage("comparing one step: memory, tiled")
        tiled_live = _watch_step(model, inputs, blocks)
        undo(model)
        stage("comparing one step: memory, untiled")
        untiled_live = _watch_step(model, inputs, blocks)
        seconds: dict[str, list[float]] = {"untiled": [], "tiled": []}
        for pair in range(TIMED_PAIRS):
            for name in (*seconds,) if pair % 2 == 0 else reversed((*seconds,)):
                stage(f"comparing one step: time, {name} ({pair + 1} of {TIMED_PAIRS})")
                if name == "tiled":
                    apply_options(model, recipe.tiling)
                else:
                    undo(model)
                started = time.perf_counter()
                run_step(model, inputs)
                seconds[name].append(time.perf_counter() - started)
                model.zero_grad(set_to_none=True)
        apply_options(model, recipe.tiling)
    weights = [parameter for parameter in verdict.parameters if parameter.name != "loss"]
    worst = max(weights, key=lambda parameter: parameter.l2)
    return Comparison(
        tiled=_side("tiled", verdict.tiled, tiled_live, seconds["tiled"]),
        untiled=_side("untiled", verdict.untiled, untiled_live, seconds["untiled"]),
        tokens=tokens,
        gradient_error=worst.l2,
        gradient_name=worst.name,
        how=(
            f"forward and backward of one batch of {tokens:,} tokens; bytes "
            f"{'of live tensors' if inputs['input_ids'].device.type == 'cpu' else 'from the allocator'} above the "
            f"model's own; seconds: median of {TIMED_PAIRS} pairs"
        ),
        pair_ratios=tuple(tiled / untiled for tiled, untiled in zip(seconds["tiled"], seconds["untiled"], strict=True)),
        notes=verdict.notes,
    )


def _watch_step(model: nn.Module, inputs: dict[str, Any], blocks: Iterable[Block]) -> LiveBytes:
    """One step, its live bytes labelled with the part of the model that runs."""
    with (
        count_live_bytes(inputs["input_ids"].device) as live,
        label_phases(live, model, blocks) as labels,
    ):
        run_step(model, inputs, labels)
    model.zero_grad(set_to_none=True)
    return live


def _side(name: str, counted: Run, live: LiveBytes, seconds: list[float]) -> Side:
    phases = {phase: row.peak for phase, row in live.phases.items()}
    return Side(
        name=name,
        step_seconds=median(seconds),
        peak_bytes=counted.peak_bytes,
        peak_phase=str(max(phases, key=lambda phase: phases[phase])),
        units=counted.units,
        phases=phases,
    )
