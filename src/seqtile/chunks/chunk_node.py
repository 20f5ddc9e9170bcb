"""Run a segment of decoder layers on one chunk of the sequence after another, as one node of the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import keeps_graph, router_logits_apart, tree_leaves
from seqtile.blocks.instance import inside_a_chunk
from seqtile.blocks.layer import tiled_layer
from seqtile.checkpointing.host_offload import OffloadedTensor, parking
from seqtile.chunks.layer_cache import NotChunkedError, view_in_chunks
from seqtile.chunks.layer_call import ChunkedCall
from seqtile.engines.flat import ParameterSwap, call_with_weights
from seqtile.ops.attention.prefix import KeyValues
from seqtile.ops.attention.segment_tree import SegmentTable
from seqtile.ops.rng import Autocast, RandomState
from seqtile.ops.tile_checkpoint import Changed, State, Weights, run_with_state
from seqtile.tiling import StateTiles


class _Randoms:
    """The generator's state at each chunk's beginning, where a layer draws random numbers."""

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self._device = device
        self._draws = any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in layer.modules())
        self._states: dict[int, RandomState] = {}

    def keep(self, index: int) -> None:
        """At a chunk of the forward."""
        if self._draws and index not in self._states:
            self._states[index] = RandomState(self._device)

    def again(self, index: int) -> AbstractContextManager[None]:
        """Inside, the chunk draws the same numbers."""
        return self._states[index].replayed() if index in self._states else nullcontext()


def run_segment(
    modules: Sequence[nn.Module],
    calls: Sequence[ChunkedCall],
    tensors: Sequence[Tensor],
    cuts: StateTiles,
    weights: Weights,
    changed: Changed = str,
) -> tuple[Any, list[Tensor]]:
    """Run layers, one after another, on one chunk after another.

    Args:
        modules: the layers.
        calls: their arguments.
        tensors: the first one's hidden states, and other arguments that require a gradient, layer by layer.
        cuts: sizes of the chunks, and those at which a document begins.
        weights: the live weights of all layers, each name after its layer's number.
        changed: as for :func:`seqtile.ops.tile_checkpoint.run_in_tiles`.

    Returns:
        What the last layer returns, and the router logits that the layers' hooks capture.

    Memory:
        Between forward and backward: the hidden states, states at each chunk's beginning, and keys and values of every
        attending layer but the first, whose keys and values are projected again. If the checkpoint around it moves its
        input to the host, the states, keys and values move there too. In the backward: gradients of the segment's keys
        and values, and one chunk's activations in all its layers.
    """
    segment = _SegmentRun(modules, calls, cuts, tensors[0])
    continues = {} if calls[0].segments is None else _continued(cuts, segment.starts, calls[0].segments)
    output = run_with_state(
        segment.run, tensors, cuts.sizes, cuts.begins, weights, segment.before_backward, segment.after_backward,
        changed, continues, parking.park,
    )  # fmt: skip
    if calls[0].projects_again:
        _drop(calls[:1])
    if any(tensor.requires_grad for tensor in tree_leaves(output) if isinstance(tensor, Tensor)):
        segment.park()
    result, captured = output
    return result, [logits.flatten(0, 1) if is_flat else logits for logits, is_flat in captured]


class _SegmentRun:
    """What the chunks of one call of a segment share, and keep until its backward."""

    def __init__(
        self, modules: Sequence[nn.Module], calls: Sequence[ChunkedCall], cuts: StateTiles, hidden_states: Tensor
    ) -> None:
        self._modules, self._calls, self._cuts = modules, calls, cuts
        self._swap = ParameterSwap(modules)
        tiled = [(module, tiled_layer(module)) for module in modules]
        self._tiled = [layer and partial(layer.together, apart=layer.why_apart(module)) for module, layer in tiled]
        self._begins, self.starts = _positions(cuts)
        self._autocast, self._random = Autocast.of(hidden_states), _Randoms(modules[0], hidden_states.device)
        self._parked: list[tuple[KeyValues, list[Tensor | OffloadedTensor]]] = []

    def run(
        self, tiles: Sequence[Tensor], aliases: Mapping[str, Tensor], state: State, index: int
    ) -> tuple[Any, State]:
        """All layers on one chunk."""
        self._random.keep(index)
        if not aliases:
            return self._layers(tiles, state, index)
        result: tuple[Any, State] = call_with_weights(self._swap, aliases, (self._layers, tiles, state, index))
        return result

    def _layers(self, tiles: Sequence[Tensor], state: State, index: int) -> tuple[Any, State]:
        states, arguments, result = list(state), list(tiles[1:]), None
        states_after: list[Tensor] = []
        captured: list[tuple[Tensor, bool]] = []
        hidden_states, begin, start = tiles[0], self._begins[index], self.starts[index]
        for module, call, in_tiles in zip(self._modules, self._calls, self._tiled, strict=True):
            own_arguments = [arguments.pop(0) for _ in range(call.extra)]
            own_states = tuple([states.pop(0) for _ in range(call.states if state else 0)])
            view = view_in_chunks(module)  # FSDP1 keeps weights as attributes, which a view has as they now are
            last = module is self._modules[-1]
            with inside_a_chunk(last=last), router_logits_apart(call.captures) as logits:
                result, after = call.run(
                    view, [hidden_states, *own_arguments], own_states, begin, start, tiles=in_tiles
                )
            hidden_states = next(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            states_after += after
            captured += [_by_row(x, hidden_states) for x in logits]
        return (result, captured), tuple(states_after)

    def park(self) -> None:
        """Keep the keys and values, or move them to the host with the input of the checkpoint around the segment."""
        for store in (store for call in self._calls for store in call.stores if store.keys is not None):
            self._parked.append((store, parking.park(store.take())))

    def before_backward(self, whole: Sequence[Tensor]) -> None:
        """Project the first layer's keys and values again, dropped after the forward; fetch others from the host."""
        for store, tensors in self._parked:
            store.keys, store.values = [x if isinstance(x, Tensor) else x.take() for x in tensors]
        if not keeps_graph():
            self._parked.clear()
        call = self._calls[0]
        if not call.projects_again:
            return
        for index, (begin, start, size) in enumerate(zip(self._begins, self.starts, self._cuts.sizes, strict=True)):
            chunk = [tensor.narrow(1, start, size) for tensor in whole[: 1 + call.extra]]
            with torch.no_grad(), self._autocast.on(), self._random.again(index):
                view = view_in_chunks(self._modules[0])
                call.run(view, chunk, (), begin, start, tiles=self._tiled[0], keys_only=True)

    def after_backward(self) -> None:
        if not keeps_graph():
            _drop(self._calls)


