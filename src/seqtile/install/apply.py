"""Tile a model in place, undo it, or both around a ``with`` block."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from seqtile._compat import untested
from seqtile._errors import UserError, expect_module
from seqtile._technique import Technique
from seqtile.blocks.instance import TiledForward, installed_forwards, logger
from seqtile.blocks.layer import TiledLayer
from seqtile.blocks.norms_and_projections import KernelNorm, TiledRows
from seqtile.engines.granularity import refuse_wrapped
from seqtile.install.attribute_snapshot import AttributeSnapshot
from seqtile.install.report import Report
from seqtile.install.techniques import EXCLUDES, NOTHING_REPLACED, known_techniques, order_of, wanted_techniques
from seqtile.install.tile_effects import remove_tile_effects, watch_tiles
from seqtile.options import Only, TilingOptions
from seqtile.rules import Combination, check_combination


def apply(
    model: nn.Module,
    *,
    tile: int | str = "auto",
    only: Only | None = None,
    trust: Only | None = None,
    blocks: str = "auto",
    path: str = "auto",
    keep: float | str = 0.0,
    loss: str | None = None,
    loss_tile: int | str = "auto",
    loss_impl: str = "torch",
    checkpoint: str | None = None,
    offload: bool | str = False,
    heads: int | str | None = None,
    state: int | str | None = None,
    chunk: int | str | None = None,
    segment: int = 1,
    vision: int | str | None = None,
) -> Report:
    """Run every position-wise block of ``model`` over tiles of tokens, in place.

    Each tiled instance gets a ``forward`` of its own that computes one tile at a time and recomputes it in backward;
    the model's numbers, gradients, parameter names and ``state_dict`` stay what they were. Works before or after
    adapters are added, and before an engine (DDP, FSDP, DeepSpeed) wraps the model.

    A second call replaces what it asks for: the blocks (unless ``blocks="none"``), and each of ``loss``, ``checkpoint``
    with ``offload``, ``heads``, ``state``, ``chunk`` and ``vision`` that it gives. What it does not ask for stays, but
    for ``heads`` and ``state``, whose place ``chunk`` takes, and the other way round. It is refused where one call for
    both would be, and then changes nothing. :func:`fit` asks for everything; :func:`undo` takes everything off.

    Args:
        model: any ``nn.Module`` with position-wise blocks, on any device, the meta device included.
        tile: ``"auto"`` (deterministic; leaves a batch untiled where tiling would not lower a block's peak); an int,
            tokens per tile; ``"shards:N"``, N tiles; ``"arctic"``, ``ceil(tokens / hidden)`` tiles, the rule of
            arXiv 2506.13996; ``"memory:1GiB"``, the largest tile whose working set fits.
        only: the blocks to tile: a qualified name, a pattern (``"*.layers.0.*"``), several of them, or a predicate
            ``(name, module) -> bool``. Without it, every block outside vision and audio towers and
            multi-token-prediction heads.
        trust: blocks to tile although they cannot be traced, named as for ``only``; the caller guarantees that they
            are position-wise and keep no state. The report names such blocks. A block whose trace mixes tokens is
            never tiled.
        blocks: ``"mlp+norm"``: the norm before the MLP runs in the MLP's tile, which avoids an fp32 copy of all hidden
            states; ``"mlp"``: the MLP only; ``"auto"``: ``"mlp+norm"``, and on accelerators the other norms (before
            attention, of queries and keys, before the head) run as one kernel each, if their formula is known and no
            other library's kernel runs them. A norm or dropout after the MLP is always in its tile, since its input
            would be recomputed otherwise. ``"mlp+norm+projections"``: also the other norms of those layers, the one
            before the head, and attention's projections, each tiled separately. ``"none"``: no block, for ``loss``,
            ``checkpoint``, ``offload`` and ``heads`` alone.
        path: ``"auto"``: the fused operator for MLPs of plain linear layers (LoRA included), decided at each call, else
            the generic one; ``"generic"``; or ``"fused"``, which raises where it is not supported.
        keep: spends memory for speed: the fraction of the tiles (0.0 to 1.0) whose gate and up are saved, 11 units down
            to 9; ``"memory:4GiB"``, a total over all blocks; ``"auto"``, a quarter of the device memory that is free
            now, 0 where it cannot be read. Fused operator only. Frozen 4-bit weights are dequantized once per block
            and pass; a number of bytes must cover one block's dequantized weights first, else they are dequantized
            for every product, one at a time.
        loss: ``"tiled"``: ``model(..., labels=labels)`` computes head and loss tile by tile in training and returns no
            logits (unless ``return_logits=True``); evaluation and ``generate`` are not changed.
        loss_tile: tokens per tile of the head, or a rule as for ``tile``.
        loss_impl: ``"torch"``, ``"liger"``, ``"cce"``, ``"quack"`` or ``"auto"``, as
            :func:`seqtile.linear_cross_entropy` takes it.
        checkpoint: ``"layer"``: activation checkpoints save the layer's input only; ``"attention-saved"``: also the
            attention kernel's output and log-sum-exp, which the recompute then skips. Either switches activation
            checkpointing on; None, or ``"none"``, leaves it as it is, and with ``offload`` means ``"layer"``. By layer,
            from the last one on, whose backward comes first: ``"none:4+attention-saved:20"`` runs the last 4 decoder
            layers without checkpoints, the 20 before them with attention's output saved, and all others as
            ``"layer"``; the last word may be without a number, for all layers that are left. The report has the bytes
            per token and layer; :func:`seqtile.fit` and ``seqtile plan`` check that they fit.
        offload: True, or ``"checkpoints"``: the layers' checkpointed inputs wait for the backward in host memory, with
            ``"attention-saved"`` attention's output too; ``"64GB"`` limits what they may take there; the layers beyond
            it keep theirs on the device. ``"weights"``: the frozen weights of decoder layers wait in pinned host
            memory, and each layer's are copied to the device while the one before it computes; for adapters (LoRA and
            others, added before or after) on one CUDA device, with 16-bit or 4-bit weights. Both:
            ``"checkpoints+weights"`` or ``"64GB+weights"``.
        heads: key-value heads per pass: attention runs for that many, and the query heads that read them, at a time,
            forward and backward, with the norm and the projections before it in tiles of tokens. ``"auto"``: as few
            as keep the device busy at the length of the batch; None: attention is not changed. The report names
            attention modules that are not supported.
        state: tokens per tile of layers that carry a state along the sequence (linear attention, state-space layers,
            short convolutions); each tile passes its state to the next, and a layer without attention runs in tiles as
            a whole. ``"auto"``: 2,048 over all sequences of the batch; None: not tiled. A layer is tiled only if a
            trial, untiled and in tiles, gives the same outputs and gradients; the report names the others.
        chunk: tokens of each row per chunk of the decoder layers: each layer runs, forward and backward, on one chunk
            after another, which hand keys, values and states on, so that everything inside a layer is bounded by the
            chunk. Works with any attention of Transformers that is causal. ``"auto"``: 8,192 over all rows of the
            batch; from 65 on rounded up to a multiple of 64; None: layers run whole. A layer whose trial differs runs
            whole, and a warning names it. MLPs of a known formula run in tiles of the chunk.
        segment: decoder layers that run on a chunk together. The input of a segment is kept instead of each layer's,
            and keys, values and states of its layers; one chunk's activations in all of them are alive in its
            backward. Needs ``chunk``; acts as 1 under engines that free a layer's weights (FSDP, ZeRO-3).
        vision: frames (two of a video count as one where the tower joins them) or pictures per group of the vision
            tower, which runs from pixels to image tokens on one group after another, each recomputed in backward; of a
            frozen tower only the features are kept. ``"auto"``: as many as have 2,048 patches, at least one; None: the
            tower runs whole. A trial at the first call decides whether frames, or whole videos,
            see each other; a warning names a tower that runs whole.

    Returns:
        Report: what was tiled, what was not, and why.

    Cost:
        Matrix products per MLP in units of 2 * tokens * hidden * intermediate: 11 with or without a non-reentrant
        activation checkpoint around the layer (untiled 9 and 11), 8 with frozen weights (untiled 6 and 8). Memory:
        one tile's intermediates instead of the whole batch's. Head and loss: 3 units of 2 * tokens * hidden *
        vocabulary, as untiled; one tile of logits instead of the whole batch's.

    Raises:
        UserError: an argument is wrong, or nothing was found to tile.
    """
    options = TilingOptions(
        tile=tile, only=only, trust=trust, blocks=blocks, path=path, keep=keep, loss=loss, loss_tile=loss_tile,
        loss_impl=loss_impl, checkpoint=checkpoint, offload=offload, heads=heads, state=state,
        chunk=chunk, segment=segment, vision=vision,
    )  # fmt: skip
    return apply_options(model, options)


def apply_options(model: nn.Module, options: TilingOptions, *, others_stay: bool = True) -> Report:
    """:func:`apply` with its arguments in a record.

    Args:
        model: as for :func:`apply`.
        options: its arguments.
        others_stay: whether techniques that ``options`` do not ask for stay as an earlier call left them, or come off.
    """
    check_combination(Combination(options))
    wanted = wanted_techniques(options)
    if not wanted:
        techniques = "loss, checkpoint, offload, heads, state, chunk or vision"
        raise UserError("blocks.nothing-to-do", f"blocks='none' leaves nothing to do; add {techniques}")
    expect_module(model, "apply")
    refuse_wrapped(model)
    installed = [technique for technique in known_techniques() if technique.installed(model)]
    excluded = {name for technique in wanted for name in EXCLUDES.get(technique.name, ())}
    replaced = [
        technique for technique in {*wanted, *installed}
        if technique.on_forwards and (technique in wanted or technique.name in excluded or not others_stay)
    ]  # fmt: skip
    lowest = min(map(order_of, replaced), default=NOTHING_REPLACED)
    removed = [technique for technique in installed if technique.on_forwards and order_of(technique) >= lowest]
    stays = [t for t in installed if others_stay and t not in wanted and t.name not in excluded]
    _check_with_earlier_settings(model, options, stays)
    reinstalled = [technique for technique in removed if technique in stays]
    for technique in installed if others_stay else ():
        if technique in wanted or technique in reinstalled:
            options = technique.with_earlier_settings(model, options)
    uses = [technique(model, options) for technique in sorted([*wanted, *reinstalled], key=order_of)]
    for use in uses:
        use.check()
    inside = [name for use in uses for name in use.inside]
    with _restored_on_failure(model):
        for technique in reversed(removed):
            technique.remove(model)
        done = {use.name: use.install(inside) for use in uses}
    for technique in installed:
        if not others_stay and not technique.on_forwards and technique not in wanted:
            technique.remove(model)
    watch_tiles(model)
    report = Report.of(model, done)
    if logger.isEnabledFor(logging.WARNING):
        _warn_of_versions()
    logger.info("%s", report)
    return report


def _check_with_earlier_settings(model: nn.Module, options: TilingOptions, stays: Iterable[type[Technique]]) -> None:
    """Refuse what one call would refuse, where an earlier call did a part of it."""
    for technique in stays:
        options = technique.with_earlier_settings(model, options)
    check_combination(Combination(options))


@contextmanager
def _restored_on_failure(model: nn.Module) -> Iterator[None]:
    """Restore the attributes and hooks of ``model`` if the ``with`` block raises."""
    snapshot = AttributeSnapshot(model)
    try:
        yield
    except BaseException:
        snapshot.changed().undo()
        raise


@functools.cache
def _warn_of_versions() -> None:
    if warning := untested():
        logger.warning("%s", warning)


@contextmanager
def replacing_all(model: nn.Module) -> Iterator[None]:
    """Take every tiled forward off, and put them back if the ``with`` block raises."""
    with _restored_on_failure(model):
        for forward in installed_forwards(model):
            forward.remove()
        yield


def undo(model: nn.Module) -> int:
    """Take every tiled ``forward`` off ``model`` and restore each attribute; returns how many blocks' came off."""
    expect_module(model, "undo")
    return take_off(model)


