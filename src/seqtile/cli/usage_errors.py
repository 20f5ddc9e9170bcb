"""What the command line's parser refuses, in one sentence like everything else: got, expected, what to do."""

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

    words: Sequence[str] = ()

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        """Parse the root's own flags."""
        self.words = list(args)
        with _one_sentence(self.words):
            return super().make_context(info_name, args, *more, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Parse a command's flags, and run it."""
        with _one_sentence(self.words):
            return super().invoke(ctx)


@contextmanager
def _one_sentence(words: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # which prints the help
            raise
        raise UserError(sentence(error, words)) from None


def sentence(error: Any, words: Sequence[str]) -> str:
    """A parser's error in words.

    Args:
        error: a ``UsageError`` of click's.
        words: the arguments of the command line.
    """
    context = getattr(error, "ctx", None)
    path = " ".join(["seqtile", *(_path(context) if context is not None else _leading(words))])
    where = f"see {path} --help"
    flag, kind = getattr(error, "option_name", None), type(error).__name__
    parameter = getattr(error, "param", None)
    if kind == "NoSuchOption":
        return _unknown(str(flag), path, context)
    if kind == "MissingParameter" and parameter is not None:
        return f"{path} needs {parameter.opts[0]}; give it, {where}"
    if kind == "BadOptionUsage" and flag is not None:
        value = _value(flag, words)
        return f"{flag} takes no value, got {value!r}; {where}" if value else f"{flag} needs a value; {where}"
    message = str(error.format_message()).strip().rstrip(".").replace(". Did you", ", did you")
    if kind == "BadParameter" and parameter is not None:
        flag = parameter.opts[0]
        return f"got {flag} {_value(flag, words)!r}, expected {_expected(error.message)}; {where}"
    message = message[:1].lower() + message[1:]
    return message if message.endswith("?") else f"{message}; {where}"


def _path(context: Any) -> list[str]:
    """Names of the command and of those around it, without the program's."""
    names: list[str] = []
    while context is not None and context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    return names


def _leading(words: Sequence[str]) -> list[str]:
    """The names of commands that a command line begins with."""
    return list(itertools.takewhile(lambda word: not word.startswith("-"), words))


def _unknown(flag: str, path: str, context: Any) -> str:
    """Of a flag that is none: where the setting is, or what it may have been meant for."""
    from seqtile.train.recipe import NAMED_TRAINER_KEYS, recipe_keys

    name = flag.lstrip("-").replace("-", "_")
    said = f"{path} has no flag {flag}"
    flags = [one for part in context.command.params for one in part.opts] if context is not None else []
    if path == "seqtile train" and name in recipe_keys():
        return f"{said}; it is a key of the recipe: write '{name}: VALUE' into a file, and give it with --recipe FILE"
    own = NAMED_TRAINER_KEYS.get(name, "").replace("_", "-")
    if path == "seqtile train" and own:
        own = {"gradient-accumulation": "grad-accumulation"}.get(own, own)
        own = own if own.startswith("--") else f"--{own}"
        return f"{said}; here it is called {own}" if own in flags else f"{said}; it is the recipe's {own[2:]!r}"
    close = difflib.get_close_matches(flag, flags, n=2, cutoff=0.75)
    if close:
        return f"{said}; did you mean {' or '.join(close)}?"
    if path == "seqtile train":
        key = f"trainer: {{{name}: VALUE}}"
        return f"{said}; an argument of TRL's SFTConfig is written as '{key}' into a file, given with --recipe FILE"
    return f"{said}; see {path} --help"


def _value(flag: str, words: Sequence[str]) -> str:
    """What came with ``flag``, which may be spelled with underscores; the last one counts."""
    found = ""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else after
    return found


def _expected(message: str) -> str:
    """What a parser's complaint about a value asks for."""
    text = message.strip().rstrip(".").lower()
    if "valid int" in text:
        return "a whole number"
    if "valid float" in text or "valid number" in text:
        return "a number"
    if "greater" in text:
        return f"a number {text.removeprefix('input should be ')}"
    return text.removeprefix("input should be ")
