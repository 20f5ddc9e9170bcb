"""Follow one training step: what is live at the peak of each part, by what it is for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqtile._compat import storage_key, tree_iter
from seqtile.counting.fake import Answers
from seqtile.counting.live import LiveBytes
from seqtile.counting.watch import Watch, name_of
from seqtile.planner.phases import REST, Phase

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimiser state"
CHECKPOINTS = "checkpointed hidden states"
KEPT = "kept attention outputs"
KEPT_TILES = "kept gate and up"
KERNELS = "inside kernels"

SQUARED = "²"
"""Behind what bytes are for where they are a multiple of tokens x tokens, as attention's scores are."""

_NEVER_SQUARED = (WEIGHTS, GRADIENTS, OPTIMIZER, CHECKPOINTS, KEPT, KEPT_TILES)
"""What grows with the length at most."""

Workspace = Callable[[str, tuple[Any, ...], dict[str, Any]], int]
"""Bytes that a kernel takes inside itself, from its operator's name and arguments."""

Held = Mapping[tuple[int, str], int]
"""Bytes that decoder layers hold, by (the layer's number, what for)."""


@dataclass(frozen=True)
class PartPeak:
    """The most bytes that one part of the step held, and what they were for.

    Attributes:
        total: bytes.
        terms: by what they were for, with :data:`SQUARED` behind it where they may grow with the square of the length.
        held: those of ``terms`` that are a decoder layer's.
        running: the decoder layer that ran last; None before the first.
        operator: how many operators of this part had run.
    """

    total: int
    terms: Mapping[str, int]
    held: Held = field(default_factory=dict)
    running: int | None = None
    operator: int = 0


