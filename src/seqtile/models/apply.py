"""Tile a model in place, undo it, or both around a ``with`` block."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from seqtile._compat import is_tiled_by_unsloth, untested
from seqtile._errors import UserError, expect_module
from seqtile.activation_checkpointing.policies import standing_checkpointing
from seqtile.devices import device_bytes
from seqtile.engines.granularity import refuse_wrapped
from seqtile.engines.zero3 import is_marked, mark_leaf, whole_shape
from seqtile.models.attention.headwise import find_for, install_heads
from seqtile.models.carried_state.state_layers import install_state
from seqtile.models.discover.candidates import LOOKED_FOR, Candidate, Left, chain_of, expected_mode, find_blocks
from seqtile.models.discover.chain import needed_words
from seqtile.models.discover.layer_parts import Neighbours
from seqtile.models.discover.proof import for_training, prove
from seqtile.models.instance import Installed, Setting, TiledForward, installed_forwards, logger
from seqtile.models.layer import TiledLayer, TiledPair
from seqtile.models.lm_loss.tiled_loss import standing_losses
from seqtile.models.loss_and_checkpoints import Rest, remove_rest
from seqtile.models.norms_and_projections import ROWS_AUTO, TiledRows, find_rows, tile_rows, words_for
from seqtile.models.report import Block, Report
from seqtile.options import WHOLE_LAYER, Only, TilingOptions
from seqtile.rules import Combination, check_combination
from seqtile.tiling import KeepRule, TileRule


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
) -> Report:
    """Run every position-wise block of ``model`` over tiles of tokens, in place.

    Each tiled instance gets a ``forward`` of its own that computes one tile at a time and recomputes it in backward;
    the model's numbers, gradients, parameter names and ``state_dict`` stay what they were. Works before or after
    adapters are added, and before an engine (DDP, FSDP, DeepSpeed) wraps the model. A second call replaces the first.

    Args:
        model: any ``nn.Module`` that holds position-wise blocks, on any device, the meta device included.
        tile: ``"auto"`` (deterministic; leaves a batch untiled where tiling would not lower a block's peak); an int,
            tokens per tile; ``"shards:N"``, N tiles; ``"arctic"``, ``ceil(tokens / hidden)`` tiles, the rule of
            arXiv 2506.13996; ``"memory:1GiB"``, the largest tile whose working set fits.
        only: the blocks to tile: a qualified name, a pattern (``"*.layers.0.*"``), several of them, or a predicate
            ``(name, module) -> bool``. Without it, every block outside vision and audio towers.
        trust: blocks to tile although nothing could be proven of them, named as for ``only``: their caller knows that
            they treat every token by itself and keep no state. The report names the blocks that this is about. A block
            that was seen to mix tokens is left alone all the same.
        blocks: ``"mlp+norm"``: the norm before the MLP runs in the tile too, so that no copy of the whole hidden
            states is made in its precision; ``"mlp"``: only what the tile needs; ``"auto"``: ``"mlp+norm"``. A norm
            or dropout after the MLP is in the tile in any case, since its input would be recomputed otherwise.
            ``"mlp+norm+projections"``: also the other norms of those layers and the one before the head, and
            attention's projections, each in tiles of its own. ``"none"``: no block, for ``loss``,
            ``checkpoint``, ``offload`` and ``heads`` alone.
        path: ``"auto"``: the fused operator where the block is an MLP of plain linear layers (LoRA included), decided
            at each call, else the generic one; ``"generic"``; or ``"fused"``, an error where it does not apply.
        keep: memory to spare for speed: the fraction of the tiles (0.0 to 1.0) that keep gate and up, 11 units down to
            9; ``"memory:4GiB"``, a total over all blocks; ``"auto"``, a quarter of the device memory that is free
            now, 0 where it cannot be read. Fused operator only. Frozen 4-bit weights are made dense once per block
            and pass; a number of bytes must hold one block's dense weights first, else they are made dense again for
            every product, one at a time.
        loss: ``"tiled"``: ``model(..., labels=labels)`` computes head and loss tile by tile in training and returns no
            logits (``return_logits=True`` asks for them); evaluation and ``generate`` stay as they were.
        loss_tile: tokens per tile of the head, or a rule as for ``tile``.
        loss_impl: ``"torch"``, ``"liger"``, ``"cce"`` or ``"auto"``, as :func:`seqtile.linear_cross_entropy` takes it.
        checkpoint: ``"attention-saved"``: activation checkpoints keep the attention kernel's output and log-sum-exp
            and compute only the rest again; ``"full"``: they keep the layer's input alone. Either switches activation
            checkpointing on; None leaves it as it is, and with ``offload`` means ``"full"``.
        offload: the layers' checkpointed inputs wait for the backward in host memory, with ``"attention-saved"``
            attention's output too; ``"memory:64GiB"`` bounds what they may take there; the layers beyond it keep theirs
            on the device.
        heads: key-value heads per pass: attention runs for that many, and the query heads that read them, at a time,
            forward and backward, with the norm and the projections before it in tiles of tokens. ``"auto"``: as few
            as keep a device busy at the length of the batch, all at once where that is all of them; None: attention
            is left alone. Attention modules of unknown form are left alone in any case and named in the report.
        state: tokens per tile of layers that carry a state along the sequence (linear attention, state-space layers,
            short convolutions), each tile handing its state to the next, the whole layer in it where it holds no
            attention; ``"auto"``: 2,048 over all rows of the batch; None: they run whole. A layer is tiled only if a
            trial of it, whole and in tiles, gives the same outputs and gradients; the report names the others.

    Returns:
        A :class:`Report`: what was tiled, what was left alone and why.

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
    )  # fmt: skip
    return apply_options(model, options)


