"""The Python code that a trace runs: which names it may read, and what it calls that no one can watch."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import seqtile
from seqtile.models.discover.live_weights import HOOKS
from seqtile.models.discover.sizes import Untraceable

TORCH = os.path.dirname(torch.__file__)
_LAYERS = os.path.join(TORCH, "nn", "modules")
_OURS = os.path.dirname(seqtile.__file__)
_STANDARD = os.path.dirname(os.__file__)
_NEEDED = ("typing_extensions", "sympy", "mpmath", "networkx", "numpy", "optree", "opt_einsum", "einops", "triton")
"""Packages that PyTorch calls: their code belongs to whoever calls it, as that of Python's own library does."""

_KNOWN_LIBRARIES = ("transformers", "peft", "accelerate", "bitsandbytes", "torchao", "liger_kernel")
"""Libraries that look attributes up by names which they spell out."""

_DYNAMIC = {"getattr", "setattr", "hasattr", "vars", "__dict__", "globals", "locals", "eval", "exec", "attrgetter"}
_KNOWN_CALLS = frozenset(
    "builtins math cmath operator _operator itertools functools _functools collections _collections _abc typing "
    "_typing _warnings _weakref re _sre copy enum inspect types string _string threading _thread contextlib "
    "_contextvars einops opt_einsum".split()
)
"""Modules whose functions, written in C, return the same for the same arguments."""


class Code:
    """The Python code that a trace ran, without PyTorch's own.

    Attributes:
        mentioned: every name that it mentions.
        names: the names that it may read: those, or None for any, where it looks names up at run time.
        scopes: the global variables of that code.
    """

    def __init__(self) -> None:
        self.mentioned: set[str] = set()
        self.dynamic = False
        self.scopes: dict[int, dict[str, Any]] = {}
        self._seen: set[types.CodeType] = set()

    @classmethod
    def written(cls, modules: Sequence[nn.Module], functions: Sequence[Any]) -> Code:
        """The code that these modules are written in, as far as it can be told without running it."""
        code = cls()
        found = [getattr(type(part), "forward", None) for module in modules for part in module.modules()]
        found += [hook for module in modules for part in module.modules() for name in HOOKS
                  for hook in part.__dict__.get(name, {}).values()]  # fmt: skip
        found += [value for module in modules for part in module.modules() for value in vars(part).values()]
        found += functions
        for _ in range(4):
            found = [more for one in found for more in code._read(one)]
        return code

    def _read(self, function: Any) -> list[Any]:
        function = inspect.unwrap(function) if isinstance(function, types.FunctionType) else function
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or function.__code__ in self._seen:
            return []
        kind = _place_of(function.__code__.co_filename)
        if kind not in ("user", "layer"):
            return []
        self._see(function.__code__, kind)
        if kind == "layer":
            return []
        self.scopes[id(function.__globals__)] = function.__globals__
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
        return [function.__globals__.get(name) for name in function.__code__.co_names] + cells

    def profile(self, frame: types.FrameType, event: str, argument: Any) -> None:
        """For ``sys.setprofile``."""
        kind = _kind_of(frame)
        if kind == "":
            return
        if event == "call" and frame.f_code not in self._seen:
            self._see(frame.f_code, kind)
            if kind == "user":
                self.scopes[id(frame.f_globals)] = frame.f_globals
        elif event == "c_call" and kind == "user" and not _is_known_call(argument):
            raise Untraceable(f"it calls {getattr(argument, '__qualname__', argument)}, which may return anything")

    def _see(self, code: types.CodeType, kind: str) -> None:
        self._seen.add(code)
        self.mentioned.update(code.co_names, code.co_freevars)
        if not _DYNAMIC.isdisjoint(code.co_names):  # libraries that we know spell out what they look up
            self.mentioned.update(constant for constant in code.co_consts if isinstance(constant, str))
            self.dynamic |= kind == "user" and _package_of(code.co_filename) not in _KNOWN_LIBRARIES
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._see(constant, kind)

    @property
    def names(self) -> set[str] | None:
        return None if self.dynamic else self.mentioned

    def reads(self, name: str) -> bool:
        return self.names is None or name in self.names


@functools.cache
def _place_of(path: str) -> str:
    if path.startswith(_LAYERS):
        return "layer"
    if path.startswith((TORCH, _OURS)):
        return ""
    standard = path.startswith("<") or (path.startswith(_STANDARD) and "-packages" not in path)
    return "library" if standard or _package_of(path) in _NEEDED else "user"


def _package_of(path: str) -> str:
    return path.rpartition("-packages" + os.sep)[2].partition(os.sep)[0].removesuffix(".py")


def _kind_of(frame: types.FrameType | None) -> str:
    """Whose code a frame runs: ``"user"``, ``"layer"`` (of ``torch.nn``) or "" for nobody's whose names matter.

    Python's own library and what PyTorch needs count as their caller's.
    """
    while frame is not None:
        place = _place_of(frame.f_code.co_filename)
        if place != "library":
            return place
        frame = frame.f_back
    return ""


def is_raised_by_user(error: BaseException) -> bool:
    """Whether the code of a module raised it, and nothing that it called."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and _place_of(frame.tb_frame.f_code.co_filename) == "user"


def _is_known_call(function: Any) -> bool:
    if function in (sys.getrecursionlimit, sys._getframe, sys.intern):
        return True
    module = getattr(function, "__module__", None)
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        names = [module or "builtins", getattr(owner, "__name__", "")]
    else:
        kind = owner if isinstance(owner, type) else type(owner)
        names = ["torch"] if issubclass(kind, (Tensor, nn.Module)) else [kind.__module__]
    return any(name in _KNOWN_CALLS or name.startswith("torch") for name in names)


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
