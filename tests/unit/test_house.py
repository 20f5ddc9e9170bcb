"""Keeps the house in order: what may import what, what stays light, and what a clone or a wheel must contain."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import processor_times
import seqtile
from seqtile._compat import OVERRIDDEN as OVERRIDDEN_METHODS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "seqtile"

# A module imports only from rows above its own and from its own package. A new top-level name needs a row here.
ORDER: tuple[frozenset[str], ...] = (
    frozenset({"_errors", "_log", "_sentences", "_shallow", "devices"}),
    frozenset({"_compat"}),
    frozenset({"_stand_in", "counting"}),
    frozenset({"_effects"}),
    frozenset({"tiling"}),
    frozenset({"options"}),
    frozenset({"rules"}),
    frozenset({"ops"}),
    frozenset({"engines", "activation_checkpointing"}),
    frozenset({"models"}),
    frozenset({"verification"}),
    frozenset({"planner"}),
    frozenset({"train", "bench", "integrations"}),
    frozenset({"cli"}),
)

DEVICE_NAMES = frozenset({"cuda", "npu", "xpu", "mps", "hip", "rocm", "hpu", "nvidia", "ascend"})

HEAVY = ("torch", "numpy", "transformers", "accelerate", "trl", "datasets", "peft", "matplotlib")
NOT_FOR_THE_LIBRARY = (*HEAVY, "pydantic", "typer", "rich", "yaml")


def modules(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Every module below ``root`` with its syntax tree."""
    files = sorted(root.rglob("*.py"))
    assert files, f"no Python file below {root}"
    for file in files:
        yield file.relative_to(root), ast.parse(file.read_text(encoding="utf-8"), str(file))


