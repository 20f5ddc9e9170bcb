"""Errors that a model's own code raises while a plan runs it on shapes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from seqtile._compat import FAKE_TENSOR_LOGGER
from seqtile._errors import UserError, in_its_words, passed_other_code
from seqtile._log import log_level


@contextmanager
def in_one_sentence(config: Any) -> Iterator[None]:
    """Raise what a model's own code raises on fake tensors as one sentence: of many models only some are tried.

    Raises:
        UserError: in place of an exception inside the model's code.
    """
    try:
        with log_level(FAKE_TENSOR_LOGGER, logging.CRITICAL):
            yield
    except UserError:
        raise
    except Exception as error:
        if not passed_other_code(error):
            raise
        raise UserError(
            "plan.step-fails",
            f"cannot plan model type {config.model_type!r}: a step does not run on fake tensors "
            f"({in_its_words(error)}); try another attention, or use seqtile.apply",
        ) from error
