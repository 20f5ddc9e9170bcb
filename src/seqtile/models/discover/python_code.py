"""The Python code that a trace runs: which names it may read, and what it calls that no one can watch."""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import seqtile
from seqtile._compat import HOOKS
from seqtile.models.discover.sizes import Untraceable

TORCH = os.path.dirname(torch.__file__)
_LAYERS = os.path.join(TORCH, "nn", "modules")
_OURS = os.path.dirname(seqtile.__file__)
_STANDARD = os.path.dirname(os.__file__)
_NEEDED = ("typing_extensions", "sympy", "mpmath", "networkx", "numpy", "optree", "opt_einsum", "einops", "triton")
"""Packages that PyTorch calls: their code belongs to whoever calls it, as that of Python's own library does."""

KNOWN_LIBRARIES = ("transformers", "peft", "accelerate", "bitsandbytes", "torchao", "liger_kernel")
"""Libraries that look attributes up by names which they spell out."""

_DYNAMIC = {"getattr", "setattr", "hasattr", "vars", "__dict__", "globals", "locals", "eval", "exec", "attrgetter",
            "methodcaller", "__getattribute__"}  # fmt: skip
_NAMESPACES = {"globals", "eval", "exec", "__import__"}
_ANYWHERE = {"currentframe", "_getframe", "__globals__", "f_globals", "import_module"}
_THREADS_OWN = {"is_inference_mode_enabled", "is_inference"}
_IMPORT = dis.opmap["IMPORT_NAME"]
_KNOWN_CALLS = frozenset(
    "builtins math cmath operator _operator itertools functools _functools collections _collections _abc typing "
    "_typing _warnings _weakref re _sre copy enum inspect types string _string contextlib "
    "_contextvars einops opt_einsum".split()
)
"""Modules whose functions, written in C, return the same for the same arguments."""

_LOCKS = (type(threading.Lock()), type(threading.RLock()))


class Code:
    """The Python code that a trace ran, without PyTorch's own.

    Attributes:
        mentioned: every name that it mentions.
        names: the names that it may read: those, or None for any, where it looks names up at run time.
        strangers: those of code that belongs to no library that we know.
        imported: what such code imports while it runs.
        scopes: the global variables of that code.
        refused: why it cannot be followed, or "".
    """

    def __init__(self) -> None:
        self.mentioned: set[str] = set()
        self.strangers: set[str] = set()
        self.imported: set[str] = set()
        self.dynamic = False
        self.scopes: dict[int, dict[str, Any]] = {}
        self.refused = ""
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
        classes = dict.fromkeys(base for module in modules for part in module.modules() for base in type(part).__mro__)
        users = [base for base in classes if not base.__module__.startswith(("torch.", "builtins"))]
        for _ in range(6):
            found = [more for one in found for more in code._read(one)]
            found += [value for base in users for name, value in vars(base).items() if name in code.mentioned]
        return code

    def _read(self, value: Any) -> list[Any]:
        """What a value leads to: the code of a function is noted, and all that it names is returned."""
        if isinstance(value, dict):
            return list(value.values())
        if isinstance(value, (list, tuple)):
            return list(value)
        if isinstance(value, functools.partial):
            return [value.func, *value.args]
        if isinstance(value, property):
            return [value.fget]
        function = inspect.unwrap(value) if isinstance(value, types.FunctionType) else value
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or function.__code__ in self._seen:
            return []
        kind = _place(function.__code__, function.__globals__)
        if kind not in ("user", "layer"):
            return []
        self._see(function.__code__, kind, function.__globals__)
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
        if event == "call" and frame.f_code not in self._seen and frame.f_globals.get("__name__") != "logging":
            self._see(frame.f_code, kind, frame.f_globals)
            if kind == "user":
                self.scopes[id(frame.f_globals)] = frame.f_globals
        elif event == "c_call" and kind == "user" and not _is_known_call(argument):
            place = f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)})"
            called = getattr(argument, "__qualname__", argument)
            self._refuse(f"it calls {called} in {place}, which may return anything")
        elif event == "c_exception" and kind == "user" and _is_pytorchs(argument):  # whoever catches it may go on
            called = getattr(argument, "__name__", argument)
            self.refused = self.refused or f"{called} failed on a tensor without memory"

    def _refuse(self, reason: str) -> None:
        self.refused = self.refused or reason  # the code that runs may swallow the error
        raise Untraceable(reason)

    def _see(self, code: types.CodeType, kind: str, scope: dict[str, Any]) -> None:
        self._seen.add(code)
        names = {*code.co_names, *code.co_freevars}
        strange = is_strange(code, scope)
        if not _DYNAMIC.isdisjoint(names):  # libraries that we know spell out what they look up
            names.update(constant for constant in code.co_consts if isinstance(constant, str))
            self.dynamic |= kind == "user" and _package_of(code.co_filename) not in KNOWN_LIBRARIES
        self.mentioned |= names
        if strange:
            self.strangers |= names
            if reason := _refused(code):
                self._refuse(reason)
            self.imported.update(_imports(code, scope))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._see(constant, kind, scope)

    @property
    def names(self) -> set[str] | None:
        return None if self.dynamic else self.mentioned

    def reads(self, name: str) -> bool:
        return self.names is None or name in self.names


