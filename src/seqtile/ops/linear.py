"""One linear projection inside a tile: forward into a buffer, gradients of its input and of what trains in it.

``y = x W^T + b + scaling * dropout(x) A^T B^T``, where the low-rank part is there with a LoRA adapter (arXiv
2106.09685). Frozen weights cost no weight-gradient product.

Shapes: ``t`` tokens of the tile, ``in`` and ``out`` features of the projection, ``rank`` of its adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from seqtile.ops.grad_accumulator import Sum
from seqtile.ops.rng import Autocast


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter on a projection.

    Attributes:
        down: ``A``, ``[rank, in]``.
        up: ``B``, ``[out, rank]``.
        scaling: factor of the low-rank part.
        dropout: probability with which an element of the adapter's input is dropped now; 0 in evaluation.
    """

    down: Tensor
    up: Tensor
    scaling: float
    dropout: float = 0.0


@dataclass(frozen=True)
class Packed:
    """A frozen quantised weight.

    Attributes:
        dense: returns it dense, ``[out, in]``.
        shape: ``(out, in)``.
    """

    dense: Callable[[], Tensor]
    shape: tuple[int, int]


@dataclass(frozen=True)
class Projection:
    """A linear layer by its tensors.

    Attributes:
        weight: ``[out, in]``, or a quantised one.
        bias: ``[out]`` or None.
        transposed: the weight is stored ``[in, out]``, as GPT-2's ``Conv1D`` does.
        adapter: a LoRA adapter, or None.
    """

    weight: Tensor | Packed
    bias: Tensor | None = None
    transposed: bool = False
    adapter: Adapter | None = None

    def tensors(self) -> list[Tensor]:
        """The tensors, in the order in which :class:`Layer` takes them back."""
        tensors = [self.weight] if isinstance(self.weight, Tensor) else []
        if self.bias is not None:
            tensors.append(self.bias)
        if self.adapter is not None:
            tensors += [self.adapter.down, self.adapter.up]
        return tensors

    def kind(self) -> Kind:
        """All but the tensors."""
        packed = None if isinstance(self.weight, Tensor) else self.weight
        adapter = self.adapter
        return Kind(
            packed, self.transposed, self.bias is not None, adapter is not None,
            adapter.scaling if adapter else 0.0, adapter.dropout if adapter else 0.0,
        )  # fmt: skip


def plain_projection(x: Tensor, projection: Projection) -> Tensor:
    """The projection in plain operators: ``[..., in] -> [..., out]``."""
    weight, adapter = projection.weight, projection.adapter
    dense = weight if isinstance(weight, Tensor) else weight.dense()
    y = F.linear(x, dense.t() if projection.transposed else dense, projection.bias)  # [..., out]
    if adapter is None:
        return y
    dropped = F.dropout(x.to(adapter.down.dtype), adapter.dropout) if adapter.dropout else x.to(adapter.down.dtype)
    return (y + F.linear(F.linear(dropped, adapter.down), adapter.up) * adapter.scaling).to(y.dtype)


@dataclass(frozen=True)
class Kind:
    """What a :class:`Projection` is, without its tensors: an autograd node may hold it."""

    packed: Packed | None
    transposed: bool
    has_bias: bool
    has_adapter: bool
    scaling: float
    dropout: float


