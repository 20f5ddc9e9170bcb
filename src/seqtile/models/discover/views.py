"""Copies of modules with other tensors in place of their weights; what runs on them leaves the modules as they are."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import BUFFERS, MODULES, PARAMETERS, buffers_of, children_of, parameters_of
from seqtile._shallow import bare_instance
from seqtile.engines.flat import is_flat_view
from seqtile.models.discover.known_kernels import own_forward, twin_of
from seqtile.models.discover.snapshot import INTERNAL

MakeTensor = Callable[[Tensor, torch.device | str], Tensor]
"""Makes the tensor that a copy has in place of one of the module's, on a device."""


class Views:
    """Copies of modules whose weights have shapes but no memory; what runs on them leaves the modules as they are."""

    def __init__(self, make: MakeTensor) -> None:
        self._make = make
        self._views: dict[int, nn.Module] = {}
        self._plain: list[nn.Module] = []
        self._weights: dict[int, tuple[str, Tensor]] = {}
        self._former: list[tuple[nn.Module, dict[str, Any]]] = []

    def of(self, module: nn.Module, name: str) -> nn.Module:
        known = self._views.get(id(module))
        if known is not None:
            return known
        plain = twin_of(module) or module
        self._plain.append(plain)  # weights are known by their ids
        view: nn.Module = bare_instance(plain)
        self._views[id(module)] = view
        own = view.__dict__
        own.update(plain.__dict__)
        own[PARAMETERS] = {key: self._fake(f"{name}.{key}", one) for key, one in parameters_of(plain).items()}
        own[BUFFERS] = {key: self._fake(f"{name}.{key}", one) for key, one in buffers_of(plain).items()}
        own[MODULES] = {
            key: self.of(child, f"{name}.{key}") if isinstance(child, nn.Module) else child
            for key, child in children_of(plain).items()
        }
        for key, value in plain.__dict__.items():
            if is_flat_view(value):
                del own[key]
                own[PARAMETERS][key] = self._fake(f"{name}.{key}", value)
            elif isinstance(value, Tensor):
                own[key] = self._fake(f"{name}.{key}", value)
            elif type(value) in (list, dict, set) and key not in INTERNAL:
                own[key] = value.copy()
        _bind_methods(own, own_forward(plain), module, view)
        self._former.append((view, {key: _copied(value) for key, value in own.items()}))
        return view

    def _fake(self, name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self._weights:
            fake = self._make(tensor, "cpu" if tensor.is_meta else tensor.device)
            self._weights[id(tensor)] = (name, fake)
        return self._weights[id(tensor)][1]

    def __getitem__(self, module: nn.Module) -> nn.Module:
        return self._views[id(module)]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._weights.values()

    def changed(self) -> str:
        """What a call changed in a module, or ""."""
        for view, former in self._former:
            for name, value in view.__dict__.items():
                if name not in former or _differs(former[name], value):
                    return f"{type(view).__name__}.{name}"
        return ""


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict, set)) else value


def _differs(one: Any, other: Any) -> bool:
    if one is other:
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(_differs(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) != len(other) or any(map(_differs, one, other))
    return isinstance(one, Tensor) or isinstance(other, Tensor) or one != other


def _bind_methods(own: dict[str, Any], forward: Any, module: nn.Module, view: nn.Module) -> None:
    """The instance's own methods that are bound to the module, forward or others, are bound to the view instead."""
    own.pop("forward", None)
    if forward is not None:
        own["forward"] = forward
    for name, value in own.items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            own[name] = types.MethodType(value.__func__, view)
