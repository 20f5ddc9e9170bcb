"""The ids of seqtile's refusals: how a test asserts one, and the list of all with their sentences.

``python tests/refusals.py --write`` writes ``tests/refusals.txt`` after a sentence has changed; ``--untested`` prints
the ids that no test names.
"""

from __future__ import annotations

import ast
import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from seqtile import UserError, cli
from seqtile._errors import USER_ERROR

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "seqtile"
SNAPSHOT = TESTS / "refusals.txt"
TABLES = ("RULES", "RECIPE_RULES")


@contextlib.contextmanager
def refused(code: str, *values: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a ``UserError`` with this id, whose sentence has ``values``: numbers, names, places, but no prose."""
    with pytest.raises(UserError) as raised:
        yield raised
    error = raised.value
    assert "\n" not in str(error), "a refusal is one sentence"
    assert error.code == code, f"{error.code}: {error}"
    missing = [value for value in values if value not in str(error)]
    assert not missing, f"{missing} not in: {error}"


def command_refused(arguments: Sequence[str], code: str, *values: str) -> str:
    """Expect ``seqtile`` to exit with code 2 and the sentence of such an error; return what stderr has."""
    build, errors, shown = cli.build_app, list[UserError](), io.StringIO()

    def build_recorded(names: Sequence[str]) -> Callable[..., None]:
        def run(words: list[str], **kwargs: Any) -> None:
            try:
                build(names)(words, **kwargs)
            except UserError as error:
                errors.append(error)
                raise

        return run

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(shown):
        patch.setattr(cli, "build_app", build_recorded)
        assert cli.main(arguments) == USER_ERROR, shown.getvalue()
    sentence = shown.getvalue().splitlines()[-1]
    assert sentence.startswith("seqtile: ") and sentence.endswith(" ".join(str(errors[0]).split())), sentence
    assert "Traceback" not in shown.getvalue()
    with refused(code, *values):
        raise errors[0]
    return shown.getvalue()


def sentences() -> list[tuple[str, str]]:
    """Each id in the source with each of its sentences, sorted; fields are written as their expressions."""
    modules = (ast.parse(path.read_text("utf-8")) for path in SOURCE.rglob("*.py"))
    return sorted({(code, text) for module in modules for code, text in _of_module(module) if text})


def snapshot() -> str:
    """What :data:`SNAPSHOT` should contain."""
    return "".join(f"{code}: {sentence}\n" for code, sentence in sentences())


def untested() -> list[str]:
    """Ids that no test names."""
    tests = "".join(path.read_text("utf-8") for path in TESTS.rglob("*.py"))
    return [code for code in dict(sentences()) if f'"{code}"' not in tests]


def _of_module(module: ast.Module) -> Iterator[tuple[str, str]]:
    names: dict[str, list[ast.expr]] = {}  # values of module-level constants, and what functions return
    for statement in module.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            names[statement.targets[0].id] = [statement.value]
        elif isinstance(statement, ast.FunctionDef):
            returns = (node.value for node in ast.walk(statement) if isinstance(node, ast.Return))
            names[statement.name] = [value for value in returns if value is not None]
    for node in ast.walk(module):
        pairs: list[list[ast.expr]] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError":
            pairs = [node.args]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in TABLES:
            assert isinstance(node.value, ast.Tuple)
            pairs = [[rule.elts[0], rule.elts[-1]] for rule in node.value.elts if isinstance(rule, ast.Tuple)]
        for code, sentence in pairs:
            if isinstance(code, ast.Constant):
                yield from ((str(code.value), text) for text in _texts(sentence, names))
            else:  # of a table, or of another error
                assert ast.unparse(code) in ("code", "error.code"), f"an id is no literal: {ast.unparse(code)}"


def _texts(node: ast.expr, names: dict[str, list[ast.expr]]) -> list[str]:
    """The texts that an expression may give."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(_field(part) for part in parts)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return ["".join(pair) for pair in product(_texts(left, names), _texts(right, names))]
        case ast.BinOp(left=ast.Name(id=name), op=ast.Mod()) if name in names:
            return _texts(names[name][0], names)
        case ast.BoolOp(values=choices):
            return [text for choice in choices for text in _texts(choice, names)]
        case ast.IfExp(body=body, orelse=orelse):
            return _texts(body, names) + _texts(orelse, names)
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)) if name in names:
            return [text for value in names[name] for text in _texts(value, names)]
    return [f"{{{ast.unparse(node)}}}"]


def _field(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        conversion = f"!{chr(part.conversion)}" if part.conversion >= 0 else ""
        spec = (
            ":" + "".join(map(_field, part.format_spec.values)) if isinstance(part.format_spec, ast.JoinedStr) else ""
        )
        return f"{{{ast.unparse(part.value)}{conversion}{spec}}}"
    assert isinstance(part, ast.Constant)
    return str(part.value)


if __name__ == "__main__":
    if "--write" in sys.argv:
        SNAPSHOT.write_text(snapshot(), "utf-8")
    elif "--untested" in sys.argv:
        print("\n".join(untested()))
    else:
        print(snapshot(), end="")
