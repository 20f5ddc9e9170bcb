"""Track which bytes are live at the peak of each phase of a step, by purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seqtile._compat import storage_key, tree_iter
from seqtile._errors import UserError
from seqtile.counting.fake import Answers
from seqtile.counting.live import LiveBytes
from seqtile.counting.watch import Watch, name_of
from seqtile.planner.phases import REST, Phase

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
CHECKPOINTS = "checkpointed hidden states"
KEPT = "kept attention outputs"
KEPT_TILES = "kept gate and up"
KERNELS = "inside kernels"
KEYS = "keys and values"
KEY_GRADIENTS = "gradients of keys and values"
CHUNK_STATES = "states at the chunks' starts"
PIECE_GRADIENTS = "gradients of one piece of keys"

Workspace = Callable[[str, tuple[Any, ...], dict[str, Any]], int]
"""Bytes that a kernel takes inside itself, from its operator's name and arguments."""


@dataclass(frozen=True)
class PartPeak:
    """The most bytes that one part of the step held, and by ``terms`` what they were for."""

    total: int
    terms: Mapping[str, int]


MOST_OPERATORS = 200_000
"""Of one step, which a loop over tokens passes; with hundreds of tiles a step runs some 30,000."""


class Tracker(LiveBytes):
    """Live bytes, what they were for, and the operators that ran.

    Every tensor is filed under the part of the step that made it, unless :meth:`file` names another purpose. Kernels
    that take memory inside themselves have peaks of their own, with that.

    Attributes:
        operators: names of all operators in order.
        purpose_of: the purpose of an operator's results, where it is not the part of the step; None for others.
        square: whether a tensor with two dimensions of ``tokens`` was seen.
        watching: False outside the step, where bytes are counted and no peak is noted.
    """

    def __init__(self, workspace: Workspace | None = None, tokens: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self._phase = Phase(REST)
        self._peaks: dict[Phase, PartPeak] = {}
        self._highest: dict[Phase, int] = {}
        self._unread: Phase | None = None
        self.operators: list[str] = []
        self.square = False
        self.watching = False
        self.purpose_of: Callable[[Any], str | None] | None = None
        self._workspace, self._tokens = workspace, tokens

    @property
    def peaks(self) -> dict[Phase, PartPeak]:
        """For each phase its peak so far."""
        self._read()
        return self._peaks

    def file(self, tensor: Tensor, purpose: str) -> None:
        """Note what ``tensor`` is for."""
        storage = self._live.get(storage_key(tensor.untyped_storage()))
        if storage is not None:
            self._read()
            storage.phase = Phase(purpose)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not self.watching:
            super().see(func, args, kwargs, result)
            return
        name = name_of(func)
        inside = self._workspace(name, args, kwargs) if self._workspace is not None else 0
        # Kernel workspace grows differently from tensors, so the two peaks have separate fits.
        phase = replace(self._phase, in_kernel=True) if inside else self._phase
        if self._unread != phase:
            self._read()
        super().see(func, args, kwargs, result)
        if self.purpose_of is not None and (purpose := self.purpose_of(func)) is not None:
            for tensor in tree_iter(result):
                if isinstance(tensor, Tensor):
                    self.file(tensor, purpose)
        if not name.startswith("prim::") and name != "aten::detach":  # fake tensors are asked and aliased more often
            self.operators.append(name)
            if len(self.operators) > MOST_OPERATORS:
                raise UserError(
                    "plan.too-many-operators",
                    f"cannot plan {self._tokens:,} tokens: a step on shapes runs over {MOST_OPERATORS:,} operators, as "
                    "code that goes from token to token does; use seqtile.apply",
                )
        if phase not in self._highest or self._now + inside > self._highest[phase]:
            if self._tokens and isinstance(result, Tensor):
                self.square |= list(result.shape).count(self._tokens) > 1
            self._highest[phase], self._unread = self._now + inside, phase
            if inside:
                self._read(inside)

    def _read(self, inside: int = 0) -> None:
        """Note what is live at a new peak; done when the first of it goes or is filed again, or the phase ends."""
        phase, self._unread = self._unread, None
        if phase is None:
            return
        terms = Counter({KERNELS: inside}) if inside else Counter()
        for storage in self._live.values():
            if storage.counted and storage.nbytes:
                terms[storage.phase.part] += storage.nbytes
        self._peaks[phase] = PartPeak(self._highest[phase], terms)

    def _change(self, nbytes: int) -> None:
        if nbytes < 0:
            self._read()
        self._now += nbytes

    def _refresh(self) -> None:
        pass  # no engine resizes a storage here

    def close(self) -> None:
        self._read()
        super().close()


@contextmanager
def track(workspace: Workspace | None = None, tokens: int = 0, shapes: Answers | None = None) -> Iterator[Tracker]:
    """Follow what runs inside on the CPU.

    Args:
        workspace: bytes that kernels take inside themselves, which no tensor shows.
        tokens: length of the sequence, to notice tensors of ``[tokens, tokens]``.
        shapes: the mode of :func:`seqtile.counting.fake.fake_tensors` that this is in.
    """
    live = Tracker(workspace, tokens)
    try:
        with Watch(live.see) if shapes is None else shapes.shown_to(live.see):
            yield live
    finally:
        live.close()
