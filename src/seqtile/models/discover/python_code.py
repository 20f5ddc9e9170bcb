"""The Python code that a trace runs: which names it may read, and what it calls that no one can watch."""

from __future__ import annotations

import dis
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, is_, is_not, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

import seqtile
from seqtile._compat import HOOKS, backward_pass, unsloths_torch_getattr
from seqtile.models.discover.sizes import Untraceable, noted

TORCH = os.path.join(os.path.dirname(torch.__file__), "")
"""PyTorch's folder, with the separator at its end: ``torchtune`` is another's."""

_LAYERS = os.path.join(TORCH, "nn", "modules", "")
_OURS = os.path.join(os.path.dirname(seqtile.__file__), "")
_STANDARD = os.path.join(os.path.dirname(os.__file__), "")
_NEEDED = ("typing_extensions", "sympy", "mpmath", "networkx", "numpy", "optree", "opt_einsum", "einops", "triton",
           "packaging")  # fmt: skip
"""Packages that PyTorch or Transformers call: their code belongs to whoever calls it, as that of Python does."""

KNOWN_LIBRARIES = ("transformers", "peft", "accelerate", "bitsandbytes", "torchao", "liger_kernel", "deepspeed")
"""Libraries that look attributes up by names which they spell out."""

_BY_NAME = frozenset(("getattr", "setattr", "hasattr", "delattr"))
DYNAMIC = {*_BY_NAME, "vars", "dir", "__dict__", "globals", "locals", "eval", "exec", "attrgetter", "methodcaller",
            "__getattribute__", "__getattr__", "__setattr__", "__getstate__", "__setstate__", "__reduce_ex__", "repr",
            "ascii", "format", "format_map", "__repr__", "__format__"}  # fmt: skip
"""Names of what reads or sets attributes that the code does not mention."""

KNOWN_BY_NAME = frozenset(map(id, (
    getattr, setattr, hasattr, delattr, vars, dir, globals, locals, eval, exec, attrgetter, methodcaller, type, id,
    hash, is_, is_not,
)))  # fmt: skip
"""Functions that read attributes by a name they are given, or tell objects apart: code that calls them names them."""

_QUESTIONS = ("get_", "is_", "are_", "has_")
"""How the names of PyTorch's functions begin that return a setting of the process."""

_IN_THE_MODE = {"is_grad_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype",
                "get_autocast_gpu_dtype", "get_autocast_cpu_dtype"}  # fmt: skip
"""Of those, the ones whose settings are part of a proof's mode."""

_HARMLESS = {"is_compiling", "is_dynamo_compiling", "is_exporting", "is_scripting", "is_tracing", "is_available",
             "current_device"}  # fmt: skip
"""Of those, the ones whose answers do not change."""

_NAMESPACES = {"globals", "eval", "exec", "__import__"}
_ANYWHERE = {"currentframe", "_getframe", "__globals__", "f_globals", "import_module", "tb_frame", "f_back", "gi_frame"}
_ANOTHER = {"is_inference_mode_enabled", "is_", "is_not"}
_SEARCHES = {"count", "index", "remove", "eq", "ne", "contains", "countOf", "indexOf"}
_UNWATCHED = {"isEnabledFor", "getEffectiveLevel", "getweakrefcount", "getweakrefs"}
_SEEDS = {"manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all", "fork_rng"}
"""Functions of PyTorch that set a random generator; Python's and NumPy's are written in C, and refused as such."""
_IS = dis.opmap["IS_OP"]
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_SETS_PYTORCH = {"use_deterministic_algorithms"} | {
    name for name in dir(torch) if name.startswith("set_") and name not in ("set_grad_enabled",)
}  # fmt: skip
"""Functions of PyTorch that set how the process works; gradients are switched for the length of a call, too."""
_STORES = {dis.opmap[name] for name in ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF",
                                      "DELETE_DEREF")}  # fmt: skip
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_SETTERS = {"setattr", "delattr", "__dict__", "vars", "globals", "locals", "eval", "exec", "__setattr__", "__delattr__",
            "__setstate__", "__init__"}  # fmt: skip
"""Names of functions that set attributes which no instruction names."""

