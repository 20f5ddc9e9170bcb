"""Loggers: first rank only, to stderr, or silenced for a while."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def process_rank() -> int:
    """This process' number in its launch (``RANK``, as torchrun sets it), 0 without a launch."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else 0


class _ToStderr(logging.Handler):
    """Writes to what ``sys.stderr`` is at that moment: a progress bar puts itself in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{self.format(record)}\n")
        sys.stderr.flush()


def log_to_stderr() -> None:
    """Show this package's messages, from ``INFO`` on."""
    logger = logging.getLogger("seqtile")
    logger.setLevel(logging.INFO)
    logger.handlers = [_ToStderr()]


def quiet_libraries() -> None:
    """Log only errors of the libraries below, also of kernels that Transformers and PEFT import unasked.

    PyTorch's extension builder warns of a CUDA toolkit without a GPU, where nothing is built.
    """
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # we name the file and the line of a bad data set
    for name in ("torchao", "bitsandbytes", "torch.utils._pytree", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def first_rank_logger(name: str) -> logging.Logger:
    """The logger ``name``, silent on every process but the first of a launch."""
    logger = logging.getLogger(name)
    if not any(getattr(log_filter, "__name__", "") == "_on_first_rank" for log_filter in logger.filters):
        logger.addFilter(_on_first_rank)
    return logger


@contextmanager
def log_level(name: str, level: int) -> Iterator[None]:
    """The logger ``name`` at ``level`` inside the ``with``; ``logging.CRITICAL + 1`` silences it."""
    logger = logging.getLogger(name)
    previous_level = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(previous_level)


def _on_first_rank(_: logging.LogRecord) -> bool:
    return process_rank() == 0
