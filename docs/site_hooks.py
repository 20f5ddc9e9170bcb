"""Hooks of the site's build: the file tree from the modules' own first lines, and docstrings' roles as plain code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TREE = "<!-- tree -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the page that asks for the tree."""
    return markdown.replace(TREE, tree(ROOT / "src" / "seqtile")) if TREE in markdown else markdown


def on_page_content(html: str, **_: Any) -> str:
    """``:func:`name``` is a role in docstrings; the site shows the name alone."""
    return re.sub(r":(?:func|class|data|meth|mod|attr):(?=<code>|<a )", "", html)


def tree(package: Path) -> str:
    """One table per folder of ``package``: each module and the first line of its docstring."""
    lines: list[str] = []
    for folder in (package, *sorted(path for path in package.rglob("*") if (path / "__init__.py").exists())):
        name = folder.relative_to(package.parent).as_posix()
        lines += [f"## {name}/", "", first_line(folder / "__init__.py"), "", "| | |", "|---|---|"]
        modules = [file for file in sorted(folder.glob("*.py")) if file.name not in ("__init__.py", "__main__.py")]
        lines += [f"| `{file.name}` | {first_line(file)} |" for file in modules]
        lines.append("")
    return "\n".join(lines)


def first_line(file: Path) -> str:
    """The first line of a module's docstring, as Markdown."""
    said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    line = re.sub(r":\w+:(?=`)", "", said.split("\n\n")[0].replace("\n", " "))
    return line.replace("``", "`").replace("|", "\\|")
