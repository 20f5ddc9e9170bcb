"""Writes the keys of a recipe and the flags into ``docs/reference.md``, from the schema and the command line itself.

``python docs/reference.py`` after a key or a flag has changed; a test compares.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from seqtile.cli import build_app
from seqtile.options import WRITTEN
from seqtile.train.recipe import NAMED_MODEL_KEYS, NAMED_TRAINER_KEYS, LoraRecipe, OptionKeys, Recipe

PAGE = Path(__file__).with_name("reference.md")

BEGIN, END = "<!-- begin: python docs/reference.py -->", "<!-- end -->"

RECIPE = """## Recipe keys

A recipe is a YAML file of `key: value` lines, given with `seqtile train --recipe FILE`; flags win over it. `trainer:`
passes any other argument to TRL's `SFTConfig`, `model_kwargs:` to `from_pretrained`. "Other names" are those of TRL,
Transformers, axolotl and ms-swift: those for tiling are understood, the others are answered with the name here.

### Model, data, training
"""

PEERS = {"tiled_mlp": ["use_tiled_mlp"], "tile": ["tiled_mlp_num_shards"]}
"""Names of other trainers that are understood."""


def page() -> str:
    """The whole page, with the part between the two markers made anew."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n\n{keys_and_flags()}\n{end}{after}"


def keys_and_flags() -> str:
    root: Any = typer.main.get_command(build_app())
    parts = [RECIPE, *_table(Recipe), "", "### Tiling", "", *_table(OptionKeys)]
    parts += ["", "### `lora`", "", *_table(LoraRecipe), "", "## Flags", ""]
    parts += ["Flags take `-` and `_` alike."]
    for name, command in _commands("seqtile", root):
        parts += ["", f"### {name}", "", command.help.split("\n\n")[0].replace("\n", " "), ""]
        parts += ["| flag | takes | default | meaning |", "|---|---|---|---|"]
        for one in command.params:
            if "--help" not in one.opts:
                flags = ", ".join(f"`{flag}`" for flag in (*one.opts, *one.secondary_opts))
                takes = one.metavar or ("" if one.is_flag else _type(one.type_descriptor.annotation))
                parts.append(f"| {flags} | {takes} | {_default(one)} | {_cell(one.help or '')} |")
    return "\n".join(parts) + "\n"


def _table(schema: Any) -> Iterator[str]:
    yield "| key | type | default | other names | meaning |"
    yield "|---|---|---|---|---|"
    named = {**NAMED_TRAINER_KEYS, **NAMED_MODEL_KEYS}
    for key, field in schema.model_fields.items():
        if key == "options":
            continue
        others = [f"`{name}`" for name, ours in named.items() if ours == key and name != key]
        others += [f"`{name}`" for name in PEERS.get(key, [])]
        default = field.get_default(call_default_factory=True)
        words = field.description or WRITTEN[key].help
        shown = "" if default is None else f"`{default}`"
        yield f"| `{key}` | {_type(field.annotation)} | {shown} | {', '.join(others)} | {_cell(words)} |"


def _type(annotation: Any) -> str:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        return ", ".join(map(_type, parts))
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if typing.get_origin(annotation) is dict:
        return "keys and values"
    if typing.get_origin(annotation) in (list, tuple):
        return "a list"
    words = {str: "text", bool: "true or false", int: "whole number", float: "number", LoraRecipe: "keys below"}
    return words.get(annotation, str(annotation))


def _default(one: Any) -> str:
    if one.required:
        return "required"
    return "" if one.default in (None, "", False) else f"`{one.default}`"


def _cell(text: str) -> str:
    text = text.replace("|", "\\|").replace("\n", " ").removesuffix(".")
    if re.match(r"[a-z]\w* (?!\()", text):  # a phrase, and not a list of values
        text = text[:1].upper() + text[1:]
    return re.sub(r"(?<!`)\{[^}]*\}", r"`\g<0>`", text)  # outside code the site takes braces for attributes


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    for child, one in command.commands.items():
        yield from _commands(f"{name} {child}", one)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
