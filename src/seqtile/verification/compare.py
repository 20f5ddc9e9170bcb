"""Run a model untiled and tiled, and judge."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._errors import UserError, expect_module
from seqtile.checkpointing.reentrant import non_reentrant
from seqtile.options import Only
from seqtile.recognise.candidates import find_blocks
from seqtile.verification.judge import TIMES, difference, groups, severity
from seqtile.verification.one_step import BlockSizes, Loss, Measured, fresh, tiled_of
from seqtile.verification.plain_autograd import without_recompute
from seqtile.verification.result import Difference, VerifyResult
from seqtile.verification.state import (
    kept,
    refuse_what_cannot_be_compared,
    tiled_for_comparison,
    without_tiling,
)

Truth = tuple[Mapping[str, Tensor | None], str | None]
"""Gradients in higher precision, by parameter, and their dtype."""

NO_TRUTH: Truth = ({}, None)

NON_REENTRANT = "the untiled run used non-reentrant checkpoints, the tiled one the model's reentrant ones"


def verify(
    model: nn.Module,
    batch: Mapping[str, Any] | Sequence[Any] | Tensor,
    *,
    tile: int | str | None = None,
    loss_fn: Loss | None = None,
    reference: str | None = "fp32",
    only: Only | None = None,
    seed: int = 0,
) -> VerifyResult:
    """Run ``model`` on ``batch`` untiled and tiled, forward and backward, and compare every gradient.

    Gradients, buffers, random state, training mode and an existing tiling are restored. The runs are in training mode,
    with the model's activation checkpointing (non-reentrant in the untiled run), and with dropout off, since each tile
    draws its own mask. For a model with dropout, two more runs have it on: the tiled one, and the same tiles under
    plain autograd, which draws the same masks and recomputes nothing. No optimizer step is taken.

    Args:
        model: a model in one process, not yet wrapped by an engine; tiled already or not.
        batch: passed as ``model(**batch)`` if it is a mapping, else as positional arguments. ``labels`` default to
            ``input_ids``.
        tile: as in :func:`seqtile.apply`; None verifies the tiling that is installed on the model, or else ``"auto"``.
        loss_fn: function of (model, batch) that returns a scalar; by default the ``loss`` of the model's output.
        reference: ``"fp32"``: the tolerance comes from a third, untiled run of a copy of the model in fp32 (in fp64 if
            the model is in fp32); None saves its memory and time and uses PyTorch's default tolerance of the dtype.
        only: as in :func:`seqtile.apply`.
        seed: seed of the random state that every run starts from.

    Returns:
        VerifyResult: ``ok=False`` for a wrong gradient, and for a batch that fits in one tile of every block; neither
        raises.

    Cost:
        Two or three forwards and backwards, with dropout two more, of which the last saves every intermediate of the
        blocks; as many sets of gradients in host memory; the fp32 copy.

    Raises:
        UserError: there is nothing to compare, or the comparison would change the model.
    """
    if reference not in ("fp32", None):
        raise UserError("verify.unknown-reference", f"got reference={reference!r}, expected 'fp32' or None")
    expect_module(model, "verify")
    if isinstance(batch, str) or not isinstance(batch, Mapping | Sequence | Tensor):
        raise UserError(
            "verify.batch-wrong-type",
            f"got a batch of type {type(batch).__name__}, expected a mapping such as {{'input_ids': ids}}, a sequence "
            "of arguments, or a tensor",
        )
    refuse_what_cannot_be_compared(model)
    notes: list[str] = []
    with kept(model, seed), without_tiling(model) as removed:
        if removed and only is not None and tile is None:
            raise UserError(
                "verify.only-without-tile",
                "only= needs tile= for a model that is already tiled; add tile=, or drop only=",
            )
        model.train()
        candidates = find_blocks(model, everything=True)[0]
        with non_reentrant(model) as was_reentrant:  # reentrant ones can lose gradients, so they are no reference
            truth = NO_TRUTH if reference is None else truth_of(model, batch, loss_fn, seed, notes)
            untiled = Measured(model, batch, loss_fn, seed)
        if was_reentrant:
            notes.append(NON_REENTRANT)
        tiling: AbstractContextManager[Any]
        if removed and tile is None:
            for module, attributes in removed:
                module.__dict__.update(attributes)
            tiling = nullcontext()
        else:
            tiling = tiled_for_comparison(model, tile="auto" if tile is None else tile, only=only)
        dropping: tuple[Measured, Measured] | None = None
        with tiling:
            tiled, blocks = Measured(model, batch, loss_fn, seed), tiled_of(model, candidates)
            if tiled.dropouts:
                again = Measured(model, batch, loss_fn, seed, dropout=True)
                with without_recompute(model):
                    dropping = Measured(model, batch, loss_fn, seed, dropout=True), again
        sizes = BlockSizes(model, blocks, candidates)
    return judged(model, untiled, tiled, dropping, truth, sizes, len(blocks), notes)


def judged(
    model: nn.Module,
    untiled: Measured,
    tiled: Measured,
    dropping: tuple[Measured, Measured] | None,
    truth: Truth,
    sizes: BlockSizes,
    blocks: int,
    notes: list[str],
) -> VerifyResult:
    """The verdict on two runs.

    Args:
        model: model whose parameters give the dtypes.
        untiled, tiled: the runs to compare, dropout off.
        dropping: runs with dropout on, of plain tiles and tiled; None without dropout.
        truth: gradients in higher precision and their dtype.
        sizes: weight sizes of the blocks.
        blocks: how many were tiled.
        notes: what is known so far.
    """
    # Other dtypes draw other random numbers, so the copy is no reference.
    true_gradients, precision = NO_TRUTH if untiled.drew_random_numbers else truth
    notes = [*notes, *_notes(untiled, tiled, sizes)]
    dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
    differences = [
        difference(name, untiled.gradients.get(name), tiled.gradients.get(name), true_gradients.get(name), dtype)
        for name in {**untiled.gradients, **tiled.gradients}
        for dtype in (dtypes.get(name, torch.float32),)
    ]
    errors = [each.untiled_error for each in differences if each.untiled_error is not None]
    if errors and median(errors) > 0.1:
        notes.append(f"the untiled run itself is off by {median(errors):.0%}, so the tiled one may be too")
    dropped = _with_dropout(dropping, differences, dtypes, notes)
    worst = max((*differences, *(each for each in dropped if severity(each) > 1)), key=severity)
    return VerifyResult(
        ok=severity(worst) <= 1 and (tiled.ran.cut > 0 or not tiled.ran.blocks),
        worst=worst,
        untiled=untiled.run(sizes),
        tiled=tiled.run(sizes),
        groups=groups(differences),
        parameters=tuple(differences),
        with_dropout=tuple(dropped),
        blocks=blocks,
        ran=tiled.ran,
        reference=precision,
        notes=tuple(notes),
    )


def truth_of(model: nn.Module, batch: Any, loss_fn: Loss | None, seed: int, notes: list[str]) -> Truth:
    """Gradients of an untiled copy in the next higher precision and its name; none, and a note, if it cannot run."""
    lowest = min(weight.element_size() for weight in model.parameters() if weight.is_floating_point())
    dtype = torch.float32 if lowest < 4 else torch.float64
    name = str(dtype).removeprefix("torch.")
    try:
        twin = copy.deepcopy(model).to(dtype=dtype)
        choose_experts = getattr(twin, "set_experts_implementation", None)
        if callable(choose_experts):
            choose_experts("eager")  # the grouped product does not support fp64
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            return Measured(twin, fresh(batch, dtype), loss_fn, seed).gradients, name
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        # Quantised weights do not cast, attention kernels may not take the dtype, a copy may not fit into memory.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        notes.append(f"no reference in {name} ({reason}); judged by PyTorch's default tolerances")
        return NO_TRUTH


def _with_dropout(
    runs: tuple[Measured, Measured] | None,
    without: Sequence[Difference],
    dtypes: Mapping[str, torch.dtype],
    notes: list[str],
) -> list[Difference]:
    """Differences of the tiled run from the plain tiles, both with dropout on; they may be as far apart as both runs
    without dropout may be from the truth together."""
    if runs is None:
        return []
    plain, tiled = runs
    places = f"dropout ({tiled.dropouts} places)"
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    lowest = min(dtypes.values(), key=lambda dtype: dtype.itemsize if dtype in floats else 8)
    apart = difference("loss", plain.gradients["loss"], tiled.gradients["loss"], None, lowest)
    if apart.score > 1:
        # Another operator may draw in another order, which is not an error.
        notes.append(f"{places} was off: with it, plain tiles draw other masks, which cannot be compared")
        return []
    notes.append(
        f"{places} was off in this comparison; with it on, tiles were compared with plain tiles, mask for mask"
    )
    untiled_errors = {each.name: each.untiled_error or 0.0 for each in without}
    return [
        difference(
            name, plain.gradients.get(name), tiled.gradients.get(name), None, dtypes.get(name, torch.float32),
            more=(1 + TIMES) * untiled_errors.get(name, 0.0), dropout=True,
        )
        for name in {**plain.gradients, **tiled.gradients}
    ]  # fmt: skip


def _notes(untiled: Measured, tiled: Measured, sizes: BlockSizes) -> list[str]:
    notes = []
    if untiled.drew_random_numbers:
        notes.append(
            "the model draws random numbers even with dropout off, so tiles may draw others and there is no reference"
        )
    if tiled.ran.blocks and not tiled.ran.cut:
        notes.append(f"nothing was compared: {tiled.ran}; use fewer tokens per tile, or a longer batch")
    if clash := sizes.clash(untiled.tokens):
        notes.append(f"no units per block: {clash}")
    return notes
