"""The tiles of a model under plain autograd: what a recompute has to agree with when dropout is on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from seqtile.blocks.instance import Installed
from seqtile.ops.plain_tiles import RunTiles, run_in_plain_tiles


@contextmanager
def without_recompute(model: nn.Module) -> Iterator[None]:
    """Let every tiled block keep all its intermediates; tiles, their order and their random numbers stay the same."""
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    tiled = [forward for forward in forwards if isinstance(forward, Installed)]
    for forward in tiled:
        forward.plainly = _run_plainly
    try:
        yield
    finally:
        for forward in tiled:
            forward.plainly = None


def _run_plainly(run: RunTiles, tensors: Sequence[Tensor], sizes: Sequence[int], fused: bool) -> Any:
    if not fused:
        return run_in_plain_tiles(run, tensors, sizes)
    with _BooleanMasks():
        return run_in_plain_tiles(run, tensors, sizes)


class _BooleanMasks(TorchFunctionMode):
    """Dropout that draws its mask as the fused operator does; an accelerator's own kernel draws other numbers."""

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.dropout:
            return _drop_by_tile(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _drop_by_tile(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    mask = torch.empty(input.shape, dtype=torch.bool, device=input.device).bernoulli_(1 - p)
    return input * mask * (1 / (1 - p) if p < 1 else 0.0)
