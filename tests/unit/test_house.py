"""Keeps the house in order: what may import what, one meaning per name, and what stays light."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import seqtile
from seqtile._compat import OVERRIDDEN as OVERRIDDEN_METHODS
from seqtile.install import techniques

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "seqtile"

ORDER = """
    _errors _log _sentences _shallow devices
    _compat
    _stand_in counting
    _effects
    tiling
    options
    rules _technique
    ops
    engines
    recognise
    checkpointing
    models
    blocks
    lm_loss headwise state host_weights
    chunks vision
    shared_prompts
    install
    verification
    planner
    fitting
    train integrations
    cli
"""
"""A module imports only from lines above its own and from its own package. A new top-level name needs a place here."""

HEAVY = {"torch", "numpy", "transformers", "accelerate", "trl", "datasets", "peft"}
EXTRAS = {"pydantic", "typer", "rich", "yaml", "psutil"}
"""What comes with ``seqtile[train]``: the library part loads none of it."""

SAME_EVERYWHERE = {"command", "main", "logger", "__all__", "linear_cross_entropy"}
"""Names that several modules have for the same thing; verl has a loss of its own by the last."""


def parse_modules(root: Path) -> dict[str, ast.Module]:
    """Every module below ``root`` by its dotted name, ``""`` for the package itself."""
    trees = {}
    for file in sorted(root.rglob("*.py")):
        dotted = ".".join(file.relative_to(root).with_suffix("").parts)
        name = "" if dotted == "__init__" else dotted.removesuffix(".__init__")
        trees[name] = ast.parse(file.read_text(encoding="utf-8"), str(file))
    assert trees, f"no Python file below {root}"
    return trees


def imports_of(name: str, trees: dict[str, ast.Module]) -> Iterator[tuple[int, str]]:
    """Line and module of every import from this package, also those in functions and those for type checkers."""
    is_package = any(other.startswith(f"{name}.") for other in trees)
    package = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(trees[name]):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(["seqtile", *package[: len(package) - node.level + 1], *filter(None, [node.module])])
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            inside = target.removeprefix("seqtile.")
            if inside != target and not inside.startswith("__"):
                yield node.lineno, inside if inside in trees else inside.rpartition(".")[0] or inside


def upward_imports(root: Path) -> list[str]:
    ranks = {name: rank for rank, line in enumerate(ORDER.strip().splitlines()) for name in line.split()}
    trees, wrong = parse_modules(root), []
    for name in trees:
        importer = name.partition(".")[0]
        if importer in ("", "__main__"):  # the public face, and the command
            continue
        if importer not in ranks:
            wrong.append(f"{importer} has no place in ORDER")
            continue
        for line, target in imports_of(name, trees):
            imported = target.partition(".")[0]
            if imported != importer and ranks.get(imported, len(ranks)) >= ranks[importer]:
                wrong.append(f"{name}:{line} may not import {imported}")
    return wrong


def circles(root: Path) -> list[str]:
    """Modules that import each other, over however many others; by Tarjan's algorithm."""
    trees = parse_modules(root)
    graph = {name: {target for _, target in imports_of(name, trees) if target in trees} - {name} for name in trees}
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for target in graph[name]:
            if target not in number:
                visit(target)
            if target in stack:
                lowest[name] = min(lowest[name], lowest[target])
        if lowest[name] == number[name]:
            at = stack.index(name)
            components.append(sorted(stack[at:]))
            del stack[at:]

    for name in graph:
        if name and name not in number:
            visit(name)
    return sorted(" ".join(component) for component in components if len(component) > 1)


