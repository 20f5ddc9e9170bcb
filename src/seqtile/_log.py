"""Loggers that speak on the first rank only."""

from __future__ import annotations

import logging
import os


def first_rank_logger(name: str) -> logging.Logger:
    """The logger ``name``, silent on every process but the first of a launch (``RANK`` as torchrun sets it)."""
    logger = logging.getLogger(name)
    if not any(getattr(one, "__name__", "") == "_on_first_rank" for one in logger.filters):
        logger.addFilter(_on_first_rank)
    return logger


def _on_first_rank(_: logging.LogRecord) -> bool:
    return os.environ.get("RANK", "0") == "0"