def apply_options(model: nn.Module, options: TilingOptions) -> Report:
    """:func:`apply` with its arguments in a record."""
    rest, heads, only, trust = Rest(options), options.heads, options.only, options.trust
    check_combination(Combination(options))
    if not (options.tiled or options.beside_blocks):
        raise UserError("blocks='none' leaves nothing to do; give loss, checkpoint, offload, heads or state too")
    expect_module(model, "apply")
    refuse_wrapped(model)
    rest.check(model)
    attention, untouched = find_for(model, heads)
    if not options.tiled:
        with rest.replacing(model), replacing(model):
            done = install_heads(model, heads, attention, untouched), *rest.install(model)
            carried, kept = install_state(model, options.state)
        kept = [*untouched, *kept]
        return _finish(Report((), tuple(kept), 0, options.keep_rule(1), weakref.ref(model), *done, state=carried))
    refuse_tiled_by_unsloth(model)
    found, left = find_blocks(
        model,
        everything=only is not None,
        trusted=lambda name, module: trust is not None and _fits(trust, name, module),
    )
    found, left = _without_own(model, found, left)
    chosen = [block for block in found if only is None or _matches(only, block)]
    left += [Left(b.name, type(b.module).__name__, "not named in only=") for b in found if b not in chosen]
    for option, names in (("only", only), ("trust", trust)):
        if idle := [one for one in _words(names) if not any(_matches(one, block) for block in found)]:
            refused = next((one for one in left if any(fnmatchcase(one.name, word) for word in idle)), None)
            if refused is not None:
                raise UserError(
                    f"{option}={idle!r}: {refused.name} ({refused.class_name}) cannot be tiled: {refused.why}"
                )
            raise UserError(_nothing(model, found, left, f"{option}={idle!r}"))
    if not chosen and not any(one.unproven and not one.custom for one in left):
        raise UserError(_nothing(model, found, left, f"only={only!r}"))
    if not chosen:
        logger.warning("%s", _nothing(model, found, left, ""))
    rule, keeping = options.tile_rule, with_free_memory(options.keep_rule(len(chosen)), model, len(chosen))
    with rest.replacing(model), replacing(model):
        tiled = [_tile(model, block, rule, keeping, options.blocks != "mlp", options.path) for block in chosen]
        norms = [f"{one.layer}.{one.norm}".strip(".") for one in attention if one.norm]
        head_wise = [*(one.name for one in attention), *norms]
        rows = _tile_rows(model, chosen, rule, options, head_wise, whole=len(chosen) == len(found))
        done = install_heads(model, heads, attention, untouched), *rest.install(model)
        carried, kept = install_state(model, options.state)
    left += untouched + kept
    return _finish(Report(tuple(tiled), tuple(left), len(found), keeping, weakref.ref(model), *done, rows, carried))


def _tile_rows(
    model: nn.Module, chosen: list[Candidate], rule: TileRule, options: TilingOptions, besides: Sequence[str],
    whole: bool,
) -> str:  # fmt: skip
    """Tile what ``blocks=`` says of the rest of the layers, but not ``besides``; what that was, in words."""
    if options.blocks != WHOLE_LAYER:
        return ""
    rows = find_rows(model, chosen, besides, whole=whole)
    tile_rows(rows, ROWS_AUTO if rule.kind == "auto" else rule, options.path)
    return words_for(rows)


