"""Trainer callbacks: stop on a signal, check the first step, time the steps."""

from __future__ import annotations

import signal
import time
from contextlib import AbstractContextManager
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.train.ranks import check_engine, largest_on_any
from seqtile.train.recipe import Recipe
from seqtile.train.signals import StoppedAtOnce, handle_signals, new_request, stop_signals
from seqtile.verification import check_gradients

if TYPE_CHECKING:
    import torch

logger = first_rank_logger(__name__)

DEMO_SECONDS, LEAST_STEPS = 180.0, 10


class StopOnSignal(TrainerCallback):
    """Ask the trainer to save and stop after the running step; a second request stops at once.

    A checkpoint is only whole between two steps, so the running one is finished first.

    Attributes:
        received: the signal that came to any process, or None; the same on all after each step and after :meth:`agree`.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._request = new_request()

    def listening(self) -> AbstractContextManager[None]:
        """Handle the signals that ask to stop inside the ``with``."""
        return handle_signals(stop_signals(), self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._request.is_urgent(number):
            raise StoppedAtOnce(self._request.first or number)
        if self.received is None:
            self.received = signal.Signals(number)
            again = "once more" if number == signal.SIGINT else "Ctrl-C"
            logger.warning("%s: saving a checkpoint after this step; %s stops at once", self.received.name, again)

    def agree(self, device: torch.device) -> bool:
        """Whether a signal has come to any process; every process has to ask, at the same place."""
        number = largest_on_any(self.received or 0, device)
        if number:
            self.received = signal.Signals(number)
        return bool(number)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Called by the trainer between two steps; all ranks stop at the same one, whichever received the signal."""
        if self.agree(args.device):
            control.should_save = control.should_training_stop = True
        return control


class CheckFirstStep(TrainerCallback):
    """Warn once of parameters in tiled blocks that have no gradient, or say why they cannot be seen."""

    def __init__(self) -> None:
        self._left = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Called by the trainer when the gradients are there and before they are used."""
        if self._left:
            self._left = False
            try:
                check_gradients(model)
            except UserError as error:
                logger.info("could not check the gradients of the first step: %s", error)


class Clock(TrainerCallback):
    """Times the steps."""

    def __init__(self) -> None:
        self.started, self.seconds = 0.0, list[float]()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)

    def median(self) -> float | None:
        """Seconds of a step, the first one left out; None below two steps."""
        return median(self.seconds[1:]) if len(self.seconds) > 1 else None


class EndSlowDemo(TrainerCallback):
    """End the demo early on a slow machine: after :data:`DEMO_SECONDS`, with at least :data:`LEAST_STEPS` steps."""

    def __init__(self) -> None:
        self._started = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Called by the trainer between two steps."""
        if LEAST_STEPS <= state.global_step < state.max_steps and time.perf_counter() - self._started > DEMO_SECONDS:
            logger.info("this machine is slow: the demo ends after %d of %d steps", state.global_step, state.max_steps)
            control.should_training_stop = True
        return control


class CheckModel(TrainerCallback):
    """Look at the model that the engine made, before the first step."""

    def __init__(self, trainer: Any, recipe: Recipe) -> None:
        self._trainer, self._recipe = trainer, recipe

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        check_engine(self._trainer, self._recipe)
