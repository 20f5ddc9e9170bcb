"""Tile a model in place, undo it, or both around a ``with`` block."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from seqtile._compat import forward_pre_hooks_of, is_tiled_by_unsloth, untested
from seqtile._errors import UserError, expect_module
from seqtile.blocks.instance import Installed, Setting, TiledForward, installed_forwards, logger
from seqtile.blocks.layer import TiledLayer, TiledPair
from seqtile.blocks.norms_and_projections import (
    ROWS_AUTO,
    KernelNorm,
    TiledRows,
    find_norms,
    find_rows,
    install_norms,
    tile_rows,
    words_for,
)
from seqtile.checkpointing.policies import standing_checkpointing
from seqtile.chunks.install_chunks import install_chunks
from seqtile.chunks.segment import ChunkForward
from seqtile.devices import device_bytes
from seqtile.engines.granularity import refuse_wrapped
from seqtile.engines.zero3 import mark_leaf, whole_shape
from seqtile.headwise.install_heads import HeadLayer, HeadWise, find_for, install_heads
from seqtile.host_weights import standing_host_weights
from seqtile.install.loss_and_checkpoints import Rest, remove_rest
from seqtile.install.report import Block, Report
from seqtile.install.tile_effects import remove_tile_effects, watch_tiles
from seqtile.lm_loss.tiled_loss import standing_losses
from seqtile.options import WHOLE_LAYER, Only, TilingOptions
from seqtile.recognise.candidates import LOOKED_FOR, Candidate, Left, chain_of, expected_mode, find_blocks
from seqtile.recognise.chain import required_arguments
from seqtile.recognise.layer_parts import Neighbours
from seqtile.recognise.proof import for_training, prove
from seqtile.rules import Combination, check_combination
from seqtile.state.state_layers import install_state
from seqtile.state.tiled_state import StateForward
from seqtile.tiling import BlockShape, KeepRule


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
) -> Report:
    """Run every position-wise block of ``model`` over tiles of tokens, in place.

    Each tiled instance gets a ``forward`` of its own that computes one tile at a time and recomputes it in backward;
    the model's numbers, gradients, parameter names and ``state_dict`` stay what they were. Works before or after
    adapters are added, and before an engine (DDP, FSDP, DeepSpeed) wraps the model.

    A second call replaces what it asks for: the blocks (unless ``blocks="none"``), and each of ``loss``, ``checkpoint``
    with ``offload``, ``heads``, ``state`` and ``chunk`` that it gives. What it does not ask for stays, as does all of
    the first call if the second one is refused. :func:`fit` asks for everything; :func:`undo` takes everything off.

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
        loss_impl: ``"torch"``, ``"liger"``, ``"cce"`` or ``"auto"``, as :func:`seqtile.linear_cross_entropy` takes it.
        checkpoint: ``"layer"``: activation checkpoints save the layer's input only; ``"attention-saved"``: also the
            attention kernel's output and log-sum-exp, which the recompute then skips. Either switches activation
            checkpointing on; None, or ``"none"``, leaves it as it is, and with ``offload`` means ``"layer"``. The
            report has the bytes per token and layer; :func:`seqtile.fit` and ``seqtile plan`` check that they fit.
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
        chunk=chunk, segment=segment,
    )  # fmt: skip
    return apply_options(model, options)


