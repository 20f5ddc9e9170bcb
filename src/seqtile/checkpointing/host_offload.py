"""Offload saved tensors to host memory until backward.

On an accelerator copies run on one stream of their own, to and from a pool of pinned chunks of one size, which later
steps of any length use again: PyTorch's own pinned blocks are rounded up to powers of two, nearly twice the bytes at
worst. A device tensor is kept until its copy has ended, so that no more than :data:`IN_FLIGHT` layers' are there
besides what computes, and on the way back as many are fetched ahead. On the CPU, where device and host are one, and on
backends without pinned memory each is a plain copy.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from seqtile._compat import PLAIN
from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.devices import available_host_bytes

logger = first_rank_logger(__name__)

IN_FLIGHT = 2
"""Layers whose tensors may be on the device for a copy, outward or back, the one at work included."""

CHUNK_BYTES = 2**28
"""Bytes that are pinned at once: a power of two, which PyTorch's allocator of pinned memory does not round up."""

ALIGNMENT = 16


def pool_bytes(nbytes: int, budget: int = 0) -> int:
    """Pinned bytes that the pool holds once ``nbytes`` have been in it at a time.

    Args:
        nbytes: bytes of the tensors.
        budget: most bytes that it may hold, 0 for no bound.
    """
    total = 0
    while total < nbytes and (size := _next_chunk(total, budget)):
        total += size
    return total


def _next_chunk(capacity: int, budget: int) -> int:
    """Bytes of the next chunk of a pool of ``capacity`` bytes; fewer at the end of a budget, 0 if it is used up."""
    if not budget:
        return CHUNK_BYTES
    left = budget - capacity
    return min(CHUNK_BYTES, 1 << (left.bit_length() - 1)) if left >= ALIGNMENT else 0


Extent = tuple[int, int]
"""First byte and number of bytes, of all chunks one after another; inside one chunk."""


