"""What a layer sees in place of a cache, and the attention function that reads the keys of the chunks before it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import MODULES, OtherAttention, attention_kind
from seqtile._shallow import view_of
from seqtile.blocks.instance import Installed
from seqtile.ops.attention.piece_kernels import score_arguments
from seqtile.ops.attention.prefix import GivenMask, KeyValues, Visible, prefix_attention
from seqtile.ops.attention.segment_tree import SegmentTable, VisibleInTree
from seqtile.state.state_cache import CarriedState, Key

CHUNK_ATTENTION = "seqtile_chunks"
"""Name of the attention function in Transformers' registry."""

SHAPES = "seqtile_shapes"
"""Name of a plan's attention, which has flash attention's shapes. Transformers looks for a kernel behind any name that
holds "flash"."""

REPLACED = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", SHAPES)
"""Attention implementations that compute what :func:`prefix_attention` does, by another kernel."""


class NotChunkedError(RuntimeError):
    """A layer computes something that chunks do not hand on."""


class ChunkCache(CarriedState):
    """The cache of one layer for one chunk: states as for state tiles; keys and values stay with the attention."""

    def __init__(self, tensors: Mapping[Key, Tensor], start: int) -> None:
        super().__init__(tensors)
        self._start = start

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """A chunk's own keys and values; :func:`attend` reads the earlier ones from its buffer."""
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        """Tokens before the chunk."""
        return self._start


@dataclass
class Attending:
    """One chunk of one layer, while it runs.

    Attributes:
        stores: keys and values of each attention call in the layer, in the order of the calls.
        begin: first token of the chunk's document.
        start: first token of the chunk.
        end: one beyond its last.
        tokens: tokens of the sequence.
        masks: the layer's arguments ``[B or 1, 1 or H, T, T]``.
        whole: its arguments ``[B, T]``, by the identity of the chunk's slice of each.
        segments: the segments of a row with shared prompts; None for another row.
        keys_only: stop at each attention as soon as its keys are stored.
        calls: attention calls so far.
    """

    stores: list[KeyValues]
    begin: int
    start: int
    end: int
    tokens: int
    masks: list[Tensor]
    whole: dict[int, Tensor]
    segments: SegmentTable | None = None
    keys_only: bool = False
    calls: int = 0

    def mask_and_padding(self, attention_mask: Any) -> tuple[GivenMask | None, Tensor | None]:
        """What the layer gives its attention as a mask, for the whole sequence: for every two tokens, or ``[B, T]``."""
        if attention_mask is None:
            return None, None
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
            if any(attention_mask is mask for mask in self.masks):
                return given_mask(attention_mask), None
            if len(self.masks) == 1:  # the layer has cut it, as it is longer than the chunk's keys
                return given_mask(self.masks[0]), None
        if (padding := self.whole.get(id(attention_mask))) is not None:
            return None, padding.bool()
        raise NotChunkedError("its attention builds its own mask")


_given_masks: dict[int, tuple[weakref.ref[Tensor], GivenMask]] = {}


def given_mask(mask: Tensor) -> GivenMask:
    """What is known of a mask, which all layers of a forward share."""
    number = id(mask)
    known = _given_masks.get(number)
    if known is None or not known[1].describes(mask):
        reference = weakref.ref(mask, lambda _: _given_masks.pop(number, None))
        known = _given_masks[number] = reference, GivenMask(mask.detach())
    return known[1]


class KeysStored(Exception):
    """Ends a layer once its keys and values are stored."""


_in_chunk = threading.local()


@contextmanager
def attending(chunk: Attending) -> Iterator[None]:
    """Around one chunk of one layer."""
    outside, _in_chunk.chunk = getattr(_in_chunk, "chunk", None), chunk
    try:
        yield
    finally:
        _in_chunk.chunk = outside


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Transformers' attention function inside a chunk: ``[B, H, t, E]`` in, ``[B, t, H, V]`` out."""
    chunk: Attending = _in_chunk.chunk
    if kwargs.get("dropout"):
        raise NotChunkedError("attention dropout is on, and attention in chunks has none")
    if query.shape[2] != key.shape[2]:
        raise NotChunkedError("its attention has more keys than queries")
    segments = chunk.segments
    if segments is None:
        mask, padding = chunk.mask_and_padding(attention_mask)
    elif attention_mask is None or tuple(attention_mask.shape) == (1, 1, 1, 1):
        mask = padding = None
        segments.attended.add((True, module.layer_idx))
    else:
        raise NotChunkedError("its attention has a mask of its own")
    is_causal = kwargs.get("is_causal")
    if mask is None and not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotChunkedError("its attention is not causal")
    if kwargs.get("position_bias") is not None:
        raise NotChunkedError("its attention adds a position bias")
    if chunk.calls == len(chunk.stores):
        chunk.stores.append(KeyValues(chunk.tokens))
    store = chunk.stores[chunk.calls]
    chunk.calls += 1
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    if chunk.keys_only:
        store.write(chunk.start, key, value)
        raise KeysStored
    replaced: Any = module.config.replaced  # type: ignore[union-attr]
    if replaced == "eager" and mask is None and segments is None:
        raise NotChunkedError("its eager attention has no mask, so it is not causal")
    visible: Visible
    window = kwargs.get("sliding_window")
    if segments is None:
        if mask is not None or replaced == "sdpa":  # a mask has the window, and sdpa takes it from there alone
            window = None
        visible = Visible(chunk.begin, chunk.start, chunk.end, window, mask, padding)
    else:
        visible = VisibleInTree(0, chunk.start, chunk.end, window, segments=segments)
    arguments = score_arguments(kwargs, query.shape[-1], replaced)
    output = prefix_attention(query, key, value, store, visible, **arguments)
    return output.transpose(1, 2), None


def view_in_chunks(layer: nn.Module) -> Any:
    """A view of a decoder layer whose attention modules call :func:`attend`.

    A view shares weights, settings and other children with its module; the module itself is not changed.
    """
    from transformers import AttentionInterface

    if CHUNK_ATTENTION not in AttentionInterface():
        AttentionInterface.register(CHUNK_ATTENTION, attend)
    view = view_of(layer)
    if hasattr(view, "gradient_checkpointing"):
        view.__dict__["gradient_checkpointing"] = False
    if attention_kind(layer) is not None:
        view.__dict__["config"] = OtherAttention(layer.config, CHUNK_ATTENTION)
    children = dict(view.__dict__[MODULES])
    for name, child in children.items():
        if child is None or isinstance(child.__dict__.get("forward"), Installed):
            continue  # a block that runs in tiles
        if any(attention_kind(inner) is not None for inner in child.modules()):
            children[name] = view_in_chunks(child)
    view.__dict__[MODULES] = children
    return view
