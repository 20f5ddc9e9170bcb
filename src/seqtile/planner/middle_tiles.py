"""Memory of a layer's tiles with a state, without running those in the middle.

A long sequence has hundreds of such tiles, of some 600 operators each: a fake step of 350,000 tokens took minutes. From
the second to the last but one they are alike, since a state has the same shape at each cut. So the first two and the
last two or three run, and one operator between them holds the states at the cuts that are left out. Each call compares
the tiles on both sides of it, in forward and recompute: where operators or bytes differ, the step runs whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqtile._compat import FakeTensor, tree_flatten, tree_unflatten
from seqtile.ops.tile_checkpoint import RunWithState, State, run_with_state
from seqtile.ops.token_tiles import is_differentiable
from seqtile.planner.live_at_peaks import Tracker
from seqtile.planner.phases import STATE
from seqtile.state import tile_call

_SECOND, _MIDDLE, _BEHIND = 1, 2, 3
"""Numbers of tiles where the middle counts as one."""


class MiddleTiles:
    """What one fake step leaves out.

    Attributes:
        alike: whether the tiles that ran on both sides of the middle were the same in each call.
    """

    def __init__(self, live: Tracker) -> None:
        self._live = live
        self.alike = True

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """While the ``with`` lasts, layers with a state run four or five of their tiles on fake tensors."""
        vars(tile_call)["run_with_state"] = self._run
        try:
            yield
        finally:
            vars(tile_call)["run_with_state"] = run_with_state

    def _run(
        self, run: RunWithState, tensors: Sequence[Tensor], sizes: Sequence[int], begins: Any = (), *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        # A backward frees a tile's tensors while the one before it begins: that is to happen after a whole tile too.
        last = 2 if sizes[-1] == sizes[0] else 3
        middle = sizes[_MIDDLE:-last]
        # A plan runs one document; another thread may train on real tensors meanwhile.
        if len(middle) < 2 or begins or not isinstance(tensors[0], FakeTensor):
            return run_with_state(run, tensors, sizes, begins, *args, **kwargs)
        few = (*sizes[:_MIDDLE], sum(middle), *sizes[-last:])
        return run_with_state(self._few(run, few, len(middle)), tensors, few, (), *args, **kwargs)

    def _few(self, run: RunWithState, sizes: Sequence[int], left_out: int) -> RunWithState:
        """``run`` for tiles of ``sizes``, of which the middle one stands for ``left_out``."""
        output: list[tuple[list[Any], Any]] = []  # the leaves of the second tile's, and their tree
        seen: dict[int, list[Any]] = {_SECOND: [], _BEHIND: []}  # forward first, then recompute

        def run_tile(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor], state: State, index: int) -> Any:
            if index == _MIDDLE:
                leaves, spec = output[0]
                sizes_at_cuts = [(left_out - 1) * tensor.untyped_storage().nbytes() for tensor in state]
                held = [*state, *(torch.empty(size, dtype=torch.uint8) for size in sizes_at_cuts)]
                made = _Middle.apply(leaves, sizes[_MIDDLE], held, tiles[0], *state)  # type: ignore[no-untyped-call]
                for tensor in (*held, *made[-len(state) :]):
                    self._live.file(tensor, STATE)
                tensors = iter(made)
                return tree_unflatten([next(tensors) if isinstance(leaf, _Leaf) else leaf for leaf in leaves], spec), (
                    tuple(tensors)
                )
            first, before = len(self._live.operators), self._live.now
            try:
                result = run(tiles, aliases, state, index)
            finally:  # a recompute that ends early leaves by an exception
                if index in seen:
                    seen[index].append((self._live.operators[first:], self._live.now - before))
                    self.alike &= all(here == there for here, there in zip(*seen.values(), strict=False))
            if index == _SECOND and not output:
                leaves, spec = tree_flatten(result[0])
                output.append(([_Leaf.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec))
            return result

        return run_tile


class _Leaf(NamedTuple):
    """A tile's output without its memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Leaf:
        return cls(tuple(tensor.shape), tensor.dtype)

    def of_tokens(self, tokens: int) -> Tensor:
        """The same of ``tokens`` tokens, in the memory of one element."""
        return torch.empty((), dtype=self.dtype).expand(self.shape[0], tokens, *self.shape[2:])


def _another(tensor: Tensor) -> Tensor:
    """A tensor in as large a storage: a state may be a view of more."""
    whole = tensor.new_empty(tensor.untyped_storage().nbytes() // tensor.element_size())
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Middle(torch.autograd.Function):
    """Returns outputs like ``leaves`` and the state after them, and holds the states at cuts until its backward."""

    @staticmethod
    def forward(
        ctx: Any, leaves: Sequence[Any], tokens: int, held: list[Tensor], x: Tensor, *state: Tensor
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.held, ctx.like = held, [_Leaf.of(tensor) for tensor in (x, *state)]
        outputs = [leaf.of_tokens(tokens) for leaf in leaves if isinstance(leaf, _Leaf)]
        ctx.mark_non_differentiable(*(output for output in outputs if not is_differentiable(output)))
        return (*outputs, *map(_another, state))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        ctx.held.clear()
        x, *state = ctx.like
        return None, None, None, x.of_tokens(x.shape[1]), *(torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in state)
