"""Ctrl-C and SIGTERM: finish the step, save a checkpoint, stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from seqtile._log import first_rank_logger
from seqtile.train.ranks import largest_on_any

logger = first_rank_logger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal(TrainerCallback):
    """Ask the trainer to save and stop after the running step; a second signal stops at once.

    A checkpoint is only whole between two steps, so the running one is finished first.

    Attributes:
        received: the signal that came, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle both signals inside the ``with``, then put the former handlers back.

        Outside the main thread, where Python allows no handlers, signals keep their former meaning.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        logger.warning("%s: saving a checkpoint after this step; once more stops at once", self.received.name)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Called by the trainer between two steps; all ranks stop at the same one, whichever heard first."""
        number = largest_on_any(self.received or 0, args.device)
        if number:
            self.received = signal.Signals(number)
            control.should_save = control.should_training_stop = True
        return control
