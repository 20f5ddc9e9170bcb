"""Flags of a command for the options of tiling, made from :class:`seqtile.options.TilingOptions`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import typer

from seqtile._errors import UserError
from seqtile.options import DEFAULTS, WRITTEN, TilingOptions, flag_type, from_flag, to_flag

Command = Callable[..., None]

PLACE = "options"
"""The parameter of a command in whose place its flags come."""


def takes_options(
    command: str,
    *,
    show_default: bool = True,
    defaults: Mapping[str, str] | None = None,
    suffixes: Mapping[str, str] | None = None,
    hidden: bool = False,
) -> Callable[[Command], Command]:
    """Give a command the flags of its options; its parameter ``options`` gets what was given, by name.

    Args:
        command: as :class:`seqtile.options.Declaration` names it.
        show_default: whether a flag that is not given has its default; else it is left out of ``options``.
        defaults: words that are the command's own defaults.
        suffixes: what the help of a flag says beside the option's.
        hidden: whether ``--help`` leaves them out.
    """

    def decorate(function: Command) -> Command:
        flags = {
            name: _parameter(name, show_default, (defaults or {}).get(name), (suffixes or {}).get(name, ""), hidden)
            for name, how in WRITTEN.items()
            if command in how.commands
        }

        def wrapper(**kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in flags}
            function(**kwargs, **{PLACE: {name: value for name, value in options.items() if value is not None}})

        hints = get_type_hints(function)
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function).parameters.values():
            parameters += (
                flags.values() if parameter.name == PLACE else [parameter.replace(annotation=hints[parameter.name])]
            )
        wrapper.__doc__, wrapper.__name__, wrapper.__module__ = function.__doc__, function.__name__, function.__module__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def _parameter(name: str, show_default: bool, default: Any, suffix: str, hidden: bool) -> inspect.Parameter:
    how = WRITTEN[name]
    if default is None:
        default = to_flag(name, DEFAULTS[name])
    flag_kind, number = flag_type(name), isinstance(default, int | float) and flag_type(name) is str
    if not show_default:
        suffix = f"{suffix} (default {default})" if default is not None else suffix
        default = None
    elif number:
        default = f"{default:g}"
    elif how.flag is not None and not isinstance(default, how.flag):
        default = None  # a word as default of a numeric flag: leaving the flag out means it
    metavar = how.metavar or "VALUE"
    option = typer.Option(default, help=f"{how.help}{suffix}.", metavar=metavar, min=how.least, hidden=hidden)
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=option, annotation=flag_kind)


def options_of(flags: Mapping[str, Any]) -> TilingOptions:
    """The options of a command's flags; ``--tile none`` leaves the blocks untiled.

    Raises:
        UserError: an invalid value.
    """
    values = {name: from_flag(name, value) for name, value in flags.items()}
    if values.get("tile") == "none":
        if values.get("blocks", "auto") != "auto":
            raise UserError("got --blocks with --tile none, which tiles nothing; drop --blocks or --tile none")
        values.update(tile=DEFAULTS["tile"], blocks="none")
    return TilingOptions(**values)
