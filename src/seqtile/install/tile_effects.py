"""Warn after the first training forward of options of tiled forwards that had no effect in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from seqtile._effects import Watched, backbone_of, find_checkpointed
from seqtile.blocks.instance import installed_forwards
from seqtile.blocks.norms_and_projections import follow_adapters
from seqtile.install.techniques import known_techniques

_EFFECTS_MARK = "_seqtile_effects"


class TileEffects(Watched):
    """Watches the tiled forwards of one model."""

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
        sentences = []
        for technique in known_techniques():
            its_own = [f for f in self.forwards if f.technique == technique.name and f.owner == "apply"]
            sentences += technique.without_effect(its_own) if its_own else []
        return sentences

    def notes(self) -> list[str]:
        return self.warnings()


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
