"""Unsloth's tiled-MLP options, run by seqtile.

Written from what Unsloth's options mean (``unsloth_zoo`` 2026.10); nothing of it is imported. Its "GB" are 2**30 bytes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase

from torch import nn

from seqtile._compat import CACHE_ARGUMENTS
from seqtile._errors import UserError
from seqtile.devices import available_host_bytes
from seqtile.install.apply import apply, free_bytes, replacing
from seqtile.install.module import tile_module
from seqtile.options import TilingOptions
from seqtile.recognise.candidates import find_blocks

_GIB = 2**30
_OPTIONS = (
    '"arctic", "target", "target:1", "target:1GB", "auto" or "shards:4"; "target:1:mlp,*.ffn" and "arctic::mlp" name '
    "modules too"
)
_OF_ATTENTION = {"attention_mask", "position_embeddings", "encoder_hidden_states", *CACHE_ARGUMENTS}


def patch_tiled_mlp(
    model: nn.Module, patch_options_str: str = "arctic", *, modules: Sequence[str | nn.Module] | None = None
) -> nn.Module:
    """Tile the MLPs of ``model``, in place: the line ``patch_tiled_mlp(model, "target:1")`` as it stands.

    Args:
        model: any model, before or after adapters, before an engine wraps it.
        patch_options_str: how long a tile is.

            * ``"arctic"`` (``"1"`` is the same): ``ceil(tokens / hidden)`` tiles, tokens counted over the whole batch.
            * ``"target:1"``, ``"target:1GB"``: the largest tile whose working set takes at most 1 GiB.
            * ``"target"``: half of the memory that is free now on the model's device, host memory for a CPU.
            * ``"auto"``: the rule of :func:`seqtile.apply`.
            * ``"shards:4"``: 4 tiles; one per token where there are fewer tokens.

            ``"target:1:mlp,*.ffn"`` is ``modules=["mlp", "*.ffn"]``, where one hit of one pattern is enough;
            ``"arctic::mlp"``, ``"arctic:1:mlp"`` and ``"target::mlp"`` name modules too.
        modules: what to tile: suffixes of qualified names, patterns with ``*`` or ``?`` (both without regard to case),
            or the modules themselves. Without it, every position-wise block outside vision and audio towers, whatever
            its name. A module that is no MLP of a known shape is tiled by :func:`seqtile.tile_module`.

    Returns:
        nn.Module: ``model``. What was tiled is logged by ``seqtile``, and :func:`seqtile.undo` takes it off.

    Raises:
        UserError: an option is wrong (a target that is no number too), nothing matches, a module mixes tokens or holds
            attention, or Unsloth has tiled the model already.
    """
    tile, named = _parse_option(patch_options_str, model)
    if named and modules is not None:
        raise UserError(f"patch_options_str={patch_options_str!r} and modules= both name modules; use one")
    targets = named if modules is None else list(modules)
    if not targets and modules is None:
        apply(model, tile=tile)
        return model
    chosen = _match_modules(model, targets, one_is_enough=bool(named))
    for name in chosen:
        taken = inspect.signature(type(model.get_submodule(name)).forward).parameters
        if mixing := sorted(_OF_ATTENTION & taken.keys()):
            raise UserError(
                f"modules= names {name}, which takes {mixing[0]}: attention mixes tokens; name MLPs instead"
            )

    def is_named(name: str, _: nn.Module) -> bool:
        """To name a module is to vouch for its code."""
        return any(f"{name}.".startswith(f"{target}.") for target in chosen)

    blocks = {block.name for block in find_blocks(model, everything=True, trusted=is_named)[0]}
    inside = [name for name in chosen if any(name != b and f"{name}.".startswith(f"{b}.") for b in blocks)]
    non_blocks = [name for name in chosen if name not in blocks and name not in inside]
    for name in non_blocks:
        if inner_block := next((block for block in sorted(blocks) if not name or block.startswith(f"{name}.")), None):
            raise UserError(
                f"modules= names {name or 'the whole model'}, which is more than an MLP; name {inner_block} instead"
            )
    with ExitStack() as undo_on_error:  # a module that is refused leaves the others as they were
        for name in non_blocks:
            if not any(outer != name and name.startswith(f"{outer}.") for outer in non_blocks):
                module = model.get_submodule(name)
                undo_on_error.enter_context(replacing(module, modules_too=True))
                tile_module(module, tile=tile)
        if chosen_blocks := [name for name in chosen if name in blocks]:
            apply(model, tile=tile, only=chosen_blocks, trust=chosen_blocks)
    return model


def patch_mlp(
    mlp_module: nn.Module,
    target_arctic: bool | None = None,
    target_gb: float | None = None,
    *,
    num_shards: int | None = None,
) -> nn.Module:
    """Tile one MLP, in place.

    Args:
        mlp_module: maps ``[..., tokens, hidden]`` to tokens in the same order, each by itself.
        target_arctic: True, or nothing given at all: ``ceil(tokens / hidden)`` tiles. False without ``target_gb``: the
            target is half of the free memory.
        target_gb: GiB that one tile's working set may take. The intermediate size is read from the weights.
        num_shards: this many tiles, one per token where there are fewer tokens.

    Returns:
        ``mlp_module``.

    Raises:
        UserError: two of them are given, a value is wrong, or the module mixes tokens.
    """
    sizes = [name for name, on in (
        ("target_arctic=True", target_arctic is True), (f"target_gb={target_gb!r}", target_gb is not None),
        (f"num_shards={num_shards!r}", num_shards is not None),
    ) if on]  # fmt: skip
    if len(sizes) > 1:
        raise UserError(f"{' and '.join(sizes)} each set the tile size; use one")
    if num_shards is not None:
        tile = f"shards:{num_shards}"
    elif target_gb is not None:
        tile = f"memory:{_parse_gb(f'target_gb={target_gb!r}', str(target_gb))}"
    else:
        tile, _ = _parse_option("target" if target_arctic is False else "arctic", mlp_module)
    tile_module(mlp_module, tile=tile)
    return mlp_module


def _parse_option(option: str, model: nn.Module) -> tuple[str, list[str]]:
    """Parse an option string into a rule of :func:`seqtile.apply` and names of modules."""
    word, *values = option.strip().split(":")
    word = word.lower()
    if word == "shards" and len(values) == 1:
        TilingOptions(tile=option)
        return option, []
    named = [name for name in values[1].split(",") if name] if len(values) == 2 else []
    if word in ("arctic", "1", "target") and len(values) == 2 and not named:
        raise UserError(f"patch_options_str={option!r} has no module after its last colon, expected {_OPTIONS}")
    if word == "auto" and not values:
        return "auto", []
    if word in ("arctic", "1") and (not values or len(values) == 2 and values[0] in ("", "1")):
        return "arctic", named
    if word == "target" and len(values) <= 2:
        if values and values[0]:
            return f"memory:{_parse_gb(f'patch_options_str={option!r}', values[0])}", named
        free = free_bytes(model) or available_host_bytes()
        if not free:
            raise UserError(
                '"target" needs the free memory, which this device does not report; use a size such as "target:4"'
            )
        return f"memory:{free // 2}", named
    raise UserError(f"got patch_options_str={option!r}, expected {_OPTIONS}")


def _parse_gb(argument: str, text: str) -> int:
    """Bytes of a memory in GB; ``argument`` is what an error quotes."""
    number = text.strip().lower().removesuffix("gib").removesuffix("gb")
    try:
        size = float(number) * _GIB
    except ValueError:
        size = math.nan
    if not 1 <= size < math.inf:
        raise UserError(f"got {argument}, expected GB above 0")
    return int(size)


def _match_modules(model: nn.Module, targets: Sequence[str | nn.Module], one_is_enough: bool) -> list[str]:
    """Qualified names of the targets; raise if one matches nothing, or with ``one_is_enough`` if none matches."""
    names = [name for name, _ in model.named_modules()]
    chosen: list[str] = []
    for target in targets:
        if isinstance(target, nn.Module):
            hits = [name for name, module in model.named_modules() if module is target]
        elif "*" in target or "?" in target:
            hits = [name for name in names if fnmatchcase(name.lower(), target.lower())]
        else:
            hits = [name for name in names if name and name.lower().endswith(target.lower())]
        if not hits and (not one_is_enough or (not chosen and target is targets[-1])):
            what = (
                f"a {type(target).__name__} that is not in the model" if isinstance(target, nn.Module) else repr(target)
            )
            some = ", ".join(names[1:6])
            raise UserError(f"modules= contains {what}, which matches no module; module names look like {some}")
        chosen += [name for name in hits if name not in chosen]
    if not chosen:
        raise UserError("modules=[] names nothing to tile; drop it to tile every MLP")
    return chosen