class Tracker(LiveBytes):
    """Live bytes, what they were for, and the operators that ran.

    Every tensor is filed under the part of the step that made it, unless :meth:`file` says what it is.

    Kernels that take memory inside themselves have peaks of their own, with that.

    Attributes:
        operators: names of all operators in order.
        ran: how many there were of each part.
        keeps: tells the operators whose results an activation checkpoint keeps; they are filed as :data:`KEPT`.
        left: what was live when a part of the step ended, by (decoder layer or None, whether in the forward); where
            it came several times, the last time.
        running: the decoder layer that was entered last; None before the first.
        in_order: whether layers ran one after another, forward and then backward, as far as the phases tell.
        square: whether a tensor with two dimensions of ``tokens`` was seen.
    """

    def __init__(self, device: torch.device, workspace: Workspace | None = None, tokens: int = 0) -> None:
        super().__init__(device)
        self._peaks: dict[str, PartPeak] = {}
        self._highest: dict[str, tuple[int, int]] = {}  # bytes, and how many of its operators had run
        self._unread: str | None = None
        self.operators: list[str] = []
        self.ran: defaultdict[str, int] = defaultdict(int)
        self.left: dict[tuple[int | None, bool], Held] = {}
        self.running: int | None = None
        self.in_order = True
        self._turn: tuple[int | None, bool] = (None, True)
        self.square = False
        self.watching = False
        self.keeps: Callable[[Any], bool] | None = None
        self._workspace, self._tokens = workspace, tokens

    @property
    def peaks(self) -> dict[str, PartPeak]:
        """For each phase its peak so far."""
        self._read()
        return self._peaks

    def file(self, tensor: Tensor, what: str, layer: int | None = None) -> None:
        """Say what ``tensor`` is for, and in which decoder layer if not in that which made it."""
        key = storage_key(tensor.untyped_storage())
        known = self._live.get(key)
        if known is not None:
            self._read()
            known.phase = _in_layer(what, _what(known.phase).layer if layer is None else layer)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not self.watching:
            super().see(func, args, kwargs, result)
            return
        turn = _turn(self._phase)
        if turn != self._turn:
            self.left[self._turn] = self._held()
            self._turn = turn
        layer, forward = turn
        if layer is not None and layer != self.running:
            self.in_order &= self.running is None or (layer > self.running if forward else layer < self.running)
            self.running = layer
        name = name_of(func)
        inside = self._workspace(name, args, kwargs) if self._workspace is not None else 0
        # What a kernel takes does not grow as tensors do, so that the two peaks are on lines of their own.
        phase = _in_kernel(self._phase) if inside else self._phase
        if self._unread != phase:
            self._read()
        super().see(func, args, kwargs, result)
        if self.keeps is not None and self.keeps(func):
            for tensor in tree_iter(result):
                if isinstance(tensor, Tensor):
                    self.file(tensor, KEPT)
        if name == "aten::_to_copy" and self._is_weight(args[0]):
            self.file(result, self._phase, self._layer_of(args[0]))
        if not name.startswith("prim::") and name != "aten::detach":  # fake tensors are asked and aliased more often
            self.operators.append(name)
        self.ran[phase] += 1
        best = self._highest.get(phase)
        if best is None or self._now + inside > best[0]:
            if self._tokens and isinstance(result, Tensor):
                self.square |= list(result.shape).count(self._tokens) > 1
            self._highest[phase], self._unread = (self._now + inside, self.ran[phase]), phase
            if inside:
                self._read(inside)

    def _read(self, inside: int = 0) -> None:
        """Note what is live at a new peak; done when the first of it goes or is filed again, or the phase ends."""
        phase, self._unread = self._unread, None
        if phase is None:
            return
        terms = Counter({KERNELS: inside}) if inside else Counter()
        total, operator = self._highest[phase]
        self._peaks[phase] = PartPeak(total, terms, self._held(terms), self.running, operator)

    def _held(self, terms: Counter[str] | None = None) -> Held:
        """What decoder layers hold now; what is live in all is added to ``terms``."""
        held: defaultdict[tuple[int, str], int] = defaultdict(int)
        square = self._tokens**2
        for known in self._live.values():
            if known.counted and known.nbytes:
                what = _what(known.phase)
                name = what.name
                if square and known.nbytes >= square and known.nbytes % square == 0 and name not in _NEVER_SQUARED:
                    name += SQUARED
                if terms is not None:
                    terms[name] += known.nbytes
                if what.layer is not None:
                    held[what.layer, name] += known.nbytes
        return dict(held)

    def _change(self, nbytes: int) -> None:
        if nbytes < 0:
            self._read()
        self._now += nbytes

    def _refresh(self) -> None:
        pass  # no engine resizes a storage here

    def close(self) -> None:
        self._read()
        super().close()

    def _is_weight(self, tensor: Tensor) -> bool:
        known = self._live.get(storage_key(tensor.untyped_storage()))
        return known is not None and _what(known.phase).name == WEIGHTS

    def _layer_of(self, tensor: Tensor) -> int | None:
        return _what(self._live[storage_key(tensor.untyped_storage())].phase).layer


@cache
def _in_layer(phase: str, layer: int | None) -> str:
    return str(replace(Phase.read(phase), layer=layer))


@cache
def _in_kernel(phase: str) -> str:
    return str(replace(Phase.read(phase), in_kernel=True))


@cache
def _turn(phase: str) -> tuple[int | None, bool]:
    """The decoder layer of a phase, and whether it is of the forward."""
    found = Phase.read(phase)
    return found.layer, found.direction == "forward"


class _What(NamedTuple):
    """What a tensor is for.

    Attributes:
        name: ``"attention"`` of ``"attention#3, backward"``.
        layer: the number of its decoder layer, None if it is in none.
    """

    name: str
    layer: int | None


@cache
def _what(phase: str) -> _What:
    found = Phase.read(phase)
    return _What(found.part or REST, found.layer)


@contextmanager
def track(
    device: torch.device | str, workspace: Workspace | None = None, tokens: int = 0, shapes: Answers | None = None
) -> Iterator[Tracker]:
    """Follow what runs inside on ``device``.

    Args:
        device: the device to count.
        workspace: bytes that kernels take inside themselves, which no tensor shows.
        tokens: length of the row, to notice tensors of ``[tokens, tokens]``.
        shapes: the mode of :func:`seqtile.counting.fake.fake_tensors` that this is in.
    """
    live = Tracker(torch.device(device), workspace, tokens)
    try:
        with Watch(live.see) if shapes is None else shapes.shown_to(live.see):
            yield live
    finally:
        live.close()
