"""One call of a decoder layer: its arguments, cut for one chunk of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import tree_flatten, tree_unflatten
from seqtile.chunks.layer_cache import Attending, ChunkCache, KeysStored, NotChunkedError, attending
from seqtile.ops.attention.prefix import KeyValues
from seqtile.ops.attention.segment_tree import ARGUMENT, SegmentTable
from seqtile.ops.tile_checkpoint import State
from seqtile.state.state_cache import Key
from seqtile.state.tile_call import DOCUMENTS, OF_DOCUMENTS


class ChunkedCall:
    """The arguments of one call of a decoder layer.

    Args:
        args: positional arguments; the first floating tensor ``[B, T, D]`` of the call is the hidden states.
        kwargs: keyword arguments.
        cache: name and position of the argument that takes the cache; None where the layer has none.
        has_state: whether the layer hands a state on, so that no chunk holds parts of two segments.
        reads_starts: whether the layer reads where documents begin (``cu_seq_lens_q``, ``seq_idx``), as states do.
        reads_positions: whether a document begins where positions start again, as flash attention takes them.
        captures: whether hooks capture router logits in this call.

    Attributes:
        hidden_states: the hidden states, until they are taken.
        extra: how many other arguments ``[B, T, ...]`` require a gradient.
        documents: lengths of the parts of the sequence that no chunk joins, documents or segments; may be empty.
        segments: the segments of a row with shared prompts; None for another row.
        masks: arguments ``[B or 1, 1 or H, T, T]``.
        why_whole: why the call cannot be cut, or "".
    """

    def __init__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], cache: tuple[str, int] | None, *,
        has_state: bool = False, reads_starts: bool = False, reads_positions: bool = False, captures: bool = False,
    ) -> None:  # fmt: skip
        args, kwargs = list(args), dict(kwargs)
        self._cache, position = cache or ("", len(args))
        self._cache_at = position if position < len(args) else None
        if self._cache_at is not None:
            args[position] = None
        kwargs.pop(self._cache, None)
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        starts = {name: kwargs.pop(name) for name in OF_DOCUMENTS if name in kwargs}
        self.segments: SegmentTable | None = kwargs.pop(ARGUMENT, None)
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self.captures = captures
        self.why_whole, self.documents = "", tuple[int, ...]()
        self.masks: list[Tensor] = []
        self.hidden_states: Tensor | None = None
        self.extra = 0
        self._differentiable: list[Tensor] = []
        self._cuts: list[tuple[int, int]] = []  # number of a leaf, and the dimension that holds tokens
        self._given: list[int] = []
        self.stores: list[KeyValues] = []
        self._keys: list[Key] = []
        tensors = [(n, leaf) for n, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        first = next((n for n, leaf in tensors if leaf.dim() == 3 and leaf.is_floating_point()), None)
        if first is None:
            self.why_whole = "it was called without hidden states [B, T, D]"
            return
        self.hidden_states = self._leaves[first]
        self.dtype, self.device = self._leaves[first].dtype, self._leaves[first].device
        self.batch, self.tokens = self._leaves[first].shape[:2]
        self._given.append(first)
        self._leaves[first] = None
        for number, leaf in tensors:
            if number != first:
                self._sort(number, leaf)
        if (segments := self.segments) is not None:
            if has_state:
                self.documents = segments.lengths
            if (self.batch, self.tokens) != (1, segments.tokens):
                self.why_whole = f"its hidden states are not one row of {segments.tokens} tokens"
        elif reads_starts or reads_positions:
            by_name = self._read_documents(starts, kwargs.get("position_ids") if reads_positions else None)
            if self.documents and has_state and not by_name:
                self.why_whole = (
                    "its attention keeps packed documents apart by their positions and its state does not; pass "
                    "cu_seq_lens_q or seq_idx"
                )

    def _sort(self, number: int, leaf: Tensor) -> None:
        """Decide along which dimension an argument is cut."""
        shape, tokens = leaf.shape, self.tokens
        if leaf.dim() == 4 and shape[-2:] == (tokens, tokens) and shape[0] in (1, self.batch):
            self.masks.append(leaf)
            return
        by_row = leaf.dim() > 1 and shape[1] == tokens and shape[0] in (1, self.batch)
        if by_row and leaf.requires_grad:
            self._differentiable.append(leaf)
            self.extra += 1
            self._given.append(number)
            self._leaves[number] = None
        elif by_row and leaf.dim() > 2 and leaf.dtype in (torch.int32, torch.int64):  # of another layer's indexer
            self.why_whole = "it takes numbers of tokens, which another layer selected in the whole sequence"
        elif leaf.requires_grad:
            self.why_whole = f"an argument of shape {tuple(shape)} requires a gradient"
        elif by_row:
            self._cuts.append((number, 1))
        elif leaf.dim() > 2 and shape[2] == tokens and shape[1] in (1, self.batch):  # a row for each axis of positions
            self._cuts.append((number, 2))
        elif leaf.dim() == 1 and shape[0] == tokens:
            self._cuts.append((number, 0))
        elif tokens in shape:
            self.why_whole = f"it takes an argument of shape {tuple(shape)}, which cannot be split into chunks"

    def _read_documents(self, starts: Mapping[str, Any], positions: Any) -> bool:
        """Set the documents; returns whether an argument names them, which positions do not."""
        boundaries = next((starts[name] for name in DOCUMENTS if starts.get(name) is not None), None)
        if boundaries is None and isinstance(positions, Tensor) and positions.shape == (1, self.tokens):
            changes = (positions[0].diff() != 1).nonzero().flatten() + 1
            ends = [0, *changes.tolist(), self.tokens]
        elif boundaries is None:
            return False
        elif boundaries.dim() == 2:  # seq_idx, [1, T]: the number of each token's document
            ends = [0, *((boundaries[0].diff() != 0).nonzero().flatten() + 1).tolist(), self.tokens]
        else:  # [documents + 1]
            ends = boundaries.tolist()
        self.documents = tuple(end - start for start, end in zip(ends, ends[1:], strict=False) if end > start)
        if len(self.documents) == 1:
            self.documents = ()
        if self.documents and self.batch > 1:
            self.why_whole = "packed documents start at different tokens in the sequences of a batch"
        if self.documents and sum(self.documents) != self.tokens:
            self.why_whole = f"its documents have {sum(self.documents):,} tokens, but its sequence {self.tokens:,}"
        return boundaries is not None

    def take(self) -> list[Tensor]:
        """The hidden states and the other arguments that require a gradient; the call keeps none of them alive."""
        assert self.hidden_states is not None
        taken = [self.hidden_states, *self._differentiable]
        self.hidden_states, self._differentiable = None, []
        return taken

    @property
    def states(self) -> int:
        """States that the layer hands on."""
        return len(self._keys)

    @property
    def projects_again(self) -> bool:
        """Whether its keys and values come from its input alone, so that the backward can project them again."""
        return len(self.stores) == 1 and not self._keys

    def run(
        self, view: nn.Module, given: Sequence[Tensor], state: State, begin: int, start: int, *,
        tiles: Callable[..., Any] | None = None, keys_only: bool = False,
    ) -> tuple[Any, State]:  # fmt: skip
        """The layer on one chunk.

        Args:
            view: the layer's view, from :func:`seqtile.chunks.layer_cache.view_in_chunks`.
            given: the chunk of the hidden states and of the differentiable arguments.
            state: after the chunk before it.
            begin: first token of the chunk's document.
            start: first token of the chunk.
            tiles: :meth:`seqtile.blocks.layer.TiledLayer.together` of the layer, if its block runs in tiles.
            keys_only: store the keys and values of its first attention, and stop.

        Returns:
            What the layer returns, and its state after the chunk.
        """
        leaves, tokens, wholes = list(self._leaves), given[0].shape[1], dict[int, Tensor]()
        for number, dimension in self._cuts:
            whole = leaves[number]
            leaves[number] = whole.narrow(dimension, start, tokens)
            if whole.dim() == 2:
                wholes[id(leaves[number])] = whole
        for number, tensor in zip(self._given, given, strict=True):
            leaves[number] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        position = start
        if self.segments is not None:
            number = self.segments.number_of(start)
            position += self.segments.positions[number] - self.segments.starts[number]
        cache = ChunkCache(dict(zip(self._keys, state, strict=False)), position)
        if self._cache_at is not None:
            args[self._cache_at] = cache
        elif self._cache:
            kwargs[self._cache] = cache
        chunk = Attending(
            self.stores, begin, start, start + tokens, self.tokens, self.masks, wholes, self.segments, keys_only
        )
        with attending(chunk):
            try:
                result = tiles(args, kwargs, view) if tiles else type(view).forward(view, *args, **kwargs)
            except KeysStored:
                return None, ()
        keys = sorted(cache.tensors)
        if self._keys and keys != self._keys:
            raise NotChunkedError(f"it leaves the states {keys} after one chunk and {self._keys} after another")
        self._keys = keys
        return result, tuple([cache.tensors[key] for key in keys])
