"""Random and autocast state of a forward, restored in its recompute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqtile._compat import disable_current_modes, keeps_generator
from seqtile.ops.norm import NormFormula

NormKind = tuple[Callable[..., Tensor], int, NormFormula | None]
"""A row-wise function, the number of its weights and its formula, if known: an autograd node may hold it."""


@dataclass(frozen=True)
class RowWise:
    """A norm, or any other row-wise function with small weights, that runs inside the tile.

    Attributes:
        function: ``(rows [t, D], weights) -> [t, D]``; differentiated by autograd, tile by tile.
        weights: the tensors it reads.
        formula: what it computes, where that is a norm for which there are kernels.
    """

    function: Callable[[Tensor, Sequence[Tensor]], Tensor]
    weights: tuple[Tensor, ...] = ()
    formula: NormFormula | None = None

    def kind(self) -> NormKind:
        """All but the tensors."""
        return self.function, len(self.weights), self.formula


class RandomState:
    """The default generator of one device, as it stood when the forward began."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state = self._get()

    def _module(self) -> Any:
        return torch.get_device_module(self._device)

    def _get(self) -> Tensor:
        return torch.get_rng_state() if self._device.type == "cpu" else self._module().get_rng_state(self._device)

    def _set(self, state: Tensor) -> None:
        # An accelerator clones the state first, which a selective checkpoint's mode would take for an operator of the
        # layer: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/cuda/random.py
        with disable_current_modes():
            if self._device.type == "cpu":
                torch.set_rng_state(state)
            else:
                self._module().set_rng_state(state, self._device)

    @property
    def is_now(self) -> bool:
        """Whether the stream is at this position."""
        with disable_current_modes():
            return torch.equal(self._state, self._get())

    def restore(self) -> None:
        """Let the stream go on from here."""
        self._set(self._state)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw the forward's numbers again; afterwards the stream goes on as if nothing had been drawn."""
        current = self._get()
        self._set(self._state)
        try:
            yield
        finally:
            self._set(current)


class TileStates:
    """The generator's state at every tile, for devices whose state PyTorch's checkpoint does not keep."""

    def __init__(self, device: torch.device) -> None:
        accelerator = torch.accelerator.current_accelerator()
        ours = accelerator is not None and accelerator.type == device.type
        self._device = device
        self._keeps = ours and not keeps_generator(device)
        self._states: dict[int, RandomState] = {}

    @contextmanager
    def of(self, index: int) -> Iterator[None]:
        """Around one tile: keeps the state in the forward, draws the same numbers in every recompute."""
        if not self._keeps:
            yield
        elif index in self._states:
            with self._states[index].replayed():
                yield
        else:
            self._states[index] = RandomState(self._device)
            yield


@dataclass(frozen=True)
class Autocast:
    """Autocast as it stood when the forward began."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Autocast:
        """The state for the device and dtype of ``x``."""
        device_type = x.device.type
        if not torch.amp.is_autocast_available(device_type):
            return cls(device_type, False, x.dtype)
        enabled = torch.is_autocast_enabled(device_type) and x.dtype != torch.float64
        return cls(device_type, enabled, torch.get_autocast_dtype(device_type) if enabled else x.dtype)

    def off(self) -> AbstractContextManager[Any]:
        """Products run in the dtype of their operands, whatever the caller's state."""
        if not torch.amp.is_autocast_available(self.device_type):
            return nullcontext()
        return torch.autocast(self.device_type, enabled=False)

    def on(self) -> AbstractContextManager[Any]:
        """The forward's state, for functions that are called as they are, whatever the state of the backward."""
        return torch.autocast(self.device_type, dtype=self.dtype) if self.enabled else self.off()
