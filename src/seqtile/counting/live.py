"""Count the bytes of live tensors."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqtile._compat import OpOverload, schema_of, storage_key, sums_gradients_in_place
from seqtile.counting.watch import Watch, name_of, tensors_in
from seqtile.devices import accelerator, is_accelerator

_UNWRITTEN = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
    )
)
# These write as many elements as their source has, whatever the size of the tensor they write into.
_WRITES_ITS_SOURCE = {"aten::index_add_": 3, "aten::index_copy_": 3, "aten::scatter_add_": 3}


class LiveSample(NamedTuple):
    """Live bytes above the start, after operator number ``op``; ``phase`` is the label of the time."""

    op: int
    live: int
    phase: Any


@dataclass(frozen=True)
class PhaseBytes:
    """Peak bytes of one phase, and bytes written."""

    peak: int
    written: int


@dataclass(slots=True)
class _Storage:
    """A live storage, held weakly; ``counted`` is False if it was there before the count began."""

    ref: weakref.KeyedRef[int, torch.UntypedStorage]
    nbytes: int
    phase: Any
    counted: bool


class LiveBytes:
    """Bytes of tensors on one device, above what was live when ``count_live_bytes`` was entered.

    A storage counts once, however many views it has, from the operator that returns it until nothing
    holds it. One that was there before is not counted, and what it held is subtracted when an operator has
    seen it and it goes. So the numbers are those an exact allocator would show, less what kernels use
    inside themselves. A sum of two gradients that autograd makes in place, except under this counter, counts as if it
    were made so.

    ``peak`` and the peaks of phases come from the allocator of the accelerator where there is one; the
    rest is counted. Reading a number raises ``RuntimeError`` when no byte was seen.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._live: dict[int, _Storage] = {}
        self._now = self._peak = self._written = 0
        self._ops = 0
        self._seen = False
        self._samples: list[LiveSample] = []
        self._left: tuple[int, Hashable] | None = None  # where the last operator left things: bytes, phase
        self._phases: dict[Any, list[int]] = {}
        self._phase: Any = ""
        self._allocator = _Allocator.of(device)
        self._allocator_phases: dict[Any, int] = {}
        # The callback of every weak reference knows this object weakly: a strong reference would be a cycle.
        owner = weakref.ref(self)

        def forget(ref: Any) -> None:
            live = owner()
            if live is not None:
                live.forget(ref.key)

        self._callback = forget

    @property
    def peak(self) -> int:
        """The most bytes that were live at once, above the start."""
        self._check()
        if self._allocator is not None:
            self._fold()
            return self._allocator.peak
        return self._peak

    @property
    def now(self) -> int:
        """Bytes live above the start, negative if more was freed; after the ``with``, those at its end."""
        self._check()
        return self._now

    @property
    def written(self) -> int:
        """Bytes operators wrote: new, in-place and ``out=`` results; views and empty tensors cost none."""
        self._check()
        return self._written

    @property
    def phases(self) -> dict[Any, PhaseBytes]:
        """Peak above the start and bytes written, for each label given to :meth:`phase`."""
        self._check()
        if self._allocator is not None:
            self._fold()
            return {name: PhaseBytes(self._allocator_phases.get(name, 0), row[1]) for name, row in self._phases.items()}
        return {name: PhaseBytes(*row) for name, row in self._phases.items()}

    def timeline(self) -> list[LiveSample]:
        """Live bytes after each operator that changed them, as counted."""
        self._check()
        return list(self._samples)

    @contextmanager
    def phase(self, label: Hashable) -> Iterator[None]:
        """Label what happens inside, which gets a peak and bytes written of its own; the inner label wins."""
        self._fold()
        outer, self._phase = self._phase, label
        self._phases.setdefault(label, [self._now, 0])
        try:
            yield
        finally:
            self._fold()
            self._phase = outer

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = name_of(func)
        fresh = name == "aten::lift_fresh"  # its input is new: it comes from torch.tensor or torch.from_numpy
        argument_keys = {self._visit(tensor, counted=fresh) for tensor in tensors_in((*args, *kwargs.values()))}
        if name == "aten::add" and self._allocator is None and sums_gradients_in_place(args[0]):
            self.forget(storage_key(args[0].untyped_storage()))  # the sum is there instead
        written = 0
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in((result,)):
            key = self._visit(tensor, counted=True)
            if key is not None and key not in argument_keys:
                written += tensor.numel() * tensor.element_size()
        if name in _UNWRITTEN:
            written = 0
        elif isinstance(func, OpOverload) and _mutable(func):
            written += self._mutated(func, args, kwargs, name)
        self._record(written)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that was made without an operator, until nothing holds it."""
        self._visit(tensor, counted=True)

    def _mutated(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> int:
        """Bytes of the arguments on this device that the operator writes into."""
        total = 0
        for position, argument in _mutable(func):
            value = args[position] if position < len(args) else kwargs.get(argument)
            for tensor in tensors_in((value,)):
                if tensor.device.type != self._device.type:
                    continue
                source = args[_WRITES_ITS_SOURCE[name]] if name in _WRITES_ITS_SOURCE else tensor
                total += source.numel() * tensor.element_size()
        return total

    def _visit(self, tensor: Tensor, *, counted: bool) -> int | None:
        """Follow the tensor's storage from now on; returns its key, or None if it is not on this device."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        key, nbytes = storage_key(storage), storage.nbytes()
        entry = self._live.get(key)
        if entry is not None and entry.nbytes == nbytes:
            return key
        device = tensor.device
        if device.type != self._device.type:
            return None
        if entry is None:
            if self._allocator is not None and storage.device.type != device.type:
                self._allocator = None  # a fake tensor: nothing is allocated for it, so its bytes are counted
            ref = weakref.KeyedRef(storage, self._callback, key)
            self._live[key] = _Storage(ref, nbytes, self._phase, counted)
            if counted:
                self._change(nbytes)
        else:
            self._resize(entry, nbytes)
        if nbytes:
            self._seen = True
        return key

    def _resize(self, entry: _Storage, nbytes: int) -> None:
        self._change(nbytes - entry.nbytes)
        entry.nbytes = nbytes

    def forget(self, key: int) -> None:
        entry = self._live.get(key)
        if entry is not None:
            self._change(-entry.nbytes)
            del self._live[key]

    def _change(self, nbytes: int) -> None:
        self._now += nbytes

    def _record(self, written: int) -> None:
        """Note where an operator left things."""
        now, phase = self._now, self._phase
        if now > self._peak:
            self._refresh()
            now = self._now
        if now > self._peak:
            self._peak = now
        if self._left != (now, phase):
            self._left = now, phase
            self._samples.append(LiveSample(self._ops, now, phase))
        self._ops += 1
        self._written += written
        row = self._phases.get(phase)
        if row is not None:
            row[0] = max(row[0], now)
            row[1] += written

    def _refresh(self) -> None:
        """See storages resized outside any operator, as FSDP does when it frees gathered weights."""
        for entry in self._live.copy().values():
            storage = entry.ref()
            if storage is not None and storage.nbytes() != entry.nbytes:
                self._resize(entry, storage.nbytes())

    def _fold(self) -> None:
        """Give the allocator's peak since the last time to the running phase."""
        if self._allocator is not None:
            peak = self._allocator.take()
            self._allocator_phases[self._phase] = max(self._allocator_phases.get(self._phase, peak), peak)

    def close(self) -> None:
        self._fold()
        if self._allocator is not None:
            self._allocator.closed = True
        self._live = {}

    def _check(self) -> None:
        if not self._seen:
            raise RuntimeError(
                f"counted no bytes on device {self._device.type!r}; run the code inside the `with` block, or pass "
                "the device of its tensors: count_live_bytes(device=...)"
            )