_KNOWN_CALLS = frozenset(
    "builtins math cmath operator _operator itertools functools _functools collections _collections _abc typing "
    "_typing _warnings _weakref re _sre copy enum inspect types string _string contextlib "
    "_contextvars einops opt_einsum".split()
)
"""Modules whose functions, written in C, return the same for the same arguments."""

ANSWERS = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""Types that a setting of the process may have."""

_EFFECTS = (print, open, input, breakpoint)
"""Functions of Python with effects outside: each tile would repeat them, and the fused operator would drop them."""

_LOCKS = (type(threading.Lock()), type(threading.RLock()))


class Code:
    """The Python code that a trace ran, without PyTorch's own.

    Attributes:
        mentioned: every name that it mentions.
        names: the names that it may read: those, or None for any, where it looks names up at run time.
        custom_names: those that custom code mentions: code of no library in :data:`KNOWN_LIBRARIES`.
        imported: what such code imports while it runs.
        in_backward: whether such code, or that of a library, runs in the backward.
        scopes: the global variables of that code.
        paths: what such code reads of its globals, as (scope, name, attributes): ``torch.backends.cudnn.enabled``.
        globals: the globals and built-in names that it reads.
        stored: the attributes and globals that the code sets.
        sets_any: whether it may set others too.
        compares: whether custom code compares with ``==`` or ``in``: a module equals only itself, never its copy.
        questions: the functions that tell how the process is set, and what they told the code.
        refused: why it cannot be followed, or "".
    """

    def __init__(self) -> None:
        self.mentioned: set[str] = set()
        self.custom_names: set[str] = set()
        self.imported: set[str] = set()
        self.dynamic = self.in_backward = False
        self.scopes: dict[int, dict[str, Any]] = {}
        self.paths: set[tuple[int, str, str]] = set()
        self.globals: set[str] = set()
        self.stored: set[str] = {"training"}
        self.sets_any = self.compares = False
        self.questions: dict[Callable[[], Any], Any] = {}
        self.refused = ""
        self._seen = unsloths_torch_getattr()
        self._awaited: set[types.FrameType] = set()

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
        """Note the code of a function and return what it names; of a container or a wrapper return what is inside."""
        if isinstance(value, dict):
            return list(value.values())
        if isinstance(value, (list, tuple)):
            return list(value)
        if isinstance(value, functools.partial):
            return [value.func, *value.args]
        if isinstance(value, property):
            return [value.fget]
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):
            return [vars(value)[name] for name in ("forward", "backward", "setup_context") if name in vars(value)]
        function = getattr(value, "__func__", value)
        if not isinstance(function, types.FunctionType) or function.__code__ in self._seen:
            return []
        kind = _place(function.__code__, function.__globals__)
        if kind not in ("user", "layer"):
            return [vars(function)["__wrapped__"]] if "__wrapped__" in vars(function) else []
        self._see(function.__code__, kind, function.__globals__, ran=False)
        if kind == "layer":
            return []
        self.scopes[id(function.__globals__)] = function.__globals__
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
        return [function.__globals__.get(name) for name in function.__code__.co_names] + cells

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the code that runs is noted."""
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def profile(self, frame: types.FrameType, event: str, argument: Any) -> None:
        """For ``sys.setprofile``."""
        kind = _kind_of(frame)
        if kind == "":
            if event == "call":
                self._hear(frame)
            elif event == "return" and frame in self._awaited:
                self._awaited.remove(frame)
                if argument is not None:
                    self._refuse(f"it calls {frame.f_code.co_name} of PyTorch, which may return anything")
            return
        if kind == "user":
            self.in_backward = self.in_backward or noted.in_backward
            if event == "c_call":
                noted.check()  # for a size that was taken before: not by PyTorch
        if event == "call" and frame.f_code not in self._seen and frame.f_globals.get("__name__") != "logging":
            self._see(frame.f_code, kind, frame.f_globals)
            if kind == "user":
                self.scopes[id(frame.f_globals)] = frame.f_globals
        elif event == "c_call" and kind == "user" and not _is_known_call(argument):
            place = f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)})"
            called = getattr(argument, "__qualname__", argument)
            does = "does something outside" if argument in _EFFECTS else "may return anything"
            self._refuse(f"it calls {called} in {place}, which {does}")
        elif event == "c_call" and kind == "user" and is_custom(frame.f_code, frame.f_globals):
            self._ask(getattr(argument, "__name__", ""), argument)
        elif event == "c_exception" and kind == "user" and _is_pytorchs(argument):  # whoever catches it may go on
            called = getattr(argument, "__name__", argument)
            self.refused = self.refused or f"{called} failed on a tensor without memory"

    def _hear(self, frame: types.FrameType) -> None:
        """Note what custom code asks PyTorch: a function without arguments returns a setting of the process."""
        code, caller = frame.f_code, frame.f_back
        if code.co_name in _SEEDS and _kind_of(caller) == "user":
            self._refuse(f"it sets a random generator with {code.co_name}, so that tiles would draw the same")
        if code is nn.Module.__repr__.__code__:
            self.dynamic = True
        if caller is None or not is_custom(caller.f_code, caller.f_globals) or not code.co_filename.startswith(TORCH):
            return
        if any(value is not None for value in frame.f_locals.values()):
            return
        function = frame.f_globals.get(code.co_name)
        if getattr(function, "__code__", None) is not code or code.co_name in _HARMLESS:
            return
        if not self._ask(code.co_name, function):
            self._awaited.add(frame)

    def _ask(self, name: str, function: Any) -> bool:
        """Note a function that tells how the process is set, and its answer; whether it is one."""
        module = getattr(function, "__module__", None) or ""
        if not name.startswith(_QUESTIONS) or name in _HARMLESS or module.partition(".")[0] != "torch":
            return False
        if name not in _IN_THE_MODE:
            try:
                answer = function()
            except TypeError:  # a question about its argument
                return True
            except Exception:  # noqa: BLE001 - whatever it raises where it cannot be told
                answer = ...
            if type(answer) not in ANSWERS:
                self._refuse(f"it calls {name} of PyTorch, which may return anything")
            self.questions[function] = answer
        return True

    def _refuse(self, reason: str) -> None:
        self.refused = self.refused or reason  # the code that runs may swallow the error
        raise Untraceable(reason)

    def _see(self, code: types.CodeType, kind: str, scope: dict[str, Any], ran: bool = True) -> None:
        self._seen.add(code)
        names = {*code.co_names, *code.co_freevars}
        custom = is_custom(code, scope)
        steps = _steps(code)
        self.globals.update(step.argval for step in steps if step.opname in _GLOBALS)
        if not DYNAMIC.isdisjoint(names):  # libraries that we know spell out what they look up
            names.update(constant for constant in code.co_consts if isinstance(constant, str))
            self.globals |= names
            known = kind != "user" or _package_of(code.co_filename) in KNOWN_LIBRARIES
            self.dynamic |= not known and not (DYNAMIC & names <= _BY_NAME and _are_spelled_out(steps))
        # A variable of the function around it is no attribute: PEFT's layers keep their own names in one called kwargs,
        # which such a variable in PyTorch's and PEFT's code would have made another for each layer.
        self.mentioned |= names if custom else names - ({*code.co_freevars} - {*code.co_names})
        self.stored.update("cell_contents" if step.opname.endswith("DEREF") else step.argval  # a closure's variable
                           for step in steps if step.opcode in _STORES)  # fmt: skip
        self.sets_any |= kind == "user" and not _SETTERS.isdisjoint(names)
        if custom:
            self.custom_names |= names
            self.dynamic |= any(step.opname == "MATCH_CLASS" for step in steps)
            self.compares |= not _SEARCHES.isdisjoint(names) or any(map(_asks_if_equal, steps))
            self.paths.update((id(scope), root, path) for root, path in _paths(steps))
            if ran and (
                reason := _refused(code) or _why_it_sets(steps, scope)
            ):  # what is only named like something that runs may do anything
                self._refuse(reason)
            self.imported.update(_imports(steps, scope))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._see(constant, kind, scope, ran)

    def same_reading(self) -> tuple[Any, ...]:
        """The same for code that reads the same names."""
        sets = (self.mentioned, self.globals, self.custom_names, self.imported, self.scopes, self.paths)
        return (self.dynamic, *map(frozenset, sets), frozenset(self.questions.items()))

    def ran(self, function: Any) -> bool:
        """Whether it, a method or a property ran."""
        function = getattr(function, "__func__", getattr(function, "fget", function))
        return getattr(function, "__code__", None) in self._seen

    def sets(self, name: str) -> bool:
        """Whether the code may have set an attribute or a global of this name."""
        return self.sets_any or name in self.stored

    @property
    def names(self) -> set[str] | None:
        return None if self.dynamic else self.mentioned

    def reads(self, name: str) -> bool:
        return self.names is None or name in self.names


