"""What a proof rests on besides tensors: everything that the traced code can read, and whether it is still so.

Which names that is, the trace tells: it notes the code that ran. Attributes of the modules, their classes, the globals,
closures and defaults of that code are remembered, with what dictionaries, lists and objects among them hold.
"""

from __future__ import annotations

import builtins
import enum
import functools
import inspect
import logging
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from operator import attrgetter, call, getitem, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqtile._compat import (
    GLOBAL_HOOKS,
    HOOKS,
    REPLICATE,
    AbcData,
    LruCache,
    OpOverload,
    OpOverloadPacket,
    ScriptMethod,
    buffers_of,
    children_of,
    parameters_of,
    version_of,
)
from seqtile.engines.flat import is_flat_view
from seqtile.models.discover.python_code import TORCH, Code, is_strange
from seqtile.models.discover.sizes import Untraceable

_FORWARD = methodcaller("get", "forward")
_PLAIN = (
    bool, int, float, complex, str, bytes, slice, range, type(None), type(...), torch.dtype, torch.device, torch.Size,
)  # fmt: skip
_FIXED = (
    types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.ClassMethodDescriptorType, re.Pattern, AbcData, OpOverload,
    OpOverloadPacket, logging.Logger, enum.Enum,
)  # fmt: skip
"""Types of objects that cannot change, or whose changes change no result."""

_SCRIPTS = (torch.jit.ScriptFunction, torch.jit.ScriptModule, ScriptMethod)
_CACHES = (LruCache, functools.cached_property)

MOST, LARGEST, DEEPEST = 500, 10_000, 8
"""Most things that a proof may rest on, entries of a container among them, and objects one inside another."""

_MISSING = object()
_KIND, _OWN = attrgetter("dtype", "requires_grad"), attrgetter("__dict__")


