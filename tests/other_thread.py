"""A backward as a device runs it: in a thread of its own, which has none of the forward's thread-local state."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


def backward_elsewhere(loss: Tensor) -> None:
    """``loss.backward()`` in a new thread, outside autocast."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.autocast(loss.device.type, enabled=False):
                loss.backward()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
