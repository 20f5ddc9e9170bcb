"""Whether a layer's forward does nothing but call its children and functions of PyTorch.

Where a norm, a block and a dropout share a tile, they run when the last of them is called, on a view of the layer. A
forward that sets a global, an attribute or a context around one of these calls, or that hands itself to other code,
could tell the difference; it is read here instruction by instruction. Layers of libraries that we know are not: their
code was looked at, and is tested architecture by architecture.
"""

from __future__ import annotations

import builtins
import dis
import re
import types
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import children_of
from seqtile.models.discover.python_code import KNOWN_LIBRARIES, is_of_known_library

_FORBIDDEN = (
    "STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "DELETE_", "BEFORE_",
    "SETUP_", "LOAD_SPECIAL", "MAKE_FUNCTION", "IMPORT_", "YIELD_", "SEND", "GET_AWAITABLE", "LOAD_BUILD_CLASS",
    "LOAD_SUPER_ATTR", "PUSH_EXC_INFO",
)  # fmt: skip
"""Instructions that set something that outlives the call, enter a context, or define a function."""

_SETTERS = re.compile(r"^(set_|use_deterministic|manual_seed|seed$|random$|_?dynamo|__)|rng_state")
_CALLERS = tuple(f"torch.{name}" for name in "utils func _functorch _higher_order_ops autograd compiler".split())
"""Modules whose functions call their arguments, once or more often, now or later."""

_BUILTINS = frozenset({isinstance, len, int, float, bool, tuple, list, range, min, max, AssertionError, ValueError})
_CONSTANTS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_READS = ("__getattribute__", "__getattr__")
_TENSORS = frozenset({Tensor, nn.Parameter})


def is_plain(layer: nn.Module) -> bool:
    """Whether the forward of ``layer`` is a library's that we know, or does nothing that outlives a call in it."""
    cls = type(layer)
    if cls.__module__.partition(".")[0] in KNOWN_LIBRARIES and is_of_known_library(cls.forward):
        return True
    own = [base for base in cls.__mro__ if base not in (object, nn.Module)]
    if any(name in vars(base) for base in own for name in _READS):
        return False
    return _is_plain_function(cls.forward, layer, set())


def _is_plain_function(function: Any, layer: nn.Module | None, seen: set[types.CodeType]) -> bool:
    """Whether a function does nothing that outlives a call in it; ``layer`` is given where it is its method."""
    if not isinstance(function, types.FunctionType):
        return False
    code = function.__code__
    if code in seen:
        return True
    seen.add(code)
    if layer is not None and not code.co_argcount:
        return False
    itself = code.co_varnames[0] if layer is not None else None
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if code.co_cellvars or any(map(_SETTERS.search, code.co_names)) or not all(map(_is_constant, defaults)):
        return False
    instructions = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "PRECALL")]
    place = 0
    while place < len(instructions):
        one, before, rest = instructions[place], instructions[place - 1 : place], instructions[place + 1 :]
        chain = [str(read.argval) for read in takewhile(_reads_attribute, rest)]  # ["b", "c"] of a.b.c
        place += 1 + len(chain)
        loaded = one.argval if isinstance(one.argval, tuple) else (one.argval,)  # Python 3.13 loads two locals at once
        if one.opname.startswith(_FORBIDDEN):
            return False
        if one.opname == "IS_OP" and not any(map(_loads_constant, before)):
            return False
        if layer is not None and itself in loaded and "FAST" in one.opname:
            if not one.opname.startswith("LOAD") or loaded.index(itself) < len(loaded) - 1 or not chain:
                return False  # handed on whole
            if not _is_plain_attribute(layer, chain[:2], seen):
                return False
            chain = chain[2:]
        elif one.opname.startswith("LOAD_FAST"):
            if any(near.opname == "PUSH_NULL" for near in (*before, *rest[:1])):
                return False  # a local variable is called
        elif one.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FROM_DICT_OR_DEREF"):
            value = _value_of(function, one.argval)
            while isinstance(value, types.ModuleType) and _is_plain_value(value, seen) and chain:
                value = getattr(value, chain.pop(0), NotImplemented)
            if not _is_constant(value) and not _is_plain_value(value, seen):
                return False
        if not all(hasattr(Tensor, name) for name in chain):
            return False
    return True


def _reads_attribute(one: dis.Instruction) -> bool:
    return one.opname in ("LOAD_ATTR", "LOAD_METHOD")


def _is_constant(value: Any) -> bool:
    return type(value) in _CONSTANTS


def _loads_constant(one: dis.Instruction) -> bool:
    return one.opname == "LOAD_CONST" and (one.argval is None or isinstance(one.argval, bool))


def _is_plain_attribute(layer: nn.Module, names: list[str], seen: set[types.CodeType]) -> bool:
    """Whether reading ``layer.a`` or ``layer.a.b`` gives a child, a tensor, a plain value or a plain function."""
    first, *rest = names
    of_class = next((vars(base)[first] for base in type(layer).__mro__ if first in vars(base)), None)
    if isinstance(of_class, staticmethod):
        return _is_plain_function(of_class.__func__, None, seen)
    if isinstance(of_class, types.FunctionType) and first not in vars(layer):
        return not of_class.__module__.startswith("torch.") and _is_plain_function(of_class, layer, seen)
    if hasattr(type(of_class), "__set__") or (hasattr(type(of_class), "__get__") and first not in vars(layer)):
        return False  # a property, a slot
    if first in children_of(layer):
        return True  # whose attributes the trace of the layer sees
    value = getattr(layer, first, None)
    if type(value) in _CONSTANTS or type(value) in _TENSORS:
        return True
    if rest:
        kind = type(value)
        reads_plainly = not any(name in vars(base) for base in kind.__mro__[:-1] for name in _READS)
        own = vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else {}
        return reads_plainly and not hasattr(kind, rest[0]) and _is_constant(own.get(rest[0], NotImplemented))
    return _is_plain_value(value, seen)


def _is_plain_value(value: Any, seen: set[types.CodeType]) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] == "torch" and not value.__name__.startswith(_CALLERS)
    if type(value) is tuple:
        return all(map(_is_constant, value))
    if isinstance(value, type):
        return value in _BUILTINS or issubclass(value, (Tensor, torch.Size))
    name = getattr(value, "__name__", "")
    if isinstance(value, types.BuiltinFunctionType):
        return value in _BUILTINS or any(getattr(one, name, None) is value for one in (torch, torch.nn.functional))
    if not isinstance(value, types.FunctionType):
        return _is_constant(value)
    if value.__module__.partition(".")[0] in ("torch", *KNOWN_LIBRARIES):
        return not value.__module__.startswith(_CALLERS) and not _SETTERS.search(name)
    return _is_plain_function(value, None, seen)


def _value_of(function: types.FunctionType, name: str) -> Any:
    """A global, a builtin or a captured variable by its name."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    if name in cells:
        try:
            return cells[name].cell_contents
        except ValueError:
            return NotImplemented
    return function.__globals__.get(name, getattr(builtins, name, NotImplemented))
