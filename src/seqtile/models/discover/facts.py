"""What a proof rests on besides tensors: everything that the traced code can read, and whether it has changed since.

Which names that is, the trace tells: it notes the code that ran. Attributes of the modules, their classes, the globals,
closures and defaults of that code are remembered, with what dictionaries, lists and objects among them hold.
"""

from __future__ import annotations

import abc
import builtins
import collections
import enum
import functools
import logging
import re
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat, starmap
from operator import attrgetter, call, contains, getitem, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqtile._compat import (
    GLOBAL_HOOKS,
    HOOKS,
    REPLICATE,
    AbcData,
    FakeTensor,
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
from seqtile.models.discover.python_code import DYNAMIC, KNOWN_BY_NAME, TORCH, Code, is_custom, is_custom_file
from seqtile.models.discover.sizes import Untraceable

_FORWARD = repeat("forward")
_PLAIN = (
    bool, int, float, complex, str, bytes, range, type(None), type(...), type(NotImplemented), torch.dtype,
    torch.device, torch.Size,
)  # fmt: skip
_FIXED = (
    types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.ClassMethodDescriptorType, re.Pattern, AbcData, OpOverload,
    OpOverloadPacket, torch.memory_format, torch.layout, torch.qscheme,
    types.GenericAlias, types.UnionType,
)  # fmt: skip
"""Types whose objects cannot change, or whose changes cannot change a result."""

_SCRIPTS = (torch.jit.ScriptFunction, torch.jit.ScriptModule, ScriptMethod)
_CACHES = (LruCache, functools.cached_property)

MOST, LARGEST, DEEPEST = 500, 10_000, 8
"""Most things that a proof may rest on, entries of a container among them, and objects one inside another."""

_LOG_STATES = frozenset(("level", "disabled", "handlers", "parent", "propagate", "filters", "manager"))
"""Attributes that hold the settings of a logger or a handler."""

_MISSING = object()
_KIND, _OWN = attrgetter("dtype", "requires_grad", "shape"), attrgetter("__dict__")
_CALLED = {"forward", "__getattr__", "__getattribute__", *(name for name in vars(nn.Module) if "call" in name)}
"""Methods that run when a module is called or one of its attributes is read, though no code names them."""


class _Unseen(Untraceable):
    """Something whose changes cannot be seen; whoever holds it puts the name in front."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind, self.names = kind, list[str]()

    def __str__(self) -> str:
        held = f"{'.'.join(self.names)}, a" if self.names else "a"
        return f"it reads {held} {self.kind}, whose changes cannot be seen"


class Facts:
    """What the code reads of these modules now, and whether it would read the same later.

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
        self._reads: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = []
        self._names: list[tuple[Any, tuple[str, ...]]] = []
        self._values: list[tuple[Any, ...]] = []
        self._asks: list[Callable[[], Any]] = []
        self._grown: list[Any] = []
        self._counted: list[Any] = []
        self._live: list[Any] = []
        self._copies: list[Any] = []
        self._contents: list[Any] = []
        self._empty: list[Any] = []
        self._none: list[tuple[dict[str, Any], str]] = []
        self._grow: list[tuple[Any, Mapping[str, Any], frozenset[str]]] = []
        self._typed: list[Any] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._places: dict[int, int] = {}
        self._tensors: list[tuple[dict[str, Any], str]] = []
        self._attributes: list[tuple[dict[str, Any], str]] = []
        self._alive: list[Any] = []
        self._held_tensors: list[Tensor] = []
        frozen: list[Any] = []
        tree = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self._places = {id(part): number for number, part in enumerate(tree)}
        self._modules = {id(part.__dict__) for part in tree}
        for hooks in GLOBAL_HOOKS:
            self._contain(hooks)
        for part in tree:
            frozen.append(self._of_module(part))
        for cls in dict.fromkeys(base for part in tree for base in type(part).__mro__[:-1]):
            frozen.append(self._of_class(cls))
        frozen += [self._freeze(function, 1) for function in functions]
        for scope in code.scopes.values():
            frozen.append(self._of_globals(scope))
        frozen += [self._of_library(vars(library), code.mentioned) for library in (F, torch)]
        frozen.append(self._of_library(vars(builtins), code.globals))
        frozen.append(self._of_tensors())
        imported = [sys.modules[name] for name in sorted(code.imported) if name in sys.modules]
        frozen += [self._of_owner(module, 0) if _is_users(module) else self._of_library(vars(module), code.mentioned)
                   for module in imported if id(vars(module)) not in code.scopes]  # fmt: skip
        frozen += [self._of_path(*path) for path in sorted(code.paths)]
        for question, answer in code.questions.items():
            if question() != answer:
                raise Untraceable(f"it calls {question.__name__} of PyTorch, which a trace answers otherwise")
            self._asks.append(question)
        self.frozen = [frozen, *code.questions.items()]
        everything = [*self._tensors, *self._attributes]
        self._same_tensors = _numbered([scope[name] for scope, name in everything])
        self.frozen.append(self._same_tensors)
        self._distinct = len(set(self._same_tensors))
        self._everything = everything
        tensors = [scope[name] for scope, name in everything]
        self._kind = _kind_here if any(hasattr(one, "ds_shape") for one in tensors) else _KIND
        self._weighed, self._types = list(map(self._kind, tensors)), list(map(type, tensors))
        self._weights = self._tensors if code.custom_names else []
        if name := next((name for scope, key in self._weights for name in self.reads_of(scope[key])), ""):
            raise Untraceable(f"it reads {name}, an attribute of a weight")
        self._typed += tree
        self._owns = [part.__dict__ for part in tree]
        for own in self._owns:
            if "forward" in own:
                self._read(["forward"], own)
        self._grown += [own for _, own, _ in self._grow]
        self._grown += [part.__dict__ for part in tree if _is_users(type(part))]
        self._counted += [part.__dict__ for part in tree if not _is_users(type(part))]
        self._counted += [scope for part in tree for scope in (parameters_of(part), buffers_of(part))]
        self._sized = [*self._grown, *self._counted, *self._contents]
        self._kinds, self._forwards = list(map(type, self._typed)), list(map(contains, self._owns, _FORWARD))
        self._expected, self._sizes, self._keys = self._read_now(), self._sized_now(), list(chain(*self._grown))
        self._answers = [ask() for ask in self._asks]
        self._held_kinds = list(map(_KIND, self._held_tensors))

    def _read_now(self) -> list[Any]:
        """Every value that is watched, one after another."""
        return [*chain.from_iterable(starmap(call, self._reads)), *chain.from_iterable(self._contents)]

    def _sized_now(self) -> list[int]:
        return list(map(len, self._sized))

    def hold(self) -> bool:
        """Whether everything that is watched is unchanged.

        Cost:
            One Python call, some 20 µs for a plain MLP with its norm, 50 µs with adapters.
        """
        try:
            tensors: list[Any] = list(starmap(getitem, self._everything))
            absent: list[Any] = list(starmap(getitem, self._none))
            now = [*chain.from_iterable(starmap(call, self._reads)), *chain.from_iterable(self._contents)]
            return (
                list(map(len, self._sized)) == self._sizes
                and (all(map(is_, now, self._expected)) or self._is_alike(now))
                and [*chain.from_iterable(self._grown)] == self._keys  # one that appears may hide one of the class
                and list(map(type, self._typed)) == self._kinds
                and list(map(contains, self._owns, _FORWARD)) == self._forwards
                and not any(self._empty)
                and list(map(self._kind, tensors)) == self._weighed
                and list(map(type, tensors)) == self._types
                and len(set(map(id, tensors))) == self._distinct
                and (self._distinct == len(tensors) or _numbered(tensors) == self._same_tensors)
                and absent.count(None) == len(absent)
                and list(map(call, self._asks)) == self._answers
                and list(map(_KIND, self._held_tensors)) == self._held_kinds
                and (not any(map(_OWN, starmap(getitem, self._weights))) or not self._marked())
            )
        except (AttributeError, KeyError, ValueError, RuntimeError):  # something is gone, or a tensor came in
            return False

    def _is_alike(self, now: list[Any]) -> bool:
        """Whether these are the values that are watched, or plain ones that are equal to the last bit."""
        if len(now) != len(self._expected) or not all(map(_same, now, self._expected)):
            return False
        self._expected = now
        return True

    def _marked(self) -> bool:
        """Whether the code may read an attribute that someone gave to a weight."""
        return any([self.reads_of(scope[name]) for scope, name in self._weights])

    def reads_of(self, tensor: Tensor) -> list[str]:
        """The attributes that someone gave to a tensor, and that the code may read."""
        own = tensor.__dict__
        return [name for name in own if name in self._code.custom_names] if own else []

    def tensors(self) -> list[tuple[str, Tensor, int]]:
        """(name, tensor, version) of the buffers and of the tensors in attributes, as they are now."""
        found = []
        for scope, name in (*self._tensors, *self._attributes):
            one = scope.get(name)
            if isinstance(one, Tensor) and not isinstance(one, nn.Parameter) and not is_flat_view(one):
                found.append((name, one, -1 if one.is_inference() else version_of(one)))
        return found

    def restore(self, ran: Code | None = None) -> str:
        """Put back what has changed, and return the first name that had changed, "" for none.

        Args:
            ran: the code that may have changed it; an attribute that it never sets is another thread's to change.
        """
        changed = ""
        for live, copy in zip(self._live, self._copies, strict=True):
            if not _holds_the_same(_plain(live), copy):
                changed = changed or "something that it keeps"
                _put_back(live, copy)
        for live in self._empty:
            if live:
                changed = changed or "something that it keeps"
                live.clear()
        for array, content in self._arrays:
            if array.tobytes() != content.tobytes():
                changed = changed or "an array that it keeps"
                array[...] = content
        for owner, own, former in self._grow:
            new = own.keys() - former - {"__annotations__"}  # which Python makes where someone asks for it
            for name in [name for name in new if ran is None or ran.sets(name)]:
                changed = changed or name
                _put(own if isinstance(own, dict) else owner, name, _MISSING)
        for (owner, names), expected in zip(self._names, self._values, strict=True):
            for name, value in zip(names, expected, strict=True):
                if _holds_the_same(_now(owner, name), value) or (ran is not None and not ran.sets(name)):
                    continue
                changed = changed or name
                _put(owner, name, value)
        return changed

    def _read(self, names: Sequence[str], owner: Any) -> None:
        """Watch attributes of an object, or entries of a dictionary or of a class."""
        if isinstance(owner, (dict, type)):
            scope = vars(owner) if isinstance(owner, type) else owner
            self._watch(itemgetter(*names, names[-1]), scope, owner, names)  # twice, so that one is a tuple too
        else:
            self._watch(attrgetter(*names, names[-1]), owner, owner, names)

    def _watch(self, read: Callable[[Any], tuple[Any, ...]], scope: Any, owner: Any, names: Sequence[str]) -> None:
        self._reads.append((read, scope))
        self._names.append((owner, tuple(names)))
        self._values.append(read(scope)[: len(names)])
        if len(self._live) + len(self._reads) > MOST:
            raise Untraceable(f"it reads more than {MOST} things that may change")

    def _watch_names(self, owner: Any, own: Mapping[str, Any]) -> None:
        """Notice an attribute that appears."""
        self._grow.append((owner, own, frozenset(own)))

    def _contain(self, live: Any) -> None:
        """Watch what a list, dictionary or set holds."""
        if type(live) in (dict, collections.OrderedDict) and not live:
            self._empty.append(live)
            return
        self._live.append(live)
        self._copies.append(_plain(live, copied=True))
        if isinstance(live, dict):
            kind = _dictionary(live)
            if all(type(key) is str for key in live):
                self._grown.append(kind.keys(live))
            else:
                self._contents.append(kind.keys(live))
            self._contents.append(kind.values(live))
        else:
            self._contents.append(live)
        if len(self._live) + len(self._reads) > MOST:
            raise Untraceable(f"it reads more than {MOST} things that may change")

    def _of_module(self, part: nn.Module) -> Any:
        if isinstance(part, _SCRIPTS):
            raise Untraceable(_NO_SCRIPT)
        own = part.__dict__
        self._contain(children_of(part))
        for name in HOOKS:
            hooks = own.get(name)
            if hooks is not None:
                self._contain(hooks)
        specs: dict[str, Any] = {}
        flat = {name: value for name, value in own.items() if is_flat_view(value)}  # FSDP1's, instead of parameters
        for scope in (parameters_of(part), buffers_of(part), flat):
            for name, tensor in scope.items():
                if tensor is not None and (scope is flat or name not in flat):
                    self._tensors.append((own if scope is flat else scope, name))
                    kind = nn.Parameter if scope is flat else _type_of(tensor)
                    specs[name] = (name, _kind_here(tensor), kind)
        for name, value in own.items():
            if isinstance(value, Tensor) and name not in flat:
                self._attributes.append((own, name))
                if self._code.reads(name):
                    specs[name] = (name, "an attribute", _KIND(value), _type_of(value))
        hooks = [self._freeze(hook, 1) for name in HOOKS for hook in own.get(name, {}).values()]
        children = [(name, self._places.get(id(child))) for name, child in children_of(part).items()]
        training = None
        if self._code.reads("training"):
            training = own.get("training")
            self._read(["training"], own)
        methods = {
            name for name, value in own.items() if isinstance(value, types.MethodType) and value.__self__ is part
        }
        named = self._of_scope(own, 0, skip=INTERNAL | methods), self._of_methods(own, methods)
        if isinstance(part, (nn.ParameterDict, nn.ParameterList)):  # whose entries are attributes, by any name
            named = self._named(own, [name for name in own if name not in INTERNAL], own, 0)
        for scope in (parameters_of(part), buffers_of(part)):
            self._none += [(scope, name) for name, tensor in scope.items() if tensor is None]
        weights = [specs[name] for name in sorted(specs)]
        return (_Same(type(part)), training, weights, children, hooks, named, self._forward(own))

    def _of_methods(self, own: dict[str, Any], methods: set[str]) -> Any:
        """Methods that were put on an instance and are bound to it; in a trace they are bound to the copy."""
        names = sorted(methods if self._known is None else methods & self._known)
        if names:
            self._read(names, own)
        return tuple([(name, self._freeze(own[name].__func__, 1)) for name in names])

    def _forward(self, own: dict[str, Any]) -> Any:
        forward = own.get("forward")
        forward = getattr(forward, "before", {"forward": forward}).get("forward")
        return self._freeze(getattr(forward, "__func__", forward), 1)

    def _of_class(self, cls: type) -> Any:
        """What the code reads of a module's class or of one that it is derived from, which ``super()`` may read."""
        own = vars(cls)
        wanted = self._code.reads if cls is not nn.Module else self._code.mentioned.__contains__
        names = [name for name in own if name in _CALLED or (wanted(name) and not _is_special(name, own[name]))]
        found = self._named(cls, names, own, 0)
        if not _is_users(cls):
            self._counted.append(own)
            return (_Same(cls), found)
        self._watch_names(cls, own)
        self._watch(attrgetter("__mro__", "__mro__"), cls, cls, ())
        return (_Same(cls), found, self._of_specials(cls, 0), self._of_metaclass(cls, 0))

    def _of_metaclass(self, cls: type, depth: int) -> Any:
        return self._freeze(type(cls), depth) if _is_users(type(cls)) else ()

    def _of_specials(self, cls: type, depth: int) -> Any:
        """The special methods of a class: ``__call__``, ``__add__``, ``__float__``."""
        own = vars(cls)
        names = [
            name for name in own if name.startswith("__") and name.endswith("__") and isinstance(own[name], _FUNCTIONS)
        ]
        if names:
            self._read(names, cls)
        return tuple([(name, self._held(name, own[name], depth) if self._code.ran(own[name]) else _Same(own[name]))
                      for name in names])  # fmt: skip

    def _of_scope(self, scope: dict[str, Any], depth: int, skip: frozenset[str] = frozenset()) -> Any:
        """The values that the code reads by name in a dictionary of attributes."""
        known = scope.keys() if self._known is None else self._known.intersection(scope)
        return self._named(scope, [name for name in known if name not in skip], scope, depth)

    def _of_globals(self, scope: dict[str, Any]) -> Any:
        names = (self._code.globals | self._code.custom_names).intersection(scope) - _FILE  # another module's code too
        if missing := self._code.globals.difference(scope, vars(builtins)):
            self._asks.append(functools.partial(scope.keys().isdisjoint, missing))  # a global that appears
        return self._named(scope, list(names), scope, 0)

    def _of_path(self, scope: int, root: str, path: str) -> Any:
        """What custom code reads of a library's module, which may be a setting of the process."""
        module = self._code.scopes.get(scope, {}).get(root)
        if not isinstance(module, types.ModuleType) or _is_users(module):
            return ()
        if not path:
            return self._of_library(vars(module), self._code.mentioned)
        try:
            value = attrgetter(path)(module)
        except AttributeError:  # the code caught it, or did not get there
            return ()
        if isinstance(value, Tensor):
            return ()
        self._watch(attrgetter(path, path), module, module, ())
        if isinstance(value, types.ModuleType) and not _is_users(value):
            return self._of_library(vars(value), self._code.mentioned)
        return (path, self._held(path, value, 0))

    def _named(self, owner: Any, names: list[str], scope: Mapping[str, Any], depth: int) -> Any:
        """What is in ``scope`` under these names, read from ``owner``; a module's own tensors are watched apart."""
        names = sorted(name for name in names if id(scope) not in self._modules or not isinstance(scope[name], Tensor))
        if names:
            self._read(names, owner)
        return tuple([(name, self._held(name, scope[name], depth)) for name in names])

    def _held(self, name: str, value: Any, depth: int) -> Any:
        if id(value) in KNOWN_BY_NAME and name == value.__name__:
            return _Same(value)
        try:
            return self._freeze(value, depth + 1)
        except _Unseen as error:
            error.names.insert(0, name)
            raise

    def _of_library(self, scope: dict[str, Any], read: set[str]) -> Any:
        """The functions of PyTorch or Python that the code names, which someone may replace."""
        names = sorted(read.intersection(scope))
        if not names:
            return ()
        self._read(names, scope)
        return tuple([self._held(name, scope[name], 0) for name in names])

    def _of_tensors(self) -> Any:
        """The methods of tensors, which someone may replace or add to."""
        own = vars(Tensor)
        self._counted.append(own)
        return (len(own), self._named(Tensor, list(self._code.mentioned.intersection(own)), own, 0))

    def _freeze(self, value: Any, depth: int) -> Any:
        """``value`` as something to compare; what it holds is watched from now on."""
        kind = type(value)
        if kind in _PLAIN:
            return (kind, repr(value))
        if id(value) in self._places:
            if self._code.compares and isinstance(value, nn.Module) and self._places[id(value)] >= 0:
                raise Untraceable(f"it compares, and holds a {kind.__name__} that is another in a trace")
            return ("known", self._places[id(value)])
        if isinstance(value, Tensor):
            self._held_tensors.append(value)
            return ("tensor", _KIND(value))
        if isinstance(value, _FIXED) or (isinstance(value, logging.Logger) and not self._asks_for_log(value)):
            return _Same(value)
        if isinstance(value, _SCRIPTS):
            raise Untraceable(_NO_SCRIPT)
        if kind is slice:
            return (kind, *[self._freeze(one, depth + 1) for one in (value.start, value.stop, value.step)])
        if id(value) in KNOWN_BY_NAME:
            raise Untraceable(f"it calls {value.__name__} by another name, so that no one can tell what it asks")
        if isinstance(value, (type, types.ModuleType)):
            if _is_users(value) and id(vars(value)) not in self._code.scopes:
                self._know(value)
                return (_Same(value), self._of_owner(value, depth))
            return _Same(value)
        if isinstance(value, enum.Enum):
            return (_Same(value), self._of_member(value, depth))
        if isinstance(value, types.FunctionType):
            return self._of_function(value, depth)
        if depth > DEEPEST or kind in weakref.ProxyTypes or isinstance(value, threading.local):
            raise _Unseen(kind.__name__)
        if isinstance(value, BaseException):
            raise _Unseen(kind.__name__)
        if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            held = value.__self__
            if isinstance(value, types.MethodWrapperType) and value.__name__ in DYNAMIC:
                raise Untraceable(f"it calls {value.__name__}, and so reads attributes that no one can tell")
            if held is None or isinstance(held, (type, types.ModuleType)):
                return _Same(value)
            return (_Same(kind), value.__name__, self._freeze(held, depth + 1))
        if isinstance(value, types.MethodType):
            return (_Same(kind), self._freeze(value.__func__, depth + 1), self._freeze(value.__self__, depth + 1))
        if isinstance(value, weakref.ref):
            target = value()
            if target is not None and not isinstance(target, (nn.Module, type, types.ModuleType)):
                raise _Unseen("weak reference, whose target may go")
            return (kind, self._freeze(target, depth + 1))
        if isinstance(value, property):
            return tuple(self._freeze(one, depth + 1) for one in (value.fget, value.fset) if one is not None)
        if isinstance(value, (classmethod, staticmethod)):
            return (kind, self._freeze(value.__func__, depth + 1))
        if isinstance(value, _CACHES):
            inner = value.func if isinstance(value, functools.cached_property) else value.__wrapped__
            if not isinstance(inner, types.FunctionType) or is_custom(inner.__code__, inner.__globals__):
                raise Untraceable(f"it reads {getattr(inner, '__name__', inner)}, which keeps what it returned before")
            return _Same(value)
        if kind.__module__ == "numpy" and hasattr(value, "tobytes") and value.size < 2**16:
            return self._of_array(value)
        self._know(value)
        if _keeps_more(kind):  # type: ignore[arg-type]  # a class is hashable
            raise _Unseen(kind.__name__)
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            return self._of_container(value, depth)
        if isinstance(value, functools.partial):
            held = (value.func, value.args, value.keywords)
            return (kind, *[self._freeze(one, depth + 1) for one in held], self._of_object(value, depth))
        if type(getattr(value, "__dict__", None)) is dict or slots_of(kind) or isinstance(value, _PLAIN):
            bases: list[Any] = [base for base in kind.__mro__ if base in _PLAIN]
            plain = bases[0].__repr__(value) if bases else ""
            return (_Same(kind), plain, self._of_object(value, depth))
        raise _Unseen(kind.__name__)

    def _asks_for_log(self, value: Any) -> bool:
        """Whether custom code reads how a logger or a file is set, or defines the value's class."""
        return _is_users(type(value)) or not self._code.custom_names.isdisjoint(_LOG_STATES)

    def _know(self, value: Any) -> None:
        """Give the value a number, for values inside it that refer back to it."""
        self._places[id(value)] = -1 - len(self._places)
        self._alive.append(value)

    def _of_array(self, value: Any) -> Any:
        if value.dtype.hasobject:
            raise _Unseen("NumPy array of objects")
        self._asks += [
            value.tobytes,
            functools.partial(getattr, value, "shape"),
            functools.partial(getattr, value, "dtype"),
        ]
        if hasattr(value, "setflags") and value.flags.writeable:
            self._arrays.append((value, value.copy()))
        return (type(value), value.dtype.str, value.shape, value.tobytes())

    def _of_member(self, value: enum.Enum, depth: int) -> Any:
        """What a member of an enumeration holds: its value may be a list."""
        self._know(value)
        own = vars(value)
        held = self._named(own, [name for name in own if name != "__objclass__"], own, depth)
        return (held, *[self._freeze(base, depth) for base in type(value).__mro__[:-1] if _is_users(base)])

    def _of_container(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if value is sys.modules:
            raise Untraceable("it looks things up with sys.modules")
        if kind.__iter__ not in _ITERATORS:
            raise _Unseen(kind.__name__)
        if not isinstance(value, (tuple, frozenset)):
            self._contain(value)
        if len(value) > LARGEST:
            raise Untraceable(f"it reads a {kind.__name__} with more than {LARGEST:,} entries")
        if isinstance(value, (dict, set, frozenset)) and any(map(_is_found_by_identity, value)):
            raise Untraceable(
                f"it looks modules or weights up in a {kind.__name__}, which has no entry of their copies"
            )
        items = list(dict.items(value)) if isinstance(value, dict) else list(value)
        items = sorted(items, key=repr) if isinstance(value, (set, frozenset)) else items
        more = () if kind in (list, tuple, set, frozenset, dict) else self._of_object(value, depth)
        return (_Same(kind), more, *[self._freeze(item, depth + 1) for item in items])

    def _of_object(self, value: Any, depth: int) -> Any:
        """Its attributes, by instance, slot and class."""
        kind, own = type(value), getattr(value, "__dict__", None)
        self._typed.append(value)
        found: list[Any] = []
        if type(own) is dict:
            inside = isinstance(value, nn.Module)
            self._watch_names(value, own)
            if issubclass(kind, types.SimpleNamespace):  # written in C: it reads all of them
                found.append(self._named(own, list(own), own, depth))
            else:
                found.append(self._of_scope(own, depth, INTERNAL - {"training"} if inside else frozenset()))
            if inside:
                self._contain(children_of(value))
                found.append(self._of_scope(children_of(value), depth))
                for hooks in [own[name] for name in HOOKS if own.get(name) is not None]:
                    self._contain(hooks)
                    found += [self._freeze(hook, depth + 1) for hook in hooks.values()]
                found.append(self._forward(own))
            elif kind.__module__.startswith("torch.distributions."):  # read by PyTorch's own code
                found.append(self._named(own, list(own), own, depth))
        if slots := [name for name in slots_of(kind) if self._known is None or name in self._known]:
            self._watch(functools.partial(_read_slots, slots), value, value, slots)
            held = {name: getattr(value, name, _MISSING) for name in slots}
            found += [(name, self._held(name, one, depth)) for name, one in held.items() if one is not _MISSING]
        for base in kind.__mro__[:-1]:
            if _is_users(base):
                found.append(self._freeze(base, depth))
            elif set_later := self._code.custom_names.intersection(vars(base)):
                plain = [name for name in set_later if isinstance(vars(base)[name], _PLAIN)]
                found.append(self._named(base, plain, vars(base), depth))
            self._counted.append(vars(base))
        return tuple(found)

    def _of_owner(self, owner: Any, depth: int) -> Any:
        """The names that the code reads of a class or a module of the user's."""
        scope = vars(owner)
        names = [name for name in scope if not _is_special(name, scope[name])]
        read = [name for name in names if name in self._code.mentioned]
        rest = [name for name in names if name not in self._code.mentioned and self._known is None
                and not isinstance(scope[name], (Tensor, type, types.ModuleType, *_FUNCTIONS))]  # fmt: skip
        self._watch_names(owner, scope)
        found = self._named(owner, read + rest, scope, depth)
        if not isinstance(owner, type):
            return found
        self._watch(attrgetter("__mro__", "__mro__"), owner, owner, ())
        if isinstance(owner, abc.ABCMeta):
            self._asks.append(abc.get_cache_token)  # moves on when something is registered as one
            found = (found, abc.get_cache_token())
        return (found, self._of_specials(owner, depth), self._of_metaclass(owner, depth))

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
            self._read(["cell_contents"], cell)
            cells.append(self._held(name, content, depth))
        defaults = self._freeze(function.__defaults__ or (), depth + 1)
        named = self._freeze(function.__kwdefaults__ or {}, depth + 1)
        own: Any = ()
        if is_custom(function.__code__, function.__globals__):
            self._watch_names(function, function.__dict__)
            own = self._of_scope(function.__dict__, depth)
        return (_Same(function.__code__), tuple(cells), defaults, named, own)


class _Same:
    """Compares by identity, and keeps nothing alive: a proof outlives the classes and functions that it is of."""

    def __init__(self, value: Any) -> None:
        self._value: Callable[[], Any]
        try:
            self._value = weakref.ref(value)
        except TypeError:
            self._value = functools.partial(_itself, value)

    def __eq__(self, other: object) -> bool:
        value = self._value()
        return isinstance(other, _Same) and value is not None and other._value() is value

    __hash__ = None  # type: ignore[assignment]


def _itself(value: Any) -> Any:
    return value


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one, or plain and equal to the last bit."""
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and repr(one) == repr(other))


def _dictionary(value: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The class whose methods know the order of its entries, which may have been moved."""
    return collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict


def _plain(value: Any, copied: bool = False) -> Any:
    """A list, dictionary or set without methods of its class, which may make something else of every entry."""
    if isinstance(value, dict):
        return value if type(value) is dict and not copied else dict(_dictionary(value).items(value))
    for kind in (list, set):
        if isinstance(value, kind):
            return value if type(value) is kind and not copied else kind(value)
    return value


def _put_back(live: Any, content: Any) -> None:
    """Make ``live`` hold what ``content`` holds, past the methods of its class."""
    if isinstance(live, list):
        list.__setitem__(live, slice(None), content)
        return
    kind: Any = next(one for one in (collections.OrderedDict, dict, set) if isinstance(live, one))
    kind.clear(live)
    for key in content:
        if kind is set:
            set.add(live, key)
        else:
            kind.__setitem__(live, key, content[key])


def _holds_the_same(one: Any, other: Any) -> bool:
    """Whether two values are the same, or containers that hold the same."""
    if _same(one, other):
        return True
    if type(one) is not type(other) or not isinstance(one, (list, tuple, dict, set)):
        return False
    if isinstance(one, set):
        return bool(one == other)
    pairs = (list(chain.from_iterable(held.items())) if isinstance(held, dict) else held for held in (one, other))
    return len(one) == len(other) and all(map(_holds_the_same, *pairs))


def _now(owner: Any, name: str) -> Any:
    scope = vars(owner) if isinstance(owner, type) else owner
    try:
        return scope.get(name, _MISSING) if isinstance(owner, (dict, type)) else getattr(owner, name, _MISSING)
    except ValueError:  # an empty cell
        return _MISSING


def _kind_here(tensor: Tensor) -> Any:
    """dtype, whether it takes a gradient, and shape: the whole shape where DeepSpeed keeps only a part of it here."""
    return (tensor.dtype, tensor.requires_grad, getattr(tensor, "ds_shape", tensor.shape))


def _type_of(tensor: Tensor) -> type:
    """The type of a tensor, of a fake one that of what it stands for: a plan's models have both."""
    if type(tensor) is not FakeTensor:
        return type(tensor)
    return nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor


def _numbered(values: Sequence[Any]) -> list[int]:
    """For each value the position of its first occurrence: which of them are one object."""
    places: dict[int, int] = {}
    return [places.setdefault(id(value), number) for number, value in enumerate(values)]


@functools.cache
def _keeps_more(kind: type) -> bool:
    """Whether its objects hold what is in none of their attributes: it is written in C, and no known container."""
    return any(
        isinstance(one, _IN_C) and one.__objclass__ is base
        for base in kind.__mro__ if base not in _HOLDERS
        for one in vars(base).values()
    )  # fmt: skip


def _put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute or entry as it was; take it away if it was not there."""
    if isinstance(owner, type):
        change: tuple[Callable[..., Any], Callable[..., Any]] = (type.__setattr__, type.__delattr__)
    elif isinstance(owner, dict):
        change = (dict.__setitem__, dict.__delitem__)
    else:
        change = (object.__setattr__, object.__delattr__)
    if value is _MISSING:
        change[1](owner, name)
    else:
        change[0](owner, name, value)


def _is_found_by_identity(key: Any) -> bool:
    return isinstance(key() if isinstance(key, weakref.ref) else key, (nn.Module, Tensor))


def slots_of(kind: type) -> list[str]:
    """The attributes that its instances keep in slots."""
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for one in found for name in ((one,) if isinstance(one, str) else one)]
    return [name for name in names if not name.startswith("__")]


def _read_slots(names: Sequence[str], owner: Any) -> Any:
    return tuple([getattr(owner, name, _MISSING) for name in names])


def _is_special(name: str, value: Any) -> bool:
    """Whether it is a method by which Python uses an object, or a name that Python itself gives to classes."""
    own = name.startswith("__") and name.endswith("__")
    return own and (name in _CLASS or isinstance(value, _FUNCTIONS))


def _is_users(value: Any) -> bool:
    name = str(value.__name__ if isinstance(value, types.ModuleType) else value.__module__)
    return _is_users_name(name, name in sys.modules, getattr(sys.modules.get(name), "__file__", None))


@functools.cache
def _is_users_name(name: str, imported: bool, file: str | None) -> bool:
    top = name.partition(".")[0]
    if top in ("torch", "numpy", "transformers", "peft", "accelerate"):
        return False
    # A package of a user's may be named like one of Python's.
    return top not in sys.stdlib_module_names or not imported or (file is not None and is_custom_file(file))


INTERNAL = frozenset(vars(nn.Module())).union(("forward", "extra_repr", REPLICATE, "training"))
"""Attributes that are PyTorch's, or ours."""

_CLASS = frozenset(vars(type("", (), {"__slots__": (), "__annotations__": {}}))) | {
    "__dict__", "__weakref__", "__annotations__", "__qualname__", "__parameters__", "__orig_bases__", "__match_args__",
    "__abstractmethods__", "__static_attributes__", "__firstlineno__", "__annotate_func__", "__type_params__",
}  # fmt: skip
_FILE = {"__builtins__", "__name__", "__file__", "__package__", "__spec__", "__loader__", "__path__"}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, classmethod, staticmethod, property)
_HOLDERS = (
    object, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, collections.OrderedDict,
    collections.defaultdict, functools.partial, types.SimpleNamespace, typing.Generic,
)  # fmt: skip
"""Types written in C of whose objects everything is watched."""

_ITERATORS = {kind.__iter__ for kind in (list, tuple, set, frozenset, dict, collections.OrderedDict)}
_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_NO_SCRIPT = "it calls TorchScript, which cannot be followed"