def apply_options(model: nn.Module, options: TilingOptions, *, others_stay: bool = True) -> Report:
    """:func:`apply` with its arguments in a record.

    Args:
        model: as for :func:`apply`.
        options: its arguments.
        others_stay: whether parts that ``options`` do not ask for stay as an earlier call left them, or come off.
    """
    check_combination(Combination(options))
    if not options.tiled and not options.beside_blocks:
        raise UserError("blocks='none' leaves nothing to do; add loss, checkpoint, offload, heads, state or chunk")
    expect_module(model, "apply")
    refuse_wrapped(model)
    rest = Rest(options, others_stay)
    rest.check(model)
    lowest = ForwardOrder.lowest(options, others_stay)
    heads, state, chunk, segment = options.heads, options.state, options.chunk, options.segment
    for forward in installed_forwards(model) if others_stay else ():
        if isinstance(forward, ChunkForward) and not (heads or state or options.chunk):
            chunk, segment = forward.chunk.tokens, forward.chunk.segment
        elif options.chunk:
            continue
        elif isinstance(forward, HeadWise) and lowest <= ForwardOrder.HEADS:
            heads = heads or forward.heads.per_pass
        elif isinstance(forward, StateForward) and lowest <= ForwardOrder.STATE:
            state = state or forward.state.tile
    attention, left_attention = find_for(model, heads)
    blocks, chosen, left = list[Candidate](), list[Candidate](), list[Left]()
    if options.tiled:
        refuse_tiled_by_unsloth(model)
        blocks, chosen, left = _choose_blocks(model, options)
    count = max(len(chosen), 1)
    keep = with_free_memory(options.keep_rule(count), model, count)
    norms = [f"{module.layer}.{module.norm}".strip(".") for module in attention if module.norm]
    head_wise = [*(module.name for module in attention), *norms]
    with replacing(model, lowest, head_wise):
        tiled = tuple([_tile(model, block, keep, options) for block in chosen])
        rows, whole = "", len(chosen) == len(blocks)
        if options.blocks == WHOLE_LAYER:
            found_rows = find_rows(model, chosen, head_wise, whole=whole)
            tile_rows(found_rows, ROWS_AUTO if options.tile_rule.kind == "auto" else options.tile_rule, options.path)
            rows = words_for(found_rows)
        if options.blocks in ("auto", WHOLE_LAYER) and options.path != "generic":

            def trusted(name: str, module: nn.Module) -> bool:
                return options.trust is not None and _matches(options.trust, name, module)

            kernel_norms, left_norms = find_norms(model, chosen, trusted, whole=whole)
            # A separately tiled norm keeps those, and one that accelerate moves (device_map) its hook.
            install_norms([norm for norm in kernel_norms if "forward" not in norm.module.__dict__], trusted)
            left = [*left, *left_norms]
        done_to_heads = install_heads(model, heads, attention, left_attention)
        done_to_state, left_states = install_state(model, state)
        done_to_chunks, left_chunks = install_chunks(model, chunk, segment)
        loss, checkpointing = rest.install(model)
    watch_tiles(model)
    left = [*dict.fromkeys([*left, *left_attention, *left_states, *left_chunks])]  # a prediction head once
    report = Report(
        tiled, tuple(left), len(blocks), keep, weakref.ref(model), done_to_heads, loss, checkpointing, rows,
        "; ".join(filter(None, (done_to_state, done_to_chunks))),
    )  # fmt: skip
    if logger.isEnabledFor(logging.WARNING):
        _warn_of_versions()
    logger.info("%s", report)
    return report


class ForwardOrder(IntEnum):
    """The tiled forwards in the order in which they are put over each other."""

    BLOCKS, HEADS, STATE, CHUNKS, NOTHING = range(5)

    @classmethod
    def of(cls, forward: Installed) -> ForwardOrder:
        if isinstance(forward, ChunkForward):
            return cls.CHUNKS
        if isinstance(forward, StateForward):
            return cls.STATE
        return cls.HEADS if isinstance(forward, HeadWise | HeadLayer) else cls.BLOCKS

    @classmethod
    def lowest(cls, options: TilingOptions, others_stay: bool) -> ForwardOrder:
        """The lowest that ``options`` replace; those above it are installed again."""
        if options.tiled or not others_stay:
            return cls.BLOCKS
        if options.heads or options.chunk:  # chunks take the place of heads and state
            return cls.HEADS
        return cls.STATE if options.state else cls.NOTHING


def _choose_blocks(model: nn.Module, options: TilingOptions) -> tuple[list[Candidate], list[Candidate], list[Left]]:
    """All blocks, those to tile, and what is left alone.

    Raises:
        UserError: ``only`` or ``trust`` names nothing that can be tiled, or there is no block.
    """
    only, trust = options.only, options.trust
    blocks, left = find_blocks(
        model,
        everything=only is not None,
        trusted=lambda name, module: trust is not None and _matches(trust, name, module),
    )
    by_owner = [f"{name}." for name, module in model.named_modules() if _is_of_owner(module.__dict__.get("forward"))]
    if inside := [block for block in blocks if f"{block.name}.".startswith(tuple(by_owner))]:
        left += [Left(block.name, type(block.module).__name__, "tiled by seqtile.tile_module") for block in inside]
        blocks = [block for block in blocks if block not in inside]
    chosen = [block for block in blocks if only is None or _matches(only, block.name, block.module)]
    left += [Left(b.name, type(b.module).__name__, "not named in only=") for b in blocks if b not in chosen]
    for option, names in (("only", only), ("trust", trust)):
        patterns = [] if names is None or callable(names) else [names] if isinstance(names, str) else [*names]
        unmatched = [word for word in patterns if not any(_matches(word, b.name, b.module) for b in blocks)]
        if not unmatched:
            continue
        for module in left:
            if any(fnmatchcase(module.name, pattern) for pattern in unmatched):
                raise UserError(f"{option}={unmatched!r} matches {module}, which cannot be tiled: {module.why}")
        raise UserError(_nothing(model, blocks, left, f"{option}={unmatched!r}"))
    if not chosen:
        nothing = _nothing(model, blocks, left, f"only={only!r}")
        if not any(module.unproven and not module.custom for module in left):
            raise UserError(nothing)
        logger.warning("%s", nothing)
    return blocks, chosen, left