def _drop(calls: Sequence[ChunkedCall]) -> None:
    for store in (store for call in calls for store in call.stores):
        store.drop()


def _by_row(logits: Tensor, hidden_states: Tensor) -> tuple[Tensor, bool]:
    """Router logits of a chunk as ``[B, t, E]``, and whether they were ``[B t, E]``."""
    rows = hidden_states.shape[:2]
    is_flat = logits.dim() == 2 and logits.shape[0] == rows.numel()
    if not is_flat and (logits.dim() < 3 or logits.shape[:2] != rows):
        raise NotChunkedError(f"a router gives {tuple(logits.shape)} logits for {tuple(rows)} tokens")
    return (logits.unflatten(0, rows) if is_flat else logits), is_flat


def _positions(cuts: StateTiles) -> tuple[list[int], list[int]]:
    """For each chunk the first token of its document, and its own first token."""
    begins, starts, begin, start = list[int](), list[int](), 0, 0
    for index, size in enumerate(cuts.sizes):
        begin = start if index in cuts.begins else begin
        begins.append(begin)
        starts.append(start)
        start += size
    return begins, starts


def _continued(cuts: StateTiles, starts: Sequence[int], segments: SegmentTable) -> dict[int, int]:
    """For each chunk that begins a segment with a parent: the last chunk of the parent."""
    last = {start + size: index for index, (start, size) in enumerate(zip(starts, cuts.sizes, strict=True))}
    parents = {start: parent for start, parent in zip(segments.starts, segments.parents, strict=True) if parent != -1}
    return {index: last[segments.ends[parents[starts[index]]]] for index in cuts.begins if starts[index] in parents}
