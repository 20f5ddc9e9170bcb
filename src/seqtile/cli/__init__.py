"""The command line: one file per command, each imported light and importing what it needs when it runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module

import typer

from seqtile import __version__
from seqtile._errors import RUN_ERROR, USER_ERROR, RunError, UserError

COMMANDS = ("train", "plan", "probe", "verify", "bench", "doctor")
"""Commands in the order of ``--help``. Each is a module ``seqtile.cli.NAME`` with a function ``command``, or with an
``app`` of several."""

INTERRUPTED = 130
OTHER_RANKS_WAIT = 5.0
"""Seconds that the other processes of a launch leave the first one to say what is wrong."""


def build_app() -> typer.Typer:
    """The command line, with every command registered."""
    app = typer.Typer(
        name="seqtile",
        help="Train language models on sequences that do not fit otherwise, with the same gradients.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        # Other trainers write --max_length; both spellings name the same option.
        context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _dashes},
    )
    app.callback()(_root)
    for name in COMMANDS:
        module = import_module(f"seqtile.cli.{name}_command")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(module.command)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 for success, 1 for a run that could not go on or a length that does not fit, 2 for input that the user has to fix
    (one sentence on stderr), 130 for Ctrl-C.
    """
    try:
        build_app()(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        sentence = " ".join(str(error).split())
        print(f"seqtile: {_rank()}{sentence}", file=sys.stderr)
        return USER_ERROR
    except RunError as error:
        print(f"seqtile: {_rank()}{error}", file=sys.stderr)
        return RUN_ERROR
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (SystemExit, KeyboardInterrupt) as error:
        # Typer makes an exit of Ctrl-C, and says nothing.
        if isinstance(error, KeyboardInterrupt) or isinstance(
            getattr(error.__context__, "__cause__", None), KeyboardInterrupt
        ):
            print("seqtile: interrupted; nothing more was saved", file=sys.stderr)
            return INTERRUPTED
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


def _rank() -> str:
    """Under a launcher the first process speaks; another one only if the launcher has not ended it by then."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or "LOCAL_RANK" not in os.environ:
        return ""
    time.sleep(OTHER_RANKS_WAIT)
    return f"rank {rank}: "


def _dashes(name: str) -> str:
    return name.replace("_", "-")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"seqtile {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_show_version, is_eager=True),
) -> None:
    """Train language models on sequences that do not fit otherwise, with the same gradients."""
