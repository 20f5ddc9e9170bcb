"""A decoder layer whose block is tiled together with its neighbours.

The layer's own ``forward`` runs unchanged, on a shallow view of the layer in which stand-ins take the members' places.
Each stand-in returns a placeholder that only the next member may read, and the last one computes all members tile by
tile. A forward that uses a placeholder in any other way than its trace did raises an error. Modules are looked up at
each call, so adapters that were added later run too.
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
    HOOKS_OF_ALL,
    MODULES,
    active_fake_mode,
    attention_kind,
    children_of,
    disable_torch_function_subclass,
    hook_on_every_module,
    make_wrapper_subclass,
    tree_leaves,
    version_of,
)
from seqtile._shallow import view_of
from seqtile.blocks.instance import Installed, Setting, TiledForward, logger
from seqtile.engines.granularity import wrapper
from seqtile.ops import rotary
from seqtile.ops.attention.backends import FLEX, has_long_mask, without_wrong_kernel
from seqtile.ops.attention.kernel_calls import names_of_kernels
from seqtile.recognise.chain import Chain
from seqtile.recognise.known_functions import with_rotary
from seqtile.recognise.layer_parts import Neighbours, device_types
from seqtile.recognise.live_weights import has_foreign_hooks, has_hooks, hooks_of

_ALLOWED = frozenset("shape dtype device ndim layout is_cuda dim size is_floating_point".split())
"""Attributes and functions that a placeholder supports."""

_DROPOUT = F.dropout
_SUMS = ("add", "__add__", "__radd__", "__iadd__")


class Placeholder(Tensor):
    """A result that is computed later, in tiles; only the next member may read it."""

    sequence: Members

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _first_placeholder(args, kwargs).sequence.refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name
        if name in _ALLOWED:
            with disable_torch_function_subclass():
                return func(*args, **(kwargs or {}))
        return _first_placeholder(args, kwargs).sequence.operator(func, name, args, kwargs or {})


def _first_placeholder(args: Any, kwargs: Any) -> Placeholder:
    return next(value for value in tree_leaves((args, kwargs)) if isinstance(value, Placeholder))


class _MemberCall(functools.partial[Any]):
    """The stand-in of one member: callable, with no attributes to read or set."""

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
    """Stand-ins for the members, which the layer's forward calls in order before they are computed in tiles.

    Args:
        owner: class of the layer.
        events: the expected calls, in order: a member's name, ``"+"`` for the sum with the input, or the name of the
            layer's attribute with the probability of a functional dropout.
        probabilities: the names in ``events`` of such attributes.
        finish: computes the result from the inputs and the probabilities with which the layer called dropout.
    """

    def __init__(
        self, owner: str, events: Sequence[str], probabilities: Sequence[str],
        finish: Callable[[list[Tensor], Mapping[str, float]], Any],
    ) -> None:  # fmt: skip
        self.owner, self.events, self.probabilities, self.finish = owner, events, probabilities, finish
        self.stand_ins: dict[str, Callable[..., Any]] = {}
        """The stand-in of each member, by its name."""
        for name in events:
            if name != "+" and name not in probabilities:
                self.stand_ins[name] = _MemberCall(self._call, name)
        self._begin()

    def _begin(self) -> None:
        self.at, self.inputs, self.versions = 0, list[Tensor](), list[int]()
        self.placeholder: Any = None
        self.context: tuple[bool, ...] | None = None
        self.dropped: dict[str, float] = {}

    def _call(self, name: str, hidden_states: Tensor, /, *others: Tensor) -> Any:
        first = self.at == 0 and not isinstance(hidden_states, Placeholder)
        if not first and hidden_states is not self.placeholder:
            self.refuse()
        tensors = [hidden_states, *others] if first else others
        self.inputs += tensors
        for tensor in tensors:
            self.versions.append(0 if tensor.is_inference() else version_of(tensor))
        return self._step(name)

    def operator(self, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Handle a PyTorch function called with a placeholder: a dropout, or the sum with the input."""
        expected = self.events[self.at]
        if func in (_DROPOUT, F.dropout) and expected in self.probabilities:
            call = inspect.signature(_DROPOUT).bind(*args, **kwargs)
            call.apply_defaults()
            if call.arguments["input"] is self.placeholder:
                self.dropped[expected] = float(call.arguments["p"]) if call.arguments["training"] else 0.0
                return self._step(expected)
        if expected == "+" and name in _SUMS and len(args) == 2 and not kwargs:
            if any(value is self.placeholder for value in args) and any(value is self.inputs[0] for value in args):
                return self._step(expected)
        return self.refuse()

    def _step(self, name: str) -> Any:
        """Return the placeholder that ``name`` passes on; after the last member, the computed result."""
        context = (torch.is_grad_enabled(), *map(torch.is_autocast_enabled, device_types()))
        self.context = self.context or context
        if name != self.events[self.at] or context != self.context:
            self.refuse()
        self.at += 1
        if self.at < len(self.events):
            x = self.inputs[0]
            self.placeholder = make_wrapper_subclass(Placeholder, x.shape, dtype=x.dtype, device=x.device)
            self.placeholder.sequence = self
            return self.placeholder
        inputs, dropped = self.inputs, self.dropped
        for tensor, version in zip(inputs, self.versions, strict=True):
            if not tensor.is_inference() and version_of(tensor) != version:
                self.refuse()  # written in place since; the members run only now, and would read the new values
        self._begin()
        return self.finish(inputs, dropped)

    def refuse(self) -> Any:
        names = [name for name in self.events if name != "+"]
        raise RuntimeError(
            f"{self.owner}: its forward now calls {', '.join(names)} differently than when seqtile traced it; call "
            "seqtile.apply again, or use blocks='mlp'"
        )

    def check_end(self, results: Any) -> None:
        """Raise if the layer returns a placeholder."""
        if any(isinstance(value, Placeholder) for value in tree_leaves(results)):
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
        """Stand-ins for norm and attention; empty without such a norm, or if one of them has hooks."""
        if not self.norm:
            return {}
        norm, attention, fsdp1 = getattr(layer, self.norm), getattr(layer, self.attention), wrapper()
        if has_hooks(norm) or has_foreign_hooks(attention) or isinstance(norm, fsdp1) or isinstance(attention, fsdp1):
            return {}
        if torch.compiler.is_compiling() or (any(HOOKS_OF_ALL) and hook_on_every_module()):
            return {}
        if not getattr(attention.__dict__.get("forward"), "takes_norm", False):
            return {}
        call: list[Any] = []

        def finish(inputs: list[Tensor], _: Mapping[str, float]) -> Any:
            args, kwargs = call.pop()
            args = [inputs[0] if isinstance(value, Placeholder) else value for value in args]
            kwargs = {name: inputs[0] if isinstance(value, Placeholder) else value for name, value in kwargs.items()}
            return attention(*args, norm_before=norm, **kwargs)

        sequence = Members(type(layer).__name__, (self.norm, self.attention), (), finish)
        second = sequence.stand_ins[self.attention]

        def attend(*args: Any, **kwargs: Any) -> Any:
            placeholders = [value for value in (*args, *kwargs.values()) if isinstance(value, Placeholder)]
            if len(placeholders) != 1:
                return sequence.refuse()
            call.append((args, kwargs))
            return second(placeholders[0])

        return {self.norm: sequence.stand_ins[self.norm], self.attention: attend}

    def view(self, layer: nn.Module) -> nn.Module | None:
        """The layer with both replaced, or None."""
        stand_ins = self.stand_ins(layer)
        return _view_with(layer, stand_ins) if stand_ins else None


