"""What pages show of ``seqtile plan`` is what the command prints."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from seqtile.cli import main
from seqtile.train.fit import fit
from seqtile.train.recipe import build_recipe, resolve

DOCS = Path(__file__).parents[2] / "docs"

if not DOCS.exists():
    pytest.skip("no docs here: the tests run from an installed package", allow_module_level=True)

GENERATORS = re.findall(
    r"^\| `(--generator [^`]+)` \| ([\d.]+) \(([\d.]+) to ([\d.]+)\) \| [^|]+ \| ([\d,]+) \|$",
    (DOCS / "rl.md").read_text(encoding="utf-8"),
    re.M,
)
BLOCKS = [
    (page.name, found[1].replace("\\\n", " "), found[2])
    for page in sorted(DOCS.glob("*.md"))
    for block in re.findall(r"^```\n(\$ .*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    for found in re.finditer(r"^\$ (seqtile plan (?:[^\n]*\\\n)*[^\n]*)\n(.+?)(?=^\$ |\Z)", block, re.M | re.S)
]


def planned(command: str, capsys: Any) -> dict[str, Any]:
    main([*shlex.split(command)[1:], "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def sentences(page: str) -> str:
    return " ".join((DOCS / f"{page}.md").read_text(encoding="utf-8").split())


@pytest.mark.slow
@pytest.mark.parametrize(("generator", "expected", "low", "high", "longest"), GENERATORS)
def test_a_plan_of_grpo(
    generator: str, expected: str, low: str, high: str, longest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [command] = re.findall(r"`(seqtile plan [^`]*--loss grpo [^`]+)` and what the row says", sentences("rl"))
    found = planned(f"{command} {generator}", capsys)
    peak = found["peak_device_gib"]
    assert [expected, low, high] == [f"{peak[bound]:.1f}" for bound in ("expected", "low", "high")]
    assert longest == f"{found['max_length']:,}"


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1048576, 131072])
def test_the_whole_step_with_heads_in_passes(tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    """In hidden-state tensors of 8 KiB a token: the peak without weights, optimiser states and the context."""
    [command] = re.findall(r"whole step by the plan, `(seqtile plan [^`]+) --max-length \d+`", sentences("attention"))
    terms = planned(f"{command} --max-length {tokens}", capsys)["terms"]["device_gib"]
    aside = ("weights", "optimiser state", "gradients", "context and allocator")
    unit = tokens / 2**17
    held = sum(gib for name, gib in terms.items() if name not in aside) / unit
    shown = {1048576: f": {held:.1f} of them at its peak", 131072: f"At 131,072 tokens it is {held:.1f}, in the loss, "}
    assert shown[tokens] in sentences("attention")
    if tokens == 131072:
        assert f"whose tile is {terms['loss tile'] / unit:.1f} of them" in sentences("attention")


def test_there_are_some() -> None:
    assert len(BLOCKS) >= 5, BLOCKS
    assert len(GENERATORS) == 3


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


def test_what_fit_chooses_for_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines that ``seqtile train --fit-memory`` prints, without the training behind them."""
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "planning-reference.md").read_text(encoding="utf-8")
    [(tokens, memory, shown)] = re.findall(
        r"^\$ seqtile train --max-length (\d+) --fit-memory (\S+)\n\.\.\.\n(.*?)^\.\.\.$", text, re.M | re.S
    )
    recipe, _ = build_recipe({}, {"max_length": int(tokens), "fit": f"memory:{memory}"})
    assert " ".join(shown.split()) == " ".join(fit(resolve(recipe)).why)