@functools.cache
def _warn_of_versions() -> None:
    if said := untested():
        logger.warning("%s", said)


def _finish(report: Report) -> Report:
    if logger.isEnabledFor(logging.WARNING):
        _warn_of_versions()
    logger.info("%s", report)
    return report


def refuse_tiled_by_unsloth(model: nn.Module) -> None:
    """Raise if Unsloth has tiled blocks of the model: its tiles would run inside ours, and every block once more.

    Raises:
        UserError: the forward of a module is Unsloth's tiled one.
    """
    if theirs := next((type(one).__name__ for one in model.modules() if is_tiled_by_unsloth(one)), ""):
        raise UserError(
            f"Unsloth's own tiled MLP runs {theirs} already: load the model with unsloth_tiled_mlp=False and without "
            "UNSLOTH_TILED_MLP, or leave this call out"
        )


def with_free_memory(keep: KeepRule, model: nn.Module, blocks: int) -> KeepRule:
    """``keep`` with a quarter of the free device memory read once, if it is ``"auto"``."""
    return KeepRule("auto", free_bytes(model) / 4 / blocks, blocks) if keep.kind == "auto" else keep


def _is_own(installed: Any) -> bool:
    """Whether :func:`seqtile.tile_module` put it there: another call of :func:`apply` leaves it."""
    return isinstance(installed, Installed) and installed.owner == "tile_module"


def _without_own(model: nn.Module, found: list[Candidate], left: list[Left]) -> tuple[list[Candidate], list[Left]]:
    own = [name for name, m in model.named_modules() if _is_own(m.__dict__.get("forward"))]
    inside = [block for block in found if any(f"{block.name}.".startswith(f"{name}.") for name in own)]
    left = left + [Left(b.name, type(b.module).__name__, "tiled by seqtile.tile_module") for b in inside]
    return [block for block in found if block not in inside], left


@contextmanager
def replacing(model: nn.Module, *, own: bool = False) -> Iterator[None]:
    """Take the tiled forwards off, and put them back if the ``with`` block raises :class:`UserError`.

    Args:
        model: what to tile again.
        own: also those of :func:`seqtile.tile_module`.
    """

    def standing() -> list[Installed]:
        return [one for one in installed_forwards(model) if own or not _is_own(one)]

    former = [(one, is_marked(one.module)) for one in standing()]
    for one, _ in former:
        one.remove()
    try:
        yield
    except UserError:
        for one in standing():
            one.remove()
        for one, was_marked in reversed(former):
            one.install()
            if was_marked:
                mark_leaf(one.module)
        raise


def undo(model: nn.Module) -> int:
    """Take every tiled ``forward`` off ``model`` and restore each attribute; returns how many blocks' came off."""
    expect_module(model, "undo")
    remove_rest(model)
    standing = installed_forwards(model)
    for one in standing:
        one.remove()
    blocks = [one for one in standing if not isinstance(one, TiledRows)]
    return sum(isinstance(one, TiledForward) or (isinstance(one, TiledLayer) and one.inline) for one in blocks)


def tiled_names(model: nn.Module) -> set[str]:
    """Qualified names that :func:`apply` gave the blocks it tiled, of those whose tiles still run."""
    return {one.setting.name for one in installed_forwards(model) if not _is_own(one)}


def carries(model: nn.Module) -> bool:
    """Whether anything of :func:`apply` is on ``model``: tiled blocks, the tiled loss, a checkpoint policy."""
    return bool(tiled_names(model) or standing_losses(model) or standing_checkpointing(model))


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