def take_off(model: nn.Module, *, leave: str = "") -> int:
    """:func:`undo`, but for the technique of the name ``leave``."""
    for technique in reversed(known_techniques()):
        if not technique.on_forwards and technique.name != leave:
            technique.remove(model)
    remove_tile_effects(model)
    blocks = 0
    for forward in installed_forwards(model):
        forward.remove()
        is_block = isinstance(forward, TiledForward) and not isinstance(forward, TiledRows)
        blocks += is_block or (isinstance(forward, TiledLayer) and forward.inline)
    return blocks


def tiled_names(model: nn.Module) -> set[str]:
    """Qualified names that :func:`apply` gave the blocks it tiled, of those whose tiles still run."""
    return {
        forward.setting.name
        for forward in installed_forwards(model)
        if forward.owner == "apply" and not isinstance(forward, KernelNorm)
    }


def carries(model: nn.Module) -> bool:
    """Whether anything of :func:`apply` is on ``model``, but for norms that run by their kernel."""
    others = [technique for technique in known_techniques() if not technique.on_forwards]
    return bool(tiled_names(model)) or any(technique.installed(model) for technique in others)


@contextmanager
def applied(model: nn.Module, **settings: Any) -> Iterator[Report]:
    """:func:`apply` for the length of a ``with`` block, then :func:`undo`; also when the block raises.

    Args:
        model: as for :func:`apply`.
        **settings: keyword arguments of :func:`apply`.
    """
    report = apply(model, **settings)
    try:
        yield report
    finally:
        undo(model)
