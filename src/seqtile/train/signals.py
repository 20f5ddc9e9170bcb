"""Stop signals: which are handled, the effect of a second one, and exit codes.

Slurm and Kubernetes send SIGTERM to every process of a job, often more than once, and what started the processes passes
it on to them as well. So a SIGTERM soon after another is the same request; Ctrl-C after any of them stops at once.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

REPEAT_SECONDS = 10.0
"""A SIGTERM or SIGHUP that comes this soon after another signal is the same request."""


class StoppedAtOnce(KeyboardInterrupt):
    """A signal ended the run where it was: nothing more was saved.

    Attributes:
        number: the signal that asked first.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class StopRequest:
    """The signals that came to this process.

    Attributes:
        first: the one that asked to stop, or None.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._last = -math.inf

    def is_urgent(self, number: int) -> bool:
        """Take note of a signal; whether it asks to stop at once, after one that asked to stop in order."""
        previous, now = self._last, time.monotonic()
        self._last = now
        if self.first is None:
            self.first = signal.Signals(number)
            return False
        return number == signal.SIGINT or now - previous > REPEAT_SECONDS


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask a run to stop; not SIGHUP under ``nohup``, which has it ignored."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def exit_code(number: int) -> int:
    """130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP: what a shell says of a program that a signal ended."""
    return 128 + number


_current = StopRequest()


def new_request() -> StopRequest:
    """A request of a run that begins to listen; what repeats it later is still known when the run has ended."""
    global _current
    _current = StopRequest()
    return _current


def stop_at_once(number: int, _: FrameType | None) -> None:
    """A handler for when there is no step to finish.

    Raises:
        StoppedAtOnce: unless the signal repeats a request that was answered.
    """
    if _current.first is None or _current.is_urgent(number):
        raise StoppedAtOnce(number)


@contextmanager
def handle_signals(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """``handler`` is called for these signals inside the ``with``; then the former handlers are put back.

    Outside the main thread, where Python allows no handlers, signals keep their former meaning.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in handlers.items():
            signal.signal(number, previous)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Block stop signals in processes started inside the ``with``; their children have to unblock those they need."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
