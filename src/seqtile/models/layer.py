"""A decoder layer whose block is tiled together with its neighbours.

The layer's own ``forward`` runs unchanged, on a shallow view of the layer in which the block's first member computes
everything tile by tile and the other members pass their input through. Modules are looked up at each call, so adapters
added later take part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqtile.engines.granularity import is_wrapped
from seqtile.models.formula import heard, heard_by_others
from seqtile.models.fuse import fused_sequence, fused_weights, row_wise
from seqtile.models.instance import Installed, Setting, TiledForward, logger
from seqtile.models.neighbours import Neighbours
from seqtile.ops.fused import FusedWeights


@dataclass(frozen=True)
class NormedAttention:
    """An attention module of a layer that runs the norm before it in its own operator.

    Attributes:
        norm: name of the norm, or "" where its output is read elsewhere.
        attention: name of the attention module.
    """

    norm: str
    attention: str

    def stand_ins(self, layer: nn.Module) -> dict[str, Callable[..., Any]]:
        """What the view calls in place of both; empty where there is no such norm or somebody listens to either."""
        if not self.norm:
            return {}
        norm, attention = getattr(layer, self.norm), getattr(layer, self.attention)
        head_wise = attention.__dict__.get("forward")
        if heard(norm) or heard_by_others(attention) or any(is_wrapped(part) for part in (norm, attention)):
            return {}
        if torch.compiler.is_compiling() or not hasattr(head_wise, "heads"):
            return {}

        def attend(*args: Any, **words: Any) -> Any:
            head_wise.norm = norm
            try:
                return attention(*args, **words)
            finally:
                head_wise.norm = None

        return {self.norm: _pass_through, self.attention: attend}

    def view(self, layer: nn.Module) -> nn.Module | None:
        """The layer with both replaced, or None."""
        stand_ins = self.stand_ins(layer)
        if not stand_ins:
            return None
        view = _view(layer, [], Counter())
        view.__dict__["_modules"] = {**layer._modules, **stand_ins}
        return view


class TiledLayer(Installed):
    """``forward`` of one decoder layer: block, norm or dropout run in one tile."""

    def __init__(self, layer: nn.Module, setting: Setting, neighbours: Neighbours, inline: bool) -> None:
        super().__init__(layer, setting)
        self.neighbours, self.inline = neighbours, inline

    attention: NormedAttention | None = None
    """Attention of the same layer that runs its norm itself."""

    def note(self) -> str:
        return f"tile={self.setting.rule} over {', '.join(self.names)}"

    @property
    def names(self) -> list[str]:
        """Children of the layer that run inside the tile, in order."""
        near = self.neighbours
        return [name for name in (near.before, *near.members, near.after, near.closing) if name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not self.inline:
            return self.original(*args, **kwargs)  # the block's own tiles, in the compiler's graph
        return self._together(*args, **kwargs)

    @torch.compiler.disable
    def _together(self, *args: Any, **kwargs: Any) -> Any:
        self.check()
        layer = self.module
        members = [(name, getattr(layer, name)) for name in self.names]
        listeners = [name for name, p in members if isinstance(p, nn.Module) and (heard(p) or is_wrapped(p))]
        if listeners:
            self._tell(listeners)
            alone = self.attention.view(layer) if self.attention else None
            return self.original(*args, **kwargs) if alone is None else type(alone).forward(alone, *args, **kwargs)
        applied: Counter[str] = Counter()
        view = _view(layer, self._shares, applied)
        stand_ins = self._stand_ins(layer, applied)
        if self.attention is not None:
            stand_ins |= self.attention.stand_ins(layer)
        view.__dict__["_modules"] = {**layer._modules, **stand_ins}
        for name in stand_ins.keys() & view.__dict__.keys():
            view.__dict__[name] = stand_ins[name]
        return type(view).forward(view, *args, **kwargs)  # the view's: checkpointing asks whose forward this is

    @property
    def _shares(self) -> list[str]:
        """Attributes of the layer that hold the probability of a functional dropout inside the tile, one per call."""
        near = self.neighbours
        inside = [name for name in near.members if isinstance(getattr(self.module, name), (int, float))]
        return [*inside, near.dropout] if near.dropout else inside

    def _stand_ins(self, layer: nn.Module, applied: Counter[str]) -> dict[str, Callable[..., Any]]:
        """What the view calls in place of the layer's children: the first does everything."""
        first, *others = [name for name in self.names if name not in self._shares]
        return {first: self._head(layer, applied), **dict.fromkeys(others, _pass_through)}

    def inside(self) -> Iterator[tuple[str, nn.Module]]:
        for name in self.names:
            member = getattr(self.module, name)
            for inner, part in member.named_modules() if isinstance(member, nn.Module) else ():
                if inner or self.inline:
                    yield f"{name}.{inner}".rstrip("."), part

    def fused(self, dtype: torch.dtype) -> FusedWeights | str:
        layer, near = self.module, self.neighbours
        parts = [getattr(layer, name) for name in near.members]
        if self.inline:
            shares = [part for part in parts if isinstance(part, (int, float))]
            if any(shares) and layer.training:
                return "a dropout stands between its linear layers"
            parts = [part for part in parts if not isinstance(part, (int, float))]
            mlp = fused_sequence(*parts) if len(parts) == 3 else f"the layer calls {len(parts)} members one by one"
        else:
            mlp = fused_weights(parts[0], dtype)
        follower = getattr(layer, near.after) if near.after else None
        share = float(getattr(layer, near.dropout)) if near.dropout and layer.training else 0.0
        if isinstance(follower, nn.Dropout):
            share, follower = (float(follower.p) if follower.training else 0.0), None
        norms = [row_wise(norm) if norm is not None else None for norm in (self._before, follower)]
        for part in (mlp, *norms):
            if isinstance(part, str):
                return part
        assert isinstance(mlp, FusedWeights)
        if share and mlp.dropout:
            return "a dropout follows a block that ends with one"
        before, after = norms
        assert not isinstance(before, str) and not isinstance(after, str)
        return replace(mlp, before=before, after=after, dropout=mlp.dropout or share)

    @property
    def _before(self) -> nn.Module | None:
        return getattr(self.module, self.neighbours.before) if self.neighbours.before else None

    def _tell(self, listeners: list[str]) -> None:
        alone = "untiled" if self.inline else "without its neighbours in the tile"
        news = f"runs {alone}: a hook listens to {', '.join(listeners)}"
        if news not in self.told:
            self.told.add(news)
            logger.warning("%s %s", type(self.module).__name__, news)

    def _head(self, layer: nn.Module, applied: Counter[str]) -> Callable[[Tensor], Any]:
        shares, near = self._shares, self.neighbours
        names = [name for name in (*self.names, near.dropout) if name and name != near.closing]
        members = [getattr(layer, name) for name in names]
        closing = getattr(layer, near.closing) if near.closing else None
        parts = [member for member in (*members, closing) if isinstance(member, nn.Module)]

        def call(tiles: list[Tensor]) -> Any:
            (hidden_states,) = tiles
            for member in members:
                if not isinstance(member, (int, float)):
                    hidden_states = _forward_of(member)(hidden_states)
                elif member:
                    hidden_states = F.dropout(hidden_states, float(member), layer.training)
            return hidden_states if closing is None else closing(tiles[0] + hidden_states)

        def head(hidden_states: Tensor) -> Any:
            result = self.run(parts, [hidden_states], call)
            applied.update(shares)
            return result

        return head