def _tile(model: nn.Module, found: Candidate, rule: TileRule, keep: KeepRule, norms: bool, path: str) -> Block:
    module, inline = found.module, found.in_layer
    near = found.neighbours if norms else replace(found.neighbours, before="")
    words = needed_words(module) if found.kind == "mlp" else []
    setting = Setting(
        rule, keep, path, found.hidden, found.intermediate, found.kind == "experts", found.name, found.layer,
        found.trusted,
    )  # fmt: skip
    own = None if inline else TiledForward(module, setting)
    standing: Installed | None = own
    layer = model.get_submodule(found.layer)
    joins = inline or (bool(found.name) and "forward" not in layer.__dict__ and found.proof is not None)
    near = near if joins else Neighbours(members=near.members)
    if joins and not inline and not needs_output(layer, near):
        near = replace(near, after="", dropout="")
    joins = inline or (joins and bool(near.before or needs_output(layer, near)))
    why, fused, not_fused, reason = _operator(model, found, layer, near if joins else Neighbours(members=near.members))
    if reason:
        raise UserError(f"{found.name}: {reason}; leave it out with only=")
    together = near.members
    if joins:
        kind = TiledPair if found.kind == "pair" else TiledLayer
        standing = kind(layer, setting, near, inline)
        standing.install()
        together = tuple(name for name in (near.before, *near.members, near.after, near.dropout, near.closing) if name)
    if own is not None:
        own.install()
    assert standing is not None
    standing.check()
    mark_leaf(standing.module)
    fused = fused and path != "generic"
    if path == "fused" and not fused:
        raise UserError(f"path='fused' does not apply to {found.name}: {not_fused}; use path='auto' or only=")
    weights = [weight for part in found.parts for weight in part.parameters()]
    sizes = [weight.element_size() for weight in weights if weight.is_floating_point()]
    x = torch.empty(0, dtype=torch.float32 if max(sizes, default=4) == 4 else torch.bfloat16, device="meta")
    shape = setting.shape(x, [weight for weight in weights if weight.requires_grad], fused)
    shape = replace(
        shape, device_type=weights[0].device.type if weights else "cpu",
        weight_numel=sum(whole_shape(weight).numel() for weight in weights if weight.requires_grad),
    )  # fmt: skip
    for one in (own, standing):
        if one is not None:
            one.falls_back = fused
    if rule.kind == "memory":
        try:
            rule.tokens_per_tile(0, shape)
        except ValueError as error:
            raise UserError(f"{found.name}: {error}") from None
    return Block(
        found.name, type(module).__name__, found.kind, "fused" if fused else "generic", found.hidden,
        found.intermediate, together, rule.describe(shape), why, not_fused,
        isinstance(standing, TiledLayer) and needs_output(layer, near),
        *words[1:2],
    )  # fmt: skip


def _operator(model: nn.Module, found: Candidate, layer: nn.Module, near: Neighbours) -> tuple[str, bool, str, str]:
    """(what proves the block with these neighbours, whether it is fused, why not, why it cannot be tiled)."""
    if found.proof is None:
        return found.why, False, "nothing is known of its formula", ""
    with for_training(model):
        chain = chain_of(layer, found, near)
        mode = expected_mode(chain, found.hidden)
        proof = found.proof if near == found.neighbours else prove(chain, mode, trusted=found.trusted)
    if proof.why_not or isinstance(proof.formula, str):
        return proof.how, False, str(proof.formula), proof.why_not
    weights = chain.weights(proof.formula, mode.inputs[0][1])
    if isinstance(weights, str) and not any(hasattr(p, "ds_shape") for part in found.parts for p in part.parameters()):
        return proof.how, False, weights, ""
    return proof.how, True, "", ""


def needs_output(layer: nn.Module, near: object) -> bool:
    """Whether what follows the block reads its output again in backward: a norm, or a dropout that drops."""
    after = getattr(near, "after", "")
    if getattr(near, "closing", ""):
        return True
    if after:
        follower = getattr(layer, after)
        return not isinstance(follower, nn.Identity) and getattr(follower, "p", 1.0) > 0.0
    share = getattr(near, "dropout", "")
    return bool(share) and float(getattr(layer, share)) > 0.0


def _words(only: Only | None) -> list[str]:
    """The names and patterns in ``only``."""
    if only is None or callable(only):
        return []
    return [only] if isinstance(only, str) else list(only)


def _matches(only: Only, block: Candidate) -> bool:
    return _fits(only, block.name, block.module)


def _fits(only: Only, name: str, module: nn.Module) -> bool:
    if callable(only):
        return bool(only(name, module))
    return any(name == one or fnmatchcase(name, one) for one in ([only] if isinstance(only, str) else only))


def _nothing(model: nn.Module, found: list[Candidate], left: list[Left], asked: str) -> str:
    name = type(model).__name__
    if found:
        seen = ", ".join(block.name for block in found[:3])
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return f"{asked} matches no block of {name}; its blocks are {seen}{more}: name one of these"
    seen = "; ".join(f"{one.name} ({one.class_name}): {one.why}" for one in left[:3])
    classes = ", ".join(sorted({type(module).__name__ for module in model.modules()})[:12])
    return (
        f"nothing to tile in {name}: looked for {LOOKED_FOR}; found "
        f"{seen or f'none among its modules ({classes})'}; pass a model with such blocks, name one with only= or "
        "leave MLPs whole: blocks='none' (plan: --tile none, train: --tiled-mlp false)"
    )