@functools.cache
def _warn_of_versions() -> None:
    if warning := untested():
        logger.warning("%s", warning)


def refuse_tiled_by_unsloth(model: nn.Module) -> None:
    """Raise if Unsloth has tiled blocks of the model: its tiles would run inside ours, and every block once more.

    Raises:
        UserError: the forward of a module is Unsloth's tiled one.
    """
    if theirs := next((type(module).__name__ for module in model.modules() if is_tiled_by_unsloth(module)), ""):
        raise UserError(
            f"Unsloth's own tiled MLP already runs {theirs}; load the model with unsloth_tiled_mlp=False and "
            "without UNSLOTH_TILED_MLP, or drop this call"
        )


def with_free_memory(keep: KeepRule, model: nn.Module, blocks: int) -> KeepRule:
    """``keep`` with a quarter of the free device memory read once, if it is ``"auto"``."""
    return KeepRule("auto", free_bytes(model) / 4 / blocks, blocks) if keep.kind == "auto" else keep


def _is_of_owner(forward: Any) -> bool:
    """Whether :func:`seqtile.tile_module` installed it, so that :func:`apply` leaves it."""
    return isinstance(forward, Installed) and forward.owner == "tile_module"


@contextmanager
def replacing(
    model: nn.Module,
    lowest: ForwardOrder = ForwardOrder.BLOCKS,
    head_wise: Sequence[str] = (),
    *,
    modules_too: bool = False,
) -> Iterator[None]:  # fmt: skip
    """Take tiled forwards off, and put them back if the ``with`` block raises.

    Args:
        model: what to tile again.
        lowest: those above it come off too.
        head_wise: names of modules that will run in head-wise attention, where no projection may have its own tiles.
        modules_too: also those of :func:`seqtile.tile_module`.
    """
    inside = {module for name in head_wise for module in model.get_submodule(name).modules()}

    def to_replace() -> list[Installed]:
        return [
            forward for forward in installed_forwards(model)
            if (modules_too or not _is_of_owner(forward))
            and (ForwardOrder.of(forward) >= lowest or (type(forward) is TiledRows and forward.module in inside))
        ]  # fmt: skip

    layers = [forward for forward in installed_forwards(model) if isinstance(forward, TiledLayer)]
    attentions = [layer.attention for layer in layers]
    removed = to_replace()
    changed = {forward.module for forward in removed}
    attributes = [(module, dict(module.__dict__), dict(forward_pre_hooks_of(module))) for module in changed]
    for forward in removed:
        forward.remove()
    if lowest <= ForwardOrder.HEADS:
        for layer in layers:
            layer.attention = None
    try:
        yield
    except BaseException:
        for forward in to_replace():
            forward.remove()
        for layer, attention in zip(layers, attentions, strict=True):
            layer.attention = attention
        for module, attributes_before, hooks in attributes:
            module.__dict__.update(attributes_before)
            forward_pre_hooks_of(module).clear()
            forward_pre_hooks_of(module).update(hooks)
        raise


def undo(model: nn.Module) -> int:
    """Take every tiled ``forward`` off ``model`` and restore each attribute; returns how many blocks' came off."""
    expect_module(model, "undo")
    remove_rest(model)
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
        if not _is_of_owner(forward) and not isinstance(forward, KernelNorm)
    }


def carries(model: nn.Module) -> bool:
    """Whether anything of :func:`apply` is on ``model``: tiled blocks, tiled loss, checkpoint policy, host weights."""
    standing = standing_losses(model) or standing_checkpointing(model) or standing_host_weights(model)
    return bool(tiled_names(model) or standing)


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


