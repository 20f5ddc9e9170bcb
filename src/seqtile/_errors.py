"""The exceptions that end a command with one sentence, and its exit codes."""

from __future__ import annotations

from numbers import Integral, Real
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


def expect_tensors(**given: Any) -> None:
    """Refuse arguments that are no tensors.

    Raises:
        ValueError: with the argument's name and what it is.
    """
    from torch import Tensor

    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is {_described(value)}, expected a tensor")


def expect_number(name: str, value: Any, least: float, most: float, expected: str, *, whole: bool = False) -> None:
    """Refuse what is no number from ``least`` to ``most``, and where ``whole`` no integer.

    Raises:
        ValueError: with the argument's name, what it is and ``expected``.
    """
    right = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if not right or not least <= float(value) <= most:
        raise ValueError(f"{name}={value!r}: expected {expected}")


def _described(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