def shared_names(root: Path) -> list[str]:
    """Top-level names that several modules define."""
    homes = defaultdict(set)
    for name, tree in parse_modules(root).items():
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            defined = [target.id for target in targets if isinstance(target, ast.Name)]
            for one in [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else defined:
                homes[one].add(name)
    return sorted(name for name, modules in homes.items() if len(modules) > 1 and name not in SAME_EVERYWHERE)


def prints(root: Path) -> list[str]:
    """Calls of ``print`` outside the command line."""
    return [
        f"{name}:{node.lineno}"
        for name, tree in parse_modules(root).items() if name.partition(".")[0] != "cli"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]  # fmt: skip


LONGEST = 60
"""Lines of a function, its docstring included: one screen. The documentation of public functions may take more."""


def long_functions(root: Path) -> list[str]:
    """Functions above :data:`LONGEST` lines; those of the public API, and the fused operator, are exempt."""
    return [
        f"{name}:{node.lineno} {node.name}"
        for name, tree in parse_modules(root).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= LONGEST and node.name not in {*seqtile.__all__, "fused_mlp"}
    ]  # fmt: skip


MOST_PARAMETERS = 8
"""Parameters of a function, without its ``self``."""

STAND_INS = ("planner.scan_kernels",)
"""Modules whose functions have the signatures of another library's kernels."""


def many_parameters(root: Path) -> list[str]:
    """Functions above :data:`MOST_PARAMETERS`; those of the public API, operators and stand-ins are exempt."""
    return [
        f"{name}:{node.lineno} {node.name}"
        for name, tree in parse_modules(root).items() if not name.startswith(("ops.", *STAND_INS))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in seqtile.__all__
        and len({each.arg for each in parameters_of(node)} - {"self", "cls"}) > MOST_PARAMETERS
    ]  # fmt: skip


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


PRIVATE = re.compile(r"_[A-Za-z]\w*")
PUBLIC = {
    "_exit", "_getframe", "_fields", "_replace", "_asdict", "_make",
    "_process_model_before_weight_loading", "_process_model_after_weight_loading",  # Transformers' quantizers
}  # fmt: skip
"""Names that only look private: their owners document them."""


def private_names(root: Path) -> list[str]:
    """Private names of other libraries outside ``_compat``: imported, read from an import, or named in a string.

    Attributes of ``self`` and ``cls`` are our own, and so is what starts with ``_seqtile``.
    """
    wrong = []
    for module, tree in parse_modules(root).items():
        allowed = PUBLIC | (OVERRIDDEN_METHODS if module == "train.trainer" else set())
        if module != "_compat":
            names = _private_names_in(tree)
            wrong += [f"{module}:{line} {name}" for line, name in names if name not in allowed]
    return wrong


def _private_names_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    nodes = list(ast.walk(tree))
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names
    }  # fmt: skip
    ours = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    ours |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_self(node.value)}
    ours |= {
        node.slice.value for node in nodes
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
        and isinstance(node.value, ast.Attribute) and _is_self(node.value.value)
    }  # fmt: skip
    in_names = {  # pieces of f-strings and of str.startswith and its like, and docstrings
        id(child)
        for node in nodes if isinstance(node, (ast.JoinedStr, ast.Expr))
        or (isinstance(node, ast.Call) and getattr(node.func, "attr", "")
            in ("startswith", "endswith", "removeprefix", "removesuffix"))
        for child in ast.iter_child_nodes(node)
    }  # fmt: skip
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [name for alias in node.names for name in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("seqtile"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            value: ast.expr = node.value
            is_super = isinstance(value, ast.Call) and getattr(value.func, "id", "") == "super"
            while isinstance(value, ast.Attribute):
                value = value.value
            names = [node.attr] if is_super or (isinstance(value, ast.Name) and value.id in imported) else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in in_names:
            is_ours = node.value in ours or node.value.startswith("_seqtile") or node.value.endswith("_")
            names = [] if is_ours else [node.value]
        else:
            continue
        for name in names:
            if PRIVATE.fullmatch(name):
                yield node.lineno, name  # type: ignore[attr-defined]


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


CHECKS: dict[Callable[[Path], list[str]], str] = {
    upward_imports: "def late():\n    from ..install import apply\n",
    circles: "def late():\n    from seqtile.blocks import worse\n",
    shared_names: "def _helper(): ...\n",
    prints: "print('hello')\n",
    many_parameters: "def late(a, b, c, d, e, f, g, h, i): ...\n",
    long_functions: "def late():\n" + "    pass\n" * LONGEST,
    private_names: "x = getattr(weight, '_hp_mapping', None)\n",
}
"""Each check, and a module ``seqtile.blocks.bad`` that it must catch, which ``seqtile.blocks.worse`` imports."""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_source_has_no(check: Callable[[Path], list[str]]) -> None:
    assert check(SOURCE) == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_check_catches(check: Callable[[Path], list[str]], tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "__init__.py").touch()
    (tmp_path / "blocks" / "bad.py").write_text(CHECKS[check], encoding="utf-8")
    (tmp_path / "blocks" / "worse.py").write_text("from seqtile.blocks.bad import x\n\ndef _helper(): ...\n")
    assert len(check(tmp_path)) == 1


@pytest.mark.parametrize("line", [
    "import torch._C", "from torch.utils import _pytree", "import torch\nx = torch.ops.aten._unsafe_view",
    "head.__dict__['_old_forward'] = None", "class A(B):\n    def _step(self):\n        super()._step()",
])  # fmt: skip
def test_every_way_to_a_private_name_is_caught(line: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(line + "\n", encoding="utf-8")
    assert private_names(tmp_path)


def loaded(code: str, names: set[str]) -> set[str]:
    """Which of ``names`` a fresh interpreter loads that runs ``code``."""
    report = "import atexit, sys\natexit.register(lambda: print('LOADED', *sys.modules, file=sys.stderr))\n"
    done = subprocess.run([sys.executable, "-c", report + code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    line = next(line for line in reversed(done.stderr.splitlines()) if line.startswith("LOADED"))
    return set(line.split()) & names


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded("import seqtile", HEAVY | EXTRAS) == set()


WITHOUT = f"""
from importlib.machinery import PathFinder
missing, find = {EXTRAS | HEAVY - {"torch", "numpy", "transformers"}!r} - {{"yaml"}}, PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *where: None if name.partition(".")[0] in missing else find(name, *where)
)
"""
"""A plain install: what comes with ``seqtile[train]`` cannot be imported, but YAML, which transformers brings."""

LIBRARY = """
import torch, seqtile
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
model, ids = LlamaForCausalLM(LlamaConfig(**sizes)).train(), torch.arange(64)[None]
batch = {"input_ids": ids, "labels": ids}
assert seqtile.verify(model, batch, tile=16)
seqtile.TilingCallback(tile=16)
report = seqtile.apply(model, tile=16, loss="tiled", heads=1, offload=True)
model(**batch).loss.backward()
assert report.tiled == 2 and report.done["heads"] and report.done["loss"]
assert seqtile.tile_module(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()), tile=16)
"""


def test_the_library_needs_torch_and_transformers_alone() -> None:
    assert loaded(WITHOUT + LIBRARY, EXTRAS - {"yaml"}) == set()
    assert loaded(LIBRARY, {"typer", "pydantic"}) == set()


TILES_ALONE = """
import torch, seqtile
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=32, intermediate_size=72, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
model, ids = LlamaForCausalLM(LlamaConfig(**sizes)).train(), torch.arange(64)[None]
seqtile.apply(model, tile=16)
model(input_ids=ids, labels=ids).loss.backward()
assert seqtile.undo(model) == 2
"""


def test_a_technique_is_imported_where_it_is_asked_for() -> None:
    others = [entry.defines for entry in techniques._ENTRIES if not entry.defines.startswith("blocks.")]
    assert others and loaded(TILES_ALONE, {f"seqtile.{module}" for module in others}) == set()


def test_the_command_of_a_plain_install_is_one_sentence() -> None:
    command = "import sys; sys.argv = ['seqtile', 'plan', '--help']; from seqtile.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", WITHOUT + command], capture_output=True, text=True, timeout=500)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"seqtile: \w+ is not installed; from a clone run: pip install '\.\[train\]'\n", done.stderr)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]], ids=" ".join)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    command = f"import sys; sys.argv = ['seqtile', *{arguments!r}]; from seqtile.cli import main; sys.exit(main())"
    assert loaded(command, HEAVY) == set()


