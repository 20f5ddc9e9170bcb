"""The sizes that represent "any number of tokens" in a trace, and the refusals of a trace.

A trace runs on tensors without memory, so its sizes can be large primes, which are factors of no feature dimension. A
multiple of one of them was computed from the number of tokens.
"""

from __future__ import annotations

SIZES = {"b": 10_007, "m": 20_011, "s": 1_000_003}
"""Primes for the token axes: batch, a dimension between (of images), sequence."""


class NotPerToken(Exception):
    """A token's output depends on other tokens, the code keeps a state, or it computes with the number of tokens."""


class Untraceable(Exception):
    """The code could not be traced to its end, so nothing is proven or refuted."""


class NoRule(Untraceable):
    """The code uses an operator without a rule."""


def axes_in(size: int) -> str:
    """The token axes that ``size`` is a multiple of, "" for a size without any."""
    return "".join(axis for axis, prime in SIZES.items() if size % prime == 0) if size else ""


def holds_tokens(number: int) -> bool:
    """Whether a number of a trace came from the number of tokens."""
    return number != 0 and any(number % prime == 0 for prime in SIZES.values())
