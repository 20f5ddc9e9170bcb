# Made from seqtile/_log.py by `python -m seqtile.integrations.hub_kernel`; do not edit.
"""Who logs what: the first rank alone, on stderr, or not for a while."""

from __future__ import annotations

import logging
import os


def process_rank() -> int:
    """This process' number in its launch (``RANK``, as torchrun sets it), 0 without a launch."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else 0


def first_rank_logger(name: str) -> logging.Logger:
    """The logger ``name``, silent on every process but the first of a launch."""
    logger = logging.getLogger(name)
    if not any(getattr(one, "__name__", "") == "_on_first_rank" for one in logger.filters):
        logger.addFilter(_on_first_rank)
    return logger


def _on_first_rank(_: logging.LogRecord) -> bool:
    return process_rank() == 0
