"""A decoder layer whose block is tiled together with its neighbours.

The layer's own ``forward`` runs unchanged, on a shallow view of the layer in which the block's first member computes
everything tile by tile and the other members pass their input through. Modules are looked up at each call, so adapters
added later take part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from seqtile.engines.granularity import is_wrapped
from seqtile.models.discover.attention import nothing_like
from seqtile.models.discover.chain import Chain
from seqtile.models.discover.layer_parts import Neighbours
from seqtile.models.discover.live_weights import has_foreign_hooks, has_hooks
from seqtile.models.instance import Installed, Setting, TiledForward, logger


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
        if has_hooks(norm) or has_foreign_hooks(attention) or any(is_wrapped(part) for part in (norm, attention)):
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
        listeners = [name for name, p in members if isinstance(p, nn.Module) and (has_hooks(p) or is_wrapped(p))]
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
        own = dict(view.__dict__)
        try:
            return type(view).forward(view, *args, **kwargs)  # the view's: checkpointing asks whose forward this is
        finally:
            for name, value in view.__dict__.items():  # what the forward sets on itself belongs to the layer
                if name not in own or value is not own[name]:
                    layer.__dict__[name] = value

    @property
    def _shares(self) -> list[str]:
        """Attributes of the layer that hold the probability of a functional dropout inside the tile, one per call."""
        near = self.neighbours
        inside = [name for name in near.members if isinstance(getattr(self.module, name), (int, float))]
        return [*inside, near.dropout] if near.dropout else inside

    def _stand_ins(self, layer: nn.Module, applied: Counter[str]) -> dict[str, Callable[..., Any]]:
        """What the view calls in place of the layer's children: the first does everything, the last returns it."""
        names = [name for name in self.names if name not in self._shares]
        head = self._head(layer, applied)
        return {names[0]: head} if len(names) == 1 else _handing_on(names, head, type(layer).__name__)

    def inside(self) -> Iterator[tuple[str, nn.Module]]:
        for name in self.names:
            member = getattr(self.module, name)
            for inner, part in member.named_modules() if isinstance(member, nn.Module) else ():
                if inner or self.inline:
                    yield f"{name}.{inner}".rstrip("."), part

    def chain(self) -> Chain:
        """What runs in the tile now."""
        layer, near = self.module, self.neighbours
        before, after, closing = (
            getattr(layer, name) if name else None for name in (near.before, near.after, near.closing)
        )
        share = float(getattr(layer, near.dropout)) if near.dropout else 0.0
        members = tuple((name, getattr(layer, name)) for name in near.members)
        return Chain(members, self.kind, before, after, share, closing, layer.training)

    @property
    def kind(self) -> str:
        return "inline" if self.inline else "block"

    def _tell(self, listeners: list[str]) -> None:
        alone = "untiled" if self.inline else "without its neighbours in the tile"
        news = f"runs {alone}: {', '.join(listeners)} has hooks"
        if news not in self.told:
            self.told.add(news)
            logger.warning("%s %s", type(self.module).__name__, news)

    def _head(self, layer: nn.Module, applied: Counter[str]) -> Callable[[Tensor], Any]:
        shares, chain = self._shares, self.chain()
        block = None if self.inline else _forward_of(chain.members[0][1])

        def call(tiles: list[Tensor]) -> Any:
            return chain.run(tiles, call=block)

        def head(hidden_states: Tensor) -> Any:
            result = self.run(chain, [hidden_states], call)
            applied.update(shares)
            return result

        return head


class TiledSum(TiledLayer):
    """``forward`` of a layer whose MLP, the sum with its input and the norm of that run in one tile (BART).

    In the view the MLP gives nothing that could be read, and the norm's stand-in does everything.
    """

    def _stand_ins(self, layer: nn.Module, applied: Counter[str]) -> dict[str, Callable[..., Any]]:
        names = [name for name in self.names if name not in self._shares and name != self.neighbours.closing]
        head, given = self._head(layer, Counter()), list[Tensor]()

        def first(hidden_states: Tensor) -> Tensor:
            given.append(hidden_states)
            applied.update(self._shares)
            return nothing_like(hidden_states)

        def closing(_: Tensor) -> Any:
            return head(given.pop())

        return {**dict.fromkeys(names, _pass_through), names[0]: first, self.neighbours.closing: closing}


class TiledPair(TiledLayer):
    """``forward`` of a layer whose MLP is two of its children: ``second(first(x), other)`` runs in one tile."""

    def _stand_ins(self, layer: nn.Module, applied: Counter[str]) -> dict[str, Callable[..., Any]]:
        chain = self.chain()

        one, two = self.names
        given: list[Tensor] = []

        def first(hidden_states: Tensor) -> Tensor:
            given.append(hidden_states)
            return nothing_like(hidden_states)

        def head(_: Tensor, other: Tensor) -> Any:
            hidden_states = given.pop()
            tensors = [hidden_states] if other is hidden_states else [hidden_states, other]
            return self.run(chain, tensors, chain.run)

        return {one: first, two: head}

    @property
    def kind(self) -> str:
        return "pair"


def _forward_of(member: Any) -> Callable[[Tensor], Tensor]:
    installed = member.__dict__.get("forward") if isinstance(member, nn.Module) else None
    return installed.original if isinstance(installed, TiledForward) else member


def _handing_on(names: list[str], head: Callable[[Tensor], Any], owner: str) -> dict[str, Callable[..., Any]]:
    """Stand-ins of which the first computes everything and the last returns it.

    In between goes a tensor that spoils whatever else reads it: should the layer's forward use one of them in another
    way than when it was traced, that does not go unnoticed.
    """
    held: list[Any] = []

    def first(hidden_states: Tensor) -> Tensor:
        result = head(hidden_states)
        held[:] = [result, nothing_like(hidden_states)]
        return held[1]

    def between(hidden_states: Tensor) -> Tensor:
        _check(hidden_states)
        return hidden_states

    def last(hidden_states: Tensor) -> Any:
        _check(hidden_states)
        result = held[0]
        held.clear()
        return result

    def _check(hidden_states: Tensor) -> None:
        if not held or (hidden_states is not held[1] and hidden_states.data_ptr() != held[1].data_ptr()):
            raise RuntimeError(
                f"{owner}: its forward now calls {', '.join(names)} in another way than when seqtile traced it; call "
                "seqtile.apply again, or with blocks='mlp'"
            )

    return {**dict.fromkeys(names, between), names[0]: first, names[-1]: last}


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
