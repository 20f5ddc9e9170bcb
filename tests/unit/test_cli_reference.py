"""Help that nothing is cut off from, and the reference page of keys and flags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from seqtile.cli import EXAMPLES, build_app, main
from seqtile.train.recipe import LoraRecipe, build_recipe, recipe_keys

if not (Path(__file__).parents[2] / "docs").is_dir():
    pytest.skip("no docs here: the tests run from an installed package", allow_module_level=True)

import reference

COMMANDS = dict(reference._commands("", typer.main.get_command(build_app())))


def test_the_page_is_the_schemas() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run: python docs/reference.py"


def test_the_page_has_every_key_and_flag_with_a_word_on_it() -> None:
    text = reference.page()
    for key in [*recipe_keys(), *LoraRecipe.model_fields]:
        (row,) = set(re.findall(rf"^\| `{key}` \|.*$", text, re.M))
        assert row.split(" | ")[-1].strip(" |"), f"nothing is said of {key}"
    for command in COMMANDS.values():
        assert all(f"`{flag}`" in text for one in command.params for flag in one.opts if flag not in ("--help", "-h"))
    assert "`gradient_accumulation_steps`" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_cuts_nothing_off_at_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*name.split(), "--help-all" if name.strip() == "train" else "--help"]) == 0
    shown = capsys.readouterr().out
    assert "\u2026" not in shown and max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    for one in COMMANDS[name].params:
        assert all(flag in words for flag in one.opts)
        assert " ".join((one.help or "").split()) in words


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_command_has_an_example_that_it_understands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    example, page = EXAMPLES[name]
    words = " ".join(capsys.readouterr().out.split())
    assert f"Example: seqtile {name} {example}" in words and f"docs/{page}" in words
    assert (reference.PAGE.parent / page).is_file()
    command: Any = COMMANDS.get(f" {name}") or COMMANDS[f" {name} {example.split()[0]}"]
    command.make_parser(command.context_class(command)).parse_args(example.split())


def test_flags_of_the_trainer_join_the_recipes_section() -> None:
    recipe, _ = build_recipe({"trainer": {"warmup_steps": 5, "adam_beta2": 0.95}}, {"trainer": {"warmup_steps": 0.1}})
    assert recipe.trainer == {"warmup_steps": 0.1, "adam_beta2": 0.95}
