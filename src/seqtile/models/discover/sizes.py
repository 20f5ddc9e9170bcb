"""The sizes that stand for "any number of tokens" in a trace.

A trace runs on tensors without memory, so its sizes may be as large as they like: large primes, which no feature
dimension has as a factor. Wherever one of them turns up, that number came from the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

SIZES = {"b": 10_007, "m": 20_011, "s": 1_000_003}
"""Primes for the token axes of the trace that is judged: batch, a dimension between (of images), sequence."""


class NotPerToken(Exception):
    """One token sees another, the code keeps a state, or it depends on how many tokens there are."""


class Untraceable(Exception):
    """The code could not be followed to its end, so that nothing is known of it."""


class NoRule(Untraceable):
    """It uses an operator without a rule."""


def axes_in(size: int) -> str:
    """The token axes that ``size`` is a multiple of, "" for a size without any."""
    return "".join(axis for axis, prime in SIZES.items() if size % prime == 0) if size else ""


def at(number: int, sizes: Mapping[str, int]) -> int:
    """What ``number`` of the judged trace is in a trace with axes of these sizes."""
    for axis, prime in SIZES.items():
        while number and number % prime == 0:
            number = number // prime * sizes[axis]
    return number


class TokenCount(int):
    """A size that holds token axes, as the traced code sees it: it may be multiplied and passed on, nothing else.

    A shape that is compared with a constant, rounded or divided is behaviour that depends on the number of tokens.
    """

    def __mul__(self, other: Any) -> Any:
        return TokenCount(int.__mul__(self, other)) if isinstance(other, int) else self._refuse("multiplied")

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        whole, rest = int.__divmod__(self, int.__index__(other)) if isinstance(other, int) else (0, 1)
        return self._refuse("divided") if rest or other == 0 else counted(whole)

    def __eq__(self, other: object) -> bool:
        return int.__eq__(self, other) if isinstance(other, TokenCount) or other in (0, 1) else self._differs(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def _differs(self, other: object) -> bool:
        return bool(self._refuse(f"compared with {other!r}")) if isinstance(other, (int, float)) else False

    def _refuse(self, how: str) -> Any:
        raise NotPerToken(f"its forward depends on the number of tokens, which is {how}")

    __hash__ = int.__hash__


def _refusing(how: str) -> Callable[..., Any]:
    return lambda self, *_: self._refuse(how)


for _how, _names in {
    "compared": ("lt", "le", "gt", "ge"),
    "divided": ("truediv", "rtruediv", "mod", "rmod", "divmod", "rdivmod", "rfloordiv"),
    "added to": ("add", "radd", "sub", "rsub", "neg", "pow", "rpow", "and", "rand", "or", "ror", "xor", "rxor",
                 "lshift", "rlshift", "rshift", "rrshift", "invert"),
    "rounded": ("round", "trunc", "floor", "ceil", "int", "float"),
}.items():  # fmt: skip
    for _name in _names:
        setattr(TokenCount, f"__{_name}__", _refusing(_how))


def holds_tokens(number: int) -> bool:
    """Whether a number of the judged trace came from the number of tokens."""
    return number != 0 and any(number % prime == 0 for prime in SIZES.values())


def counted(number: int) -> int:
    """``number``, watched if it holds token axes."""
    return TokenCount(number) if holds_tokens(number) else number
