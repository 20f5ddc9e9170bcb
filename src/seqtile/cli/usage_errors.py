"""Turn the command-line parser's errors into one sentence: got, expected, what to do."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from seqtile._errors import UserError

# The parser is click's, or since typer 0.20 typer's own copy of it; either way this is where its errors come from.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class OneSentence(TyperGroup):
    """The root of the commands, which raises :class:`seqtile.UserError` where the parser would print its usage."""

    arguments: Sequence[str] = ()

    def make_context(self, info_name: str | None, args: list[str], *positional: Any, **extra: Any) -> Any:
        """Parse the root's own flags."""
        self.arguments = list(args)
        with _one_sentence(self.arguments):
            return super().make_context(info_name, args, *positional, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Parse a command's flags, and run it."""
        with _one_sentence(self.arguments):
            return super().invoke(ctx)


@contextmanager
def _one_sentence(arguments: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # which prints the help
            raise
        raise UserError(sentence(error, arguments)) from None


def sentence(error: Any, arguments: Sequence[str]) -> str:
    """A parser's error as one sentence.

    Args:
        error: a ``UsageError`` of click's.
        arguments: those of the command line.
    """
    context = getattr(error, "ctx", None)
    leading_names = itertools.takewhile(lambda argument: not argument.startswith("-"), arguments)
    path = " ".join(["seqtile", *(_path(context) if context is not None else leading_names)])
    where = f"see {path} --help"
    flag, error_class = getattr(error, "option_name", None), type(error).__name__
    parameter = getattr(error, "param", None)
    if error_class == "NoSuchOption":
        return _unknown(str(flag), path, context)
    if error_class == "MissingParameter" and parameter is not None:
        return f"{path} needs {parameter.opts[0]}; {where}"
    if error_class == "BadOptionUsage" and flag is not None:
        value = _value(flag, arguments)
        return f"{flag} takes no value, got {value!r}; {where}" if value else f"{flag} needs a value; {where}"
    message = str(error.format_message()).strip().rstrip(".").replace(". Did you", ", did you")
    if error_class == "BadParameter" and parameter is not None:
        flag = parameter.opts[0]
        return f"got {flag} {_value(flag, arguments)!r}, expected {_expected(error.message)}; {where}"
    message = message[:1].lower() + message[1:]
    return message if message.endswith("?") else f"{message}; {where}"


def _path(context: Any) -> list[str]:
    """Names of the command and of those around it, without the program's."""
    names: list[str] = []
    while context is not None and context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    return names


def _unknown(flag: str, path: str, context: Any) -> str:
    """Answer an unknown flag: where the setting is, or what it may have been meant for."""
    from seqtile.train.recipe import NAMED_TRAINER_KEYS, OTHER_NAMES, recipe_keys

    name = flag.lstrip("-").replace("-", "_")
    lead = f"{path} has no flag {flag}"
    flags = [] if context is None else [flag for parameter in context.command.params for flag in parameter.opts]
    if path == "seqtile train" and name in recipe_keys():
        return f"{lead}; it is a recipe key: put '{name}: VALUE' in a file and pass --recipe FILE"
    meant = [f"--{ours}" for ours, names in OTHER_NAMES.items() if name in names.split() and f"--{ours}" in flags]
    if meant:
        return f"{lead}; use {' or '.join(meant)}"
    key = NAMED_TRAINER_KEYS.get(name, "").replace("_", "-")
    if path == "seqtile train" and key:
        key = key.removeprefix("--")
        return f"{lead}; use --{key}" if f"--{key}" in flags else f"{lead}; use the recipe key {key!r}"
    close = difflib.get_close_matches(flag, flags, n=2, cutoff=0.75)
    if close:
        return f"{lead}; did you mean {' or '.join(close)}?"
    if path == "seqtile train":
        line = f"trainer: {{{name}: VALUE}}"
        return f"{lead}; to pass an argument of TRL's SFTConfig, put '{line}' in a file and pass --recipe FILE"
    return f"{lead}; see {path} --help"


def _value(flag: str, arguments: Sequence[str]) -> str:
    """The value of ``flag``, which may be spelled with underscores; the last one counts."""
    flag_value = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == flag:
            flag_value = value if equals else following
    return flag_value


def _expected(message: str) -> str:
    """What the parser's error about a value expected."""
    text = message.strip().rstrip(".").lower()
    if "valid int" in text:
        return "a whole number"
    if "valid float" in text or "valid number" in text:
        return "a number"
    if "greater" in text:
        return f"a number {text.removeprefix('input should be ')}"
    return text.removeprefix("input should be ")
