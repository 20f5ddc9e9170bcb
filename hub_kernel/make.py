"""``python hub_kernel/make.py FOLDER``: write the Hub's kernel ``<org>/seqtile:TiledMLP`` as ``kernels`` loads it.

``layers.py`` beside this file is the layer; with it goes what it needs of :mod:`seqtile.ops`, and nothing but torch.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import seqtile
from seqtile._errors import UserError

LAYERS = "layers"
VARIANT = Path("build") / "torch-universal"  # Python alone: one build for every device and version

_SOURCE = Path(seqtile.__file__).parent


def files() -> dict[Path, str]:
    """Every file of the kernel, by its path in the folder: what :data:`LAYERS` reaches, and no more."""
    modules: dict[str, _Module] = {}
    needed = [(LAYERS, name) for name in _Module(LAYERS).tree_names()]
    while needed:
        module, name = needed.pop()
        needed += modules.setdefault(module, _Module(module)).keep(name)
    contents = {VARIANT / f"{_flat(name)}.py": module.text() for name, module in modules.items()}
    contents[VARIANT / "__init__.py"] = (
        '"""A tiled MLP for transformers: the same gradients in less memory. Made from seqtile; do not edit."""\n\n'
        "from . import layers\n\n"
        f'__version__ = "{seqtile.__version__}"\n__all__ = ["layers"]\n'
    )
    metadata = {
        "id": f"_seqtile_torch_universal_{seqtile.__version__.replace('.', '_')}",
        "name": "seqtile",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    contents[VARIANT / "metadata.json"] = json.dumps(metadata, indent=2) + "\n"
    return contents


def write(folder: Path) -> None:
    """Write :func:`files` into ``folder``.

    Raises:
        UserError: other files lie where the kernel goes.
    """
    contents = files()
    if others := [path.name for path in (folder / VARIANT).glob("*.py") if path.relative_to(folder) not in contents]:
        raise UserError(
            "hub-kernel.folder-not-empty",
            f"{folder / VARIANT} holds {others[0]}, which the kernel does not: give an empty folder",
        )
    for path, text in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def _flat(module: str) -> str:
    """Name of a module's file in the kernel, which has no packages inside."""
    return module.rpartition(".")[2]


class _Module:
    """The top-level statements of one module, and which of them are kept."""

    def __init__(self, name: str) -> None:
        self.name = name
        path = Path(__file__).parent / name if name == LAYERS else _SOURCE / Path(*name.split(".")[1:])
        self._lines = path.with_suffix(".py").read_text(encoding="utf-8").splitlines()
        self._body = ast.parse("\n".join(self._lines)).body
        self._kept: set[int] = set()
        self._imports: dict[str, tuple[str, ast.alias, bool]] = {}  # module, alias, whether for type checkers alone
        self._needed: set[str] = set()
        for statement in self._body:
            only_types = isinstance(statement, ast.If)
            for node in statement.body if isinstance(statement, ast.If) else [statement]:
                if isinstance(node, ast.ImportFrom) and node.module != "__future__":
                    self._imports |= {a.asname or a.name: (node.module or "", a, only_types) for a in node.names}
                elif isinstance(node, ast.Import):
                    self._imports |= {a.asname or a.name.partition(".")[0]: ("", a, only_types) for a in node.names}

    def tree_names(self) -> list[str]:
        """Everything that the module defines."""
        return [name for statement in self._body for name in _defined(statement)]

    def keep(self, name: str) -> Iterator[tuple[str, str]]:
        """Keep what defines ``name``; yields what that needs of other modules of ours."""
        pending = [name]
        while pending:
            current = pending.pop()
            if current in self._imports:
                module, alias, _ = self._imports[current]
                if current not in self._needed and module.startswith("seqtile."):
                    yield module, alias.name
                self._needed.add(current)
            for number, statement in enumerate(self._body):
                if number not in self._kept and current in _defined(statement):
                    self._kept.add(number)
                    pending += {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}

    def text(self) -> str:
        """The kept statements in their order, as they are written in the source."""
        docstring = ast.get_source_segment("\n".join(self._lines), self._body[0]) or ""
        parts = [f"# Made from {self.name.replace('.', '/')}.py by `python hub_kernel/make.py`; do not edit."]
        parts += [docstring, "", "from __future__ import annotations", "", *self._import_lines()]
        for number, statement in enumerate(self._body):
            if number not in self._kept:
                continue
            decorators = getattr(statement, "decorator_list", [])
            start = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
            following = self._body[number + 1] if number + 1 < len(self._body) else None
            described = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            end = (following if described and following else statement).end_lineno
            parts += ["", *(("",) if hasattr(statement, "body") else ()), *self._lines[start - 1 : end]]
        return "\n".join(parts) + "\n"

    def _import_lines(self) -> Iterator[str]:
        plain = sorted(name for name in self._needed if not self._imports[name][2])
        for name in plain:
            yield self._import_line(name)
        if only_types := sorted(self._needed - set(plain)):
            if "TYPE_CHECKING" not in plain:
                yield "from typing import TYPE_CHECKING"
            yield "\nif TYPE_CHECKING:"
            for name in only_types:
                yield f"    {self._import_line(name)}"

    def _import_line(self, name: str) -> str:
        module, alias, _ = self._imports[name]
        what = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
        if not module:
            return f"import {what}"
        return f"from {'.' + _flat(module) if module.startswith('seqtile.') else module} import {what}"


def _defined(statement: ast.stmt) -> set[str]:
    """Names that a top-level statement gives a value."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python hub_kernel/make.py FOLDER")
    try:
        write(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))
