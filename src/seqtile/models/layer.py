"""A decoder layer whose block is tiled together with its neighbours.

The layer's own ``forward`` runs unchanged, on a shallow view of the layer in which stand-ins take the members' places.
They hand on a placeholder, which nothing but the next member may read, and the last one computes everything tile by
tile. So a forward that now does anything else with these results than when it was traced is an error. Modules are
looked up at each call, so adapters added later take part.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqtile._compat import (
    CHECKPOINT_FUNCTION,
    MODULES,
    active_fake_mode,
    attention_kind,
    disable_torch_function_subclass,
    make_wrapper_subclass,
    tree_leaves,
    version_of,
)
from seqtile._shallow import bare_instance
from seqtile.engines.granularity import wrapper
from seqtile.models.discover.chain import Chain
from seqtile.models.discover.layer_parts import Neighbours, device_types
from seqtile.models.discover.live_weights import has_foreign_hooks, has_hooks
from seqtile.models.instance import Installed, Setting, TiledForward, logger
from seqtile.ops.attention.backends import FLEX, has_long_mask, without_wrong_kernel
from seqtile.ops.attention.kernel_calls import names_of_kernels

_ALLOWED = frozenset("shape dtype device ndim layout is_cuda dim size is_floating_point".split())
"""What may be asked of a placeholder."""

_DROPOUT = F.dropout
_SUMS = ("add", "__add__", "__radd__", "__iadd__")


class Placeholder(Tensor):
    """Stands for a result that is computed later, in tiles; only the member that comes next may read it."""

    sequence: Members

    @classmethod
    def like(cls, hidden_states: Tensor, sequence: Members) -> Placeholder:
        """One of the shape, dtype and device of ``hidden_states``, without memory."""
        shape, dtype, device = hidden_states.shape, hidden_states.dtype, hidden_states.device
        held: Placeholder = make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        held.sequence = sequence
        return held

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return next(one for one in tree_leaves((args, kwargs)) if isinstance(one, Placeholder)).sequence.refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name
        if name in _ALLOWED:
            with disable_torch_function_subclass():
                return func(*args, **(kwargs or {}))
        held = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, Placeholder))
        return held.sequence.operator(func, name, args, kwargs or {})


class _MemberCall(functools.partial[Any]):
    """The stand-in of one member: it can be called, and nothing else can be asked of it or set on it."""

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol
            raise AttributeError(name)
        self._refuse()

    def _refuse(self) -> None:
        members: Any = self.func
        members.__self__.refuse()


class Members:
    """The members of one tile while the layer's forward calls them one after another.

    Args:
        owner: class of the layer.
        events: names of what is called, in order; ``"+"`` for the sum with the input; numbers' names for functional
            dropouts.
        shares: those of the names that are probabilities of functional dropouts.
        finish: computes everything, from the inputs and the probabilities with which the layer called dropout.
    """

    def __init__(
        self, owner: str, events: Sequence[str], shares: Sequence[str],
        finish: Callable[[list[Tensor], Mapping[str, float]], Any],
    ) -> None:  # fmt: skip
        self.owner, self.events, self.shares, self.finish = owner, events, shares, finish
        self.stand_ins: dict[str, Callable[..., Any]] = {}
        """What is called in each member's place."""
        for name in events:
            if name != "+" and name not in shares:
                self.stand_ins[name] = _MemberCall(self._call, name)
        self._begin()

    def _begin(self) -> None:
        self.at, self.inputs, self.versions = 0, list[Tensor](), list[int]()
        self.held: Tensor | None = None
        self.context: tuple[bool, ...] | None = None
        self.dropped: dict[str, float] = {}

    def _call(self, name: str, hidden_states: Tensor, /, *others: Tensor) -> Any:
        first = self.at == 0 and not isinstance(hidden_states, Placeholder)
        if not first and hidden_states is not self.held:
            self.refuse()
        given = [hidden_states, *others] if first else others
        self.inputs += given
        for one in given:
            self.versions.append(0 if one.is_inference() else version_of(one))
        return self._step(name)

    def operator(self, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """A function of PyTorch that is called with a placeholder: a dropout, or the sum with the input."""
        expected = self.events[self.at]
        if func in (_DROPOUT, F.dropout) and expected in self.shares:
            call = inspect.signature(_DROPOUT).bind(*args, **kwargs)
            call.apply_defaults()
            if call.arguments["input"] is self.held:
                self.dropped[expected] = float(call.arguments["p"]) if call.arguments["training"] else 0.0
                return self._step(expected)
        if expected == "+" and name in _SUMS and len(args) == 2 and not kwargs:
            if any(one is self.held for one in args) and any(one is self.inputs[0] for one in args):
                return self._step(expected)
        return self.refuse()

    def _step(self, name: str) -> Any:
        """``name`` is called: what it hands on, or after the last one what everything gives."""
        context = (torch.is_grad_enabled(), *map(torch.is_autocast_enabled, device_types()))
        self.context = self.context or context
        if name != self.events[self.at] or context != self.context:
            self.refuse()
        self.at += 1
        if self.at < len(self.events):
            self.held = Placeholder.like(self.inputs[0], self)
            return self.held
        inputs, dropped = self.inputs, self.dropped
        for one, version in zip(inputs, self.versions, strict=True):
            if not one.is_inference() and version_of(one) != version:
                self.refuse()  # the members have not run yet, and would read what it is now
        self._begin()
        return self.finish(inputs, dropped)

    def refuse(self) -> Any:
        names = [name for name in self.events if name != "+"]
        raise RuntimeError(
            f"{self.owner}: its forward now calls {', '.join(names)} in another way than when seqtile traced it; call "
            "seqtile.apply again, or with blocks='mlp'"
        )

    def check_end(self, results: Any) -> None:
        """Raise where the layer hands a placeholder out."""
        if any(isinstance(one, Placeholder) for one in tree_leaves(results)):
            self.refuse()


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
        """What the view calls in place of both; empty where there is no such norm or one of them has hooks."""
        if not self.norm:
            return {}
        norm, attention, fsdp1 = getattr(layer, self.norm), getattr(layer, self.attention), wrapper()
        if has_hooks(norm) or has_foreign_hooks(attention) or isinstance(norm, fsdp1) or isinstance(attention, fsdp1):
            return {}
        if torch.compiler.is_compiling() or not getattr(attention.__dict__.get("forward"), "takes_norm", False):
            return {}
        call: list[Any] = []

        def finish(inputs: list[Tensor], _: Mapping[str, float]) -> Any:
            args, words = call.pop()
            args = list(args)
            for number, one in enumerate(args):
                if isinstance(one, Placeholder):
                    args[number] = inputs[0]
            for name, one in words.items():
                if isinstance(one, Placeholder):
                    words[name] = inputs[0]
            return attention(*args, norm_before=norm, **words)

        sequence = Members(type(layer).__name__, (self.norm, self.attention), (), finish)
        second = sequence.stand_ins[self.attention]

        def attend(*args: Any, **words: Any) -> Any:
            held = []
            for one in (*args, *words.values()):
                if isinstance(one, Placeholder):
                    held.append(one)
            if len(held) != 1:
                return sequence.refuse()
            call.append((args, words))
            return second(held[0])

        return {self.norm: sequence.stand_ins[self.norm], self.attention: attend}

    def view(self, layer: nn.Module) -> nn.Module | None:
        """The layer with both replaced, or None."""
        stand_ins = self.stand_ins(layer)
        if not stand_ins:
            return None
        view = view_of(layer)
        view.__dict__[MODULES] = {**layer.__dict__[MODULES], **stand_ins}
        return view


class TiledLayer(Installed):
    """``forward`` of one decoder layer: block, norm or dropout run in one tile."""

    def __init__(self, layer: nn.Module, setting: Setting, neighbours: Neighbours, inline: bool) -> None:
        super().__init__(layer, setting)
        self.neighbours, self.inline, self.kind = neighbours, inline, "inline" if inline else "block"
        near = neighbours
        self.names = [name for name in (near.before, *near.members, near.after, near.closing) if name]
        """Children of the layer that run inside the tile, in order."""
        names = [near.before, *near.members, near.after, near.dropout, *(("+", near.closing) if near.closing else ())]
        self._events = [name for name in names if name]
        """What the layer's forward calls, in order."""
        self._code = _code_of(layer)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_code": None}  # which cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._code = _code_of(self.module)

    attention: NormedAttention | None = None
    """Attention of the same layer that runs its norm itself."""

    attention_ran: frozenset[str] | None = None
    """Operators of attention in the layer's first call with gradients, none for plain products; None where there was
    no such call, or no attention in it."""

    _watched = False

    left_out_compiled = "norms and dropouts beside a tiled block run whole where torch.compile compiles their layer"

    def note(self) -> str:
        return f"tile={self.setting.rule} over {', '.join(self.names)}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not self.inline:
            self.note_compiled()
            return self.original(*args, **kwargs)  # the block's own tiles, in the compiler's graph
        return self._together(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _together(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._module() or self.module
        self.check()
        fsdp1 = wrapper()
        shares, hooked = [], []  # shares: attributes that hold the probability of a functional dropout
        for name in self.names:
            part = getattr(layer, name)
            if isinstance(part, (int, float)):
                shares.append(name)
            elif isinstance(part, nn.Module) and (has_hooks(part) or isinstance(part, fsdp1)):
                hooked.append(name)
        if hooked or _code_of(layer) is not self._code:
            self._tell(f"{', '.join(hooked)} has hooks" if hooked else "its forward is another than seqtile read")
            alone = self.attention.view(layer) if self.attention else None
            forward = self.original if alone is None else functools.partial(type(alone).forward, alone)
            return self._run_layer(layer if alone is None else alone, forward, args, kwargs)
        if self.neighbours.dropout:
            shares.append(self.neighbours.dropout)
        finish = functools.partial(self._compute, layer)
        sequence = Members(type(layer).__name__, self._events, shares, finish)
        stand_ins = sequence.stand_ins
        if self.attention is not None:
            stand_ins |= self.attention.stand_ins(layer)
        view = view_of(layer)
        view.__dict__[MODULES] = {**layer.__dict__[MODULES], **stand_ins}
        for name in stand_ins.keys() & view.__dict__.keys():
            view.__dict__[name] = stand_ins[name]
        plainly = self._watched
        for one in (*args, *kwargs.values()):
            plainly = plainly and not (isinstance(one, Tensor) and one.ndim == 4)  # a mask, maybe a long one
        own = dict(view.__dict__)
        try:
            # The view's: checkpointing asks whose forward this is.
            if plainly:
                result = type(view).forward(view, *args, **kwargs)
            else:
                result = self._run_layer(view, functools.partial(type(view).forward, view), args, kwargs)
        finally:
            changed = {name: value for name, value in view.__dict__.items() if value is not own.get(name, own)}
            layer.__dict__.update(changed)  # what the forward sets on itself belongs to the layer
            for name in own.keys() - view.__dict__.keys():
                del layer.__dict__[name]
        sequence.check_end((result, changed))
        return result

    def _run_layer(
        self, layer: nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The layer's forward; with a long mask without the attention kernel that is wrong then, recomputed too."""
        if not has_long_mask((*args, *kwargs.values())):
            return self._looked_at(forward, args, kwargs)
        forward = functools.partial(without_wrong_kernel, forward)
        own = layer.__dict__
        checkpoint = own.get(CHECKPOINT_FUNCTION)
        if checkpoint is None:
            return self._looked_at(forward, args, kwargs)
        # Transformers' forward calls it inside, and the recompute comes back there.
        own[CHECKPOINT_FUNCTION] = functools.partial(_checkpoint_without_wrong_kernel, checkpoint)
        try:
            return self._looked_at(forward, args, kwargs)
        finally:
            own[CHECKPOINT_FUNCTION] = checkpoint

    def _looked_at(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The layer's forward; at its first call with gradients the operators of attention in it are noted."""
        if self._watched or not torch.is_grad_enabled() or active_fake_mode() is not None:
            return forward(*args, **kwargs)
        self._watched = True
        kind = next((kind for part in self.module.children() if (kind := attention_kind(part)) is not None), None)
        if kind == FLEX:  # compiled, so that nothing is seen of it
            self.attention_ran = frozenset({FLEX})
            return forward(*args, **kwargs)
        with names_of_kernels() as names:
            result = forward(*args, **kwargs)
        self.attention_ran = frozenset(names) if names or kind == "eager" else None
        return result

    def inside(self) -> list[tuple[str, nn.Module]]:
        layer, found = self._module(), []
        for name in self.names:
            member = getattr(layer, name)
            for inner, part in member.named_modules() if isinstance(member, nn.Module) else ():
                if inner or self.inline:
                    found.append((f"{name}.{inner}".rstrip("."), part))
        return found

    def chain(self, layer: nn.Module, dropped: Mapping[str, float]) -> Chain:
        """What runs in the tile now.

        Args:
            layer: the layer.
            dropped: probability of each functional dropout in this call.
        """
        near = self.neighbours
        before = getattr(layer, near.before) if near.before else None
        after = getattr(layer, near.after) if near.after else None
        closing = getattr(layer, near.closing) if near.closing else None
        members = []
        for name in near.members:
            members.append((name, dropped[name] if name in dropped else getattr(layer, name)))
        share = dropped.get(near.dropout, 0.0)
        return Chain(tuple(members), self.kind, before, after, share, closing, any(dropped.values()))

    def _tell(self, why: str) -> None:
        alone = "untiled" if self.inline else "without its neighbours in the tile"
        news = f"runs {alone}: {why}"
        if self.is_news(news):
            logger.warning("%s %s", type(self.module).__name__, news)

    def _compute(self, layer: nn.Module, inputs: list[Tensor], dropped: Mapping[str, float]) -> Any:
        chain = self.chain(layer, dropped)
        block = None if self.inline else _forward_of(chain.members[0][1])

        def call(tiles: list[Tensor]) -> Any:
            return chain.run(tiles, call=block)

        return self.run(chain, inputs, call, functools.partial(call, inputs))


def _checkpoint_without_wrong_kernel(checkpoint: Callable[..., Any], function: Any, *args: Any, **words: Any) -> Any:
    return checkpoint(functools.partial(without_wrong_kernel, function), *args, **words)


class TiledPair(TiledLayer):
    """``forward`` of a layer whose MLP is two of its children: ``second(first(x), other)`` runs in one tile."""

    def __init__(self, layer: nn.Module, setting: Setting, neighbours: Neighbours, inline: bool) -> None:
        super().__init__(layer, setting, neighbours, inline)
        self.kind = "pair"

    def _compute(self, layer: nn.Module, inputs: list[Tensor], dropped: Mapping[str, float]) -> Any:
        chain = self.chain(layer, dropped)
        tensors = inputs[:1] if inputs[-1] is inputs[0] else inputs
        return self.run(chain, tensors, chain.run, functools.partial(chain.run, tensors))


def _code_of(layer: nn.Module) -> Any:
    """What tells one forward of a layer's class from another."""
    return getattr(type(layer).forward, "__code__", None)


def _forward_of(member: Any) -> Callable[[Tensor], Tensor]:
    installed = member.__dict__.get("forward") if isinstance(member, nn.Module) else None
    return installed.original if isinstance(installed, TiledForward) else member


def view_of(layer: nn.Module) -> nn.Module:
    """A shallow copy that shares weights and children with the layer and has its class's forward."""
    view: nn.Module = bare_instance(layer)
    view.__dict__.update(layer.__dict__)
    view.__dict__.pop("forward", None)
    return view