def free_bytes(model: nn.Module) -> int:
    """Free memory of the device that the model is on, 0 where it cannot be read."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return device_bytes(device)[0]


def _tile(model: nn.Module, block: Candidate, keep: KeepRule, options: TilingOptions) -> Block:
    module, layer, rule = block.module, model.get_submodule(block.layer), options.tile_rule
    setting = Setting(
        rule, keep, options.path, block.hidden, block.intermediate, block.kind == "experts", block.name, block.layer,
        block.trusted,
    )  # fmt: skip
    neighbours = _neighbours(block, layer, norms=options.blocks != "mlp")
    why, not_fused = _operator(model, block, layer, neighbours)
    arguments = required_arguments(module) if block.kind == "mlp" else []
    installed: list[Installed] = []
    together = neighbours.members
    if block.in_layer or neighbours != Neighbours(members=neighbours.members):
        layer_class = TiledPair if block.kind == "pair" else TiledLayer
        installed.append(layer_class(layer, setting, neighbours, block.in_layer))
        together = neighbours.names
    if not block.in_layer:  # also inside a layer's replacement, which falls back to it
        installed.append(TiledForward(module, setting))
    for forward in installed:
        forward.install()
        forward.falls_back = not not_fused and options.path != "generic"
    installed[0].check()
    mark_leaf(installed[0].module)
    fused = installed[0].falls_back
    if options.path == "fused" and not fused:
        raise UserError(f"path='fused' does not support {block.name}: {not_fused}; use path='auto' or only=")
    shape = _expected_shape(setting, block, fused)
    if rule.kind == "memory":
        try:
            rule.tokens_per_tile(0, shape)
        except ValueError as error:
            raise UserError(f"{block.name}: {error}") from None
    return Block(
        block.name, type(module).__name__, block.kind, "fused" if fused else "generic", block.hidden,
        block.intermediate, together, rule.describe(shape), why, not_fused,
        isinstance(installed[0], TiledLayer) and needs_output(layer, neighbours), *arguments[1:2],
    )  # fmt: skip


def _neighbours(block: Candidate, layer: nn.Module, *, norms: bool) -> Neighbours:
    """The neighbours in a block's tile: those it needs, and with ``norms`` the norm before it."""
    neighbours, alone = block.neighbours, Neighbours(members=block.neighbours.members)
    neighbours = neighbours if norms else replace(neighbours, before="")
    if block.in_layer:
        return neighbours
    if not block.name or "forward" in layer.__dict__ or block.proof is None:
        return alone
    if not needs_output(layer, neighbours):
        return replace(alone, before=neighbours.before)
    return neighbours


def _operator(model: nn.Module, block: Candidate, layer: nn.Module, neighbours: Neighbours) -> tuple[str, str]:
    """(what proves the block with these neighbours, why the fused operator does not run it or "").

    Raises:
        UserError: with these neighbours nothing is proven.
    """
    if block.proof is None:
        return block.why, "its formula is unknown"
    with for_training(model):
        chain = chain_of(layer, block, neighbours)
        mode = expected_mode(chain, block.hidden)
        proof = block.proof if neighbours == block.neighbours else prove(chain, mode, trusted=block.trusted)
    if proof.why_not:
        raise UserError(f"{block.name}: {proof.why_not}; exclude it with only=")
    if isinstance(proof.formula, str):
        return proof.how, proof.formula
    weights = proof.formula.weights(chain, mode.inputs[0][1])
    in_shards = any(hasattr(weight, "ds_shape") for module in block.parts for weight in module.parameters())
    return proof.how, weights if isinstance(weights, str) and not in_shards else ""


def _expected_shape(setting: Setting, block: Candidate, fused: bool) -> BlockShape:
    """The sizes that the tile rule will read in training, estimated from the block's weights."""
    weights = [weight for module in block.parts for weight in module.parameters()]
    trained = [weight for weight in weights if weight.requires_grad]
    itemsize = max([weight.element_size() for weight in weights if weight.is_floating_point()], default=4)
    x = torch.empty(0, dtype=torch.float32 if itemsize == 4 else torch.bfloat16, device="meta")
    return replace(
        setting.shape(x, trained, fused), device_type=weights[0].device.type if weights else "cpu",
        weight_numel=sum(whole_shape(weight).numel() for weight in trained),
    )  # fmt: skip


def needs_output(layer: nn.Module, neighbours: Neighbours) -> bool:
    """Whether the backward of the next module (a norm, an active dropout) reads the block's output."""
    if neighbours.closing:
        return True
    if neighbours.after:
        follower = getattr(layer, neighbours.after)
        return not isinstance(follower, nn.Identity) and getattr(follower, "p", 1.0) > 0.0
    return bool(neighbours.dropout) and float(getattr(layer, neighbours.dropout)) > 0.0


def _matches(only: Only, name: str, module: nn.Module) -> bool:
    if callable(only):
        return bool(only(name, module))
    patterns = [only] if isinstance(only, str) else only
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def _nothing(model: nn.Module, blocks: list[Candidate], left: list[Left], argument: str) -> str:
    name = type(model).__name__
    if blocks:
        first = ", ".join(block.name for block in blocks[:3])
        others = f" and {len(blocks) - 3} more" if len(blocks) > 3 else ""
        return f"{argument} matches no block of {name}; its blocks are {first}{others}"
    refusals = "; ".join(f"{module}: {module.why}" for module in left[:3])
    classes = ", ".join(sorted({type(module).__name__ for module in model.modules()})[:12])
    return (
        f"nothing to tile in {name}: looked for {LOOKED_FOR}; found "
        f"{refusals or f'none among its modules ({classes})'}; name a block with only=, or use blocks='none' (plan: "
        "--tile none, train: --tiled-mlp false)"
    )
