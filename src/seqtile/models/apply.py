"""Tile a model in place, undo it, or both around a ``with`` block."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import nn

from seqtile._errors import UserError
from seqtile.models.find import LOOKED_FOR, Candidate, Left, find_blocks
from seqtile.models.instance import Installed, TiledForward, logger
from seqtile.models.layer import TiledLayer
from seqtile.models.report import Block, Report
from seqtile.tiling import BlockShape, TileRule, parse_tile

Only = str | Sequence[str] | Callable[[str, nn.Module], bool]


def apply(model: nn.Module, *, tile: int | str = "auto", only: Only | None = None) -> Report:
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

    Returns:
        A :class:`Report`: what was tiled, what was left alone and why.

    Cost:
        Matrix products per MLP in units of 2 * tokens * hidden * intermediate: 11 with or without a non-reentrant
        activation checkpoint around the layer (untiled 9 and 11), 8 with frozen weights (untiled 6 and 8). Memory:
        one tile's intermediates instead of the whole batch's.

    Raises:
        UserError: the tile rule is wrong, or nothing was found to tile.
    """
    try:
        rule = parse_tile(tile)
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from None
    undo(model)
    found, left = find_blocks(model, everything=only is not None)
    chosen = [block for block in found if only is None or _matches(only, block)]
    left += [Left(b.name, type(b.module).__name__, "not named in only=") for b in found if b not in chosen]
    if not chosen:
        raise UserError(_nothing(model, found, left, only))
    blocks = [_tile(model, candidate, rule) for candidate in chosen]
    report = Report(tuple(blocks), tuple(left), len(found), weakref.ref(model))
    logger.info("%s", report)
    return report


def undo(model: nn.Module) -> int:
    """Take every tiled ``forward`` off ``model`` and restore each attribute; returns how many came off."""
    installed = [module.__dict__.get("forward") for module in model.modules()]
    standing = [one for one in installed if isinstance(one, Installed)]
    for one in standing:
        one.remove()
    return sum(isinstance(one, TiledForward) or (isinstance(one, TiledLayer) and one.inline) for one in standing)


@contextmanager
def applied(model: nn.Module, *, tile: int | str = "auto", only: Only | None = None) -> Iterator[Report]:
    """:func:`apply` for the length of a ``with`` block, then :func:`undo`; also when the block raises."""
    report = apply(model, tile=tile, only=only)
    try:
        yield report
    finally:
        undo(model)


def _tile(model: nn.Module, found: Candidate, rule: TileRule) -> Block:
    module, near = found.module, found.neighbours
    shape = _shape(found)
    if rule.kind == "memory":
        try:
            rule.tokens_per_tile(0, shape)
        except ValueError as error:
            raise UserError(f"{found.name}: {error}") from None
    together = near.members
    if found.kind == "inline":
        TiledLayer(module, rule, found.hidden, found.intermediate, near, True).install()
        together = tuple(name for name in (*near.members, near.after, near.dropout) if name)
    else:
        TiledForward(module, rule, found.hidden, found.intermediate).install()
        layer = model.get_submodule(found.layer)
        if found.name and needs_output(layer, near) and "forward" not in layer.__dict__:
            TiledLayer(layer, rule, found.hidden, found.intermediate, near, False).install()
            together = tuple(name for name in (*near.members, near.after, near.dropout) if name)
    return Block(
        found.name, type(module).__name__, found.kind, "generic", found.hidden, found.intermediate, together,
        rule.describe(shape), found.why,
    )  # fmt: skip


def needs_output(layer: nn.Module, near: object) -> bool:
    """Whether what follows the block reads its output again in backward: a norm, or a dropout that drops."""
    after = getattr(near, "after", "")
    if after:
        follower = getattr(layer, after)
        return not isinstance(follower, nn.Identity) and getattr(follower, "p", 1.0) > 0.0
    share = getattr(near, "dropout", "")
    return bool(share) and float(getattr(layer, share)) > 0.0


def _shape(found: Candidate) -> BlockShape:
    weights = list(found.module.parameters())
    trains = [weight for weight in weights if weight.requires_grad]
    sizes = [weight.element_size() for weight in weights if weight.is_floating_point()]
    return BlockShape(
        hidden=found.hidden,
        intermediate=found.intermediate,
        itemsize=max(sizes, default=4),
        weight_numel=sum(weight.numel() for weight in trains),
        weight_itemsize=min((weight.element_size() for weight in trains), default=4),
        device_type=weights[0].device.type if weights else "cpu",
    )


def _matches(only: Only, block: Candidate) -> bool:
    if isinstance(only, str):
        return block.name == only or fnmatchcase(block.name, only)
    if callable(only):
        return bool(only(block.name, block.module))
    return any(block.name == one or fnmatchcase(block.name, one) for one in only)


def _nothing(model: nn.Module, found: list[Candidate], left: list[Left], only: Only | None) -> str:
    name = type(model).__name__
    if found:
        seen = ", ".join(block.name for block in found[:3])
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return f"only={only!r} matches no block of {name}; its blocks are {seen}{more}: name one of these"
    seen = "; ".join(f"{one.name} ({one.class_name}): {one.why}" for one in left[:3])
    classes = ", ".join(sorted({type(module).__name__ for module in model.modules()})[:12])
    return (
        f"nothing to tile in {name}: looked for {LOOKED_FOR}; found "
        f"{seen or f'none among its modules ({classes})'}; pass a model with such blocks or name one with only="
    )
