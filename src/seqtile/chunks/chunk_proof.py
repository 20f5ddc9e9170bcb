"""Check that a layer computes the same in chunks: run both ways on a few tokens, outputs and gradients.

Layers differ in what they hand from token to token, and in what they read of a cache. So the layer itself is asked, in
the mode in which it runs, at its first call: whole, and in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from seqtile._compat import (
    attention_kind,
    replaced_attention,
    router_logits_apart,
    tree_leaves,
    tree_map,
    ulysses_around,
)
from seqtile.blocks.instance import inside
from seqtile.checkpointing.host_offload import parking
from seqtile.chunks.chunk_node import run_segment
from seqtile.chunks.layer_cache import REPLACED, NotChunkedError
from seqtile.chunks.layer_call import ChunkedCall
from seqtile.devices import is_out_of_memory
from seqtile.engines.flat import ParameterSwap, call_with_weights, named_weights
from seqtile.ops.attention.segment_tree import ARGUMENT, SegmentTable
from seqtile.ops.grad_accumulator import LOW
from seqtile.ops.rng import Autocast
from seqtile.state.state_cache import cache_argument
from seqtile.state.state_proof import TOLERANCE, distance, has_values, without_dropouts
from seqtile.state.tile_call import OF_DOCUMENTS, forward_of
from seqtile.tiling import CHUNK_MULTIPLE, StateTiles, chunk_sizes

TOKENS = 2 * CHUNK_MULTIPLE + 22
"""Tokens of the trial, where the sequence has as many: whole blocks of a delta rule, and a rest."""

_INDEXER = "Indexer"
"""In the name of each class that selects keys for sparse attention (DeepSeek-V3.2, GLM-5, MiniMax-M3)."""

ROWS = 2
"""Rows of the trial, where the batch has as many."""


@dataclass(frozen=True)
class ChunkProof:
    """What is known of a layer in one mode.

    Attributes:
        why_not: why it must run whole, or "".
        beside: what it returns in a tuple behind its hidden states; None where it returns these alone.
        returns_more: whether it returns other tensors besides.
    """

    why_not: str = ""
    beside: tuple[Any, ...] | None = None
    returns_more: bool = False

    def as_returned(self, hidden_states: Tensor) -> Any:
        """Hidden states in the form in which the layer returns them."""
        return hidden_states if self.beside is None else (hidden_states, *self.beside)


UNKNOWN = ChunkProof()


class ChunkProofs:
    """Proofs of one model's layers, by structure and settings.

    Attributes:
        recording: the segment whose layers recorded a call last.
    """

    def __init__(self) -> None:
        self._known: dict[Any, ChunkProof] = {}
        self.recording: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_known": {}, "recording": None}  # a copy is verified again

    def of(self, layer: nn.Module, call: ChunkedCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ChunkProof:
        """The proof of ``layer`` for calls such as this one.

        Cost:
            Some 100 microseconds; where nothing is known of such a layer, two forwards and backwards of 150 tokens.
        """
        if call.tokens < 4:
            return UNKNOWN  # too few for a trial; they are one chunk
        key = _mode_of_layer(layer, call, kwargs)
        if key not in self._known:
            self._known[key] = _try_layer(layer, call, args, kwargs)
        return self._known[key]


def _mode_of_layer(layer: nn.Module, call: ChunkedCall, kwargs: Mapping[str, Any]) -> Any:
    settings = [
        (type(module), *((name, value) for name, value in module.__dict__.items()
                         if isinstance(value, bool | int | float | str) and name != "layer_idx"))
        for module in layer.modules()
    ]  # fmt: skip
    weights = [(name, tuple(weight.shape), weight.dtype, weight.requires_grad) for name, weight in named_weights(layer)]
    kinds: list[tuple[str, Any]] = [
        (name, value if isinstance(value, bool) else value.dim() if isinstance(value, Tensor) else type(value))
        for name, value in kwargs.items()
    ]
    kinds += [("attention", attention_kind(module)) for module in layer.modules()]
    return (
        *settings,
        *weights,
        *kinds,
        call.captures,
        call.dtype,
        call.device,
        Autocast(call.device.type, *_autocast(call)),
    )


def _autocast(call: ChunkedCall) -> tuple[bool, torch.dtype]:
    enabled = torch.is_autocast_enabled(call.device.type)
    return enabled, torch.get_autocast_dtype(call.device.type)


def _try_layer(layer: nn.Module, call: ChunkedCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ChunkProof:
    attentions = {kind for module in layer.modules() if (kind := replaced_attention(module)) is not None}
    if unreplaced := sorted(attentions - {*REPLACED}):
        return ChunkProof(f"its attention runs as {unreplaced[0]!r}, which chunks do not replace")
    if any(ulysses_around(kind) for kind in attentions):
        return ChunkProof("sequence parallelism splits its sequence over ranks")
    if any(getattr(module, "is_kv_shared_layer", False) for module in layer.modules()):
        return ChunkProof("it reads another layer's keys and values")
    # Before the trial, whose tokens may be fewer than those that an indexer selects: all of them.
    if indexer := next((type(module).__name__ for module in layer.modules() if _INDEXER in type(module).__name__), ""):
        return ChunkProof(f"its attention selects tokens of the whole sequence ({indexer})")
    if any(isinstance(value, dict | list) for value in (*args, *kwargs.values())):
        return ChunkProof("it takes a container that layers may write to")
    if not has_values(layer):
        return UNKNOWN
    try:
        hooks = saved_tensors_hooks(Tensor.detach, lambda saved: saved)
        with without_dropouts(layer), torch.enable_grad(), hooks, parking.inside(None, 0):
            return _compare(layer, call, args, kwargs)
    except NotChunkedError as error:
        return ChunkProof(str(error))
    except Exception as error:
        if is_out_of_memory(error):  # tells nothing of the layer
            raise
        first = (str(error).splitlines() or [""])[0][:200]
        return ChunkProof(f"in chunks it raises {type(error).__name__}: {first}")


def _compare(layer: nn.Module, call: ChunkedCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ChunkProof:
    tokens, rows = min(TOKENS, call.tokens), min(ROWS, call.batch)
    aligned = tokens == TOKENS
    sizes = (CHUNK_MULTIPLE, CHUNK_MULTIPLE, 22) if aligned else (tokens // 2, tokens - tokens // 2)
    cuts, segments = StateTiles(sizes), None
    if call.segments is not None:  # a prompt of several chunks, and two answers
        segments = SegmentTable((0, tokens // 2, tokens * 3 // 4), (-1, 0, 0), tokens)
        cuts = chunk_sizes(
            tokens, 1, CHUNK_MULTIPLE if aligned else max(2, tokens // 4), segments.lengths if call.documents else ()
        )
    few = _Shortened(call, tokens, rows)
    cache = cache_argument(layer)
    name, position = cache or ("", len(args))
    positional = tree_map(few, tuple(None if number == position else value for number, value in enumerate(args)))
    named = tree_map(few, {key: value for key, value in kwargs.items() if key not in (name, *OF_DOCUMENTS)})
    for key, of_no_padding in (("attention_mask", torch.ones_like), ("position_ids", _from_zero)):
        if isinstance(named.get(key), Tensor) and named[key].dim() == 2:
            named[key] = of_no_padding(named[key])
    if segments is not None:
        named[ARGUMENT] = segments
    weights = {f"0.{n}": w.detach().requires_grad_() for n, w in named_weights(layer) if w.requires_grad}
    returned = UNKNOWN

    def whole() -> list[Tensor]:
        nonlocal returned
        with inside("trial"), router_logits_apart(call.captures) as captured:
            result = call_with_weights(
                ParameterSwap((layer,)), weights, (lambda: forward_of(layer)(*positional, **named),)
            )
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        beside = result[1:] if isinstance(result, tuple) and result[0] is tensors[0] else None
        plain = beside is not None or isinstance(result, Tensor)
        returned = ChunkProof("", beside if len(tensors) == 1 else None, len(tensors) > 1 or not plain)
        return [tensors[0], *captured]

    def in_chunks() -> list[Tensor]:
        chunked = ChunkedCall(positional, named, cache, captures=call.captures)
        if chunked.why_whole:
            raise ValueError(chunked.why_whole)
        result, captured = run_segment([layer], [chunked], chunked.take(), cuts, lambda: weights)
        return [next(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)), *captured]

    expected, got = (_gradients(run, few.hidden_states, weights) for run in (whole, in_chunks))
    low = call.dtype in LOW or (_autocast(call)[0] and _autocast(call)[1] in LOW)
    error, name = distance(got, expected)
    if not error <= TOLERANCE[low]:
        return ChunkProof(f"in chunks {name} is off by {error:.1g}")
    return returned


def _from_zero(position_ids: Tensor) -> Tensor:
    return torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)


def _gradients(run: Callable[[], list[Tensor]], x: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    outputs, generator = run(), torch.Generator("cpu").manual_seed(1)
    upstream = [torch.randn(y.shape, generator=generator, device="cpu").to(y.device, y.dtype) for y in outputs]
    names = ["its input's gradient", *(name.removeprefix("0.") for name in weights)]
    gradients = torch.autograd.grad(outputs, [x, *weights.values()], upstream, allow_unused=True)
    zeros = [
        torch.zeros_like(tensor) if g is None else g
        for tensor, g in zip([x, *weights.values()], gradients, strict=True)
    ]
    names_of_outputs = ["its output", *(f"router logits {number}" for number in range(1, len(outputs)))]
    detached = {name: output.detach() for name, output in zip(names_of_outputs, outputs, strict=True)}
    return {**detached, **dict(zip(names, zeros, strict=True))}


class _Shortened:
    """Maps a call's arguments to those of its first tokens, with other hidden states and without padding."""

    def __init__(self, call: ChunkedCall, tokens: int, rows: int) -> None:
        self._call, self._tokens, self._rows = call, tokens, rows
        width = call.hidden_states.shape[-1]  # type: ignore[union-attr]
        drawn = torch.randn(rows, tokens, width, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        self.hidden_states = drawn.to(call.device, call.dtype).requires_grad_()

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        call, tokens = self._call, self._tokens
        if value is call.hidden_states:
            return self.hidden_states
        if any(value is mask for mask in call.masks):
            causal = torch.ones(tokens, tokens, dtype=torch.bool, device=value.device).tril_()
            if value.dtype == torch.bool:
                return causal[None, None]
            lowest = torch.finfo(value.dtype).min
            return torch.zeros(1, 1, tokens, tokens, dtype=value.dtype, device=value.device).masked_fill_(
                ~causal, lowest
            )
        if value.dim() == 2 and value.shape == (call.batch, call.tokens) and not value.is_floating_point():
            return value[: self._rows, :tokens]
        for dimension, size in enumerate(value.shape):
            if size == call.tokens and dimension < 3:
                value = value.narrow(dimension, 0, tokens)
                if dimension > 0 and value.shape[dimension - 1] == call.batch:
                    value = value.narrow(dimension - 1, 0, self._rows)
                return value.detach()
        return value.detach() if value.requires_grad else value
