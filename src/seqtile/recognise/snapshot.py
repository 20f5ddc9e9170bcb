"""State that a proof depends on: classes, settings, hooks and tensor types of the modules.

:class:`Snapshot` checks in microseconds that an instance has not changed; instances with equal :func:`description`
share one proof.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from itertools import chain as chained
from itertools import filterfalse, repeat, starmap, zip_longest
from operator import attrgetter, call, is_, itemgetter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import BOOKKEEPING, BUFFERS, HOOKS, MODULES, PARAMETERS, PLAIN, children_of
from seqtile._stand_in import ForwardStandIn, attributes_without_stand_ins

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes of every module, in which PyTorch keeps parameters, children and hooks, and ``training``."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

_KIND = attrgetter("dtype", "requires_grad")
_IS_NONE = partial(is_, None)


def parts_of(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules and all their children, each once."""
    return list(dict.fromkeys(submodule for module in modules for submodule in module.modules()))


class Snapshot:
    """The classes, forwards, settings, hooks and children of some modules, compared by identity.

    Tensors are compared by dtype and by whether they train, since engines replace them.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._parts = parts_of(modules)
        self._attributes: list[tuple[Any, dict[str, Any]]] = []
        self._values: list[Any] = []
        self._tensors: list[Any] = []
        self._sized: list[Any] = []
        for module in self._parts:
            attributes = module.__dict__
            names = [
                name for name, value in attributes.items()
                if not isinstance(value, Tensor) and not name.startswith(BOOKKEEPING)
            ]  # fmt: skip
            containers = [attributes[MODULES], *(attributes[name] for name in HOOKS)]
            containers += [
                attributes[name] for name in names if name not in INTERNAL and type(attributes[name]) is dict
            ]
            lists = [attributes[name] for name in names if type(attributes[name]) is list]  # PEFT's merged adapters
            self._attributes.append((itemgetter(*names), attributes))
            self._values += [*(container.values for container in containers), *(entries.copy for entries in lists)]
            self._tensors += [attributes[name].values for name in (PARAMETERS, BUFFERS)]
            self._sized += [attributes, attributes[PARAMETERS], *containers, *lists]
        self._sizes, self._objects = list(map(len, self._sized)), self._read()
        self._kinds = list(map(_KIND, self.tensors()))

    def _read(self) -> list[Any]:
        classes = list(map(type, self._parts))
        forwards = map(getattr, classes, repeat("forward"), repeat(None))
        return [*classes, *forwards, *chained(*starmap(call, self._attributes), *map(call, self._values))]

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers, as they are now."""
        return list(filterfalse(_IS_NONE, chained(*map(call, self._tensors))))

    def holds(self, tensors: list[Tensor] | None = None) -> bool:
        """Whether nothing has changed since the snapshot.

        Args:
            tensors: what :meth:`tensors` has just returned, if it was called.

        Cost:
            Three Python calls and some 10 µs for an MLP with its norm.
        """
        try:
            return (
                list(map(len, self._sized)) == self._sizes
                and all(map(is_, self._read(), self._objects))
                and list(map(_KIND, self.tensors() if tensors is None else tensors)) == self._kinds
            )
        except (AttributeError, KeyError):  # an attribute was removed
            return False


class SameSettings:
    """The settings that a tile's forward had, to compare with those of its recompute.

    A setting that was changed and set back may be another object (PEFT's ``set_adapter`` makes a list). So values are
    compared where the snapshot, which compares identities, does not hold.
    """

    def __init__(self, modules: Sequence[nn.Module], snapshot: Snapshot | None = None) -> None:
        self.modules, self._snapshot = modules, snapshot or Snapshot(modules)
        self._settings = self._read()

    def _read(self) -> list[dict[str, Any]]:
        return [
            {"class": type(module), **_plain_settings(attributes_without_stand_ins(module))}
            for module in parts_of(self.modules)
        ]

    def holds(self) -> bool:
        """Whether nothing was set, not even to the same value."""
        return self._snapshot.holds()

    def changed(self) -> str:
        """The first setting that has changed, such as ``"Linear.scaling"``, or ""."""
        if self._snapshot.holds():
            return ""
        nothing: dict[str, Any] = {}
        for before, now in zip_longest(self._settings, self._read(), fillvalue=nothing):
            for name in {**before, **now}:
                # An instance's own forward is our replacement, or is set by the call that is running.
                if name not in ForwardStandIn.changed and before.get(name) != now.get(name):
                    return f"{(now or before)['class'].__name__}.{name}"
        return ""


def _plain_settings(attributes: dict[str, Any]) -> dict[str, Any]:
    """The settings of one module as comparable values: no tensors, no children, no engine's bookkeeping."""
    return {
        name: setting(value) for name, value in attributes.items()
        if not isinstance(value, Tensor)
        and (name == "training" or name not in INTERNAL and not name.startswith((*BOOKKEEPING, "_seqtile")))
    }  # fmt: skip


def description(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """A key that is equal for modules with one proof; it holds no module and no tensor."""
    parts = parts_of(modules)
    indices = {id(module): index for index, module in enumerate(parts)}
    numbers: dict[int, int] = {}

    def kind_of(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        tied = numbers.setdefault(id(tensor), len(numbers))
        tensor_class = None if type(tensor) in PLAIN else type(tensor)  # a plan's fake tensors count as real ones
        return tied, tensor_class, getattr(tensor, "ds_shape", tensor.shape), tensor.dtype, tensor.requires_grad

    described = []
    for module in parts:
        attributes = attributes_without_stand_ins(module)
        tensors = {**attributes[PARAMETERS], **attributes[BUFFERS]}
        tensors |= {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
        settings = _plain_settings(attributes)
        described.append((
            type(module), getattr(type(module), "forward", None),
            tuple((name, kind_of(tensors[name])) for name in sorted(tensors)),
            tuple((name, indices.get(id(child))) for name, child in children_of(module).items()),
            tuple((name, settings[name]) for name in sorted(settings)),
            # By their code: a closure of DeepSpeed's holds the model.
            tuple(getattr(hook, "__code__", type(hook)) for name in HOOKS for hook in attributes[name].values()),
        ))  # fmt: skip
    return tuple(described)


def setting(value: Any, depth: int = 4) -> tuple[Any, ...]:
    """A comparable form of ``value`` without references to modules; for an object, its class and attributes."""
    if isinstance(value, MethodType):
        return value.__func__, value.__self__ if isinstance(value.__self__, type) else type(value.__self__)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (nn.Module, Tensor)) or not depth:
        return (type(value),)
    if isinstance(value, partial):
        return tuple(setting(entry, depth - 1) for entry in (value.func, value.args, value.keywords))
    if isinstance(value, dict):
        return tuple((str(name), setting(entry, depth - 1)) for name, entry in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), *(setting(entry, depth - 1) for entry in value)
    if isinstance(value, type) or inspect.isroutine(value):
        return (value,)
    attributes = getattr(value, "__dict__", {})
    return type(value), *((name, setting(entry, depth - 1)) for name, entry in attributes.items())