class Layer:
    """A projection during one pass: its live tensors in the compute dtype, and the sums of their gradients.

    Args:
        kind: what the projection is.
        pairs: gives its tensors, each with the sum of its gradient or None.
        autocast: gives the compute dtype. Where it is on, an adapter runs in that too, else in its own precision where
            that is higher.
        holds_dense: a quantised weight is made dense once for the pass; else again for every product.

    Attributes:
        trains: whether anything in it needs a gradient.
        needs_input: whether one of its gradients is a product with its input.
        draws: whether its adapter drops parts of its input.
    """

    def __init__(
        self,
        kind: Kind,
        pairs: Iterator[tuple[Tensor, Sum | None]],
        autocast: Autocast,
        holds_dense: bool = True,
    ) -> None:
        dtype = autocast.dtype
        self.transposed, self.dropout = kind.transposed, kind.dropout
        self.weight_sum: Sum | None = None
        self.bias: Tensor | None = None
        self.bias_sum: Sum | None = None
        self.down: Tensor | None = None
        self.down_sum: Sum | None = None
        self.up_sum: Sum | None = None
        self._dtype, self._packed = dtype, kind.packed
        self._matrix: Tensor | None = None
        if kind.packed is None:
            weight, self.weight_sum = next(pairs)
            matrix = weight.detach().to(dtype)
            self._matrix = matrix.t() if kind.transposed else matrix  # [out, in]
            self.width, self.inputs = self._matrix.shape
        else:
            self.width, self.inputs = kind.packed.shape
            if holds_dense:
                self._matrix = self.matrix
        if kind.has_bias:
            bias, self.bias_sum = next(pairs)
            self.bias = bias.detach().to(dtype)
        self.low_dtype = dtype
        if kind.has_adapter:
            down, self.down_sum = next(pairs)
            up, self.up_sum = next(pairs)
            if not autocast.enabled:
                self.low_dtype = torch.promote_types(dtype, down.dtype)
            self.down = down.detach().to(self.low_dtype)  # [rank, in]
            self.up = up.detach().to(self.low_dtype)  # [out, rank]
        self.scaling = kind.scaling / (1 - kind.dropout) if kind.dropout < 1 else 0.0
        self.narrow = self.low_dtype == dtype
        self.draws = kind.has_adapter and kind.dropout > 0
        self.needs_input = any((self.weight_sum, self.down_sum, self.up_sum))
        self.trains = self.needs_input or self.bias_sum is not None

    @property
    def matrix(self) -> Tensor:
        """The weight as ``[out, in]``."""
        if self._matrix is not None:
            return self._matrix
        assert self._packed is not None
        return self._packed.dense().detach().to(self._dtype)

    def reading(self, cut: Callable[[Tensor, int], Tensor]) -> Layer:
        """The part of it that reads some features of its input, ``cut(tensor, dimension)``."""
        narrowed = copy.copy(self)
        narrowed._matrix = cut(self.matrix, 1)  # noqa: SLF001 - a copy of its own class
        narrowed.inputs = narrowed.matrix.shape[1]
        if self.down is not None:
            narrowed.down = cut(self.down, 1)
        return narrowed

    def draw(self, rows: int) -> Tensor | None:
        """The adapter's dropout mask for one tile, ``[t, in]``, a byte each; draws from the global generator."""
        if not self.draws or self.down is None:
            return None
        mask = torch.empty(rows, self.inputs, dtype=torch.bool, device=self.down.device)
        return mask.bernoulli_(1 - self.dropout)

    def forward(self, x: Tensor, out: Tensor, mask: Tensor | None) -> None:
        """Write the projection of ``x`` ``[t, in]`` into ``out`` ``[t, out]``; ``mask`` is what :meth:`draw` drew."""
        matrix = self.matrix if self._matrix is None else self._matrix
        if self.bias is None:
            torch.mm(x, matrix.t(), out=out)
        else:
            torch.addmm(self.bias, x, matrix.t(), out=out)
        if self.down is None:
            return
        for xs, out_rows, kept in self.pieces(x, out, mask):
            assert xs is not None and out_rows is not None
            low = torch.mm(self._dropped(xs, kept), self.down.t())  # [t, in] @ [in, rank]
            if self.narrow:
                torch.addmm(out_rows, low, self.up.t(), alpha=self.scaling, out=out_rows)  # [t, rank] @ [rank, out]
            else:
                out_rows.add_(torch.mm(low, self.up.t()), alpha=self.scaling)

    def low_rank_gradient(self, dy: Tensor) -> Tensor | None:
        """Gradient of the adapter's ``[t, rank]`` tensor, from that of the output ``[t, out]``; None without one."""
        if self.down is None:
            return None
        result = dy.new_empty(dy.shape[0], self.up.shape[1], dtype=self.low_dtype)
        for dys, out_rows in self.pieces(dy, result):
            assert dys is not None and out_rows is not None
            torch.mm(dys.to(self.low_dtype), self.up, out=out_rows).mul_(self.scaling)  # [t, out] @ [out, rank]
        return result

    def add_gradients(
        self, x: Tensor | None, dy: Tensor, low: Tensor | None, mask: Tensor | None, *, overwrite: bool = False
    ) -> None:
        """Add this tile's gradients of everything that trains to their sums.

        Args:
            x: the projection's input, ``[t, in]``; may be None unless :attr:`needs_input`.
            dy: gradient of its output, ``[t, out]``.
            low: what :meth:`low_rank_gradient` returned, ``[t, rank]``.
            mask: the adapter's dropout mask, ``[t, in]``.
            overwrite: ``x`` is dead afterwards, so the mask may be applied in place.
        """
        if self.bias_sum is not None:
            self.bias_sum.add(dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)))
        if self.weight_sum is not None:
            assert x is not None
            self.weight_sum.add_product(*((x.t(), dy) if self.transposed else (dy.t(), x)))  # [in, out] or [out, in]
        if self.down_sum is None and self.up_sum is None:
            return
        for xs, dys, lows, kept in self.pieces(x, dy, low, mask):
            assert xs is not None and dys is not None and lows is not None and self.down is not None
            xs = self._dropped(xs, kept, overwrite=overwrite)
            if self.down_sum is not None:
                self.down_sum.add_product(lows.t(), xs)  # [rank, t] @ [t, in]
            if self.up_sum is not None:
                scaled = torch.mm(xs, self.down.t()).mul_(self.scaling)  # [t, rank]
                self.up_sum.add_product(dys.to(self.low_dtype).t(), scaled)  # [out, t] @ [t, rank]

    def input_gradient(
        self, dy: Tensor, out: Tensor, low: Tensor | None, mask: Tensor | None, *, add: bool = False
    ) -> None:
        """Write the gradient of the input, ``[t, in]``, into ``out``, or add it to what stands there."""
        if low is not None and mask is not None and self.narrow and not add:
            assert self.down is not None
            torch.mm(low, self.down, out=out).mul_(mask)  # the dropped part first, in place: no buffer of its own
            torch.addmm(out, dy, self.matrix, out=out)
            return
        torch.addmm(out, dy, self.matrix, beta=int(add), out=out)  # [t, out] @ [out, in]
        if low is None or self.down is None:
            return
        if self.narrow and mask is None:
            torch.addmm(out, low, self.down, out=out)
            return
        for lows, out_rows, kept in self.pieces(low, out, mask):
            assert lows is not None and out_rows is not None
            low_rank = torch.mm(lows, self.down)  # [t, rank] @ [rank, in]
            out_rows.add_(low_rank if kept is None else low_rank.mul_(kept))

    def _dropped(self, x: Tensor, mask: Tensor | None, *, overwrite: bool = False) -> Tensor:
        """The adapter's input, in its dtype."""
        cast = x.to(self.low_dtype)
        if mask is None:
            return cast
        return cast.mul_(mask) if overwrite or cast is not x else cast * mask

    def pieces(self, *tensors: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
        """The rows at once; in pieces where the adapter is wider than the rest, so that no wide tile is made."""
        rows = next(tensor.shape[0] for tensor in tensors if tensor is not None)
        for start, size in self.cuts(rows):
            yield tuple(t if t is None or size == rows else t[start : start + size] for t in tensors)

    def cuts(self, rows: int) -> Iterator[tuple[int, int]]:
        """The first row of each piece, and its rows; a plan of memory has only some of them run."""
        step = rows if self.narrow else WIDE_ROWS
        for start in range(0, rows, step):
            yield start, min(step, rows - start)


WIDE_ROWS = 512
"""Rows at once where an adapter is kept in higher precision than the layer it is on."""