def is_custom(code: types.CodeType, scope: dict[str, Any]) -> bool:
    """Whether it is custom code: a user's or of a library that is not in :data:`KNOWN_LIBRARIES`."""
    return _place(code, scope) == "user" and _package_of(code.co_filename) not in KNOWN_LIBRARIES


def is_custom_file(path: str) -> bool:
    """Whether a file holds custom code."""
    return _place_of(path) == "user" and _package_of(path) not in KNOWN_LIBRARIES


def is_of_known_library(function: Any) -> bool:
    """Whether a function is written in one of the libraries that we know, whatever class it was put into."""
    code = getattr(function, "__code__", None)
    return code is not None and _package_of(code.co_filename) in KNOWN_LIBRARIES


def _place(code: types.CodeType, scope: dict[str, Any]) -> str:
    """Whose code it is; code without a file (a console's, a dataclass's) counts as its module's."""
    place = _place_of(code.co_filename)
    return place if place != "made" else _place_of_module(str(scope.get("__name__")).partition(".")[0])


@functools.cache
def _place_of_module(name: str) -> str:
    if name.startswith("namedtuple_"):
        return "library"
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
    if "needs_input_grad" in names and code.co_name not in ("backward", "vjp"):
        return f"it asks which inputs need gradients in {code.co_name}, which is another in a tile"
    if found := names & _UNWATCHED:
        return f"it calls {min(found)} in {code.co_name}, whose answer cannot be watched"
    if found := names & _ANOTHER:
        return f"it calls {min(found)} in {code.co_name}, which is another in a trace"
    if names & {"type", "id", "hash", "__class__"} or _IS in code.co_code[::2]:
        return _why_identity(code)
    return ""


