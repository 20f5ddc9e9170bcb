"""Every command that a page shows exists as it is written: its program, its subcommand, its file and its flags.

The README's and the start page's are run as well, by ``tests/integration/test_readme.py``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer

from seqtile.cli import build_app

ROOT = Path(__file__).parents[2]
if not (ROOT / "docs").is_dir():
    pytest.skip("no pages here: the tests run from an installed package", allow_module_level=True)

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("*/README.md")),
]
SEPARATORS = {"|", "&&", ";", ">", "<", "2>&1", "||", "&", "$(cat"}


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in code: a block without a language, or for a shell, and code in a line of text."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^ *```(?:|console|bash|sh)\n(.*?)^ *```", text, re.M | re.S)
    lines = re.findall(
        r"`((?:\w+=\S+ )*(?:seqtile|python|make) [^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    )
    for block in blocks:
        lines += [one[1] for one in re.finditer(r"^ *(?:\$ )?((?:\w+=\S+ )*(?:seqtile|python|make) .*)$", block, re.M)]
    for line in lines:
        words = shlex.split(line.replace("\n", " "), comments=True)
        end = next((i for i, word in enumerate(words) if word in SEPARATORS), len(words))
        yield words[:end]


@cache
def app() -> Any:
    return typer.main.get_command(build_app())


def problem(words: list[str]) -> str:
    """What is wrong with a command, or "" ."""
    given = dict(word.split("=", 1) for word in takewhile(lambda word: re.match(r"[A-Z_]+=", word), words))
    program, *rest = words[len(given) :]
    if program == "seqtile":
        return _of_seqtile(rest)
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        targets = [word for word in rest if "=" not in word and not word.startswith("-")]
        return next((f"no target {one}" for one in targets if not _has_target(makefile, one)), "")
    if rest[0] == "-m":
        return _of_module(rest[1], given.get("PYTHONPATH", "src"))
    script = ROOT / rest[0]
    if script.suffix != ".py" or rest[0].split("/")[0] not in ("benchmarks", "docs", "tests", "examples"):
        return ""
    if not script.exists():
        return f"no file {rest[0]}"
    source = script.read_text(encoding="utf-8")
    return next(
        (f"{rest[0]} has no {flag}" for flag in _flags(rest) if f'"{flag}"' not in source and flag != "--help"), ""
    )


def _flags(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)]


def _has_target(makefile: str, target: str) -> bool:
    return bool(re.search(rf"^{re.escape(target)}:", makefile, re.M)) or target.startswith("test-python-3.")


def _of_module(name: str, path: str) -> str:
    """A module of ours runs from a clone's root: ``seqtile`` as it is installed, another if ``path`` leads to it."""
    if name.split(".")[0] in ("pytest", "pip", "mypy", "mkdocs", "venv"):
        return ""
    paths = [ROOT.joinpath(place, *name.split(".")) for place in path.split(":")]
    exists = any(path.with_suffix(".py").exists() or (path / "__main__.py").exists() for path in paths)
    return "" if exists else f"no module {name} in {path}"


def _of_seqtile(words: list[str]) -> str:
    command = app()
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    known = {"--help", "--version"} | {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
    return next((f"no flag {flag}" for flag in _flags(words) if flag.replace("_", "-") not in known), "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).with_suffix("").as_posix())
def test_its_commands_exist(page: Path) -> None:
    wrong = [
        f"{' '.join(words)}: {why}" for words in commands(page.read_text(encoding="utf-8")) if (why := problem(words))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", ["", "PYTHONPATH=docs ", "PYTHONPATH=tests:src "])
def test_a_module_that_is_not_installed_needs_its_folder(path: str) -> None:
    [words] = commands(f"Made by `{path}python -m grid.table`.")
    assert (problem(words) == "") is ("tests" in path)


def test_the_workflows_make_what_there_is() -> None:
    lines = [
        line
        for workflow in (ROOT / ".github" / "workflows").glob("*.yml")
        for line in re.findall(r"run: (make .*)", workflow.read_text(encoding="utf-8"))
    ]
    assert len(lines) > 3
    assert not [
        (line, why) for line in lines if (why := problem(shlex.split(line.replace("${{ matrix.version }}", "3.12"))))
    ]
