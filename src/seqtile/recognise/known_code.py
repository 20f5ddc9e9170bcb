"""Distinguish the code of known libraries, which is traced, from custom code, which is left untiled."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from types import BuiltinMethodType, MethodType
from typing import Any

from torch import nn

from seqtile._compat import HOOKS
from seqtile._stand_in import attributes_without_stand_ins

LIBRARIES = frozenset(
    "torch transformers peft accelerate bitsandbytes torchao liger_kernel deepspeed trl axolotl swift unsloth "
    "unsloth_zoo seqtile".split()
)
"""Packages whose modules are tested. The code of a model repository (``transformers_modules``) is not."""


def is_known(code: Any) -> bool:
    """Whether a library or Python itself wrote this class or function."""
    if isinstance(code, partial):
        return all(is_known(inner) for inner in (code.func, *code.args, *code.keywords.values()) if callable(inner))
    if isinstance(code, (MethodType, BuiltinMethodType)) and isinstance(code.__self__, type):
        # apply of an autograd.Function, which is written in C from torch 2.14 on
        return is_known(code.__self__) and is_known(getattr(code, "__func__", code.__self__))
    return _home(code).partition(".")[0].removeprefix("_") in LIBRARIES | _PYTHON


_PYTHON = sys.stdlib_module_names - {"__main__"}


def _home(code: Any) -> str:
    """The module that defines a class or function, past the names that ``functools.wraps`` copies."""
    scope = getattr(getattr(code, "__func__", code), "__globals__", None)
    return str(scope.get("__name__") if scope is not None else getattr(code, "__module__", None) or "builtins")


def is_known_module(module: nn.Module) -> bool:
    """Whether a library wrote a module's class and its instance attributes; children are not checked."""
    return all(map(is_known, _code_in(module, False)))


def custom_code(modules: Iterable[nn.Module], functions: Iterable[Any] = (), called: nn.Module | None = None) -> str:
    """The first class or function that no known library wrote, as ``"class project.model.MLP"``, or "".

    Args:
        modules: checked with all their children.
        functions: other code that runs.
        called: the module whose ``forward`` alone is called, so that its own hooks run outside of the tiles.
    """
    submodules = [module for outer in modules for module in outer.modules()]
    for code in (*(code for module in submodules for code in _code_in(module, module is not called)), *functions):
        outside = (
            isinstance(code, MethodType) and isinstance(code.__self__, nn.Module) and code.__self__ not in submodules
        )
        if outside or not is_known(code):
            code = code.func if isinstance(code, partial) else code
            name = getattr(code, "__qualname__", type(code).__name__)
            return f"{'class' if isinstance(code, type) else 'function'} {_home(code)}.{name}"
    return ""


def _code_in(module: nn.Module, with_hooks: bool) -> Iterator[Any]:
    """The classes and functions that run when a module is called."""
    module_class: Any = type(module)
    yield from module_class.__mro__[:-1]
    if hasattr(module_class, "forward"):  # TorchScript's classes have none
        yield module_class.forward  # a library may have replaced it on the class
    for name, value in attributes_without_stand_ins(module).items():
        if name != "extra_repr" and callable(value) and not isinstance(value, type):
            yield value if hasattr(value, "__module__") else type(value)
    if with_hooks:
        for name in HOOKS:
            yield from module.__dict__.get(name, {}).values()
