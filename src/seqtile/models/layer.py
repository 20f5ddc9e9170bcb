"""A decoder layer whose block is tiled together with its neighbours.

The layer's own ``forward`` runs unchanged, on a shallow view of the layer in which the block's first member computes
everything tile by tile and the other members pass their input through. Modules are looked up at each call, so adapters
added later take part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqtile.models.instance import Installed, TiledForward, has_hooks, logger, run_block
from seqtile.models.neighbours import Neighbours
from seqtile.tiling import TileRule


class TiledLayer(Installed):
    """``forward`` of one decoder layer: block, norm or dropout run in one tile."""

    def __init__(
        self, layer: nn.Module, rule: TileRule, hidden: int, intermediate: int, neighbours: Neighbours, inline: bool
    ) -> None:
        super().__init__(layer, rule, hidden, intermediate)
        self.neighbours, self.inline = neighbours, inline
        self._told = False

    def note(self) -> str:
        return f"tile={self.rule} over {', '.join(self.names)}"

    @property
    def names(self) -> list[str]:
        """Children of the layer that run inside the tile, in order."""
        near = self.neighbours
        return [name for name in (*near.members, near.after) if name]

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.module
        heard = [name for name in self.names if isinstance(p := getattr(layer, name), nn.Module) and has_hooks(p)]
        if heard:
            self._tell(heard)
            return self.original(*args, **kwargs)
        after_dropout = [False]
        view = _view(layer, self.neighbours.dropout, after_dropout)
        children = dict(layer._modules)
        first, *others = self.names
        children[first] = self._head(layer, after_dropout)  # type: ignore[assignment]
        children.update(dict.fromkeys(others, _pass_through))  # type: ignore[arg-type]
        view.__dict__["_modules"] = children
        for name in {first, *others} & view.__dict__.keys():
            view.__dict__[name] = children[name]
        return type(layer).forward(view, *args, **kwargs)

    def _tell(self, heard: list[str]) -> None:
        if not self._told:
            self._told = True
            alone = "untiled" if self.inline else "without its neighbours in the tile"
            logger.warning(
                "%s runs %s: a hook listens to %s", type(self.module).__name__, alone, ", ".join(heard)
            )

    def _head(self, layer: nn.Module, after_dropout: list[bool]) -> Callable[[Tensor], Any]:
        members = [getattr(layer, name) for name in self.names]
        parts = [member for member in members if isinstance(member, nn.Module)]
        share = float(getattr(layer, self.neighbours.dropout)) if self.neighbours.dropout else 0.0

        def call(tiles: list[Tensor]) -> Tensor:
            (hidden_states,) = tiles
            for member in members:
                hidden_states = _forward_of(member)(hidden_states)
            return F.dropout(hidden_states, share, layer.training)

        def head(hidden_states: Tensor) -> Any:
            result = run_block(self, parts, [hidden_states], call)
            after_dropout[0] = True
            return result

        return head


def _forward_of(member: Any) -> Callable[[Tensor], Tensor]:
    installed = member.__dict__.get("forward") if isinstance(member, nn.Module) else None
    return installed.original if isinstance(installed, TiledForward) else member


def _pass_through(hidden_states: Tensor) -> Tensor:
    return hidden_states


def _view(layer: nn.Module, dropout: str, after_dropout: list[bool]) -> nn.Module:
    view: nn.Module = object.__new__(_once_dropped(type(layer), dropout) if dropout else type(layer))
    view.__dict__.update(layer.__dict__)
    view.__dict__.pop("forward")
    if dropout:
        view.__dict__.update(_share=view.__dict__.pop(dropout), _dropped=after_dropout)
    return view


@cache
def _once_dropped(layer_class: type[nn.Module], dropout: str) -> type[nn.Module]:
    """A subclass whose dropout probability reads 0 once after the tiles have applied it."""

    def read(self: Any) -> float:
        if self._dropped[0]:
            self._dropped[0] = False
            return 0.0
        return self._share

    return type(layer_class.__name__, (layer_class,), {dropout: property(read)})
