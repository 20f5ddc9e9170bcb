"""Copies of modules with other tensors in place of their weights; running a copy does not change its module."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import BUFFERS, MODULES, PARAMETERS, buffers_of, children_of, parameters_of
from seqtile._shallow import view_of
from seqtile.engines.flat import is_flat_view
from seqtile.recognise.known_kernels import own_forward, twin_of
from seqtile.recognise.snapshot import INTERNAL

MakeTensor = Callable[[Tensor, torch.device | str], Tensor]
"""Makes the tensor, on a device, that replaces a tensor of the module in its copy."""


class Views:
    """Copies of modules whose weights have shapes but no memory."""

    def __init__(self, make: MakeTensor) -> None:
        self._make = make
        self._views: dict[int, nn.Module] = {}
        self._plain: list[nn.Module] = []
        self._weights: dict[int, tuple[str, Tensor]] = {}
        self._former: list[tuple[nn.Module, dict[str, Any]]] = []

    def of(self, module: nn.Module, name: str) -> nn.Module:
        if id(module) in self._views:
            return self._views[id(module)]
        plain = twin_of(module) or module
        self._plain.append(plain)  # kept alive, since weights are identified by id
        view: nn.Module = view_of(plain)
        self._views[id(module)] = view
        attributes = view.__dict__
        attributes[PARAMETERS] = {
            key: self._fake(f"{name}.{key}", tensor) for key, tensor in parameters_of(plain).items()
        }
        attributes[BUFFERS] = {key: self._fake(f"{name}.{key}", tensor) for key, tensor in buffers_of(plain).items()}
        attributes[MODULES] = {
            key: self.of(child, f"{name}.{key}") if isinstance(child, nn.Module) else child
            for key, child in children_of(plain).items()
        }
        for key, value in plain.__dict__.items():
            if is_flat_view(value):
                del attributes[key]
                attributes[PARAMETERS][key] = self._fake(f"{name}.{key}", value)
            elif isinstance(value, Tensor):
                attributes[key] = self._fake(f"{name}.{key}", value)
            elif type(value) in (list, dict, set) and key not in INTERNAL:
                attributes[key] = value.copy()
        _bind_methods(attributes, own_forward(plain), module, view)
        copies = {k: v.copy() if isinstance(v, (list, dict, set)) else v for k, v in attributes.items()}
        self._former.append((view, copies))
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
        """The attribute that a call changed in a module, or ""."""
        for view, earlier in self._former:
            for name, value in view.__dict__.items():
                if name not in earlier or _differs(earlier[name], value):
                    return f"{type(view).__name__}.{name}"
        return ""


def _differs(earlier: Any, later: Any) -> bool:
    if earlier is later:
        return False
    if isinstance(earlier, dict) and isinstance(later, dict):
        return earlier.keys() != later.keys() or any(_differs(value, later[key]) for key, value in earlier.items())
    if isinstance(earlier, list) and isinstance(later, list):
        return len(earlier) != len(later) or any(map(_differs, earlier, later))
    return isinstance(earlier, Tensor) or isinstance(later, Tensor) or earlier != later


def _bind_methods(attributes: dict[str, Any], forward: Any, module: nn.Module, view: nn.Module) -> None:
    """Rebind the instance's own methods (forward or others) from the module to the view."""
    attributes.pop("forward", None)
    if forward is not None:
        attributes["forward"] = forward
    for name, value in attributes.items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            attributes[name] = types.MethodType(value.__func__, view)
