"""After the first backward of a run: does everything inside the tiled blocks train?"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.verification import check_gradients

logger = first_rank_logger(__name__)


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
                logger.info("gradients of the first step were not checked: %s", error)