def test_every_public_name_resolves() -> None:
    assert len(set(seqtile.__all__)) == len(seqtile.__all__) > 1
    for name in seqtile.__all__:
        assert getattr(seqtile, name) is not None
        assert name in dir(seqtile)
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_that_name'"):
        _ = seqtile.nothing_of_that_name


def test_the_version_is_the_same_everywhere() -> None:
    version = seqtile.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (\S+)$", citation, re.MULTILINE) == [version]
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0] == version


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / name).read_text(encoding="utf-8").splitlines()
    pinned = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in pinned}


@pytest.mark.parametrize(
    ("constraints", "extras"), [("highest.txt", ("train", "test", "dev", "deepspeed")), ("lowest.txt", ("test",))]
)
def test_every_dependency_is_pinned(constraints: str, extras: tuple[str, ...]) -> None:
    """A dependency that nobody pins would be another version on every machine; the lowest pins are the lower bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [*project["dependencies"], *(r for extra in extras for r in project["optional-dependencies"][extra])]
    names = {re.split(r"[<>=\[ ]", requirement)[0].lower() for requirement in required} - {"seqtile"}
    assert names - pins(constraints).keys() - pins("torch.txt").keys() == set()
    if constraints == "lowest.txt":
        bounds = dict(requirement.lower().split(">=") for requirement in project["dependencies"])
        assert {name: pins(constraints)[name].startswith(bounds[name]) for name in bounds.keys() - {"torch"}} == {
            name: True for name in bounds.keys() - {"torch"}
        }


def test_the_network_is_blocked_here_and_in_processes_that_tests_start() -> None:
    for connect in ("connect", "connect_ex"):
        with socket.socket() as client, pytest.raises(RuntimeError, match="without a network"):
            getattr(client, connect)(("192.0.2.1", 80))  # an address reserved for documentation
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    for scheme in ("http", "https"):  # a proxy on this machine that does not exist
        assert urllib.request.getproxies()[scheme].startswith("http://127.0.0.1:")
