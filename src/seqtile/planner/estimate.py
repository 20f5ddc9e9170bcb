"""The result of a plan: bytes with bounds, by term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """Bytes: at least, most likely, at most."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """The memory of one step of one length.

    Attributes:
        tokens: tokens of each row.
        device: bytes on one rank's device at the peak of the step.
        host: bytes on the node's host.
        peak_at: the part of the step at whose peak that is.
        terms: bytes on the device at that point, by what they are for.
        host_terms: the same of the host.
        square: whether a ``[tokens, tokens]`` mask is built.
        moved: share of what checkpoints keep that waits on the host.
    """

    tokens: int
    device: Bounds
    host: Bounds
    peak_at: str
    terms: Mapping[str, float]
    host_terms: Mapping[str, float]
    square: bool
    moved: float = 0.0


@dataclass(frozen=True)
class Saving:
    """Whether activation checkpoints keep attention's output, and why.

    Attributes:
        chosen: whether they do.
        more: bytes on the device that it adds to the expected peak; None where that was not looked at.
        share: share of the step's operations that it saves.
        why: as a sentence.
    """

    chosen: bool
    more: float | None
    share: float
    why: str
