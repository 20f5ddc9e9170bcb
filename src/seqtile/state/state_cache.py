"""A cache object that passes one layer's state from tile to tile.

Transformers' own cache writes the state in place, so that its gradient is lost or autograd refuses the backward. This
one stores the tensors that it receives, and never writes into them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqtile._compat import CACHE_ARGUMENTS

Key = tuple[str, int]
"""``"convolution"`` or ``"recurrent"``, and the number of that state in its layer."""


def cache_argument(module: nn.Module) -> tuple[str, int] | None:
    """Name and position of the argument that takes a cache, None where the forward has none."""
    names = [*inspect.signature(type(module).forward).parameters][1:]
    return next(((name, names.index(name)) for name in CACHE_ARGUMENTS if name in names), None)


class CarriedState:
    """The state of one layer, passed from tile to tile in place of transformers' cache.

    Attributes:
        tensors: the state; replaced as the layer updates it.
    """

    def __init__(self, tensors: Mapping[Key, Tensor]) -> None:
        self.tensors: dict[Key, Tensor] = dict(tensors)

    @property
    def layers(self) -> StatesOfLayer:
        """The states indexed by layer, as transformers before 5.21 reads them."""
        return StatesOfLayer(self)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The inputs of a convolution before the tile, ``[B, channels, kernel]``."""
        return self.tensors.get(("convolution", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The recurrent state before the tile."""
        return self.tensors.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Append a tile's inputs ``[B, channels, t]`` to the earlier ones, and store the last ``conv_kernel_size``."""
        earlier = self.tensors.get(("convolution", state_idx))
        whole = conv_states if earlier is None else torch.cat([earlier, conv_states], dim=-1)
        kernel = conv_kernel_size or (conv_states if earlier is None else earlier).shape[-1]
        missing = max(0, kernel - whole.shape[-1])
        # Cloned, since a slice would keep the whole tile in memory.
        self.tensors["convolution", state_idx] = F.pad(whole[..., -kernel:], (missing, 0)).clone()
        return F.pad(whole, (missing, 0)) if missing else whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Store the state after the tile."""
        self.tensors["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there is a state before the tile."""
        return bool(self.tensors)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether the cache stores earlier states, to return to them: never."""
        return False


class StatesOfLayer:
    """The layer of a :class:`CarriedState`, under every layer's number.

    Attributes:
        conv_states: the state of :meth:`CarriedState.get_conv_state`, indexed by number from transformers 5.14 on.
        recurrent_states: the state of :meth:`CarriedState.get_recurrent_state`, likewise.
        record_past: whether earlier states are stored, to return to them.
    """

    record_past = False

    def __init__(self, carried: CarriedState) -> None:
        numbered = numbers_states()
        self.conv_states = _ByNumber(carried.get_conv_state) if numbered else carried.get_conv_state(0)
        self.recurrent_states = _ByNumber(carried.get_recurrent_state) if numbered else carried.get_recurrent_state(0)

    def __getitem__(self, layer_idx: int) -> StatesOfLayer:
        return self


class _ByNumber:
    def __init__(self, get: Callable[[int, int], Tensor | None]) -> None:
        self._get = get

    def __getitem__(self, state_idx: int) -> Tensor | None:
        return self._get(0, state_idx)


@functools.cache
def numbers_states() -> bool:
    """Whether transformers' own cache numbers the states of a layer; before 5.14 a layer has one of each kind."""
    from transformers.cache_utils import LinearAttentionLayer

    return isinstance(LinearAttentionLayer().conv_states, Mapping)
