"""The exceptions that end a command with one sentence, and its exit codes."""

from __future__ import annotations

import sys
import traceback
from numbers import Integral, Real
from pathlib import Path
from types import FrameType
from typing import Any

RUN_ERROR = 1
USER_ERROR = 2


class UserError(ValueError):
    """Bad input, in one sentence: what was got, what was expected, what to do. The command exits with code 2.

    Attributes:
        code: an id that stays when the sentence is reworded: the option or thing, a dot, and what is wrong with it.
    """

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(code, sentence)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[1])


class RunError(RuntimeError):
    """A run that cannot go on, through no setting that could have been refused. The command exits with code 1."""


OUR_FAULT = "This is a bug in seqtile: please report these lines with the output of 'seqtile doctor'."


def is_ours(error: BaseException) -> bool:
    """Whether seqtile's own code raised ``error``, by itself or by a wrong call of PyTorch or of Python's library."""
    frame = _raised_in(error)
    return frame is not None and _package(frame) == "seqtile"


def note_fault(error: BaseException) -> None:
    """Add to the traceback of an error of ours that it is one."""
    if is_ours(error) and OUR_FAULT not in getattr(error, "__notes__", ()):
        error.add_note(OUR_FAULT)


def in_its_words(error: BaseException) -> str:
    """Describe another library's error, and where it was raised, in one line."""
    message = (str(error).strip().splitlines() or [""])[0]
    what = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frame = _raised_in(error)
    if frame is None:
        return what
    return f"{what}; raised by {_package(frame)} in {Path(frame.f_code.co_filename).name}"


def passed_other_code(error: BaseException) -> bool:
    """Whether code of a library beside PyTorch was running, such as a model's forward."""
    packages = {_package(frame) for frame, _ in traceback.walk_tb(error.__traceback__)}
    return bool(packages - _LOWER_PACKAGES - {"seqtile"})


def _raised_in(error: BaseException) -> FrameType | None:
    """The innermost frame that is neither PyTorch's, nor Python's, nor of a mode that only passes operators on."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        package = _package(frame)
        if str(frame.f_globals.get("__name__", "")).startswith("seqtile.counting"):
            continue
        if package not in _LOWER_PACKAGES and frame.f_code.co_name not in ("__torch_dispatch__", "__torch_function__"):
            return frame
    return None


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


_LOWER_PACKAGES = {"torch", "numpy", "", *sys.stdlib_module_names}


def expect_module(model: Any, caller: str) -> None:
    """Refuse what is no model.

    Raises:
        UserError: with what it is.
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        got = f"the text {model!r}" if isinstance(model, str) else type(model).__name__
        raise UserError(
            "model.not-a-module",
            f"{caller} got {got}, expected an nn.Module, such as AutoModelForCausalLM.from_pretrained returns",
        )


def expect_tensors(**arguments: Any) -> None:
    """Refuse arguments that are no tensors.

    Raises:
        ValueError: with the argument's name and what it is.
    """
    from torch import Tensor

    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            what = "None" if value is None else f"of type {type(value).__name__}"
            raise ValueError(f"{name} is {what}, expected a tensor")


def expect_number(name: str, value: Any, least: float, most: float, expected: str, *, whole: bool = False) -> None:
    """Refuse what is no number from ``least`` to ``most``, and where ``whole`` no integer.

    Raises:
        ValueError: with the argument's name, what it is and ``expected``.
    """
    right = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if not right or not least <= float(value) <= most:
        raise ValueError(f"{name}={value!r}: expected {expected}")