class ChunkPool:
    """Memory in chunks. Tensors take free extents of any size, the lowest first, so no fragment stays unused.

    Args:
        budget: most bytes in all chunks, 0 for no bound.
        allocate: makes a chunk of so many bytes; a RuntimeError means that the host has none left.
    """

    def __init__(self, budget: int, allocate: Callable[[int], Tensor]) -> None:
        self.budget, self._allocate = budget, allocate
        self._chunks: list[Tensor] = []
        self._starts: list[int] = []
        self._free: list[Extent] = []
        self._lock = threading.RLock()  # a backward releases memory in its own thread
        self.capacity = 0
        self.full = False

    @property
    def free_bytes(self) -> int:
        """Free bytes of the pool."""
        with self._lock:
            return sum(size for _, size in self._free)

    def make_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` are free, after more chunks are made if need be."""
        nbytes = _aligned(nbytes)
        if self.budget and self.free_bytes + self.budget - self.capacity < nbytes:
            return False  # before allocating chunks that would not suffice
        while self.free_bytes < nbytes:
            size = _next_chunk(self.capacity, self.budget)
            if not size or self.full:
                return False
            try:
                chunk = self._allocate(size)
            except RuntimeError as error:
                self.full = True
                logger.warning(
                    "offload: the host provides only %.3g GiB of pinned memory; the rest stays on the device (%s)",
                    self.capacity / 2**30, str(error).splitlines()[0],
                )  # fmt: skip
                return False
            with self._lock:
                self._chunks.append(chunk)
                self._starts.append(self.capacity)
                self._free.append((self.capacity, size))
                self.capacity += size
        return True

    def take(self, nbytes: int) -> list[Extent]:
        """Extents of ``nbytes`` in all, which :meth:`make_room` has found room for."""
        taken, left = [], _aligned(nbytes)
        with self._lock:
            while left:
                start, size = self._free.pop(0)
                length = min(size, left)
                taken.append((start, length))
                left -= length
                if length < size:
                    self._free.insert(0, (start + length, size - length))
        return taken

    def give(self, extents: list[Extent]) -> None:
        """Take extents back."""
        with self._lock:
            merged: list[Extent] = []
            for start, size in sorted([*self._free, *extents]):
                last = merged[-1] if merged else None
                if last is not None and sum(last) == start and start not in self._starts:
                    merged[-1] = (last[0], last[1] + size)
                else:
                    merged.append((start, size))
            self._free = merged

    def bytes_of(self, extent: Extent) -> Tensor:
        """The memory of an extent, ``uint8``."""
        start, size = extent
        number = bisect(self._starts, start) - 1
        return self._chunks[number].narrow(0, start - self._starts[number], size)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Lane:
    """The copies of one device.

    One stream runs them all, so that memory of the pool that is given back can be written at once: by a later copy.

    Args:
        stream: the stream that copies.
        current: gives the stream that computes.
        pool: where tensors wait.
        in_flight: layers whose device tensors may be in flight.
    """

    def __init__(self, stream: Any, current: Callable[[], Any], pool: ChunkPool, in_flight: int) -> None:
        self.stream, self.current, self.pool, self.in_flight = stream, current, pool, in_flight
        self.outward: deque[tuple[int, Tensor, Any]] = deque()
        self.inward: dict[int, tuple[Tensor, Any]] = {}
        self._numbers = itertools.count()

    def write(self, tensor: Tensor, layer: int) -> list[Extent]:
        """Begin to copy ``tensor``, dense, to the host."""
        extents = self.pool.take(tensor.nbytes)
        self.stream.wait_stream(self.current())
        self._copy(tensor, extents, outward=True)
        self.outward.append((layer, tensor, self.stream.record_event()))
        self.release(layer - self.in_flight)
        return extents

    def release(self, layer: int) -> None:
        """Release the device tensors up to ``layer``, after the compute stream has waited for their copies."""
        while self.outward and (self.outward[0][0] <= layer or self.outward[0][2].query()):
            _, _, event = self.outward.popleft()
            if not event.query():
                self.current().wait_event(event)

    def give(self, extents: list[Extent]) -> None:
        """Free the extents of a tensor that has no reference left.

        If these were the last, a forward without a backward, or an exception, has left the copies in flight.
        """
        self.pool.give(extents)
        if (self.outward or self.inward) and self.pool.free_bytes == self.pool.capacity:
            for event in (*(copy[-1] for copy in self.outward), *(copy[-1] for copy in self.inward.values())):
                self.current().wait_event(event)
            self.outward.clear()
            self.inward.clear()

    def read(self, extents: list[Extent], like: Tensor) -> tuple[Tensor, Any, int]:
        """Begin to copy extents back: a tensor like ``like``, the event after which it is whole, its number."""
        # Made for the stream that computes, to which it belongs: it may still use that memory for what came before.
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.stream.device)
        self.stream.wait_stream(self.current())
        self._copy(tensor, extents, outward=False)
        number = next(self._numbers)
        # Kept until it is fetched or the copy has ended, so that its memory is not reused before.
        self.inward = {key: copy for key, copy in self.inward.items() if not copy[1].query()}
        self.inward[number] = (tensor, self.stream.record_event())
        return *self.inward[number], number

    def _copy(self, tensor: Tensor, extents: list[Extent], *, outward: bool) -> None:
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        start = 0
        with self.stream:
            for extent in extents:
                device_bytes = flat[start : start + extent[1]]  # the last extent may be longer, by its alignment
                host_bytes = self.pool.bytes_of(extent)[: len(device_bytes)]
                target, source = (host_bytes, device_bytes) if outward else (device_bytes, host_bytes)
                target.copy_(source, non_blocking=True)
                start += len(device_bytes)


class OffloadedTensor:
    """One tensor on the host, and how it comes back."""

    def __init__(self, owner: HostMemory, tensor: Tensor) -> None:
        self.owner, self.device, self.layer = owner, tensor.device, owner.layer
        self.nbytes = tensor.numel() * tensor.element_size()
        self.fetched: tuple[Tensor, Any, int] | None = None
        self.taken = False
        tensor = tensor.detach()
        self.lane = owner.lane_of(tensor)
        # Strides are kept: with others, a recompute would run other operators than the forward did.
        if self.lane is None:
            self.host = torch.empty_like(tensor, device="cpu").copy_(tensor)
            return
        if not is_dense(tensor):
            tensor = torch.empty_like(tensor).copy_(tensor)
        self.host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self.extents = self.lane.write(tensor, self.layer)
        weakref.finalize(self, self.lane.give, self.extents).atexit = False

    def fetch(self) -> tuple[Tensor, Any, int]:
        """The device tensor, the event after which it is whole, and its number. The first call starts the copy."""
        if self.fetched is None:
            if self.lane is None:
                self.fetched = (self.host if self.device.type == "cpu" else self.host.to(self.device), None, 0)
            else:
                self.fetched = self.lane.read(self.extents, self.host)
        return self.fetched

    def take(self) -> Tensor:
        """The tensor on its device again, for the compute stream; the earlier layers are prefetched."""
        if self.lane is not None:
            self.lane.release(self.owner.layer)
        tensor, event, number = self.fetch()
        self.fetched, self.taken = None, True
        self.owner.prefetch_before(self)
        if self.lane is not None:
            self.lane.current().wait_event(event)
            self.lane.inward.pop(number, None)
        return tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one contiguous range of memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class HostMemory:
    """Host memory for the tensors of one model.

    Args:
        budget: most bytes of these tensors (others stay on their device); 0 for the host's free memory.
        in_flight: layers whose tensors may be on the device for a copy.
    """

    def __init__(self, budget: int = 0, in_flight: int = IN_FLIGHT) -> None:
        self.budget, self.in_flight = budget, in_flight
        self.layer = 0
        self.ever_parked = 0  # bytes
        self._order: deque[weakref.ref[OffloadedTensor]] = deque()
        self._prefetched_before = -1
        self._lanes: dict[torch.device, Lane] = {}
        self._checked = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"budget": self.budget, "in_flight": self.in_flight}

    def __setstate__(self, state: dict[str, Any]) -> None:
        HostMemory.__init__(self, **state)

    @property
    def parked_bytes(self) -> int:
        """Bytes of tensors on the host now."""
        return sum(parked.nbytes for ref in self._order if (parked := ref()) is not None)

    @property
    def pool_bytes(self) -> int:
        """Bytes that are pinned for them, now and later."""
        return sum(lane.pool.capacity for lane in self._lanes.values())

    def begin_layer(self) -> None:
        """Start the next layer: it owns the tensors parked from now on."""
        self.layer += 1

    def has_room(self, tensor: Tensor) -> bool:
        """Whether the budget has room for ``tensor``; the first layers, needed last in backward, get it."""
        nbytes = tensor.numel() * tensor.element_size()
        lane = self.lane_of(tensor)
        if lane is not None:
            if self.budget:  # minus what other devices use
                lane.pool.budget = max(ALIGNMENT, self.budget - self.pool_bytes + lane.pool.capacity)
            return lane.pool.make_room(nbytes)
        return not self.budget or self.parked_bytes + nbytes <= self.budget

    def park(self, tensor: Tensor) -> OffloadedTensor:
        """Start the copy of ``tensor`` to the host; :meth:`has_room` was checked."""
        while self._order and self._order[-1]() is None:  # left over from an earlier step
            self._order.pop()
        while self._order and self._order[0]() is None:
            self._order.popleft()
        parked = OffloadedTensor(self, tensor)
        self.ever_parked += parked.nbytes
        self._order.append(weakref.ref(parked))
        return parked

    def prefetch_before(self, taken: OffloadedTensor) -> None:
        """Start to fetch the layers before ``taken``'s, as many as may be in flight with it; once per layer."""
        if taken.layer == self._prefetched_before:  # a layer of many chunks parks thousands of states
            return
        self._prefetched_before = taken.layer
        for ref in reversed(self._order):
            parked = ref()
            if parked is not None and parked.layer <= taken.layer - self.in_flight:
                return
            if parked is not None and parked.layer < taken.layer and not parked.taken:
                parked.fetch()

    def lane_of(self, tensor: Tensor) -> Lane | None:
        """The lane of this tensor; None for a plain copy, as of a subclass that wraps other tensors."""
        return self.lane(tensor.device) if type(tensor) in PLAIN else None

    def lane(self, device: torch.device) -> Lane | None:
        """The lane of ``device``, None if copies are plain there."""
        if device.type == "cpu" or not can_pin():
            return None
        if device not in self._lanes:
            self._lanes[device] = self._make_lane(device)
        return self._lanes[device]

    def _make_lane(self, device: torch.device) -> Lane:
        left = max(ALIGNMENT, self.budget - self.pool_bytes) if self.budget else 0
        pool = ChunkPool(left, lambda size: torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True))
        return Lane(torch.Stream(device), lambda: torch.accelerator.current_stream(device), pool, self.in_flight)

    def check(self, each: int, layers: Callable[[], int], device: torch.device) -> None:
        """Refuse a step whose ``layers()`` tensors of ``each`` bytes on ``device`` do not fit, before one is copied.

        Raises:
            UserError: with the sizes, and what to change.
        """
        if each <= self._checked:
            return
        count = layers()
        if self.budget:
            count = min(count, self.budget // each)  # the others stay on the device
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free, pinned = available_host_bytes(), self.pool_bytes
        whole = each * count if self.lane(device) is None else pool_bytes(each * count, self.budget)
        budget = free // ranks + pinned
        if free and whole > budget:
            raise UserError(
                "offload.exceeds-host-memory",
                f"offload needs {whole / 2**30:.3g} GiB of host memory ({count} layer inputs of "
                f"{each / 2**30:.3g} GiB), but each of the {ranks} ranks on this host has {budget / 2**30:.3g} "
                "GiB; use shorter sequences, more ranks per sequence, or offload a part: "
                f"offload='{budget // 2**20}MiB'",
            )
        self._checked = each


class Parking(threading.local):
    """Lets code inside a checkpoint move further tensors to the host, if the checkpoint moves its input there.

    Attributes:
        host: the host memory; None outside of such a checkpoint.
        nbytes: bytes of the checkpoint: its input, and what was announced besides.
        checkpoints: counts the checkpoints of a step.
    """

    host: HostMemory | None = None
    nbytes = 0
    checkpoints: Callable[[], int] = int

    @contextmanager
    def inside(self, host: HostMemory | None, input_bytes: int, checkpoints: Callable[[], int] = int) -> Iterator[None]:
        """Wrap the forward of one checkpoint; without a host nothing inside is moved."""
        outside = self.host, self.nbytes, self.checkpoints
        self.host, self.nbytes, self.checkpoints = host, input_bytes, checkpoints
        try:
            yield
        finally:
            self.host, self.nbytes, self.checkpoints = outside

    def park(self, tensors: Sequence[Tensor], announced: int = 1) -> list[Tensor | OffloadedTensor]:
        """Start to copy to the host those of ``tensors`` that it has room for; the backward needs all of them.

        Args:
            tensors: tensors on the device.
            announced: how many such groups of tensors the checkpoint will park, this one included, so that a host
                without room for all is refused at the first; 0 for those that were announced.

        Raises:
            UserError: the host has no room for as many bytes of every checkpoint.
        """
        host = self.host
        if host is None or not tensors:
            return [*tensors]
        self.nbytes += announced * sum(tensor.nbytes for tensor in tensors)
        host.check(self.nbytes, self.checkpoints, tensors[0].device)
        return [host.park(tensor) if host.has_room(tensor) else tensor for tensor in tensors]


parking = Parking()


@functools.cache
def can_pin() -> bool:
    """Whether the accelerator's backend has pinned memory; without it the device waits for each copy."""
    try:
        return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
    except RuntimeError:  # NotImplementedError is one
        return False
