"""One process of ``seqtile train --engine``: ``python -m seqtile.cli.worker FOLDER``.

``FOLDER`` holds the recipe and what to do with it. An error goes to the file that torch's agent names, and is printed
by the command in front: of several processes the one that failed first counts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import typer

from seqtile._compat import end_process
from seqtile._errors import UserError, note_fault
from seqtile._log import process_rank
from seqtile.train.atomic_files import write_whole
from seqtile.train.signals import stop_at_once

ORPHAN_SECONDS = 20.0
"""How long a process may go on when the command in front has been killed: to end its step and to save."""


def main(folder: Path) -> int:
    """Train, and leave in ``folder`` what the command in front needs to know; returns the exit code."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        signal.signal(number, stop_at_once)
    errors = get_error_handler()
    errors.initialize()
    try:
        _train(folder)
    except typer.Exit as stopped:  # in order, on all ranks: for the agent, a success
        from seqtile.train.launch import STOPPED_FILE

        write_whole(folder / STOPPED_FILE, str(stopped.exit_code))
    except BaseException as error:  # noqa: BLE001 (the command in front prints it)
        for number in numbers:  # the agent ends all when one has failed
            signal.signal(number, signal.SIG_IGN)
        if retry := getattr(error, "retry", None):
            from seqtile.train.launch import RETRY_FILE

            write_whole(folder / RETRY_FILE, json.dumps({"retry": retry, "done": getattr(error, "done", [])}))
        if isinstance(error, Exception):
            note_fault(error)
        if isinstance(error, UserError):
            from seqtile.train.launch import RankRefused

            error = RankRefused(f"{error.code}: {error}")
        errors.record_exception(error)
        return 1
    return 0


def _train(folder: Path) -> None:
    from seqtile.cli.train_command import quiet, run
    from seqtile.train.launch import HOW_FILE
    from seqtile.train.ranks import leave
    from seqtile.train.recipe import RECIPE_FILE, build_recipe, read_recipe

    recipe, _ = build_recipe(read_recipe(folder / RECIPE_FILE), {})
    how = json.loads((folder / HOW_FILE).read_text(encoding="utf-8"))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, how.pop("signals"))  # the parent command started it with them blocked
    threading.Thread(target=follow, args=(how.pop("front"),), daemon=True).start()
    quiet()
    if process_rank():  # only rank 0 prints; DeepSpeed prints on each
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    try:
        run(recipe, **how)
    except typer.Exit:
        leave()
        raise
    leave()


def follow(front: int) -> None:
    """End this process when the command in front was killed, which then cannot pass a signal on.

    One that waits in a collective for a rank that hangs never comes to the end of its step: it is killed.
    """
    while os.getppid() == front:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os.killpg(0, signal.SIGKILL)  # the agent made each worker the leader of a session


if __name__ == "__main__":
    end_process(main(Path(sys.argv[1])))  # an abort would end the first one while it writes its report
