"""The rows of each tile, and whole outputs written slice by slice.

Offsets are PyTorch's own 64-bit ones: tiles are cut by ``narrow`` and ``view``, never by an index tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqtile._compat import tree_flatten, tree_unflatten
from seqtile.tiling import tile_ranges


def is_differentiable(tensor: Tensor) -> bool:
    """Whether a tensor of this dtype can have a gradient: real or complex numbers, no integers."""
    return tensor.is_floating_point() or tensor.is_complex()


def refuse_trace() -> None:
    """Raise inside ``torch.jit.trace``, which would write down the tiles of one length for every length.

    Raises:
        NotImplementedError: a trace runs.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise NotImplementedError(
            "torch.jit.trace would record the tiles of this length for every length; call seqtile.undo(model) "
            "first and seqtile.apply afterwards"
        )


def refuse_second_derivative(
    sentence: str = (
        "a tiled block does not support double backward, got create_graph=True; call seqtile.undo for this backward, "
        "or drop create_graph"
    ),
) -> None:
    """Raise inside a backward with ``create_graph=True``: its gradients would come out as constants, without a word.

    Raises:
        NotImplementedError: with this sentence; the backward builds a graph of its own.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(sentence)


class Cuts:
    """The rows of each tile, and how outputs go back together."""

    def __init__(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
        refuse_trace()
        self.leading = tensors[0].shape[:-1]
        self.sizes = tuple(sizes) or (0,)  # no rows at all are one empty tile
        self.ranges = tuple(tile_ranges(self.sizes))
        self.ndims = [tensor.dim() for tensor in tensors]
        tokens = self.leading.numel()
        for number, tensor in enumerate(tensors):
            if tensor.dim() < 2 or tensor.shape[:-1].numel() != tokens:
                raise ValueError(
                    f"cannot tile: input {number} has shape {tuple(tensor.shape)}, expected [..., D] with "
                    f"{tokens:,} rows in at least two dimensions; pass it as a keyword argument that is not split"
                )
        if sum(self.sizes) != tokens:
            raise ValueError(f"cannot tile: sizes sum to {sum(self.sizes):,}, expected {tokens:,} rows")

    @staticmethod
    def rows(tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each input as ``[N, D_i]``; a non-contiguous one is copied once."""
        return [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]

    def tiles(self, rows: Sequence[Tensor], index: int) -> list[Tensor]:
        """One tile of each input, ``[N, D_i] -> [1, ..., t, D_i]``, as many dimensions as the input has."""
        start, size = self.ranges[index]
        return [
            row.narrow(0, start, size).view((1,) * (ndim - 2) + (size, row.shape[-1]))
            for row, ndim in zip(rows, self.ndims, strict=True)
        ]

    def of_whole(self, whole: Tensor) -> Tensor:
        """A whole tensor, in the shape of which :meth:`part` takes a tile's slice: ``[N, ...]``."""
        tokens = self.leading.numel()
        return whole.reshape(tokens, whole.numel() // max(tokens, 1))

    def of_tile(self, tile: Tensor) -> Tensor:
        """The gradient of a tile's input in that shape: ``[t, D]``."""
        return tile.reshape(-1, tile.shape[-1])

    def part(self, whole: Tensor, index: int) -> Tensor:
        """One tile's slice."""
        return whole.narrow(0, *self.ranges[index])

    def empty_for(self, tile: Tensor) -> Tensor:
        """A whole tensor for such slices."""
        return tile.new_empty(self.leading.numel(), *tile.shape[1:])

    def as_rows(self, output: Tensor, index: int) -> Tensor:
        """One tile's output as ``[t, ...]``."""
        size = self.sizes[index]
        if output.dim() == self.ndims[0] and output.shape[:-1].numel() == size:
            return output.reshape(size, output.shape[-1])
        if output.dim() > 0 and output.shape[0] == size:
            return output
        raise ValueError(
            f"cannot tile: for a tile of {size:,} tokens the block returned shape {tuple(output.shape)}, expected "
            "one row per token; it is not position-wise, so exclude it with only="
        )

    def joined_shape(self, output: Tensor, index: int) -> tuple[int, ...]:
        """Shape of the whole output, from one tile's."""
        if output.dim() == self.ndims[0] and output.shape[:-1].numel() == self.sizes[index]:
            return (*self.leading, output.shape[-1])
        return (self.leading.numel(), *output.shape[1:])

    def outputs(self) -> Outputs:
        """What the outputs of all tiles are written to."""
        return Outputs(self)


class SequenceCuts(Cuts):
    """Cuts along the sequence: a tile holds the same tokens of every row of the batch.

    Inputs are ``[B, T, ...]`` or, the same for the whole batch, ``[1, T, ...]``; a tile of them is a view.
    """

    def __init__(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
        refuse_trace()
        self.leading = tensors[0].shape[:2]
        self.sizes = tuple(sizes)
        self.ranges = tuple(tile_ranges(self.sizes))
        tokens = self.leading[1]
        for number, tensor in enumerate(tensors):
            if tensor.dim() < 2 or tensor.shape[1] != tokens:
                raise ValueError(
                    f"cannot tile: input {number} has shape {tuple(tensor.shape)}, expected [B, {tokens:,}, ...]"
                )
        if sum(self.sizes) != tokens or min(self.sizes, default=0) < 1:
            raise ValueError(f"cannot tile: sizes are {self.sizes}, expected positive ones that sum to {tokens:,}")

    @staticmethod
    def rows(tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def tiles(self, rows: Sequence[Tensor], index: int) -> list[Tensor]:
        """One tile of each input, ``[B, T, ...] -> [B, t, ...]``."""
        start, size = self.ranges[index]
        return [row.narrow(1, start, size) for row in rows]

    def of_whole(self, whole: Tensor) -> Tensor:
        return whole

    def of_tile(self, tile: Tensor) -> Tensor:
        return tile

    def part(self, whole: Tensor, index: int) -> Tensor:
        return whole.narrow(1, *self.ranges[index])

    def empty_for(self, tile: Tensor) -> Tensor:
        return tile.new_empty(tile.shape[0], self.leading[1], *tile.shape[2:])

    def as_rows(self, output: Tensor, index: int) -> Tensor:
        if output.dim() < 2 or output.shape[1] != self.sizes[index]:
            raise ValueError(
                f"cannot tile: for a tile of {self.sizes[index]:,} tokens the layer returned shape "
                f"{tuple(output.shape)}, expected [B, {self.sizes[index]:,}, ...]"
            )
        return output

    def joined_shape(self, output: Tensor, index: int) -> tuple[int, ...]:
        return (output.shape[0], self.leading[1], *output.shape[2:])


class Outputs:
    """Whole outputs, written slice by slice."""

    def __init__(self, cuts: Cuts) -> None:
        self.cuts = cuts
        self.buffers: list[Tensor] = []
        self.needs_gradient: list[bool] = []
        self._rest: list[Any] = []

    def write(self, index: int, result: Any) -> list[Tensor]:
        """Copy one tile's tensors into their slices and return them."""
        leaves, spec = tree_flatten(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not self._rest:
            self._rest, self._spec = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
            self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
            for tensor in tensors:
                self.cuts.as_rows(tensor, index)
            self.buffers = [tensor.new_empty(self.cuts.joined_shape(tensor, index)) for tensor in tensors]
            self.needs_gradient = [False] * len(tensors)
        for number, (buffer, tensor) in enumerate(zip(self.buffers, tensors, strict=True)):
            rows = self.cuts.as_rows(tensor, index)
            self.cuts.part(self.cuts.of_whole(buffer), index).view(rows.shape).copy_(rows.detach())
            self.needs_gradient[number] |= tensor.requires_grad
        return tensors

    def finish(self) -> None:
        """After the last tile."""

    def result(self, joined: Sequence[Tensor]) -> Any:
        """The output as the function returns it, around the joined tensors."""
        tensors = iter(joined)
        leaves = [
            next(tensors) if is_tensor else leaf for is_tensor, leaf in zip(self._is_tensor, self._rest, strict=True)
        ]
        return tree_unflatten(leaves, self._spec)