class TiledSum(TiledLayer):
    """``forward`` of a layer whose MLP, the sum with its input and the norm of that run in one tile (BART).

    In the view the MLP gives zeros, so that the sum is the input, and the norm's stand-in does everything.
    """

    def _stand_ins(self, layer: nn.Module, applied: Counter[str]) -> dict[str, Callable[..., Any]]:
        shares, closing = self._shares, self.neighbours.closing
        first, *others = [name for name in self.names if name not in shares and name != closing]

        def zeros(hidden_states: Tensor) -> Tensor:
            applied.update(shares)
            return hidden_states.new_zeros(()).expand_as(hidden_states)

        return {first: zeros, **dict.fromkeys(others, _pass_through), closing: self._head(layer, Counter())}

    def fused(self, dtype: torch.dtype) -> FusedWeights | str:
        return "its norm reads the residual beside the MLP's output"


class TiledPair(TiledLayer):
    """``forward`` of a layer whose MLP is two of its children: ``second(first(x), other)`` runs in one tile."""

    def _stand_ins(self, layer: nn.Module, applied: Counter[str]) -> dict[str, Callable[..., Any]]:
        first, second = (getattr(layer, name) for name in self.names)

        def call(tiles: list[Tensor]) -> Any:
            return second(first(tiles[0]), tiles[-1])

        def head(hidden_states: Tensor, other: Tensor) -> Any:
            tensors = [hidden_states] if other is hidden_states else [hidden_states, other]
            return self.run([first, second], tensors, call)

        one, two = self.names
        return {one: _pass_through, two: head}

    def fused(self, dtype: torch.dtype) -> FusedWeights | str:
        return "its norm reads another tensor beside the MLP's output"


def _forward_of(member: Any) -> Callable[[Tensor], Tensor]:
    installed = member.__dict__.get("forward") if isinstance(member, nn.Module) else None
    return installed.original if isinstance(installed, TiledForward) else member


def _pass_through(hidden_states: Tensor) -> Tensor:
    return hidden_states


def _view(layer: nn.Module, shares: list[str], applied: Counter[str]) -> nn.Module:
    names = tuple(dict.fromkeys(shares))
    view: nn.Module = object.__new__(_once_dropped(type(layer), names) if names else type(layer))  # type: ignore[arg-type]
    view.__dict__.update(layer.__dict__)
    view.__dict__.pop("forward")
    if names:
        view.__dict__.update(_shares={name: view.__dict__.pop(name) for name in names}, _applied=applied)
    return view


@cache
def _once_dropped(layer_class: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass whose dropout probabilities read 0 as often as the tiles have applied them."""

    def reader(name: str) -> property:
        def read(self: Any) -> float:
            if self._applied[name] > 0:
                self._applied[name] -= 1
                return 0.0
            return float(self._shares[name])

        return property(read)

    return type(layer_class.__name__, (layer_class,), {name: reader(name) for name in names})