def _asks_if_equal(step: dis.Instruction) -> bool:
    return step.opname == "CONTAINS_OP" or (step.opname == "COMPARE_OP" and str(step.argval).endswith(("==", "!=")))


def _why_it_sets(steps: Sequence[dis.Instruction], scope: dict[str, Any]) -> str:
    """Why code is refused that sets how the process works, or an attribute of what is no user's, or ""."""
    for step in steps:
        if step.opname in (*_GLOBALS, *_ATTRIBUTES) and step.argval in _SETS_PYTORCH:
            return f"it calls {step.argval}, which changes what PyTorch does elsewhere"
    for root, path in _stores(steps):
        try:
            owner = attrgetter(path)(scope.get(root)) if path else scope.get(root)
        except AttributeError:
            continue
        named = getattr(owner, "__name__" if isinstance(owner, types.ModuleType) else "__module__", "")
        if str(named).partition(".")[0] in ("torch", "numpy", "logging", *KNOWN_LIBRARIES):
            return f"it sets an attribute of {'.'.join(filter(None, (root, path)))}, which nobody watches"
    return ""


def _stores(steps: Sequence[dis.Instruction]) -> Iterator[tuple[str, str]]:
    """The globals, each with the attributes read of it, of which an attribute is set."""
    root, path = "", list[str]()
    for step in steps:
        if root and step.opname in _ATTRIBUTES:
            path.append(step.argval)
            continue
        if root and step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            yield root, ".".join(path)
        root, path = (step.argval, []) if step.opname in _GLOBALS else ("", [])