class TiledLayer(Installed):
    """``forward`` of one decoder layer, whose block, norm and dropout run in one tile."""

    def __init__(self, layer: nn.Module, setting: Setting, neighbours: Neighbours, inline: bool) -> None:
        super().__init__(layer, setting)
        self.neighbours, self.inline, self.kind = neighbours, inline, "inline" if inline else "block"
        self.names = [name for name in neighbours.names if name != neighbours.dropout]
        """Children of the layer that run inside the tile, in order."""
        self._events = [*neighbours.names]
        """The calls that the layer's forward makes, in order."""
        if neighbours.closing:
            self._events.insert(-1, "+")
        self._probabilities = [name for name in neighbours.names if isinstance(getattr(layer, name), (int, float))]
        """Attributes that hold the probability of a functional dropout."""
        self._code = _forward_code(layer)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_code": None}  # which cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._code = _forward_code(self.module)

    attention: NormedAttention | None = None
    """Attention of the same layer that runs its norm itself."""

    attention_ran: frozenset[str] | None = None
    """Attention operators in the layer's first call with gradients, empty for plain products; None before that call, or
    if it ran no attention."""

    _watched = False

    left_out_compiled = "under torch.compile, norms and dropouts beside a tiled block run untiled"

    @property
    def rotary_kernels(self) -> int:  # type: ignore[override]
        rotates = self.attention is None and self.setting.path != "generic"
        return len(rotating_children(self.module)) if rotates else 0

    def note(self) -> str:
        return f"tile={self.setting.rule} over {', '.join(self.names)}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not self.inline:
            self.note_compiled()
            return self.original(*args, **kwargs)  # the block's own tiles, in the compiler's graph
        return self.together(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def together(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], chunk: nn.Module | None = None, apart: str | None = None
    ) -> Any:
        """Run the layer's own forward on a view that has stand-ins for the members.

        Args:
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            chunk: the view of the layer that runs one chunk of its sequence, from :mod:`seqtile.chunks`, or None.
            apart: why the members cannot share a tile, or ""; None to look now. A chunk's recompute runs as its
                forward did.
        """
        module = self.refuse_copies()
        layer = module if chunk is None else chunk
        if reason := self.why_apart(module) if apart is None else apart:
            return self._apart(reason, layer, args, kwargs)
        finish = functools.partial(self._compute, layer)
        sequence = Members(type(layer).__name__, self._events, self._probabilities, finish)
        stand_ins = sequence.stand_ins
        if self.attention is not None:
            stand_ins |= self.attention.stand_ins(layer)
        elif self.setting.path != "generic":
            stand_ins |= _rotary_stand_ins(layer, args[0] if args else kwargs.get("hidden_states"))
        view = _view_with(layer, stand_ins)
        attributes = dict(view.__dict__)
        try:
            # Bound to the view: checkpointing reads the forward's __self__.
            forward = functools.partial(type(view).forward, view)
            result = self._run_layer(view, forward, args, kwargs) if chunk is None else forward(*args, **kwargs)
        finally:
            changed = {name: value for name, value in view.__dict__.items() if value is not attributes.get(name, view)}
            layer.__dict__.update(changed)  # attributes that the forward sets belong to the layer
            for name in attributes.keys() - view.__dict__.keys():
                del layer.__dict__[name]
        sequence.check_end((result, changed))
        return result

    def why_apart(self, layer: nn.Module) -> str:
        """Why the members cannot run in one tile at this call, or ""."""
        if getattr(type(layer).forward, "__code__", None) is not self._code:
            return "its forward differs from the one that seqtile read"
        if any(HOOKS_OF_ALL) and (hook := hook_on_every_module()):
            return f"a hook on every module ({hook}) would see tiles"
        fsdp1, hooked = wrapper(), []
        for name in self.names:
            member = getattr(layer, name)
            if isinstance(member, nn.Module) and (any(hooks_of(member)) or isinstance(member, fsdp1)):
                hooked.append(name)
            elif (
                isinstance(member, nn.Module) and getattr(member.__dict__.get("forward"), "owner", "") == "tile_module"
            ):
                return f"{name} was tiled by seqtile.tile_module since"
        return f"{', '.join(hooked)} has hooks" if hooked else ""

    def _apart(self, reason: str, layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the layer's own forward, in which the block alone is tiled and an inline block is not."""
        self.check()
        how = "untiled" if self.inline else "without its neighbours in the tile"
        message = f"runs {how}: {reason}"
        if self.is_news(message):
            logger.warning("%s %s", type(layer).__name__, message)
        if layer is not self.module:
            return type(layer).forward(layer, *args, **kwargs)
        view = self.attention.view(layer) if self.attention else None
        if view is None:
            return self._run_layer(layer, self.original, args, kwargs)
        return self._run_layer(view, functools.partial(type(view).forward, view), args, kwargs)

    def _run_layer(
        self, layer: nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the layer's forward and its recompute, without the attention kernel that is wrong under a long mask."""
        if not has_long_mask((*args, *kwargs.values())):
            return forward(*args, **kwargs) if self._watched else self._record_attention(forward, args, kwargs)
        forward = functools.partial(without_wrong_kernel, forward)
        attributes = layer.__dict__
        checkpoint = attributes.get(CHECKPOINT_FUNCTION)
        if checkpoint is None:
            return self._record_attention(forward, args, kwargs)

        def checkpoint_without_wrong_kernel(function: Any, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(functools.partial(without_wrong_kernel, function), *args, **kwargs)

        # Transformers' layers checkpoint inside their forward, so the recompute must run without that kernel too.
        attributes[CHECKPOINT_FUNCTION] = checkpoint_without_wrong_kernel
        try:
            return self._record_attention(forward, args, kwargs)
        finally:
            attributes[CHECKPOINT_FUNCTION] = checkpoint

    def _record_attention(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the layer's forward, and record its attention operators at the first call with gradients."""
        if self._watched or not torch.is_grad_enabled() or active_fake_mode() is not None:
            return forward(*args, **kwargs)
        self._watched = True
        attention = next(
            (attention for child in self.module.children() if (attention := attention_kind(child)) is not None), None
        )
        if attention == FLEX:  # compiled, so its operators cannot be observed
            self.attention_ran = frozenset({FLEX})
            return forward(*args, **kwargs)
        with names_of_kernels() as names:
            result = forward(*args, **kwargs)
        self.attention_ran = frozenset(names) if names or attention == "eager" else None
        return result

    def inside(self) -> list[tuple[str, nn.Module]]:
        layer, inner = self._module(), []
        for name in self.names:
            member = getattr(layer, name)
            for path, module in member.named_modules() if isinstance(member, nn.Module) else ():
                if path or self.inline:
                    inner.append((f"{name}.{path}".rstrip("."), module))
        return inner

    def chain(self, layer: nn.Module, dropped: Mapping[str, float]) -> Chain:
        """The chain that runs in the tile at this call; ``dropped`` has each functional dropout's probability."""
        parts = self.neighbours
        norm_before = getattr(layer, parts.before) if parts.before else None
        after = getattr(layer, parts.after) if parts.after else None
        closing = getattr(layer, parts.closing) if parts.closing else None
        members = []
        for name in parts.members:
            members.append((name, dropped[name] if name in dropped else getattr(layer, name)))
        probability = dropped.get(parts.dropout, 0.0)
        return Chain(tuple(members), self.kind, norm_before, after, probability, closing, any(dropped.values()))

    def _compute(self, layer: nn.Module, inputs: list[Tensor], dropped: Mapping[str, float]) -> Any:
        chain = self.chain(layer, dropped)
        block = None
        if not self.inline:  # the block's own replacement would tile inside the tile
            block = chain.members[0][1]
            installed = block.__dict__.get("forward") if isinstance(block, nn.Module) else None
            block = installed.original if isinstance(installed, TiledForward) else block

        def call(tiles: list[Tensor]) -> Any:
            return chain.run(tiles, call=block)

        return self.run(chain, inputs, call, functools.partial(call, inputs))


def tiled_layer(layer: nn.Module) -> TiledLayer | None:
    """The forward that tiles the layer's block and its neighbours, also where another technique's is put over it."""
    forward = layer.__dict__.get("forward")
    while isinstance(forward, Installed) and not isinstance(forward, TiledLayer):
        forward = forward.before.get("forward")
    return forward if isinstance(forward, TiledLayer) else None


class TiledPair(TiledLayer):
    """``forward`` of a layer whose MLP is two of its children: ``second(first(x), other)`` runs in one tile."""

    def __init__(self, layer: nn.Module, setting: Setting, neighbours: Neighbours, inline: bool) -> None:
        super().__init__(layer, setting, neighbours, inline)
        self.kind = "pair"

    def _compute(self, layer: nn.Module, inputs: list[Tensor], dropped: Mapping[str, float]) -> Any:
        chain = self.chain(layer, dropped)
        tensors = inputs[:1] if inputs[-1] is inputs[0] else inputs
        return self.run(chain, tensors, chain.run, functools.partial(chain.run, tensors))


def _rotary_stand_ins(layer: nn.Module, x: Any) -> dict[str, Callable[..., Any]]:
    """Views of attention modules without hooks, whose rotary embedding runs by the device's kernel, if it has one."""
    if not isinstance(x, Tensor) or rotary.ROTARY_BY_DEVICE.get(x.device.type, rotary.ROTARY_KERNELS) is None:
        return {}
    stand_ins: dict[str, Callable[..., Any]] = {}
    for name in rotating_children(layer):
        child = getattr(layer, name)
        if "forward" not in child.__dict__ and not has_hooks(child) and not isinstance(child, wrapper()):
            stand_ins[name] = view = view_of(child)
            view.__dict__["forward"] = functools.partial(with_rotary(type(child).forward), child)
    return stand_ins


def rotating_children(layer: nn.Module) -> list[str]:
    """Names of the children whose forward calls a rotary embedding that has a kernel."""
    children = ((name, child) for name, child in children_of(layer).items() if child is not None)
    return [name for name, child in children if with_rotary(type(child).forward) is not type(child).forward]


def _forward_code(layer: nn.Module) -> Any:
    """The code of the forward of a layer's class, to detect a replaced forward."""
    return getattr(type(layer).forward, "__code__", None)


def _view_with(layer: nn.Module, stand_ins: Mapping[str, Any]) -> nn.Module:
    """A shallow copy of the layer, with stand-ins for some children."""
    view: nn.Module = view_of(layer)
    attributes = view.__dict__
    attributes[MODULES] = {**layer.__dict__[MODULES], **stand_ins}
    for name in stand_ins.keys() & attributes.keys():  # an activation function is an attribute
        attributes[name] = stand_ins[name]
    return view
