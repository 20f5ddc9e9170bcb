"""Runs in processes of their own that are killed, with SIGKILL, at a moment that a test chooses.

The processes are forked from a server that has imported the trainer once, so that each costs about a second.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kill:
    """When a run dies.

    Attributes:
        step: in this optimizer step, or in its checkpoint; 0 for the model saved at the end.
        writing: the file of the checkpoint that is half written then; None: after the backward of the step.
    """

    step: int
    writing: str | None = None


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit code (negative: a signal), losses by step if it came to its end, what it said."""

    code: int | None
    losses: list[list[float]]
    said: str


def server() -> ForkServerContext:
    """The context to start runs in."""
    context = multiprocessing.get_context("forkserver")
    # Modules that are found without the tests' own path: a server that cannot import one goes on without a word.
    context.set_forkserver_preload(["seqtile.train.trainer", "transformers.models.llama.modeling_llama", "peft"])
    return context


def train(context: ForkServerContext, values: dict[str, Any], log: Path, *, kill: Kill | None = None,
          resume: bool = False, checkpoint: str | None = None,
          before: Callable[[], None] | None = None) -> Ended:  # fmt: skip
    """Run a recipe in a new process, there after ``before``, and wait for its end."""
    process = context.Process(target=_child, args=(values, log, kill, resume, checkpoint, before))
    process.start()
    process.join(500)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"the run hangs:\n{log.read_text()}")
    result = log.with_suffix(".json")
    losses = json.loads(result.read_text()) if result.exists() else []
    result.unlink(missing_ok=True)
    return Ended(process.exitcode, losses, log.read_text())


def _child(
    values: dict[str, Any], log: Path, kill: Kill | None, resume: bool, checkpoint: str | None,
    before: Callable[[], None] | None,
) -> None:  # fmt: skip
    if before is not None:
        before()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import logging

    from seqtile._errors import RunError, UserError
    from seqtile.train.recipe import build_recipe
    from seqtile.train.run import train as run

    logging.getLogger("seqtile").addHandler(logging.StreamHandler())
    logging.getLogger("seqtile").setLevel(logging.INFO)
    if kill is not None:
        _plan(kill, Path(values["output"]))
    try:
        outcome = run(build_recipe(values, {})[0], resume=resume, resume_from=checkpoint)
    except (UserError, RunError) as error:
        print(error)
        os._exit(2 if isinstance(error, UserError) else 1)
    log.with_suffix(".json").write_text(json.dumps(outcome.losses))


def _plan(kill: Kill, output: Path) -> None:
    """Put the kill where it belongs."""
    import safetensors.torch
    import torch
    from transformers import TrainerState, modeling_utils

    from seqtile.train import run_directory, trainer

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if kill.writing is None:
        check = trainer.Trainer._get_grad_norm

        def after_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == kill.step - 1:
                die()
            return check(self, *args, **kwargs)

        trainer.Trainer._get_grad_norm = after_backward  # type: ignore[method-assign]
        return

    # The trial before the first step, in a directory of its own, writes an adapters' file too, without a tensor.
    folder = output / f"checkpoint-{kill.step}" if kill.step else output

    def dying(write: Any, place: int) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = write(*args, **kwargs)
            path = Path(args[place])
            # PEFT's and transformers' own writers land here too, under the final name.
            if path == folder / kill.writing:
                if path.name == run_directory.MARK:
                    path.rename(path.with_name(".part"))  # as it lies there before the rename that makes it count
                else:
                    os.truncate(path, path.stat().st_size // 2)
                die()
            return result

        return wrapped

    torch.save = dying(torch.save, 1)
    modeling_utils.safe_save_file = dying(modeling_utils.safe_save_file, 1)
    safetensors.torch.save_file = dying(safetensors.torch.save_file, 1)
    import peft.peft_model

    peft.peft_model.safe_save_file = dying(peft.peft_model.safe_save_file, 1)
    TrainerState.save_to_json = dying(TrainerState.save_to_json, 1)  # type: ignore[method-assign]
    run_directory.write_whole = dying(run_directory.write_whole, 0)
