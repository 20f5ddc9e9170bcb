"""The exceptions that end a command with one sentence, and its exit codes."""

from __future__ import annotations

from typing import Any

RUN_ERROR = 1
USER_ERROR = 2


class UserError(ValueError):
    """Bad input, in one sentence: what was got, what was expected, what to do. The command exits with code 2."""


class RunError(RuntimeError):
    """A run that cannot go on, through no setting that could have been refused. The command exits with code 1."""


def expect_module(model: Any, caller: str) -> None:
    """Refuse what is no model.

    Raises:
        UserError: with what it is.
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        got = f"the text {model!r}" if isinstance(model, str) else type(model).__name__
        raise UserError(
            f"{caller} got {got}, expected an nn.Module; load the model first, such as with "
            "AutoModelForCausalLM.from_pretrained"
        )
