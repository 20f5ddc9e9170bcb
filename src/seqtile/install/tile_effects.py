"""Warn after the first training forward of options of tiled forwards that had no effect in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from seqtile._effects import Watched, backbone_of
from seqtile.blocks.instance import Installed, installed_forwards
from seqtile.blocks.norms_and_projections import KernelNorm, TiledRows, follow_adapters
from seqtile.checkpointing.policies import find_checkpointed
from seqtile.chunks.segment import ChunkForward
from seqtile.headwise.install_heads import HeadWise
from seqtile.options import WHOLE_LAYER
from seqtile.state.tiled_state import StateForward

_EFFECTS_MARK = "_seqtile_effects"
_IDLE = "had no effect in the first training step"


class TileEffects(Watched):
    """Watches the tiled forwards of one model: blocks, ``keep`` and ``path``, ``heads``, ``state`` and ``chunk``."""

    looks_while_compiling = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.forwards = installed_forwards(module)  # other code may put its own in their places

    def install(self) -> None:
        self.module.__dict__[_EFFECTS_MARK] = self
        self.watch()

    def watch(self) -> None:
        super().watch()
        self._before = backbone_of(self.module).register_forward_pre_hook(self._follow_adapters)

    def unwatch(self) -> None:
        super().unwatch()
        self._before.remove()

    def remove(self) -> None:
        self.unwatch()
        self.module.__dict__.pop(_EFFECTS_MARK, None)

    def _follow_adapters(self, backbone: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not (backbone.training and torch.is_grad_enabled()):
            return
        if backbone is backbone_of(self.module):  # else a copy of it, with the copied hook
            self.forwards += follow_adapters(self.module)

    def without_effect(self) -> list[str]:
        blocks, rows, heads = list[Installed](), list[Installed](), list[Installed]()
        states, chunks = list[StateForward](), list[ChunkForward]()
        for forward in self.forwards:
            if forward.owner == "tile_module":
                continue
            if isinstance(forward, HeadWise):
                heads.append(forward)
            elif isinstance(forward, ChunkForward):
                chunks.append(forward)
            elif isinstance(forward, StateForward):
                states += [forward] if forward.state.runs else []
            elif isinstance(forward, TiledRows):
                rows += [] if isinstance(forward, KernelNorm) else [forward]
            elif hasattr(forward.setting, "rule"):  # not the layer around head-wise attention
                blocks.append(forward)
        sentences = []
        if blocks:
            rule = blocks[0].setting.rule
            sentences += _idle(f"tile={rule}", blocks, decides=rule.kind == "auto")
        if rows:
            rule = rows[0].setting.rule
            sentences += _idle(f"blocks={WHOLE_LAYER!r}", rows, decides=rule.kind == "auto")
        if heads:
            per_pass = heads[0].heads.per_pass  # type: ignore[attr-defined]
            sentences += _idle(f"heads={per_pass}", heads, decides=per_pass == "auto")
        if states:
            tile = states[0].state.tile
            sentences += _idle(f"state={tile}", states, decides=tile == "auto")
        if chunks:
            tokens = chunks[0].chunk.tokens
            sentences += _idle(f"chunk={tokens}", chunks, decides=tokens == "auto") or _idle_segment(chunks)
        if any(block.acted for block in blocks):
            sentences += _idle_fused(blocks)
        return sentences

    def notes(self) -> list[str]:
        return self.warnings()


def _idle(option: str, forwards: Sequence[Installed], *, decides: bool) -> list[str]:
    """One sentence if none of ``forwards`` ran in parts, and the option did not leave that to the length."""
    if any(forward.acted for forward in forwards):
        return []
    if reasons := dict.fromkeys(forward.idle_reason for forward in forwards if forward.idle_reason):
        return [f"{option} {_IDLE}: {'; '.join(reasons)}"]
    if not any(forward.called for forward in forwards):
        return [f"{option} {_IDLE}: no forward that it changed was called"]
    return [] if decides else [f"{option} {_IDLE}: the batch fits in one part"]


def _idle_segment(chunks: Sequence[ChunkForward]) -> list[str]:
    """A sentence if no layers shared their chunks although ``segment`` asks for it."""
    reasons = dict.fromkeys(forward.alone_reason for forward in chunks if forward.alone_reason)
    segment = chunks[0].chunk.segment
    if segment == 1 or not reasons or any(forward.together for forward in chunks):
        return []
    return [f"segment={segment} {_IDLE}: {'; '.join(reasons)}"]


def _idle_fused(blocks: Sequence[Installed]) -> list[str]:
    """Sentences on ``keep`` and ``path``, which act on the fused operator alone."""
    sentences, keep = [], blocks[0].setting.keep
    why = "" if any(block.fused for block in blocks) else "the blocks run in the generic operator"
    if keep.kind != "auto" and keep.value and not any(block.kept for block in blocks):
        sentences.append(f"keep={keep} {_IDLE}: {why or 'it holds gate and up of no tile'}")
    if blocks[0].setting.path == "fused" and why:
        sentences.append(f"path='fused' {_IDLE}: {why}")
    return sentences


def watch_tiles(model: nn.Module) -> None:
    """Watch the first training forward of each model of transformers in ``model``, or of ``model`` itself."""
    remove_tile_effects(model)
    for module in [module for _, module in find_checkpointed(model)] or [model]:
        if installed_forwards(module):
            TileEffects(module).install()


def tile_effects(model: nn.Module) -> list[TileEffects]:
    """What :func:`watch_tiles` put on the modules of ``model``."""
    return [module.__dict__[_EFFECTS_MARK] for module in model.modules() if _EFFECTS_MARK in module.__dict__]


def remove_tile_effects(model: nn.Module) -> None:
    """Stop watching."""
    for effects in tile_effects(model):
        effects.remove()