def is_strange(code: types.CodeType, scope: dict[str, Any]) -> bool:
    """Whether it belongs to none of the libraries that we know."""
    return _place(code, scope) == "user" and _package_of(code.co_filename) not in KNOWN_LIBRARIES


def _place(code: types.CodeType, scope: dict[str, Any]) -> str:
    """Whose code it is; one without a file (a console's, a dataclass's) is its module's."""
    place = _place_of(code.co_filename)
    return place if place != "made" else _place_of_module(str(scope.get("__name__")).partition(".")[0])


@functools.cache
def _place_of_module(name: str) -> str:
    return "library" if name in (*sys.stdlib_module_names, *_NEEDED, "torch", "seqtile") else "user"


def _refused(code: types.CodeType) -> str:
    """Why code that reads what nobody can watch, or what a trace shows otherwise than a call, is refused, or ""."""
    names = set(code.co_names)
    found = names & _ANYWHERE
    if not names.isdisjoint(_NAMESPACES):
        found |= _NAMESPACES.intersection(_globals_of(code))
    if {"sys", "modules"} <= names:
        found.add("sys.modules")
    if found:
        return f"it looks things up with {min(found)} in {code.co_name}, which may find anything"
    if found := names & _THREADS_OWN:
        return f"it calls {min(found)} in {code.co_name}, which is another in a trace"
    if "Tensor" in names and ("__class__" in names or ("type" in names and "type" in _globals_of(code))):
        return f"it asks for the type of a tensor in {code.co_name}"
    return ""


def _globals_of(code: types.CodeType) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _imports(code: types.CodeType, scope: dict[str, Any]) -> Iterator[str]:
    """The modules that it imports while it runs, as ``sys.modules`` may call them."""
    if _IMPORT in code.co_code[::2]:
        names = [step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"]
        for name in names:
            yield from (name, f"{scope.get('__package__')}.{name}")


@functools.cache
def _place_of(path: str) -> str:
    if path.startswith(_LAYERS):
        return "layer"
    if path.startswith((TORCH, _OURS)):
        return ""
    if path.startswith("<") and not path.startswith("<frozen"):
        return "made"
    standard = path.startswith("<") or (path.startswith(_STANDARD) and "-packages" not in path)
    return "library" if standard or _package_of(path) in _NEEDED else "user"


def _package_of(path: str) -> str:
    return path.rpartition("-packages" + os.sep)[2].partition(os.sep)[0].removesuffix(".py")


def _kind_of(frame: types.FrameType | None) -> str:
    """Whose code a frame runs: ``"user"``, ``"layer"`` (of ``torch.nn``) or "" for nobody's whose names matter.

    Python's own library and what PyTorch needs count as their caller's.
    """
    while frame is not None:
        place = _place(frame.f_code, frame.f_globals)
        if place != "library":
            return place
        frame = frame.f_back
    return ""


def is_raised_by_user(error: BaseException) -> bool:
    """Whether the code of a module raised it, and nothing that it called."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and _place(frame.tb_frame.f_code, frame.tb_frame.f_globals) == "user"


def _is_pytorchs(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    return isinstance(owner, Tensor) or (getattr(function, "__module__", None) or "").startswith("torch")


def _is_known_call(function: Any) -> bool:
    if function in (sys.getrecursionlimit, sys._getframe, sys.intern):
        return True
    module = getattr(function, "__module__", None)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, _LOCKS):
        return True
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
