"""Follow one training step: what is live at the peak of each part, by what it is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from seqtile._compat import storage_key, tree_iter
from seqtile.counting.live import LiveBytes, LiveTensor
from seqtile.counting.watch import Watch, name_of
from seqtile.planner.phases import REST, Phase

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimiser state"
CHECKPOINTS = "checkpointed hidden states"
KEPT = "kept attention outputs"
KERNELS = "inside kernels"

Workspace = Callable[[str, tuple[Any, ...], dict[str, Any]], int]
"""Bytes that a kernel takes inside itself, from its operator's name and arguments."""


COPY_OF_WEIGHT = "copy of a weight"
"""In place of a direction, in the phase of a weight's copy in another type, which autocast keeps for its next use."""


@dataclass(frozen=True)
class PartPeak:
    """The most bytes that one part of the step held, and what they were for.

    Attributes:
        total: bytes.
        terms: by what they were for.
        copies: those of ``terms`` that are copies of weights in another type.
    """

    total: int
    terms: Mapping[str, int]
    copies: Mapping[str, int]


class Tracker(LiveBytes):
    """Live bytes, what they were for, and the operators that ran.

    Every tensor is filed under the part of the step that made it, unless :meth:`file` says what it is.

    Attributes:
        peaks: for each phase its peak, apart for kernels that take memory inside themselves, with that.
        operators: names of all operators in order.
        keeps: tells the operators whose results an activation checkpoint keeps; they are filed as :data:`KEPT`.
        square: whether a tensor with two dimensions of ``tokens`` was seen.
        kernels: how often each operator with a workspace ran, by (name, shapes).
    """

    def __init__(self, device: torch.device, workspace: Workspace | None = None, tokens: int = 0) -> None:
        super().__init__(device)
        self.peaks: dict[str, PartPeak] = {}
        self.operators: list[str] = []
        self.square = False
        self.watching = False
        self.keeps: Callable[[Any], bool] | None = None
        self._workspace, self._tokens = workspace, tokens

    def file(self, tensor: Tensor, what: str) -> None:
        """Say what ``tensor`` is for."""
        key = storage_key(tensor.untyped_storage())
        known = self._live.get(key)
        if known is not None:
            self._live[key] = replace(known, tensor=replace(known.tensor, phase=what))

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        super().see(func, args, kwargs, result)
        if not self.watching:
            return
        if self.keeps is not None and self.keeps(func):
            for tensor in tree_iter(result):
                if isinstance(tensor, Tensor):
                    self.file(tensor, KEPT)
        name = name_of(func)
        if name == "aten::_to_copy" and self._is_weight(args[0]):
            self.file(result, str(replace(Phase.read(self._phase), direction=COPY_OF_WEIGHT)))
        if not name.startswith("prim::") and name != "aten::detach":  # fake tensors are asked and aliased more often
            self.operators.append(name)
        inside = self._workspace(name, args, kwargs) if self._workspace is not None else 0
        # What a kernel takes does not grow as tensors do, so that the two peaks are on lines of their own.
        phase = _in_kernel(self._phase) if inside else self._phase
        best = self.peaks.get(phase)
        if best is None or self._now + inside > best.total:
            if self._tokens and isinstance(result, Tensor):
                self.square |= list(result.shape).count(self._tokens) > 1
            terms = Counter({KERNELS: inside}) if inside else Counter()
            copies: Counter[str] = Counter()
            for known in self._live.values():
                if known.counted and known.tensor.nbytes:
                    what, is_copy = _what(known.tensor.phase)
                    terms[what] += known.tensor.nbytes
                    if is_copy:
                        copies[what] += known.tensor.nbytes
            self.peaks[phase] = PartPeak(self._now + inside, terms, copies)

    def _snapshot(self) -> list[LiveTensor]:
        return []  # the phases' peaks say what made them

    def _is_weight(self, tensor: Tensor) -> bool:
        known = self._live.get(storage_key(tensor.untyped_storage()))
        return known is not None and known.tensor.phase == WEIGHTS


@cache
def _in_kernel(phase: str) -> str:
    return str(replace(Phase.read(phase), in_kernel=True))


@cache
def _what(phase: str) -> tuple[str, bool]:
    """What a tensor of that phase is for, ``"attention"`` of ``"attention#3, backward"``; if it is a weight's copy."""
    found = Phase.read(phase)
    return found.part or REST, found.direction == COPY_OF_WEIGHT


@contextmanager
def track(device: torch.device | str, workspace: Workspace | None = None, tokens: int = 0) -> Iterator[Tracker]:
    """Follow what runs inside on ``device``.

    Args:
        device: the device to count.
        workspace: bytes that kernels take inside themselves, which no tensor shows.
        tokens: length of the row, to notice tensors of ``[tokens, tokens]``.
    """
    live = Tracker(torch.device(device), workspace, tokens)
    try:
        with Watch(live.see):
            yield live
    finally:
        live.close()
