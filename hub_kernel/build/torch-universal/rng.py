# Made from seqtile/ops/rng.py by `python -m seqtile.integrations.hub_kernel`; do not edit.
"""What a recompute needs besides tensors: the random stream and the autocast state of the forward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from collections.abc import Callable
from collections.abc import Iterator
from .norm import NormFormula
from collections.abc import Sequence
from torch import Tensor
from contextlib import contextmanager
from dataclasses import dataclass
from ._compat import disable_current_modes
from contextlib import nullcontext
import torch


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
        """Whether the stream stands there."""
        with disable_current_modes():
            return torch.equal(self._state, self._get())

    def restore(self) -> None:
        """Let the stream go on from here."""
        self._set(self._state)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw the forward's numbers again; afterwards the stream goes on as if nothing had been drawn."""
        before = self._get()
        self._set(self._state)
        try:
            yield
        finally:
            self._set(before)


@dataclass(frozen=True)
class Autocast:
    """Autocast as it stood when the forward began."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Autocast:
        """The state for the device and dtype of ``x``."""
        kind = x.device.type
        if not torch.amp.is_autocast_available(kind):
            return cls(kind, False, x.dtype)
        enabled = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
        return cls(kind, enabled, torch.get_autocast_dtype(kind) if enabled else x.dtype)

    def off(self) -> AbstractContextManager[Any]:
        """Products run in the dtype of their operands, whatever the caller's state."""
        if not torch.amp.is_autocast_available(self.device_type):
            return nullcontext()
        return torch.autocast(self.device_type, enabled=False)

    def on(self) -> AbstractContextManager[Any]:
        """The forward's state, for functions that are called as they are, whatever the state of the backward."""
        return torch.autocast(self.device_type, dtype=self.dtype) if self.enabled else self.off()