def top_level_name(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


UNKNOWN = "\0"
"""Stands for a part of a string that the source alone does not tell."""

IMPORTERS = frozenset({"import_module", "__import__", "find_spec", "run_module", "resolve_name"})


def package_of(file: Path) -> str:
    return ".".join(("seqtile", *file.parent.parts))


def constants_of(file: Path, tree: ast.Module) -> dict[str, ast.expr]:
    """What the names at the top of a module stand for, where they are assigned once."""
    given = [node for node in tree.body if isinstance(node, ast.Assign) and len(node.targets) == 1]
    found = {node.targets[0].id: node.value for node in given if isinstance(node.targets[0], ast.Name)}
    times = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    once = {name: value for name, value in found.items() if times.count(name) == 1}
    name = package_of(file) if file.stem == "__init__" else f"{package_of(file)}.{file.stem}"
    return once | {"__package__": ast.Constant(package_of(file)), "__name__": ast.Constant(name)}


def text_of(node: ast.AST | None, constants: dict[str, ast.expr], depth: int = 0) -> str | None:
    """The string that an expression makes, with :data:`UNKNOWN` for what cannot be told; None for no string at all."""
    if depth > 9:
        return None

    def part(value: ast.AST) -> str:
        text = text_of(value, constants, depth + 1)
        return UNKNOWN if text is None else text

    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return part(node.value)
    if isinstance(node, ast.Name):
        return text_of(constants.get(node.id), constants, depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [text_of(side, constants, depth + 1) for side in (node.left, node.right)]
        return None if sides == [None, None] else "".join(UNKNOWN if side is None else side for side in sides)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        given = [part(value) for value in (node.right.elts if isinstance(node.right, ast.Tuple) else [node.right])]
        pattern = text_of(node.left, constants, depth + 1)
        return None if pattern is None else _filled(r"%[-+ #0-9.]*[a-zA-Z]", pattern, given)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        pattern, first = text_of(node.func.value, constants, depth + 1), node.args[0] if node.args else None
        if pattern is None:
            return None
        if node.func.attr == "join" and isinstance(first, (ast.List, ast.Tuple)):
            return pattern.join(part(value) for value in first.elts)
        if node.func.attr == "format":
            return _filled(r"\{[^{}]*\}", pattern, [part(value) for value in node.args])
    return None


def _filled(field: str, pattern: str, given: list[str]) -> str:
    values = iter(given)
    return re.sub(field, lambda _: next(values, UNKNOWN), pattern)


def names_in_strings(file: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and top-level name of every module of ours that a string names, written out or put together.

    Seen through: f-strings, ``+``, ``%``, ``.format``, ``.join`` of a display, names assigned once at the top of the
    module, ``__name__`` and ``__package__``; relative names given to what imports. ``"?"`` is what is imported, or run
    by ``-m``, from ``seqtile`` under a name that cannot be told. A docstring names no module, by whoever gets it.
    """
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants, packages, seen = constants_of(file, tree), frozenset().union(*ORDER), set(prose)
    loaded = set(map(id, _loaded(tree)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (text := _relative(node, file, constants)):
            seen.update(map(id, ast.walk(node)))
        elif id(node) in seen or isinstance(node, ast.Name) or (text := text_of(node, constants)) is None:
            continue
        else:
            seen.update(id(child) for child in ast.walk(node))
        for name in re.findall(rf"\bseqtile\.(\w+|{UNKNOWN})", text):
            if name in packages or (name == UNKNOWN and id(node) in loaded):  # else it is a public name, in a message
                yield node.lineno, name.replace(UNKNOWN, "?")  # type: ignore[attr-defined]


def _loaded(tree: ast.Module) -> Iterator[ast.expr]:
    """Expressions that are handed to what imports, or follow ``"-m"`` in a command."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) in IMPORTERS:
            yield from node.args[:1]
        elif isinstance(node, (ast.List, ast.Tuple)):
            for option, module in zip(node.elts, node.elts[1:], strict=False):
                if isinstance(option, ast.Constant) and option.value == "-m":
                    yield module


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _relative(call: ast.Call, file: Path, constants: dict[str, ast.expr]) -> str:
    """The whole name behind a relative one that ``import_module`` and its like are given, else ""."""
    name = text_of(call.args[0], constants) if _called(call) in IMPORTERS and call.args else None
    if name is None or not name.startswith("."):
        return ""
    given = call.args[1:2] or [word.value for word in call.keywords if word.arg == "package"]
    base = (text_of(given[0], constants) if given else None) or package_of(file)
    level = len(name) - len(name.lstrip("."))
    return ".".join([*base.split(".")[: len(base.split(".")) - level + 1], name.lstrip(".")])


def imports_of_ours(file: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and top-level name of everything that ``file`` imports from this package, wherever in the file."""
    yield from names_in_strings(file, tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            package = ("seqtile", *file.parent.parts)
            base = package[: len(package) - node.level + 1]
            stem = ".".join([*base, *([node.module] if node.module else [])])
            targets = [f"{stem}.{alias.name}" for alias in node.names] if stem == "seqtile" else [stem]
        elif isinstance(node, ast.ImportFrom):
            stem = node.module or ""
            targets = [f"{stem}.{alias.name}" for alias in node.names] if stem == "seqtile" else [stem]
        else:
            continue
        for target in targets:
            parts = target.split(".")
            if parts[0] == "seqtile" and len(parts) > 1 and not parts[1].startswith("__"):
                yield node.lineno, parts[1]


def wrong_imports(root: Path) -> list[str]:
    ranks = {name: rank for rank, names in enumerate(ORDER) for name in names}
    wrong = []
    for file, tree in modules(root):
        importer = top_level_name(file)
        if importer in ("__init__", "__main__"):  # the public face, and the command
            continue
        if importer not in ranks:
            wrong.append(f"{file}: {importer} has no row in ORDER")
            continue
        for line, imported in imports_of_ours(file, tree):
            if imported != importer and ranks.get(imported, len(ORDER)) >= ranks[importer]:
                wrong.append(f"{file}:{line}: {importer} may not import {imported}")
    return wrong


def prints(root: Path) -> list[str]:
    """Calls of ``print`` outside the command line."""
    return [
        f"{file}:{node.lineno}"
        for file, tree in modules(root)
        if top_level_name(file) != "cli"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def device_names(root: Path) -> list[str]:
    """Mentions of one vendor's device in the code of ``ops``; docstrings may speak of it."""
    found = []
    for file, tree in modules(root):
        if top_level_name(file) != "ops":
            continue
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            name = {ast.Name: "id", ast.Attribute: "attr", ast.Constant: "value", ast.alias: "name"}.get(type(node))
            value = getattr(node, name) if name and id(node) not in prose else None
            if isinstance(value, str) and DEVICE_NAMES & set(re.split(r"[^a-z]+", value.lower())):
                found.append(f"{file}:{node.lineno}: {value}")  # type: ignore[attr-defined]
    return found


FACTS = frozenset({
    "mem_get_info", "get_memory_info", "get_device_properties", "get_device_name", "recommended_max_memory",
    "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved", "reset_peak_memory_stats",
    "empty_cache", "synchronize", "sched_getaffinity", "sysconf",
})  # fmt: skip


def machine_facts(root: Path) -> list[str]:
    """Facts of the machine that are read outside ``devices.py``: versions, memory, names, the allocator's peaks."""
    found = []
    for file, tree in modules(root):
        if file.name == "devices.py":
            continue
        for node in ast.walk(tree):
            name = ""
            if isinstance(node, ast.ImportFrom) and node.module == "importlib.metadata":
                name = "importlib.metadata"
            elif isinstance(node, ast.Attribute) and node.attr in FACTS:
                name = node.attr
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in FACTS:
                name = node.value
            elif isinstance(node, ast.Constant) and str(node.value).startswith(("/proc/", "/sys/")):
                name = str(node.value)
            if name:
                found.append(f"{file}:{node.lineno}: {name}")  # type: ignore[attr-defined]
    return found


PRIVATE = re.compile(r"_[A-Za-z]\w*")
PUBLIC = frozenset({"_exit", "_getframe", "_fields", "_replace", "_asdict", "_make"})
"""Names that only look private: their owners document them."""

OVERRIDDEN = {"train/trainer.py": OVERRIDDEN_METHODS}
"""Private methods of a library's class that a class of ours overrides; each has a contract in ``_compat.py``."""


def private_names(root: Path) -> list[str]:
    """Private names of other libraries outside ``_compat.py``: imported, read as an attribute, or named in a string.

    Attributes of ``self`` and ``cls`` are our own, also where a string names them; so is what starts with ``_seqtile``.
    """
    found = []
    for file, tree in modules(root):
        if file.name == "_compat.py":
            continue
        for node, name in _private_names_in(tree):
            if name not in OVERRIDDEN.get(file.as_posix(), ()):
                found.append(f"{file}:{node.lineno}: {name}")
    return found


def _private_names_in(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
    own |= {
        node.slice.value for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and _is_self_dict(node.value)
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in (part for alias in node.names for part in alias.name.split(".")):
                if PRIVATE.fullmatch(name):
                    yield node, name
        elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("seqtile"):
            for name in (*(node.module or "").split("."), *(alias.name for alias in node.names)):
                if PRIVATE.fullmatch(name):
                    yield node, name
        elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and node.attr not in PUBLIC:
            if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
                yield node, node.attr
            elif _leads_to_import(node, tree):
                yield node, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE.fullmatch(node.value):
            parent = parents[id(node)]
            part_of_a_name = isinstance(parent, ast.JoinedStr) or (
                isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute)
                and parent.func.attr in ("startswith", "endswith", "removeprefix", "removesuffix")
            )  # fmt: skip
            ours = node.value in own | PUBLIC or node.value.startswith("_seqtile") or node.value.endswith("_")
            if not ours and not part_of_a_name and not isinstance(parent, ast.Expr):
                yield node, node.value


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_self_dict(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "__dict__" and _is_self(node.value)


def _leads_to_import(node: ast.Attribute, tree: ast.Module) -> bool:
    """Whether an attribute is read from a name that the file imports: ``torch._C._x``."""
    value: ast.expr = node.value
    while isinstance(value, ast.Attribute):
        value = value.value
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for one in ast.walk(tree) if isinstance(one, (ast.Import, ast.ImportFrom)) for alias in one.names
    }  # fmt: skip
    return isinstance(value, ast.Name) and value.id in imported


def shared_names(root: Path) -> list[str]:
    """Module names that two files have, or a file and a package."""
    files = [file for file, _ in modules(root)]
    known = {folder.name: folder for file in files for folder in file.parents}
    found = []
    for file in files:
        if file.stem.startswith("__"):
            continue
        if file.stem in known:
            found.append(f"{file} and {known[file.stem]}")
        known[file.stem] = file
    return found


SAME_EVERYWHERE = {
    "command": "of one command of the command line",
    "main": "of a process",
    "linear_cross_entropy": "verl calls its own by this name",
}
"""Public functions that several modules have for the same."""


def shared_definitions(root: Path) -> list[str]:
    """Classes, and public functions, of one name; a class's leading underscore does not count."""
    known: dict[str, Path] = {}
    found = []
    for file, tree in modules(root):
        for node in tree.body:
            is_class = isinstance(node, ast.ClassDef)
            if not is_class and not (isinstance(node, ast.FunctionDef) and not node.name.startswith("_")):
                continue
            name = node.name.lstrip("_")
            if name in known and name not in SAME_EVERYWHERE:
                found.append(f"{name}: {file} and {known[name]}")
            known[name] = file
    return found


def stale_paths(root: Path) -> list[str]:
    """Paths of this package in strings, by which frames of a traceback are known, that are not there."""
    return [
        f"{file}:{node.lineno}: {path}"
        for file, tree in modules(root)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for path in re.findall(r"/seqtile/([\w/]+)", node.value)
        if not (root / path).exists() and not (root / f"{path}.py").exists()
    ]


ROLE = re.compile(r":(?:func|class|data|meth|mod|attr|exc):`~?([\w.]+)`")


def _defined(tree: ast.Module) -> set[str]:
    """Every name that a file defines, imports or assigns, attributes among them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def stale_references(root: Path) -> list[str]:
    """Names of ours in roles of docstrings (``:func:`name```) that the file, or the module that is named, has not."""
    files = list(modules(root))
    defined = {".".join(("seqtile", *file.with_suffix("").parts)).removesuffix(".__init__"): _defined(tree)
               for file, tree in files}  # fmt: skip
    found = []
    for file, tree in files:
        text, own = (root / file).read_text(encoding="utf-8"), _defined(tree)
        for match in ROLE.finditer(text):
            home, _, name = match[1].rpartition(".")
            if home.partition(".")[0] == "seqtile":
                owner = home if home in defined else home.rpartition(".")[0]  # of a method: its class's module
                is_known = match[1] in defined or name in defined.get(owner, ())
            else:
                is_known = name in own if not home else home.partition(".")[0] in {*own, "torch"}
            if not is_known:
                found.append(f"{file}:{text.count(chr(10), 0, match.start()) + 1}: {match[1]}")
    return found


CHECKS: dict[Callable[[Path], list[str]], tuple[str, str]] = {
    wrong_imports: ("ops/bad.py", "def late():\n    from ..models import find\n"),
    prints: ("models/bad.py", "print('hello')\n"),
    shared_names: ("tiling/tiling.py", "x = 1\n"),
    shared_definitions: ("ops/bad.py", "class Recipe:\n    pass\n\n\nclass _Recipe:\n    pass\n"),
    stale_paths: ("train/bad.py", 'known = "/seqtile/ops/head" in "a path"\n'),
    stale_references: ("ops/bad.py", '"""As :func:`gone`, :func:`kept` and :mod:`torch.nn`."""\n\ndef kept(): ...\n'),
    device_names: ("ops/bad.py", "import torch\n\ntorch.cuda.synchronize()\n"),
    machine_facts: ("train/bad.py", "import torch\n\ntorch.accelerator.memory_allocated()\n"),
    private_names: ("ops/bad.py", "import torch\n\ntorch._C\n"),
}
"""Each check, and a file that it must catch."""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_source_has_no(check: Callable[[Path], list[str]]) -> None:
    assert check(SOURCE) == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_check_catches(check: Callable[[Path], list[str]], tmp_path: Path) -> None:
    file, text = CHECKS[check]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text, encoding="utf-8")
    assert len(check(tmp_path)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "import torch._C",
        "from torch.utils import _pytree",
        "from torch.utils._pytree import tree_map",
        "from torch.overrides import _get_current_function_mode_stack",
        "import torch\nx = torch.ops.aten._unsafe_view",
        "x = getattr(weight, '_hp_mapping', None)",
        "x = '_old_forward' in head.__dict__",
        "head.__dict__['_old_forward'] = None",
        "class A(B):\n    def _step(self):\n        super()._step()",
    ],
)
def test_every_way_to_a_private_name_is_caught(line: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(line + "\n", encoding="utf-8")
    assert private_names(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "from seqtile._compat import tree_map",
        "from seqtile._errors import UserError",
        "import sys\nx = sys._getframe(1)",
        "class A:\n    def __getstate__(self):\n        return {'_module': self._module()}",
        "x = name.endswith('_backward')",
        "x = f'{name}_kwargs'",
        "x = getattr(tensor, '_seqtile_mark', None)",
    ],
)
def test_our_own_names_may_be_private(line: str, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(line + "\n", encoding="utf-8")
    assert private_names(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("tiling.py", "from seqtile import ops"),
        ("tiling.py", "import seqtile.ops.tile_checkpoint"),
        ("counting/live.py", "from seqtile.tiling import cuts"),
        ("ops/tile_checkpoint.py", "from ..train import recipe"),
        ("models/apply.py", "from seqtile.cli.train_command import command"),
        ("train/launch.py", 'WORKER = "seqtile.cli.worker"'),
        ("train/launch.py", 'command = ["-m", f"seqtile.cli.{name}"]'),
        ("train/launch.py", 'import_module("seqtile.cli.worker", "seqtile")'),
        ("train/launch.py", 'name = "seqtile" + ".cli." + "worker"'),
        ("train/launch.py", 'name = "seqtile.%s.worker" % "cli"'),
        ("train/launch.py", 'name = "{}.cli.{}".format("seqtile", worker)'),
        ("train/launch.py", 'name = ".".join(["seqtile", "cli", worker])'),
        ("train/launch.py", 'PACKAGE, NOTE = "seqtile", 1\nOURS = "seqtile"\nname = f"{OURS}.cli.{worker}"'),
        ("train/launch.py", 'command = ["-m", f"seqtile.{name}"]'),
        ("train/launch.py", 'import_module(f"seqtile.{name}")'),
        ("train/launch.py", 'import_module(".cli.worker", "seqtile")'),
        ("train/launch.py", 'import_module("..cli", __package__)'),
        ("train/launch.py", 'import_module("..cli", package="seqtile.train")'),
        ("somewhere.py", "x = 1"),
    ],
)
def test_every_way_of_importing_upwards_is_caught(file: str, line: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(line + "\n", encoding="utf-8")
    assert len(wrong_imports(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("cli/train_command.py", "from seqtile.train import recipe"),
        ("ops/tile_checkpoint.py", "from seqtile.tiling import cuts"),
        ("ops/tile_checkpoint.py", "from .sums import add"),
        ("ops/tile_checkpoint.py", "from . import sums"),
        ("train/run.py", "from .._errors import UserError"),
        ("train/run.py", "from seqtile import __version__"),
        ("train/run.py", '"""As :func:`seqtile.cli.main` does."""'),
        ("train/run.py", "logger = getLogger(__name__)"),
        ("train/run.py", 'import_module(".recipe", __package__)'),
        ("train/run.py", 'name = f"{base}.cli"'),
        ("train/run.py", 'key = f"seqtile.{name}"'),
        ("train/run.py", 'name = f"seqtile {version}. The command line"'),
        ("train/run.py", 'logger = getLogger("seqtile.models")'),
        ("train/run.py", 'raise ValueError("call seqtile.apply first")'),
    ],
)
def test_importing_downwards_and_inside_a_package_is_allowed(file: str, line: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(line + "\n", encoding="utf-8")
    assert wrong_imports(tmp_path) == []


def loaded(code: str, names: tuple[str, ...]) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run ``code`` in a fresh interpreter; which of ``names`` did it load?"""
    report = "import atexit, sys\natexit.register(lambda: print('LOADED', *sys.modules, file=sys.stderr))\n"
    done = subprocess.run([sys.executable, "-c", report + code], capture_output=True, text=True, timeout=500)
    line = next(line for line in reversed(done.stderr.splitlines()) if line.startswith("LOADED"))
    return done, set(line.split()) & set(names)


PRIVATE_CLASS = re.compile("_[A-Z]+[a-z]")


def private_classes_in_tests(root: Path) -> list[str]:
    """Private classes of this package that tests import, or read from one of its modules: to patch them, say."""
    found = []
    for file, tree in modules(root):
        ours: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "seqtile":
                ours.update(alias.asname or alias.name for alias in node.names)
                found += [
                    f"{file}:{node.lineno}: {one.name}" for one in node.names if re.match("_[A-Z]+[a-z]", one.name)
                ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and PRIVATE_CLASS.match(node.attr):
                if isinstance(node.value, ast.Name) and node.value.id in ours:
                    found.append(f"{file}:{node.lineno}: {node.attr}")
    return found


def test_tests_use_no_private_class() -> None:
    assert private_classes_in_tests(ROOT / "tests") == []


@pytest.mark.parametrize("text", ["from seqtile.a import _Put", "from seqtile import a\nx = a._Put.forward"])
def test_a_private_class_in_a_test_is_caught(text: str, tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text(text, encoding="utf-8")
    assert len(private_classes_in_tests(tmp_path)) == 1


def modules_named_in(cell: str) -> list[str]:
    """The paths that a cell of a table names; a name without a folder is in the folder of the one before it."""
    paths: list[str] = []
    for name in re.findall(r"`([\w./]+)`", cell):
        inherits = "/" not in name and "." not in name and paths
        paths.append(f"{paths[-1].rpartition('/')[0]}/{name}" if inherits else name)
    return paths


def test_the_page_of_the_move_names_modules_that_are_there() -> None:
    page = (ROOT / "docs" / "tree.md").read_text(encoding="utf-8").partition("## Before and after")[2]
    table = page.partition("| module before | module now |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if "`" in line]
    assert len(rows) > 10
    before, now = ([path for row in rows for path in modules_named_in(row[side])] for side in (0, 1))
    assert [path for path in now if not (SOURCE / path).exists() and not (SOURCE / f"{path}.py").exists()] == []
    assert [path for path in before if (SOURCE / f"{path}.py").exists()] == []
    assert modules_named_in("`ops/mlp`, `linear` and `models/discover/`") == [
        "ops/mlp",
        "ops/linear",
        "models/discover/",
    ]


def test_importing_the_package_loads_nothing_heavy() -> None:
    done, heavy = loaded("import seqtile", NOT_FOR_THE_LIBRARY)
    assert done.returncode == 0, done.stderr
    assert heavy == set()


def test_the_check_for_heavy_imports_sees_torch() -> None:
    assert "torch" in loaded("import seqtile; seqtile.apply", HEAVY)[1]


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]], ids=" ".join)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    command = f"import sys; sys.argv = ['seqtile', *{arguments!r}]; from seqtile.cli import main; sys.exit(main())"
    done, heavy = loaded(command, HEAVY)
    assert done.returncode == 0, done.stderr
    assert "seqtile" in done.stdout.lower()
    assert heavy == set()


def test_every_public_name_resolves() -> None:
    assert len(set(seqtile.__all__)) == len(seqtile.__all__) > 1
    for name in seqtile.__all__:
        assert getattr(seqtile, name) is not None
        assert name in dir(seqtile)
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_that_name'"):
        _ = seqtile.nothing_of_that_name


def test_type_information_is_shipped() -> None:
    assert (SOURCE / "py.typed").is_file()


def test_the_version_is_the_same_everywhere() -> None:
    """It is written once, in the package; the citation and the change log, read by people, must follow."""
    version = seqtile.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?", version), "not a semantic version"
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (\S+)$", citation, re.MULTILINE) == [version]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == version
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dynamic"]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / name).read_text(encoding="utf-8").splitlines()
    pinned = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in pinned}


@pytest.mark.parametrize(
    ("constraints", "extras"), [("highest.txt", ("train", "test", "dev", "deepspeed")), ("lowest.txt", ("test",))]
)
def test_every_dependency_is_pinned(constraints: str, extras: tuple[str, ...]) -> None:
    """A dependency that nobody pins would be another version on every machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(r for extra in extras for r in project["optional-dependencies"][extra])]
    names = {re.split(r"[<>=\[ ]", requirement)[0].lower() for requirement in wanted} - {"seqtile"}
    assert names - pins(constraints).keys() - pins("torch.txt").keys() == set()


def test_the_lowest_row_is_the_lower_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [one.lower().split(">=") for one in project["dependencies"]]
    bounds = {name: bound for name, bound in wanted if name != "torch"}  # pinned in torch.txt, as lowest.txt says
    lowest = pins("lowest.txt")
    for name, bound in bounds.items():
        assert lowest[name].startswith(bound), f"{name}: lowest.txt pins {lowest[name]}, pyproject.toml says >={bound}"


def test_the_network_is_blocked_in_this_process() -> None:
    for connect in ("connect", "connect_ex"):
        with socket.socket() as client, pytest.raises(RuntimeError, match="without a network"):
            getattr(client, connect)(("192.0.2.1", 80))  # an address reserved for documentation


def test_this_machine_can_be_reached() -> None:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect(server.getsockname())


def test_the_network_is_blocked_in_processes_that_tests_start() -> None:
    """Their clients are told of a proxy on this machine that does not exist."""
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    for scheme in ("http", "https"):
        assert urllib.request.getproxies()[scheme].startswith("http://127.0.0.1:")
    code = "import urllib.request as r; r.urlopen('http://192.0.2.1/', timeout=5)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 1
    assert "refused" in done.stderr.lower()  # by the proxy's port, at once, rather than timed out or answered


def test_the_list_of_long_tests_names_tests() -> None:
    gone = [
        name
        for name in processor_times.listed()
        if f"def {name.rpartition('::')[2]}(" not in (ROOT / name.partition("::")[0]).read_text(encoding="utf-8")
    ]
    assert not gone, f"tests/times.txt lists {gone}; run `make times`"
