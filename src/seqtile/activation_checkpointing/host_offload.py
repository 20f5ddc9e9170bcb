"""Tensors that wait for the backward in host memory.

On an accelerator copies run on a stream of their own: pinned memory, at most :data:`IN_FLIGHT` copies outward at once,
and on the way back the tensor that was packed before is fetched ahead. On the CPU, where device and host are one, each
is a plain copy, so that the same path is tested there.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqtile._errors import UserError
from seqtile.devices import available_host_bytes

IN_FLIGHT = 2
"""Copies to the host that may be under way at once; each holds its device tensor until it has ended."""

GIB = 2**30


class Parked:
    """One tensor on the host, and how it comes back."""

    def __init__(self, owner: HostMemory, tensor: Tensor) -> None:
        self.owner, self.device = owner, tensor.device
        self.nbytes = tensor.numel() * tensor.element_size()
        self.copied: Any = None
        self.fetched: tuple[Tensor, Any] | None = None
        self.taken = False
        self.host = self._to_host(tensor.detach())

    def _to_host(self, tensor: Tensor) -> Tensor:
        stream = self.owner.stream(tensor.device)
        if stream is None:
            return tensor.clone()
        # Strides are kept: with others, a recompute would run other operators than the forward did.
        host = torch.empty_like(tensor, device="cpu", pin_memory=can_pin())
        current = torch.accelerator.current_stream(tensor.device)
        stream.wait_stream(current)
        with stream:
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not given away before the copy has ended
        self.copied = stream.record_event()
        self.owner.wait_for_room(self.copied, current)
        return host

    def fetch(self) -> tuple[Tensor, Any]:
        """The device tensor and the event after which it is whole; begun once, by whoever comes first."""
        if self.fetched is None:
            stream = self.owner.stream(self.device)
            if stream is None:
                self.fetched = (self.host, None)
            else:
                with stream:
                    stream.wait_event(self.copied)
                    tensor = self.host.to(self.device, non_blocking=True)
                self.fetched = (tensor, stream.record_event())
        return self.fetched

    def take(self) -> Tensor:
        """The tensor back on its device, for the stream that computes; the layer before is fetched ahead."""
        tensor, event = self.fetch()
        self.fetched, self.taken = None, True
        for earlier in self.owner.before(self):
            earlier.fetch()
        if event is not None:
            current = torch.accelerator.current_stream(self.device)
            current.wait_event(event)
            tensor.record_stream(current)
        return tensor


class HostMemory:
    """Where one model's tensors are parked.

    Args:
        budget: bytes that they may take, what is beyond stays on its device; 0 for what the host has free.
    """

    def __init__(self, budget: int = 0) -> None:
        self.budget = budget
        self._order: deque[weakref.ref[Parked]] = deque()
        self._outward: deque[Any] = deque()
        self._streams: dict[torch.device, Any] = {}
        self._checked = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"budget": self.budget}

    def __setstate__(self, state: dict[str, Any]) -> None:
        HostMemory.__init__(self, state["budget"])

    @property
    def parked_bytes(self) -> int:
        """Bytes on the host now."""
        return sum(one.nbytes for ref in self._order if (one := ref()) is not None)

    def has_room(self, tensor: Tensor) -> bool:
        """Whether the budget holds ``tensor`` too; the layers that come first, and are wanted last, find room."""
        return not self.budget or self.parked_bytes + tensor.numel() * tensor.element_size() <= self.budget

    def park(self, tensor: Tensor) -> Parked:
        """Begin to copy ``tensor`` to the host."""
        while self._order and self._order[-1]() is None:  # what an earlier step left behind
            self._order.pop()
        one = Parked(self, tensor)
        self._order.append(weakref.ref(one))
        return one

    def before(self, one: Parked) -> list[Parked]:
        """What was parked before ``one`` and not taken yet, back to the tensor of its shape: one layer's tensors."""
        found: list[Parked] = []
        parked = [other for ref in self._order if (other := ref()) is not None]
        for other in reversed(parked[: parked.index(one)]):
            if not other.taken:
                found.append(other)
                if other.host.shape == one.host.shape:
                    return found
        return found[:1]

    def stream(self, device: torch.device) -> Any:
        """The stream of copies, None where there is nothing to copy between."""
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]

    def wait_for_room(self, event: Any, current: Any) -> None:
        """Let what computes wait until no more than :data:`IN_FLIGHT` copies are under way."""
        self._outward.append(event)
        if len(self._outward) > IN_FLIGHT:
            current.wait_event(self._outward.popleft())

    def check(self, each: int, layers: Callable[[], int]) -> None:
        """Refuse a step whose ``layers()`` tensors of ``each`` bytes do not fit, before the first is copied.

        Raises:
            UserError: with the sizes, and what to change.
        """
        if each <= self._checked:
            return
        count = layers()
        if self.budget:
            count = min(count, self.budget // each)  # the others stay on the device
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free = available_host_bytes()
        room = free // ranks
        if free and each * count > room:
            raise UserError(
                f"offload would put {count} layer inputs of {each / GIB:.3g} GiB on the host, {each * count / GIB:.3g} "
                f"GiB in all, but {room / GIB:.3g} GiB are free on this host for each of its {ranks} ranks; use "
                f"shorter sequences, more ranks per sequence, or a part only: offload='memory:{room // 2**20}MiB'"
            )
        self._checked = each


@functools.cache
def can_pin() -> bool:
    """Whether the accelerator's backend has pinned memory; without it copies are right, and the device waits."""
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except RuntimeError:  # NotImplementedError is one
        return False