class _Unseen(Untraceable):
    """Something whose changes cannot be seen; whoever holds it puts the name in front."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind, self.names = kind, list[str]()

    def __str__(self) -> str:
        held = f"{'.'.join(self.names)}, a" if self.names else "a"
        return f"it reads {held} {self.kind}, whose changes cannot be seen"


class Facts:
    """What the code reads of these modules now, and whether it still would read the same.

    Args:
        modules: the traced modules.
        code: what the trace ran.

    Attributes:
        frozen: the same for every instance whose code reads the same values.

    Raises:
        Untraceable: it reads more than can be watched.
    """

    def __init__(self, modules: Sequence[nn.Module], functions: Sequence[Any], code: Code) -> None:
        if code.refused:
            raise Untraceable(code.refused)
        self._code = code
        self._known = code.names
        self._reads: list[tuple[Callable[[Any], Any], Any]] = []
        self._names: list[tuple[str, ...]] = []
        self._expected: list[Any] = []
        self._live: list[Any] = []
        self._copies: list[Any] = []
        self._empty: list[Any] = []
        self._grow: list[tuple[Any, Mapping[str, Any], frozenset[str]]] = []
        self._typed: list[Any] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._places: dict[int, int] = {}
        self._tensors: list[tuple[dict[str, Any], str]] = []
        self._attributes: list[tuple[dict[str, Any], str]] = []
        self._alive: list[Any] = []
        frozen: list[Any] = []
        tree = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self._places = {id(part): number for number, part in enumerate(tree)}
        for hooks in GLOBAL_HOOKS:
            self._contain(hooks, hooks.copy())
        for part in tree:
            frozen.append(self._of_module(part))
        for cls in dict.fromkeys(type(part) for part in tree):
            frozen.append(self._of_class(cls))
        frozen += [self._freeze(function, 1) for function in functions]
        for scope in code.scopes.values():
            frozen.append(self._of_globals(scope))
        frozen += [self._of_library(vars(library)) for library in (F, torch)]
        frozen += [self._of_owner(sys.modules[name], 0) for name in sorted(code.imported) if name in sys.modules
                   and _is_users(sys.modules[name]) and id(vars(sys.modules[name])) not in code.scopes]  # fmt: skip
        self.frozen = frozen
        self._weighed = [_KIND(scope[name]) for scope, name in self._tensors]
        self._weights = self._tensors if code.strangers else []
        if name := next((name for scope, key in self._weights for name in self.reads_of(scope[key])), ""):
            raise Untraceable(f"it reads {name}, an attribute of a weight")
        self._typed += tree
        self._owns = [part.__dict__ for part in tree]
        self._grown: list[Mapping[str, Any]] = [*self._owns, *(own for _, own, _ in self._grow)]
        self._sizes = list(map(len, self._grown))
        self._kinds, self._forwards = list(map(type, self._typed)), list(map(_FORWARD, self._owns))

    def hold(self) -> bool:
        """Whether everything is as it was.

        Cost:
            One Python call, some 15 µs for a plain MLP with its norm, 30 µs with adapters.
        """
        try:
            return (
                self._live == self._copies
                and list(map(type, self._typed)) == self._kinds
                and list(map(len, self._grown)) == self._sizes  # an attribute that appears may hide one of the class
                and list(map(_FORWARD, self._owns)) == self._forwards
                and not any(self._empty)
                and list(starmap(call, self._reads)) == self._expected
                and list(map(_KIND, starmap(getitem, self._tensors))) == self._weighed
                and (not any(map(_OWN, starmap(getitem, self._weights))) or not self._marked())
            )
        except (AttributeError, KeyError, ValueError, RuntimeError):  # something is gone, or a tensor came in
            return False

    def _marked(self) -> bool:
        """Whether the code may read an attribute that someone gave to a weight."""
        return any([self.reads_of(scope[name]) for scope, name in self._weights])

    def reads_of(self, tensor: Tensor) -> list[str]:
        """The attributes that someone gave to a tensor, and that the code may read."""
        own = tensor.__dict__
        return [name for name in own if name in self._code.strangers] if own else []

    def tensors(self) -> list[tuple[str, Tensor, int]]:
        """(name, tensor, version) of the buffers and of the tensors in attributes, as they are now."""
        found = []
        for scope, name in (*self._tensors, *self._attributes):
            one = scope.get(name)
            if isinstance(one, Tensor) and not isinstance(one, nn.Parameter) and not is_flat_view(one):
                found.append((name, one, -1 if one.is_inference() else version_of(one)))
        return found

    def restore(self) -> str:
        """Put back what has changed; what it was, "" for nothing."""
        changed = ""
        for live, copy in zip(self._live, self._copies, strict=True):
            if not _same(live, copy):
                changed = changed or "something that it keeps"
                if isinstance(live, list):
                    live[:] = copy
                else:
                    live.clear()
                    live.update(copy)
        for live in self._empty:
            if live:
                changed = changed or "something that it keeps"
                live.clear()
        for array, content in self._arrays:
            if array.tobytes() != content.tobytes():
                changed = changed or "an array that it keeps"
                array[...] = content
        for owner, own, former in self._grow:
            for name in [name for name in own if name not in former]:
                changed = changed or name
                _put(own if isinstance(own, dict) else owner, name, _MISSING)
        for (read, owner), names, expected in zip(self._reads, self._names, self._expected, strict=True):
            if not names or _same(_now(read, owner), expected):
                continue
            for name, value in zip(names, expected if len(names) > 1 else (expected,), strict=True):
                now = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, _MISSING)
                if not _same(now, value):
                    changed = changed or name
                    _put(owner, name, value)
        return changed

    def _read(self, names: Sequence[str], owner: Any) -> None:
        """Watch attributes of ``owner``, or entries of a dictionary."""
        read = itemgetter(*names) if isinstance(owner, dict) else attrgetter(*names)
        self._reads.append((read, owner))
        self._names.append(tuple(names))
        self._expected.append(read(owner))

    def _watch_names(self, owner: Any, own: Mapping[str, Any]) -> None:
        """Notice an attribute that appears."""
        self._grow.append((owner, own, frozenset(own)))

    def _contain(self, live: Any, copy: Any) -> None:
        if isinstance(live, dict) and not live:
            self._empty.append(live)
            return
        self._live.append(live)
        self._copies.append(copy)
        if len(self._live) + len(self._reads) > MOST:
            raise Untraceable(f"it reads more than {MOST} things that may change")

    def _of_module(self, part: nn.Module) -> Any:
        if isinstance(part, _SCRIPTS):
            raise Untraceable(_NO_SCRIPT)
        own = part.__dict__
        self._contain(children_of(part), dict(children_of(part)))
        for name in HOOKS:
            hooks = own.get(name)
            if hooks is not None:
                self._contain(hooks, type(hooks)(hooks))
        specs = {}
        flat = {name: value for name, value in own.items() if is_flat_view(value)}  # FSDP1's, instead of parameters
        for scope in (parameters_of(part), buffers_of(part), flat):
            for name, tensor in scope.items():
                if tensor is not None and (scope is flat or name not in flat):
                    self._tensors.append((own if scope is flat else scope, name))
                    kind = nn.Parameter if scope is flat else type(tensor)
                    specs[name] = (name, tuple(getattr(tensor, "ds_shape", tensor.shape)), _KIND(tensor), kind)
        self._attributes += [(own, k) for k, value in own.items() if isinstance(value, Tensor) and k not in flat]
        hooks = [self._freeze(hook, 1) for name in HOOKS for hook in own.get(name, {}).values()]
        children = [(name, self._places.get(id(child))) for name, child in children_of(part).items()]
        training = None
        if self._code.reads("training"):
            training = own.get("training")
            self._read(["training"], own)
        named = self._of_scope(own, 0, skip=INTERNAL)
        weights = [specs[name] for name in sorted(specs)]
        return (type(part), training, weights, children, hooks, named, self._forward(own))

    def _forward(self, own: dict[str, Any]) -> Any:
        forward = own.get("forward")
        forward = getattr(forward, "before", {"forward": forward}).get("forward")
        return self._freeze(getattr(forward, "__func__", forward), 1)

    def _of_class(self, cls: type) -> Any:
        names = [
            name for base in cls.__mro__ if base not in (nn.Module, object) for name, value in vars(base).items()
            if (self._code.reads(name) and not name.startswith("__")) or name == "forward"
        ]  # fmt: skip
        for base in cls.__mro__[:-1]:
            if _is_users(base):
                self._watch_names(base, vars(base))
        names = sorted(set(names))
        if not names:
            return ()
        self._read(names, cls)
        values = [inspect.getattr_static(cls, name, None) for name in names]
        return (cls, *[(name, self._freeze(value, 1)) for name, value in zip(names, values, strict=True)])

    def _of_scope(self, scope: dict[str, Any], depth: int, skip: frozenset[str] = frozenset()) -> Any:
        """The values that the code reads by name in a dictionary of attributes."""
        known = scope.keys() if self._known is None else self._known.intersection(scope)
        return self._named(scope, [name for name in known if name not in skip], scope, depth)

    def _of_globals(self, scope: dict[str, Any]) -> Any:
        names = self._code.mentioned.intersection(scope) - _FILE
        missing = self._code.mentioned.difference(scope, vars(builtins))
        self._reads.append((scope.keys().isdisjoint, missing))  # a global that appears
        self._names.append(())
        self._expected.append(True)
        return self._named(scope, list(names), scope, 0)

    def _named(self, owner: Any, names: list[str], scope: Mapping[str, Any], depth: int) -> Any:
        """What is in ``scope`` under these names, read from ``owner``."""
        names = sorted(name for name in names if not isinstance(scope[name], Tensor))
        if names:
            self._read(names, owner)
        return tuple([(name, self._held(name, scope[name], depth)) for name in names])

    def _held(self, name: str, value: Any, depth: int) -> Any:
        try:
            return self._freeze(value, depth + 1)
        except _Unseen as error:
            error.names.insert(0, name)
            raise

    def _of_library(self, scope: dict[str, Any]) -> Any:
        """PyTorch's functions, which someone may replace."""
        names = sorted(self._code.mentioned.intersection(scope))
        if not names:
            return ()
        self._read(names, scope)
        others = [one for one in map(scope.get, names) if isinstance(one, types.FunctionType)
                  and not one.__code__.co_filename.startswith(TORCH)]  # fmt: skip
        return (self._expected[-1], *[self._freeze(one, 1) for one in others])

    def _freeze(self, value: Any, depth: int) -> Any:
        """``value`` as something to compare; what it holds is watched from now on."""
        kind = type(value)
        if kind in _PLAIN:
            return (kind, repr(value) if kind is float else value)
        if id(value) in self._places:
            return ("known", self._places[id(value)])
        if isinstance(value, Tensor):
            return ("tensor", tuple(value.shape), value.dtype)
        if isinstance(value, _FIXED):
            return _Same(value)
        if isinstance(value, _SCRIPTS):
            raise Untraceable(_NO_SCRIPT)
        if isinstance(value, (type, types.ModuleType)):
            if _is_users(value) and id(vars(value)) not in self._code.scopes:
                self._know(value)
                return (_Same(value), self._of_owner(value, depth))
            return _Same(value)
        if isinstance(value, types.FunctionType):
            return self._of_function(value, depth)
        if depth > DEEPEST or kind in weakref.ProxyTypes or isinstance(value, threading.local):
            raise _Unseen(kind.__name__)
        if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            held = value.__self__
            if held is None or isinstance(held, (type, types.ModuleType)):
                return _Same(value)
            return (kind, value.__name__, self._freeze(held, depth + 1))
        if isinstance(value, types.MethodType):
            return (kind, self._freeze(value.__func__, depth + 1), self._freeze(value.__self__, depth + 1))
        if isinstance(value, weakref.ref):
            return (kind, self._freeze(value(), depth + 1))
        if isinstance(value, property):
            return tuple(self._freeze(one, depth + 1) for one in (value.fget, value.fset) if one is not None)
        if isinstance(value, (classmethod, staticmethod)):
            return (kind, self._freeze(value.__func__, depth + 1))
        if isinstance(value, _CACHES):
            inner = value.func if isinstance(value, functools.cached_property) else value.__wrapped__
            if not isinstance(inner, types.FunctionType) or is_strange(inner.__code__, inner.__globals__):
                raise Untraceable(f"it reads {getattr(inner, '__name__', inner)}, which keeps what it returned before")
            return _Same(value)
        if kind.__module__ == "numpy" and hasattr(value, "tobytes") and value.size < 2**16:
            return self._of_array(value)
        self._know(value)
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            return self._of_container(value, depth)
        if isinstance(value, functools.partial):
            held = (value.func, value.args, value.keywords)
            return (kind, *[self._freeze(one, depth + 1) for one in held], self._of_object(value, depth))
        if type(getattr(value, "__dict__", None)) is dict or _slots(kind) or isinstance(value, _PLAIN):
            plain = repr(value) if isinstance(value, _PLAIN) else ""
            return (kind, plain, self._of_object(value, depth))
        raise _Unseen(kind.__name__)

    def _know(self, value: Any) -> None:
        """Remember where it was met, for what holds it in turn."""
        self._places[id(value)] = -1 - len(self._places)
        self._alive.append(value)

    def _of_array(self, value: Any) -> Any:
        self._reads.append((_bytes_of, value))
        self._names.append(())
        self._expected.append(value.tobytes())
        if hasattr(value, "setflags") and value.flags.writeable:
            self._arrays.append((value, value.copy()))
        return (type(value), value.tobytes())

    def _of_container(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if not isinstance(value, (tuple, frozenset)):
            self._contain(value, kind(value) if kind in (list, set, dict) else value.copy())
        if len(value) > LARGEST:
            raise Untraceable(f"it reads a {kind.__name__} with more than {LARGEST:,} entries")
        items = list(value.items()) if isinstance(value, dict) else list(value)
        items = sorted(items, key=repr) if isinstance(value, (set, frozenset)) else items
        more = () if kind in (list, tuple, set, frozenset, dict) else self._of_object(value, depth)
        return (kind, more, *[self._freeze(item, depth + 1) for item in items])

    def _of_object(self, value: Any, depth: int) -> Any:
        """Its attributes, by instance, slot and class."""
        kind, own = type(value), getattr(value, "__dict__", None)
        self._typed.append(value)
        found: list[Any] = []
        if type(own) is dict:
            inside = isinstance(value, nn.Module)
            self._watch_names(value, own)
            found.append(self._of_scope(own, depth, INTERNAL - {"training"} if inside else frozenset()))
            if inside:
                self._contain(children_of(value), dict(children_of(value)))
                found.append(self._of_scope(children_of(value), depth))
        if slots := [name for name in _slots(kind) if self._known is None or name in self._known]:
            read = functools.partial(_read_slots, slots)
            self._reads.append((read, value))
            self._names.append(tuple(slots))
            self._expected.append(read(value))
            held = {name: getattr(value, name, _MISSING) for name in slots}
            found += [(name, self._held(name, one, depth)) for name, one in held.items() if one is not _MISSING]
        for base in kind.__mro__[:-1]:
            if _is_users(base):
                found.append(self._freeze(base, depth))
        return tuple(found)

    def _of_owner(self, owner: Any, depth: int) -> Any:
        """The names that the code reads of a class or a module of the user's."""
        scope = vars(owner)
        names = [name for name in scope if not name.startswith("__")]
        read = [name for name in names if name in self._code.mentioned]
        rest = [name for name in names if name not in self._code.mentioned and self._known is None
                and not isinstance(scope[name], (Tensor, type, types.ModuleType, *_FUNCTIONS))]  # fmt: skip
        self._watch_names(owner, scope)
        return self._named(owner, read + rest, scope, depth)

    def _of_function(self, function: types.FunctionType, depth: int) -> Any:
        if function.__code__.co_filename.startswith(TORCH):
            inner = function.__dict__.get("__wrapped__")
            return _Same(function) if inner is None else (_Same(function.__code__), self._freeze(inner, depth + 1))
        self._know(function)
        self._read(["__code__", "__defaults__", "__kwdefaults__"], function)
        cells = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            if not isinstance(content, Tensor):
                self._read(["cell_contents"], cell)
            cells.append(self._held(name, content, depth))
        defaults = self._freeze(function.__defaults__ or (), depth + 1)
        named = self._freeze(function.__kwdefaults__ or {}, depth + 1)
        own: Any = ()
        if is_strange(function.__code__, function.__globals__):
            self._watch_names(function, function.__dict__)
            own = self._of_scope(function.__dict__, depth)
        return (_Same(function.__code__), tuple(cells), defaults, named, own)


def _bytes_of(array: Any) -> bytes:
    return array.tobytes()  # type: ignore[no-any-return]


class _Same:
    """Compares by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # noqa: BLE001 - tensors and arrays, among others
        return False


def _now(read: Callable[[Any], Any], owner: Any) -> Any:
    try:
        return read(owner)
    except (AttributeError, KeyError, ValueError):
        return _MISSING


def _put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute or entry as it was; take it away if it was not there."""
    if isinstance(owner, type):
        owner = next((base for base in owner.__mro__ if name in vars(base)), owner)
        change: tuple[Callable[..., Any], Callable[..., Any]] = (type.__setattr__, type.__delattr__)
    elif isinstance(owner, dict):
        change = (dict.__setitem__, dict.__delitem__)
    else:
        change = (object.__setattr__, object.__delattr__)
    if value is _MISSING:
        change[1](owner, name)
    else:
        change[0](owner, name, value)


def _slots(kind: type) -> list[str]:
    """The attributes that its instances keep in slots."""
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for one in found for name in ((one,) if isinstance(one, str) else one)]
    return [name for name in names if not name.startswith("__")]


def _read_slots(names: Sequence[str], owner: Any) -> Any:
    values = tuple([getattr(owner, name, _MISSING) for name in names])
    return values if len(names) > 1 else values[0]


def _is_users(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    top = str(name).partition(".")[0]
    return top not in sys.stdlib_module_names and top not in ("torch", "numpy", "transformers", "peft", "accelerate")


INTERNAL = frozenset(vars(nn.Module())).union(("forward", "extra_repr", REPLICATE, "training"))
"""Attributes that are PyTorch's, or ours."""

_FILE = {"__builtins__", "__name__", "__file__", "__package__", "__spec__", "__loader__", "__path__"}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, classmethod, staticmethod, property)
_NO_SCRIPT = "it calls TorchScript, which cannot be followed"
