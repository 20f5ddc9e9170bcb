"""Flags of a command, each declared once: as the field of a dataclass, a key of a recipe, or an option of tiling."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, get_type_hints

import typer

from seqtile._errors import UserError
from seqtile.options import DEFAULTS, WRITTEN, Record, TilingOptions, flag_type, from_flag, to_flag


def flag(default: Any, help: str, metavar: str | None = None, **how: Any) -> Any:
    """A field of a record that is a flag of a command; ``how`` is typer's, and ``names`` other spellings of it."""
    return field(default=default, metadata={"help": help, "metavar": metavar, **how})


def takes(
    record: type[Record], **groups: list[inspect.Parameter]
) -> Callable[[Callable[[Record], None]], Callable[..., None]]:
    """Turn a function of ``record``, a dataclass whose fields are :func:`flag` or groups, into a command.

    Args:
        record: what the function takes.
        **groups: flags in the place of a field, which gets the values of those that are given, by name.
    """

    def decorate(function: Callable[[Record], None]) -> Callable[..., None]:
        hints, parameters = get_type_hints(record), list[inspect.Parameter]()
        for entry in fields(record):  # type: ignore[arg-type]
            if entry.name in groups:
                parameters += groups[entry.name]
            else:
                parameters.append(_parameter(entry.name, hints[entry.name], entry.default, **entry.metadata))

        def wrapper(**flags: Any) -> None:
            for name, group in groups.items():
                values = {flag.name: flags.pop(flag.name) for flag in group}
                flags[name] = {key: value for key, value in values.items() if value is not None}
            function(record(**flags))

        wrapper.__doc__, wrapper.__name__, wrapper.__module__ = function.__doc__, function.__name__, function.__module__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def recipe_flags(*names: str) -> list[inspect.Parameter]:
    """Flags for keys of a recipe: ``names``, or every key that is a flag of ``seqtile train``. None: not given."""
    from seqtile.train.recipe import DEMO, Recipe, alternatives  # pydantic takes a third of the time of --help

    flags = []
    for name, key in Recipe.model_fields.items():
        how: Any = (key.json_schema_extra or {}).get("flag")  # type: ignore[union-attr]
        if how is None or (names and name not in names):
            continue
        shows_default = key.default != DEMO and key.default is not None and key.default is not False
        help_text = f"{key.description}{f' (default {key.default})' if shows_default else ''}"
        kinds = alternatives(key.annotation) - {types.NoneType}
        kind = next((kind for kind in (bool, int, float) if kinds == {kind}), str)
        flags.append(_parameter(name, kind, None, help=help_text, **(how | ({"hidden": False} if names else {}))))
    return flags


def option_flags(
    command: str,
    *,
    show_default: bool = True,
    defaults: Mapping[str, str] | None = None,
    suffixes: Mapping[str, str] | None = None,
    hidden: bool = False,
) -> list[inspect.Parameter]:
    """The flags of a command for options of tiling.

    Args:
        command: as :class:`seqtile.options.Declaration` names it.
        show_default: whether a flag that is not given has its default; else it is None.
        defaults: words that are the command's own defaults.
        suffixes: what the help of a flag says beside the option's.
        hidden: whether ``--help`` leaves them out.
    """
    flags = []
    for name, how in WRITTEN.items():
        if command not in how.commands:
            continue
        default: Any = (defaults or {}).get(name) or to_flag(name, DEFAULTS[name])
        suffix = (suffixes or {}).get(name, "")
        if not show_default:
            suffix = f"{suffix} (default {default})" if default is not None else suffix
            default = None
        elif isinstance(default, int | float) and flag_type(name) is str:
            default = f"{default:g}"
        elif how.flag is not None and not isinstance(default, how.flag):
            default = None  # a word as default of a numeric flag: leaving the flag out means it
        help_text, metavar = f"{how.help}{suffix}", how.metavar or "VALUE"
        flags.append(
            _parameter(name, flag_type(name), default, help=help_text, metavar=metavar, min=how.least, hidden=hidden)
        )
    return flags


def _parameter(
    name: str, kind: type, default: Any, *, help: str, names: Sequence[str] = (), **how: Any
) -> inspect.Parameter:
    if kind is bool and not names:
        names = (f"--{name.replace('_', '-')}",)  # else typer adds --no-NAME
    option = typer.Option(default, *names, help=f"{help}.", **how)
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=option, annotation=kind)


def options_of(flags: Mapping[str, Any]) -> TilingOptions:
    """The options of a command's flags; ``--tile none`` leaves the blocks untiled.

    Raises:
        UserError: an invalid value.
    """
    values = {name: from_flag(name, value) for name, value in flags.items()}
    if values.get("tile") == "none":
        if values.get("blocks", "auto") != "auto":
            raise UserError(
                "blocks.with-tile-none",
                "got --blocks with --tile none, which tiles nothing; drop --blocks or --tile none",
            )
        values.update(tile=DEFAULTS["tile"], blocks="none")
    return TilingOptions(**values)
