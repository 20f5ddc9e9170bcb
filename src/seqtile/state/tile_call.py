"""One call of a layer with a state: which arguments are cut along the sequence, and the call on one tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from seqtile._compat import tree_flatten, tree_map, tree_unflatten
from seqtile._shallow import view_of
from seqtile.blocks.instance import inside
from seqtile.engines.flat import ParameterSwap, call_with_weights
from seqtile.ops.tile_checkpoint import Changed, State, Weights, run_with_state
from seqtile.state.state_cache import CarriedState, Key
from seqtile.tiling import StateTiles

DOCUMENTS = ("cu_seq_lens_q", "cu_seqlens", "seq_idx")
"""Arguments that mark where the documents of a packed sequence begin."""

OF_DOCUMENTS = (*DOCUMENTS, "cu_seq_lens_k", "max_length_q", "max_length_k")
"""All arguments about documents; a tile gets none of them, since its documents are sequences of a batch."""


class ReadWholeError(RuntimeError):
    """A layer reads an argument that cannot be cut along the sequence."""


class _Uncut:
    """Placeholder for an argument that cannot be cut; a layer may pass it on, but not read it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.__dict__["_shape"] = shape

    def refuse(self, *_: Any, **__: Any) -> Any:
        raise ReadWholeError(
            f"it reads an argument of shape {self.__dict__['_shape']}, which cannot be split into tiles"
        )

    __getattr__ = __getitem__ = __bool__ = __len__ = __iter__ = __add__ = __mul__ = __setattr__ = refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls)).refuse()


class TileCall:
    """The arguments of one call, of which the tensors ``[B, T, ...]`` and ``[1, T, ...]`` are cut along ``T``.

    Args:
        args: positional arguments; the first floating tensor of the call is the hidden states, ``[B, T, D]``.
        kwargs: keyword arguments.
        cache: name and position of the argument that takes the state.

    Attributes:
        tensors: the tensors that are cut, the hidden states first.
        documents: lengths of the documents that the sequence holds; empty where the call names none.
        why_whole: why the call cannot be cut, or "".
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], cache: tuple[str, int]) -> None:
        args, kwargs = list(args), dict(kwargs)
        self.cache, position = cache
        if position < len(args):
            args[position] = None
        kwargs.pop(self.cache, None)
        self._cache_at = position if position < len(args) else None
        starts = {name: kwargs.pop(name) for name in OF_DOCUMENTS if name in kwargs}
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self.tensors: list[Tensor] = []
        self._cut: list[int] = []
        self.documents: tuple[int, ...] = ()
        self.why_whole = ""
        self._keys: list[Key] = []
        tensors = [(n, leaf) for n, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        first = next((n for n, leaf in tensors if leaf.dim() == 3 and leaf.is_floating_point()), None)
        if first is None:
            self.why_whole = "it was called without hidden states [B, T, D]"
            return
        self.batch, self.tokens = self._leaves[first].shape[:2]
        self._take(first)
        for number, leaf in enumerate(self._leaves):
            if number == first or not isinstance(leaf, Tensor):
                continue
            if leaf.dim() > 1 and leaf.shape[1] == self.tokens and leaf.shape[0] in (1, self.batch):
                self._take(number)
            elif self.tokens in leaf.shape:
                self._leaves[number] = _Uncut(tuple(leaf.shape))
            elif leaf.requires_grad:
                self.why_whole = f"an argument of shape {tuple(leaf.shape)} requires a gradient"
        self._read_documents(starts)

    def _take(self, number: int) -> None:
        self.tensors.append(self._leaves[number])
        self._cut.append(number)
        self._leaves[number] = None

    def _read_documents(self, starts: Mapping[str, Any]) -> None:
        boundaries = next((starts[name] for name in DOCUMENTS if starts.get(name) is not None), None)
        if boundaries is None:
            return
        if self.batch > 1:
            self.why_whole = "packed documents start at different tokens in the sequences of a batch"
        elif boundaries.dim() == 2:  # seq_idx, [1, T]: the number of each token's document
            changes = (boundaries[0, 1:] != boundaries[0, :-1]).nonzero().flatten() + 1
            ends = [0, *changes.tolist(), self.tokens]
            self.documents = tuple(end - start for start, end in zip(ends, ends[1:], strict=False))
        else:  # [documents + 1]
            self.documents = tuple(length for length in boundaries.diff().tolist() if length)
        if self.documents and sum(self.documents) != self.tokens:
            self.why_whole = f"its documents have {sum(self.documents):,} tokens, but its sequence {self.tokens:,}"

    @property
    def states(self) -> list[str]:
        """Names of the states that a tile leaves, in the order in which they are passed on."""
        return [f"{name} state" + f" {number}" * bool(number) for name, number in self._keys]

    def run(self, module: nn.Module, tiles: Sequence[Tensor], state: State, documents: int = 1) -> tuple[Any, State]:
        """Run ``module`` on one tile that begins with ``state``; return its result, and the state after it."""
        leaves = list(self._leaves)
        for number, tile in zip(self._cut, tiles, strict=True):
            leaves[number] = tile if documents == 1 else tile.unflatten(1, (documents, -1)).squeeze(0)
        args, kwargs = tree_unflatten(leaves, self._spec)
        carried = CarriedState(dict(zip(self._keys, state, strict=False)))
        if self._cache_at is None:
            kwargs[self.cache] = carried
        else:
            args[self._cache_at] = carried
        result = forward_of(module)(*args, **kwargs)
        if documents > 1:  # [documents, T, ...] to [1, documents * T, ...]
            result = tree_map(lambda leaf: leaf.flatten(0, 1)[None] if isinstance(leaf, Tensor) else leaf, result)
        keys = sorted(carried.tensors)
        if self._keys and keys != self._keys:
            raise RuntimeError(f"it leaves the states {keys} after one tile and {self._keys} after another")
        self._keys = keys
        return result, tuple([carried.tensors[key] for key in keys])


def argument_value(args: Sequence[Any], kwargs: Mapping[str, Any], argument: tuple[str, int]) -> Any:
    """The value of an argument, None where the call has none."""
    name, position = argument
    return args[position] if position < len(args) else kwargs.get(name)


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module's class, without its replacement and without its activation checkpoint."""
    view = view_of(module)
    if hasattr(view, "gradient_checkpointing"):
        view.__dict__["gradient_checkpointing"] = False
    return partial(type(view).forward, view)


def in_tiles(
    module: nn.Module, call: TileCall, tensors: Sequence[Tensor], cuts: StateTiles, weights: Weights,
    changed: Changed = str,
) -> Any:  # fmt: skip
    """Run one call of ``module`` in tiles.

    Args:
        module: the layer or the mixer.
        call: its arguments.
        tensors: the tensors to cut.
        cuts: the tiles.
        weights: its live weights by name.
        changed: as for :func:`seqtile.ops.tile_checkpoint.run_in_tiles`.
    """
    swap = ParameterSwap((module,))

    def run(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor], state: State, number: int) -> tuple[Any, State]:
        call_tile = partial(call.run, module, state=state, documents=cuts.documents.get(number, 1))
        with inside():
            if not aliases:
                return call_tile(tiles)
            named = {f"0.{name}": alias for name, alias in aliases.items()}
            result: tuple[Any, State] = call_with_weights(swap, named, (call_tile, tiles))
            return result

    return run_with_state(run, tensors, cuts.sizes, cuts.begins, weights, changed=changed)