def _why_identity(code: types.CodeType) -> str:
    """Why code that asks what or which object something is may get another answer from a trace, or "".

    Of ``self`` and of what is written down (``None``, a global and its attributes) it may ask.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PRECALL")]
    for number, step in enumerate(steps):
        before, after = steps[max(number - 1, 0)], steps[min(number + 1, len(steps) - 1)]
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in ("type", "id", "hash"):
            if after.argval != "self" or step.argval != "type" or steps[number + 2].opname != "CALL":
                return f"it calls {step.argval} in {code.co_name}, and a tensor or module of a trace is another"
        elif step.argval == "__class__" and step.opname == "LOAD_ATTR" and before.argval != "self":
            return f"it asks for a __class__ in {code.co_name}, and a tensor of a trace has another"
        elif step.opname == "IS_OP":
            while before.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                before = steps[steps.index(before) - 1]
            if before.opname not in ("LOAD_CONST", "LOAD_GLOBAL", "LOAD_NAME"):
                return f"it compares by identity in {code.co_name}, and a tensor, size or module of a trace is another"
    return ""


def _globals_of(code: types.CodeType) -> set[str]:
    return {step.argval for step in _steps(code) if step.opname in _GLOBALS}


@functools.lru_cache(4096)
def _steps(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


def _imports(steps: Sequence[dis.Instruction], scope: dict[str, Any]) -> Iterator[str]:
    """The modules that it imports while it runs, as ``sys.modules`` may call them."""
    for step in steps:
        if step.opname == "IMPORT_NAME":
            yield from (step.argval, f"{scope.get('__package__')}.{step.argval}")


def _paths(steps: Sequence[dis.Instruction]) -> Iterator[tuple[str, str]]:
    """The globals that it reads, each with the attributes that it reads of it: ``("torch", "backends.cudnn")``."""
    root, path = "", list[str]()
    for step in steps:
        if root and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path.append(step.argval)
            continue
        if root:
            yield root, ".".join(path)
        root, path = (step.argval, []) if step.opname in _GLOBALS else ("", [])


def _are_spelled_out(steps: Sequence[dis.Instruction]) -> bool:
    """Whether each ``getattr`` and ``hasattr`` names its attribute in the code."""
    places = [number for number, step in enumerate(steps) if step.argval in _BY_NAME and step.opname != "LOAD_CONST"]
    return all(steps[number].opname == "LOAD_GLOBAL" and _names_its_second(steps[number + 1 :]) for number in places)


def _names_its_second(steps: Sequence[dis.Instruction]) -> bool:
    """Whether the second argument of the call that these steps prepare is a string in the code."""
    depth, named = 0, False
    for before, step in zip([None, *steps], steps, strict=False):
        if step.is_jump_target or step.opcode in _JUMPS:
            return False
        called = step.opname == "PRECALL" or (step.opname == "CALL" and (before is None or before.opname != "PRECALL"))
        if called and depth == step.argval:
            return named
        effect = dis.stack_effect(step.opcode, step.arg if step.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        if depth == 1 and effect > 0:
            named = step.opname == "LOAD_CONST" and isinstance(step.argval, str)
        elif depth + effect <= 2 <= depth:  # something was made of it
            named = False
        depth += effect
        if depth < 0:
            return False
    return False


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
    """Whose code a frame runs: ``"user"``, ``"layer"`` (of ``torch.nn``) or "" for code whose names do not matter.

    Python's own library and what PyTorch needs count as their caller's.
    """
    while frame is not None:
        place = _place(frame.f_code, frame.f_globals)
        if place != "library":
            return place
        frame = frame.f_back
    return ""


def is_raised_by_user(error: BaseException) -> bool:
    """Whether a module's own code raised it, rather than something that it called."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and _place(frame.tb_frame.f_code, frame.tb_frame.f_globals) == "user"


def _is_pytorchs(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    return isinstance(owner, Tensor) or (getattr(function, "__module__", None) or "").partition(".")[0] == "torch"


def _is_known_call(function: Any) -> bool:
    if function in _EFFECTS or function is backward_pass:
        return False
    if function in (sys.getrecursionlimit, sys._getframe, sys.intern):
        return True
    module = getattr(function, "__module__", None)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, _LOCKS):
        return True
    if isinstance(owner, torch.Generator):
        return False
    if owner is None or isinstance(owner, types.ModuleType):
        names = [module or "builtins", getattr(owner, "__name__", "")]
    else:
        kind = owner if isinstance(owner, type) else type(owner)
        # A function's apply is a method in C from torch 2.15 on (torch/autograd/function.py), so its class is named.
        of_torch = (Tensor, nn.Module, torch.autograd.Function)
        names = ["torch"] if issubclass(kind, of_torch) else [kind.__module__]
    return any(name in _KNOWN_CALLS or name.partition(".")[0] == "torch" for name in names)


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
