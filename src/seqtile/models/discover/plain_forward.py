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
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import children_of
from seqtile.models.discover.python_code import KNOWN_LIBRARIES

_FORBIDDEN = (
    "STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "DELETE_", "BEFORE_",
    "SETUP_", "LOAD_SPECIAL", "MAKE_FUNCTION", "IMPORT_", "YIELD_", "SEND", "GET_AWAITABLE", "LOAD_BUILD_CLASS",
    "LOAD_SUPER_ATTR", "PUSH_EXC_INFO",
)  # fmt: skip
"""Instructions that set something that outlives the call, enter a context, or make code of their own."""

_SETTERS = re.compile(r"^(set_|use_deterministic|manual_seed|seed$|random$|_?dynamo|__)|rng_state")
_BUILTINS = frozenset({isinstance, len, int, float, bool, tuple, list, range, min, max, AssertionError, ValueError})
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def is_plain(layer: nn.Module) -> bool:
    """Whether the forward of ``layer`` is a library's that we know, or does nothing that outlives a call in it."""
    cls = type(layer)
    if cls.__module__.partition(".")[0] in KNOWN_LIBRARIES:
        return True
    return _is_plain_function(cls.forward, layer, set())


def _is_plain_function(function: Any, layer: nn.Module | None, seen: set[types.CodeType]) -> bool:
    """The same of one function; ``layer`` if it is a method of it."""
    if not isinstance(function, types.FunctionType):
        return False
    code = function.__code__
    if code in seen:
        return True
    seen.add(code)
    itself = code.co_varnames[0] if layer is not None and code.co_argcount else None
    if code.co_cellvars or any(map(_SETTERS.search, code.co_names)):
        return False
    instructions = list(dis.get_instructions(code))
    for number, one in enumerate(instructions):
        if one.opname.startswith(_FORBIDDEN):
            return False
        following = [later for later in instructions[number + 1 : number + 3] if later.opname != "PUSH_NULL"]
        loaded = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        if itself in loaded and "FAST" in one.opname:
            names = list(_attributes_of(following))
            if one.opname.startswith("STORE") or loaded[-1] != itself or loaded.count(itself) > 1 or not names:
                return False
            assert layer is not None
            if not _is_plain_attribute(layer, names, seen):
                return False
        elif one.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FROM_DICT_OR_DEREF"):
            value = _value_of(function, one.argval)
            if not isinstance(value, _CONSTANTS) and not _is_plain_value(value, seen):
                return False
    return True


def _attributes_of(instructions: list[dis.Instruction]) -> Iterator[str]:
    for one in instructions:
        if one.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return
        yield str(one.argval)


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
    if isinstance(value, (*_CONSTANTS, Tensor)):
        return True
    if rest and not isinstance(value, type) and hasattr(value, "__dict__"):
        return isinstance(vars(value).get(rest[0]), _CONSTANTS)
    return _is_plain_value(value, seen)


def _is_plain_value(value: Any, seen: set[types.CodeType]) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] == "torch"
    if isinstance(value, tuple):
        return all(isinstance(one, _CONSTANTS) for one in value)
    module = getattr(value, "__module__", None) or ""
    if module.partition(".")[0] in ("torch", *KNOWN_LIBRARIES):
        return not _SETTERS.search(getattr(value, "__name__", ""))
    if isinstance(value, types.BuiltinFunctionType | type):
        return value in _BUILTINS or getattr(torch, getattr(value, "__name__", ""), None) is value
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
