"""The model inside of PEFT's wrapper."""

from __future__ import annotations

from typing import Any


def causal_model(model: Any) -> Any:
    """The causal language model itself, under PEFT's wrapper if there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
