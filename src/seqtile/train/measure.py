"""Tiled against untiled: one forward and backward of the same model on the same batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from seqtile.models.apply import apply, undo

from seqtile.counting import Products, Sample, count_live_bytes, count_products
from seqtile.train.phases import label_phases, run_step

if TYPE_CHECKING:
    from torch import Tensor, nn

    from seqtile.models.report import Block
    from seqtile.train.recipe import Recipe

TIMED_PAIRS = 3


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
        timeline: live bytes after each operator that changed them.
    """

    name: str
    step_seconds: float
    peak_bytes: int
    peak_phase: str
    units: float | None
    phases: dict[str, int]
    timeline: tuple[Sample, ...]


@dataclass(frozen=True)
class Comparison:
    """Both sides, and how far their gradients are apart.

    Attributes:
        tiled, untiled: the two sides.
        tokens: tokens of the batch.
        gradient_error: largest over all parameters of ``norm(tiled - untiled) / norm(untiled)``.
        gradient_name: the parameter that has it.
        how: one sentence on how it was measured.
    """

    tiled: Side
    untiled: Side
    tokens: int
    gradient_error: float
    gradient_name: str
    how: str

    @property
    def left_untiled(self) -> bool:
        """Whether the tile rule left this batch whole, so that both sides ran the same operators."""
        return len(self.tiled.timeline) == len(self.untiled.timeline)


def compare(model: nn.Module, batch: Mapping[str, Any], recipe: Recipe) -> Comparison:
    """Measure ``model`` tiled as ``recipe`` says and untiled; it is left tiled, without gradients.

    Runs one counted and three timed steps of each kind, the timed ones in turn. The gradients of the untiled step
    are kept in host memory until the tiled one has run.

    Args:
        model: a causal language model in training mode, PEFT's wrapper or not.
        batch: keyword arguments of its forward, labels included.
        recipe: for the tile rule.

    Raises:
        UserError: nothing to tile.
    """
    inputs = dict(batch)
    tokens = inputs["input_ids"].numel()
    with _silent():
        blocks = apply(model, tile=recipe.tile, only=recipe.only).blocks
        undo(model)
        untiled, reference = _count_step("untiled", model, inputs, blocks, tokens)
        apply(model, tile=recipe.tile, only=recipe.only)
        tiled, gradients = _count_step("tiled", model, inputs, blocks, tokens)
        error, name = _worst(gradients, reference)
        seconds: dict[str, list[float]] = {"untiled": [], "tiled": []}
        for _ in range(TIMED_PAIRS):
            undo(model)
            seconds["untiled"].append(_time_step(model, inputs))
            apply(model, tile=recipe.tile, only=recipe.only)
            seconds["tiled"].append(_time_step(model, inputs))
    return Comparison(
        tiled=_side(tiled, seconds["tiled"]),
        untiled=_side(untiled, seconds["untiled"]),
        tokens=tokens,
        gradient_error=error,
        gradient_name=name,
        how=f"forward and backward of one batch of {tokens:,} tokens; bytes "
        f"{'of live tensors' if inputs['input_ids'].device.type == 'cpu' else 'from the allocator'} "
        f"above the model's own; seconds: median of {TIMED_PAIRS}",
    )


@contextmanager
def _silent() -> Iterator[None]:
    """The tiling was reported when training began; switching it on and off here is nobody's news."""
    logger = logging.getLogger("seqtile.models")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _side(values: dict[str, Any], seconds: list[float]) -> Side:
    return Side(**values, step_seconds=median(seconds))


def _count_step(
    name: str, model: nn.Module, inputs: dict[str, Any], blocks: Iterable[Block], tokens: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Run one step under both counters; its numbers and its gradients."""
    places = [block.name if len(block.together) <= 1 else block.name.rpartition(".")[0] for block in blocks]
    gradients: dict[str, Tensor] = {}
    with (
        count_products() as products,
        count_live_bytes(inputs["input_ids"].device) as live,
        label_phases(live, model, places) as labels,
    ):
        run_step(model, inputs, labels)
    gradients = {
        key: weight.grad.detach().to("cpu", copy=True) for key, weight in model.named_parameters() if weight.grad is not None
    }
    model.zero_grad(set_to_none=True)
    phases = {phase: row.peak for phase, row in live.phases.items()}
    values = {
        "name": name,
        "peak_bytes": live.peak,
        "peak_phase": max(phases, key=lambda phase: phases[phase]),
        "units": _units(products, list(blocks), tokens, model),
        "phases": phases,
        "timeline": tuple(live.timeline()),
    }
    return values, gradients


def _units(products: Products, blocks: list[Block], tokens: int, model: nn.Module) -> float | None:
    """Units per block, or None where sizes elsewhere in the model would be counted too."""
    text = model.config.get_text_config()  # type: ignore[union-attr, operator]
    total = 0.0
    for hidden, intermediate in {(block.hidden, block.intermediate) for block in blocks}:
        if text.vocab_size == intermediate:
            return None
        try:
            total += products.units(tokens, hidden, intermediate, fused=text.vocab_size != 2 * intermediate)
        except (RuntimeError, ValueError):
            return None
    return total / len(blocks)


def _time_step(model: nn.Module, inputs: dict[str, Any]) -> float:
    started = time.perf_counter()
    run_step(model, inputs)
    seconds = time.perf_counter() - started
    model.zero_grad(set_to_none=True)
    return seconds


def _worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """Largest relative difference between two sets of gradients; a missing one is as wrong as can be."""
    errors = {}
    for name, reference in theirs.items():
        scale = torch.linalg.vector_norm(reference.double())
        difference = torch.linalg.vector_norm(ours[name].double() - reference.double()) if name in ours else scale
        errors[name] = (difference / scale).item() if scale > 0 else difference.item()
    name = max(errors, key=lambda key: errors[key])
    return errors[name], name
