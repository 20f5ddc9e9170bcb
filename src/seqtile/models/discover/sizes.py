"""The sizes that stand for "any number of tokens" in a trace, and the refusals of a trace.

A trace runs on tensors without memory, so its sizes may be as large as they like: large primes, which no feature
dimension has as a factor. Wherever one of them turns up, that number came from the number of tokens.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

SIZES = {"b": 10_007, "m": 20_011, "s": 1_000_003}
"""Primes for the token axes of the trace that is judged: batch, a dimension between (of images), sequence."""


class _Noted(threading.local):
    """The refusals of the trace in this thread: where the traced code catches one, the tracer still sees it.

    Attributes:
        refusals: in the order in which they were raised; None where no trace runs.
        in_backward: whether the backward runs.
        ones: the token axes that say that they are of size 1.
        asked: whether the code asked if a size is 1.
        indexed: calls, by frame and instruction, that made a plain number of a watched size, or asked what it is;
            PyTorch's own do so when they look at their arguments.
    """

    refusals: list[Exception] | None = None
    in_backward = False
    ones: Collection[str] = ()
    asked = False

    def __init__(self) -> None:
        self.indexed: set[tuple[types.FrameType, int]] = set()

    def begin(self, ones: Collection[str] = ()) -> None:
        """A trace begins in this thread, which ends with it."""
        self.refusals, self.in_backward, self.ones, self.asked = [], False, ones, False
        self.indexed.clear()

    def refuse(self, error: Exception) -> None:
        if self.refusals is not None:
            self.refusals.append(error)

    def pytorch_called(self, frame: types.FrameType) -> None:
        """A function of PyTorch was called from here; no other function may have taken a size since the last one."""
        self.indexed.discard((frame, frame.f_lasti))
        self.check()

    def check(self) -> None:
        """Raise what the traced code has caught."""
        if self.indexed:
            self.indexed.clear()
            raise NotPerToken("its forward depends on the number of tokens, which is read")
        if self.refusals:
            raise self.refusals[0]


noted = _Noted()


class NotPerToken(Exception):
    """One token sees another, the code keeps a state, or it depends on how many tokens there are."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        noted.refuse(self)


class Untraceable(Exception):
    """The code could not be followed to its end, so that nothing is known of it."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        if not isinstance(self, NoRule):
            noted.refuse(self)


class NoRule(Untraceable):
    """It uses an operator without a rule."""


def axes_in(size: int) -> str:
    """The token axes that ``size`` is a multiple of, "" for a size without any."""
    return "".join(axis for axis, prime in SIZES.items() if size % prime == 0) if size else ""


def at(number: int, sizes: Mapping[str, int]) -> int:
    """What ``number`` of the judged trace is in a trace with axes of these sizes."""
    for axis, prime in SIZES.items():
        while sizes[axis] != prime and number and number % prime == 0:
            number = number // prime * sizes[axis]
    return number


class TokenCount:
    """A size that holds token axes, as the traced code sees it.

    It may be multiplied, divided by one of its factors, handed to PyTorch, and asked whether it is 1: a trace is made
    for either answer. Whatever else is asked of it would make the code depend on the number of tokens. It is no
    ``int``, since functions written in C would read the number of one without asking; nor may code ask what it is.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __mul__(self, other: Any) -> Any:
        other = other.number if isinstance(other, TokenCount) else other
        return TokenCount(self.number * other) if type(other) is int and other else self._refuse("multiplied")

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        divisor = other.number if isinstance(other, TokenCount) else other
        if type(divisor) is not int or not divisor or self.number % divisor:
            return self._refuse("divided")
        return counted(self.number // divisor)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._refuse("divided by")

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenCount):
            return self.number == other.number or bool(self._refuse("compared with another size"))
        return other is not None and self._compared(other) == 0

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: object) -> bool:
        return self._compared(other) < 0

    def __le__(self, other: object) -> bool:
        return self._compared(other) <= 0

    def __gt__(self, other: object) -> bool:
        return self._compared(other) > 0

    def __ge__(self, other: object) -> bool:
        return self._compared(other) >= 0

    def _compared(self, other: Any) -> int:
        number = getattr(other, "number", other)
        asker = sys._getframe(2).f_globals.get("__name__")
        if number == self.number and (number is not other or asker == "torch.utils.checkpoint"):
            return 0
        if type(other) is not int or other not in (0, 1):
            # It may be an assertion, which mixes nothing: not refuted, so that a caller may vouch for it.
            raise Untraceable(f"its forward compares the number of tokens with {number!r}")
        noted.asked |= other == 1
        return 0 if other == 1 == at(self.number, {**SIZES, **dict.fromkeys(noted.ones, 1)}) else 1

    def __index__(self) -> int:
        frame = sys._getframe(1)
        noted.indexed.add((frame, frame.f_lasti))
        return self.number

    def __hash__(self) -> int:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("einops."):
            raise TypeError("unhashable size")  # einops caches what it does by shapes, and goes on without
        return int(self._refuse("looked up"))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _class_of(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # PyTorch asks for its protocols
            raise AttributeError(name)
        return self._refuse(f"asked for its {name}")

    def _refuse(self, how: str) -> Any:
        raise NotPerToken(f"its forward depends on the number of tokens, which is {how}")


def _class_of(value: Any) -> Any:
    """The class of a size or a shape, for PyTorch: what they stand for are an ``int`` and a :class:`torch.Size`."""
    frame = sys._getframe(2)
    if not frame.f_globals.get("__name__", "").startswith(("torch.", "einops.", "seqtile.")):
        noted.indexed.add((frame, frame.f_lasti))
    return type(value)


def _refusing(how: str) -> Callable[..., Any]:
    return lambda self, *_: self._refuse(how)


for _how, _names in {
    "divided": ("truediv", "rtruediv", "mod", "rmod", "divmod", "rdivmod"),
    "added to": ("add", "radd", "sub", "rsub", "neg", "pos", "abs", "pow", "rpow", "and", "rand", "or", "ror", "xor",
                 "rxor", "lshift", "rlshift", "rshift", "rrshift", "invert"),
    "read": ("round", "trunc", "floor", "ceil", "int", "float", "complex", "str", "repr", "format"),
}.items():  # fmt: skip
    for _name in _names:
        setattr(TokenCount, f"__{_name}__", _refusing(_how))


class Shape(tuple[Any, ...]):
    """The shape of a tensor as the traced code sees it; like :class:`torch.Size`, which holds nothing but ``int``."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _class_of(self)

    def numel(self) -> Any:
        total: Any = 1
        for size in self:
            total = total * size
        return total

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Shape(found) if isinstance(index, slice) else found


def holds_tokens(number: int) -> bool:
    """Whether a number of the judged trace came from the number of tokens."""
    return number != 0 and any(number % prime == 0 for prime in SIZES.values())


def counted(number: int) -> Any:
    """``number``, watched if it holds token axes."""
    return TokenCount(number) if holds_tokens(number) else number


def plain(value: Any) -> Any:
    """``value`` with plain numbers in place of watched ones, as PyTorch takes it."""
    if isinstance(value, TokenCount):
        return value.number
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        made = [plain(one) for one in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value


def has_count(values: Sequence[Any]) -> bool:
    """Whether one of the values is a number of tokens."""
    return any(isinstance(one, TokenCount) for one in values)
