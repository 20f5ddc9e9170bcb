"""The command line: one file per command, each imported light and importing what it needs when it runs."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import typer

from seqtile import __version__
from seqtile._errors import RUN_ERROR, USER_ERROR, RunError, UserError, note_fault
from seqtile._log import process_rank, quiet_libraries
from seqtile.cli.usage_errors import OneSentence

EXAMPLES = {
    "train": ("--model PATH --dataset chat.jsonl --max-length 131072", "start.md"),
    "plan": ("--model llama-8b --device h100 --lora r=16 --explain", "planning.md"),
    "verify": ("--model PATH --lora 16 --tokens 4096", "start.md"),
    "doctor": ("--compat", "start.md"),
}
"""An example of each command, and the page of the documentation that is about it, in the order of ``--help``."""

COMMANDS = tuple(EXAMPLES)
"""Each is a function ``command`` in a module ``seqtile.cli.NAME_command``."""

OTHER_RANKS_WAIT = 5.0
"""Seconds that the other processes of a launch leave the first one to say what is wrong."""


def build_app(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """The command line, with the commands of these names."""
    app = typer.Typer(
        name="seqtile",
        cls=OneSentence,
        help="Train language models on longer sequences in the same memory, with the same gradients.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # whose tables cut long flags and defaults off at 80 columns
        # Other trainers write --max_length; both spellings name the same option.
        context_settings={
            "help_option_names": ["-h", "--help"],
            "token_normalize_func": lambda name: name.replace("_", "-"),
        },
    )
    app.callback()(_root)
    for name in names:
        module = import_module(f"seqtile.cli.{name}_command")
        example, page = EXAMPLES[name]
        epilog = f"Example: seqtile {name} {example}\n\nMore: docs/{page}, and docs/reference.md for every flag and key"
        app.command(name, epilog=epilog)(module.command)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 for success, 1 for a run that could not go on or a length that does not fit, 2 for input that the user has to fix
    (one sentence on stderr), 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    quiet_libraries()
    try:
        build_app([word for word in words[:1] if word in COMMANDS] or COMMANDS)(words, prog_name="seqtile")
        sys.stdout.flush()
    except UserError as error:
        print(f"seqtile: {_rank()}{' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except RunError as error:
        print(f"seqtile: {_rank()}{error}", file=sys.stderr)
        return RUN_ERROR
    except BrokenPipeError:
        return _reader_left()
    except (SystemExit, KeyboardInterrupt) as error:
        if _is_broken_pipe(error):
            return _reader_left()
        # Typer turns Ctrl-C into a silent exit.
        cause = getattr(error.__context__, "__cause__", None) if isinstance(error, SystemExit) else error
        if isinstance(error, KeyboardInterrupt) or isinstance(cause, KeyboardInterrupt):
            print("seqtile: interrupted; nothing else was saved", file=sys.stderr)
            return 128 + getattr(cause, "number", signal.SIGINT)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception as error:
        note_fault(error)
        raise
    return 0


def console() -> NoReturn:
    """The ``seqtile`` command.

    A plan makes a million objects, nearly all of them by imports, and ends within seconds: nothing looks through them
    for reference cycles, which would take a third of its time, and nothing takes them apart at the end.
    """
    plans = sys.argv[1:2] == ["plan"]
    if plans:
        gc.disable()
    code = main()
    compat = sys.modules.get("seqtile._compat")  # imported together with PyTorch
    if plans and compat is not None:
        compat.end_process(code)
    sys.exit(code)


def _is_broken_pipe(error: BaseException) -> bool:
    """Whether click or rich made an exit of a broken pipe, or one will be found when the output is flushed."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return isinstance(error.__context__, OSError) and error.__context__.errno == errno.EPIPE


def _reader_left() -> int:
    """The reader of our output (head, less) has what it wanted; what is still buffered has nowhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _rank() -> str:
    """Under a launcher the first process speaks; another one only if the launcher has not ended it by then."""
    if process_rank() == 0 or "LOCAL_RANK" not in os.environ:
        return ""
    time.sleep(OTHER_RANKS_WAIT)
    return f"rank {process_rank()}: "


def _show_version(show: bool) -> None:
    if show:
        print(f"seqtile {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_show_version, is_eager=True),
) -> None:
    """Train language models on longer sequences in the same memory, with the same gradients."""
