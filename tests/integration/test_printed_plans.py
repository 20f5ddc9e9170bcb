"""What pages show of ``seqtile plan`` is what the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from seqtile.cli import main

DOCS = Path(__file__).parents[2] / "docs"

if not DOCS.exists():
    pytest.skip("no docs here: the tests run from an installed package", allow_module_level=True)

BLOCKS = [
    (page.name, found[1].replace("\\\n", " "), found[2])
    for page in sorted(DOCS.glob("*.md"))
    for block in re.findall(r"^```\n(\$ .*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    for found in re.finditer(r"^\$ (seqtile plan (?:[^\n]*\\\n)*[^\n]*)\n(.+?)(?=^\$ |\Z)", block, re.M | re.S)
]


def test_there_are_some() -> None:
    assert len(BLOCKS) >= 5, BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command", "shown"), BLOCKS, ids=[f"{page} {command}" for page, command, _ in BLOCKS])
def test_a_plan_is_what_the_command_prints(
    page: str, command: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    main(shlex.split(command)[1:])
    printed = " ".join(capsys.readouterr().out.split())
    for recipe in tmp_path.glob("*.yaml"):
        assert recipe.read_text(encoding="utf-8") in (DOCS / page).read_text(encoding="utf-8")
    at = 0
    for part in re.split(r"^\.\.\.$", shown, flags=re.M):  # three dots stand for lines that the page leaves out
        words = " ".join(part.split())
        at = printed.find(words, at)
        assert at >= 0, f"{page}: {words!r} is not, or not there, in {printed!r}"
        at += len(words)