class _Allocator:
    """The accelerator's own peak, read in stretches so that phases can have one each."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._start = torch.accelerator.memory_allocated(index)
        self.peak = 0
        self.closed = False
        torch.accelerator.reset_peak_memory_stats(index)

    @classmethod
    def of(cls, device: torch.device) -> _Allocator | None:
        if not is_accelerator(device):
            return None
        try:
            return cls(torch.accelerator.current_device_index() if device.index is None else device.index)
        except RuntimeError:  # this backend's allocator keeps no statistics: bytes of tensors are counted, as on a CPU
            return None

    def take(self) -> int:
        """Peak above the start since the last call."""
        if self.closed:
            return self.peak
        peak = torch.accelerator.max_memory_allocated(self._index) - self._start
        torch.accelerator.reset_peak_memory_stats(self._index)
        self.peak = max(self.peak, peak)
        return peak


@contextmanager
def count_live_bytes(device: torch.device | str | None = None) -> Iterator[LiveBytes]:
    """Count the bytes of tensors that are live at the same time inside the ``with`` block.

    On the CPU the bytes are those of the tensors; on an accelerator ``peak`` is read from its allocator,
    whose peak statistics this resets. Keeps no tensor alive and makes no reference cycle. A storage resized
    outside any operator is noticed at the next operator that touches it or would make a new peak.

    Costs some ten microseconds per operator, and one small record per operator that changes what is live.

    Args:
        device: the device to count; None means the accelerator if there is one, else the CPU.

    Yields:
        LiveBytes: readable inside and after the ``with``.
    """
    if device is None:
        device = accelerator() or "cpu"
    live = LiveBytes(torch.device(device))
    try:
        with Watch(live.see):
            yield live
    finally:
        live.close()


@cache
def _mutable(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """The arguments that an operator writes into, by position and name."""
    schema = schema_of(func)
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if schema.is_mutable and argument.alias_info is not None and argument.alias_info.is_write
    )
