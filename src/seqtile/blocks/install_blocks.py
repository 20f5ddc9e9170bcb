"""Position-wise blocks as a technique of :func:`seqtile.apply`: which are tiled, and what runs in their tiles."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from seqtile._compat import is_tiled_by_unsloth
from seqtile._errors import UserError
from seqtile._technique import Left, TechniqueResult
from seqtile.blocks.instance import (
    NO_EFFECT,
    ForwardsTechnique,
    Installed,
    Setting,
    TiledForward,
    idle_sentences,
    logger,
)
from seqtile.blocks.layer import TiledLayer, TiledPair
from seqtile.blocks.norms_and_projections import (
    ROWS_AUTO,
    KernelNorm,
    TiledRows,
    adapted_since,
    describe_rows,
    find_norms,
    find_rows,
    install_norms,
    tile_rows,
)
from seqtile.devices import device_bytes
from seqtile.engines.zero3 import mark_leaf, whole_shape
from seqtile.options import WHOLE_LAYER, Only, TilingOptions
from seqtile.recognise.candidates import LOOKED_FOR, Candidate, chain_of, expected_mode, find_blocks
from seqtile.recognise.chain import required_arguments
from seqtile.recognise.known_kernels import parts_by_liger
from seqtile.recognise.layer_parts import Neighbours
from seqtile.recognise.proof import for_training, prove
from seqtile.tiling import BlockShape, KeepRule


@dataclass(frozen=True)
class Block:
    """One tiled block.

    Attributes:
        name: qualified name.
        class_name: class of the module, or of the layer whose children are its parts.
        kind: ``"mlp"``, ``"experts"``, ``"inline"`` or ``"pair"`` (see
            :class:`seqtile.recognise.candidates.Candidate`), or ``"module"``, from :func:`seqtile.tile_module`.
        path: operator that runs it: ``"fused"`` or ``"generic"``.
        hidden: width of its input.
        intermediate: width of its widest tensor per token.
        together: children of the layer that run in the same tile, in order.
        tile: description of the tile rule.
        why: how it was proven to be position-wise.
        not_fused: why the fused operator does not apply, or "".
        follower: whether a norm or dropout after the block is in the tile.
        beside: name of the further required argument of its forward, or "".
    """

    name: str
    class_name: str
    kind: str
    path: str
    hidden: int
    intermediate: int
    together: tuple[str, ...]
    tile: str
    why: str
    not_fused: str
    follower: bool
    beside: str = ""


@dataclass(frozen=True)
class BlocksResult(TechniqueResult):
    """The tiled blocks, and a phrase on the norms and projections that are tiled separately.

    Attributes:
        blocks: the tiled blocks, in module order.
        found: number of blocks that were found, tiled or not.
        keep: rule for the tiles that keep gate and up.
    """

    blocks: tuple[Block, ...] = ()
    found: int = 0
    keep: KeepRule = KeepRule("share", 0.0, 1)


class BlocksTechnique(ForwardsTechnique):
    """``blocks`` and what belongs to it: ``tile``, ``only``, ``trust``, ``path`` and ``keep``."""

    name = "blocks"

    def check(self) -> None:
        refuse_tiled_by_unsloth(self.model)
        self._blocks, self._chosen, self._left = _choose_blocks(self.model, self.options)

    def install(self, inside: Collection[str]) -> BlocksResult:
        model, options, chosen = self.model, self.options, self._chosen
        count, whole = max(len(chosen), 1), len(chosen) == len(self._blocks)
        keep = with_free_memory(options.keep_rule(count), model, count)
        tiled = tuple([_tile(model, block, keep, options) for block in chosen])
        rows, left = "", self._left
        if options.blocks == WHOLE_LAYER:
            found_rows = find_rows(model, chosen, [*inside], whole=whole)
            tile_rows(found_rows, ROWS_AUTO if options.tile_rule.kind == "auto" else options.tile_rule, options.path)
            rows = describe_rows(found_rows)
        if options.blocks in ("auto", WHOLE_LAYER) and options.path != "generic":
            kernel_norms, left_norms = find_norms(model, chosen, self._trusted, whole=whole)
            # A separately tiled norm keeps its forward, and a norm that accelerate moves (device_map) keeps its hook.
            install_norms([norm for norm in kernel_norms if "forward" not in norm.module.__dict__], self._trusted)
            left = [*left, *left_norms]
        return BlocksResult(rows and f"{rows} tiled separately", left, tiled, len(self._blocks), keep)

    def _trusted(self, name: str, module: nn.Module) -> bool:
        return self.options.trust is not None and _matches(self.options.trust, name, module)

    @classmethod
    def with_earlier_settings(cls, model: nn.Module, options: TilingOptions) -> TilingOptions:
        if options.tiled:
            return options
        settings = [forward.setting for forward in cls.installed(model) if not isinstance(forward, TiledRows)]
        whole_layer = any(type(forward) is TiledRows for forward in cls.installed(model))
        keep = max((setting.keep.value for setting in settings if setting.keep.kind == "share"), default=0.0)
        return replace(options, blocks=WHOLE_LAYER if whole_layer else "auto", keep=keep)

    @classmethod
    def notes(cls, model: nn.Module) -> list[str]:
        notes = []
        if by_liger := parts_by_liger(model):
            notes.append(f"Liger's kernels run the {' and the '.join(by_liger)}")
        if adapted := adapted_since(model):
            notes.append(
                f"adapters were added to {adapted} projections after tiling, and run untiled; call seqtile.apply again"
            )
        return notes

    @classmethod
    def without_effect(cls, forwards: Sequence[Installed]) -> list[str]:
        rows = [forward for forward in forwards if isinstance(forward, TiledRows)]
        blocks = [forward for forward in forwards if forward not in rows]
        rows = [forward for forward in rows if not isinstance(forward, KernelNorm)]
        sentences = []
        if blocks:
            rule = blocks[0].setting.rule
            sentences += idle_sentences(f"tile={rule}", blocks, decides=rule.kind == "auto")
        if rows:
            rule = rows[0].setting.rule
            sentences += idle_sentences(f"blocks={WHOLE_LAYER!r}", rows, decides=rule.kind == "auto")
        return sentences + (_idle_fused(blocks) if any(block.acted for block in blocks) else [])


def _idle_fused(blocks: Sequence[Installed]) -> list[str]:
    """Sentences on ``keep`` and ``path``, which act on the fused operator alone."""
    sentences, keep = [], blocks[0].setting.keep
    why = "" if any(block.fused for block in blocks) else "the blocks run in the generic operator"
    if keep.kind != "auto" and keep.value and not any(block.kept for block in blocks):
        sentences.append(f"keep={keep} {NO_EFFECT}: {why or 'it holds gate and up of no tile'}")
    if blocks[0].setting.path == "fused" and why:
        sentences.append(f"path='fused' {NO_EFFECT}: {why}")
    return sentences


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
    by_owner = [
        f"{name}." for name, module in model.named_modules()
        if isinstance(forward := module.__dict__.get("forward"), Installed) and forward.owner == "tile_module"
    ]  # fmt: skip
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
                raise UserError(
                    "only.cannot-be-tiled",
                    f"{option}={unmatched!r} matches {module}, which cannot be tiled: {module.why}",
                )
        raise _nothing(model, blocks, left, f"{option}={unmatched!r}")
    if not chosen:
        nothing = _nothing(model, blocks, left, f"only={only!r}")
        if not any(module.unproven and not module.custom for module in left):
            raise nothing
        logger.warning("%s", nothing)
    return blocks, chosen, left


def refuse_tiled_by_unsloth(model: nn.Module) -> None:
    """Raise if Unsloth has tiled blocks of the model: its tiles would run inside ours, and every block once more.

    Raises:
        UserError: the forward of a module is Unsloth's tiled one.
    """
    if theirs := next((type(module).__name__ for module in model.modules() if is_tiled_by_unsloth(module)), ""):
        raise UserError(
            "unsloth.tiles-already",
            f"Unsloth's own tiled MLP already runs {theirs}; load the model with unsloth_tiled_mlp=False and "
            "without UNSLOTH_TILED_MLP, or drop this call",
        )


def with_free_memory(keep: KeepRule, model: nn.Module, blocks: int) -> KeepRule:
    """``keep="auto"`` with its memory, a quarter of what is free on the device now; any other rule unchanged."""
    return KeepRule("auto", free_bytes(model) / 4 / blocks, blocks) if keep.kind == "auto" else keep


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
    if not block.in_layer:  # also below a layer's forward, which falls back to it
        installed.append(TiledForward(module, setting))
    for forward in installed:
        forward.install()
        forward.falls_back = not not_fused and options.path != "generic"
    installed[0].check()
    mark_leaf(installed[0].module)
    fused = installed[0].falls_back
    if options.path == "fused" and not fused:
        raise UserError(
            "path.fused-unsupported",
            f"path='fused' does not support {block.name}: {not_fused}; use path='auto' or only=",
        )
    shape = _expected_shape(setting, block, fused)
    if rule.kind == "memory":
        try:
            rule.tokens_per_tile(0, shape)
        except ValueError as error:
            raise UserError("tile.memory-too-small", f"{block.name}: {error}") from None
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
    """Return (what proves the block with these neighbours, why the fused operator does not run it or "").

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
        raise UserError("blocks.unproven-with-neighbours", f"{block.name}: {proof.why_not}; exclude it with only=")
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


def _nothing(model: nn.Module, blocks: list[Candidate], left: list[Left], argument: str) -> UserError:
    name = type(model).__name__
    if blocks:
        first = ", ".join(block.name for block in blocks[:3])
        others = f" and {len(blocks) - 3} more" if len(blocks) > 3 else ""
        return UserError("only.no-match", f"{argument} matches no block of {name}; its blocks are {first}{others}")
    refusals = "; ".join(f"{module}: {module.why}" for module in left[:3])
    classes = ", ".join(sorted({type(module).__name__ for module in model.modules()})[:12])
    found = refusals or f"none among its modules ({classes})"
    return UserError(
        "blocks.nothing-to-tile",
        f"nothing to tile in {name}: looked for {LOOKED_FOR}; found {found}; name a block with only=, or use "
        "blocks='none' (plan: --tile none, train: --tiled-mlp false)",
    )
