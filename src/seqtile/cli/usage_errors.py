"""Turn the command-line parser's errors into one sentence: got, expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from seqtile._errors import UserError

# The parser is click's, or since typer 0.20 typer's own copy of it; either way this is where its errors come from.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class OneSentence(TyperGroup):
    """The root of the commands, which raises :class:`seqtile.UserError` where the parser would print its usage."""

    def make_context(self, info_name: str | None, args: list[str], *positional: Any, **extra: Any) -> Any:
        """Parse the root's own flags."""
        with _one_sentence():
            return super().make_context(info_name, args, *positional, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Parse a command's flags, and run it."""
        with _one_sentence(ctx):
            return super().invoke(ctx)


@contextmanager
def _one_sentence(root: Any = None) -> Iterator[None]:
    try:
        yield
    except _UsageError as usage_error:
        error: Any = usage_error
        if type(error).__name__ == "NoArgsIsHelpError":  # which prints the help
            raise
        context = getattr(error, "ctx", None)
        command = getattr(root, "invoked_subcommand", None)  # the parser of its flags names no context
        path = f"seqtile {command or ''}".strip() if context is None else context.command_path
        if type(error).__name__ == "NoSuchOption":
            raise UserError("flag.unknown", _unknown(str(error.option_name), path, context)) from None
        message = error.format_message().strip().rstrip(".").replace(". Did you", ", did you")
        raise UserError("flag.malformed", f"{message[:1].lower()}{message[1:]}; see {path} --help") from None


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
