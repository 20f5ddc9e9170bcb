"""One process of ``seqtile train --engine`` or ``seqtile verify --engine``: ``python -m seqtile.cli.worker FOLDER``.

``FOLDER`` holds the recipe and what to do with it. The process says there which one it is and how it ended, for the
command that waits in front of the launcher; that one speaks for all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from seqtile._compat import end_process
from seqtile._errors import RunError, UserError, note_fault
from seqtile._log import process_rank
from seqtile.train.atomic_files import write_whole
from seqtile.train.processes import is_running
from seqtile.train.signals import exit_code, stop_at_once

if TYPE_CHECKING:
    from seqtile.train.recipe import Recipe

MODULE = __name__
"""What a launch is told to run: this module."""


ORPHAN_SECONDS = 20.0
"""How long a process may go on when the command in front has been killed: to end its step and to save."""


def main(folder: Path) -> int:
    """Train, and write how it ended: exit code, what is to be said, and whether all ranks end together."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop_at_once)
    write_whole(folder / f"{process_rank()}.pid", str(os.getpid()))
    code, message, together, more = 0, "", True, dict[str, Any]()
    try:
        _train(folder)
    except typer.Exit as stopped:
        code = stopped.exit_code
    except UserError as error:
        code, message, together = 2, " ".join(str(error).split()), False
    except RunError as error:
        code, message, together = 1, str(error), False
        more = {name: getattr(error, name) for name in ("retry", "done") if getattr(error, name, None)}
    except KeyboardInterrupt as stopped_at_once:
        code, together = exit_code(getattr(stopped_at_once, "number", signal.SIGINT)), False
    except Exception as error:
        note_fault(error)
        raise
    write_whole(
        folder / f"{process_rank()}.end", json.dumps({"code": code, "message": message, "together": together, **more})
    )
    # A run that all ranks stopped in order has succeeded, as the launcher sees it; else it has to end the others.
    return 0 if together else code


def _train(folder: Path) -> None:
    from seqtile.cli.train_command import quiet, run
    from seqtile.train.launch import HOW_FILE, kill_workers
    from seqtile.train.ranks import leave
    from seqtile.train.recipe import RECIPE_FILE, build_recipe, read_recipe

    recipe, _ = build_recipe(read_recipe(folder / RECIPE_FILE), {})
    how = json.loads((folder / HOW_FILE).read_text(encoding="utf-8"))
    os.chdir(how.pop("cwd"))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, how.pop("signals"))  # the launcher that started it has them blocked
    front, started = how.pop("front")
    follow(front, started, lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: kill_workers(folder))
    if how.pop("check", False):
        _check(recipe, folder)
        return
    quiet()
    if process_rank():  # the first one speaks; DeepSpeed prints on each
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    try:
        run(recipe, **how)
    except typer.Exit:
        leave()
        raise
    leave()


def _check(recipe: Recipe, folder: Path) -> None:
    import pickle

    from seqtile.cli.verify_command import only_errors
    from seqtile.train.launch import RESULT_FILE
    from seqtile.train.verify_model import check_rank

    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # DeepSpeed talks on stdout, which is the result's
    only_errors()
    result = check_rank(recipe)
    if process_rank() == 0:
        (folder / RESULT_FILE).write_bytes(pickle.dumps(result))


def follow(front: int, started: float, end: Callable[[], None], kill: Callable[[], None]) -> None:
    """Watch the command in front: killed, it could not tell the others to stop.

    Args:
        front, started: its process.
        end: called when it is gone.
        kill: called :data:`ORPHAN_SECONDS` later, if this process has not ended by then: one that waits in a collective
            for a rank that hangs never comes to the end of its step.
    """

    def watch() -> None:
        while is_running(front, started):
            time.sleep(1)
        end()
        time.sleep(ORPHAN_SECONDS)
        kill()

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_process(main(Path(sys.argv[1])))  # an abort would end the first one while it writes its report
