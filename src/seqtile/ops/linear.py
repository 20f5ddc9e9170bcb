"""One linear projection inside a tile: forward into a buffer, gradients of its input and of what trains in it.

``y = x W^T + b + scaling * dropout(x) A^T B^T``, where the low-rank part is there with a LoRA adapter (arXiv
2106.09685). Frozen weights cost no weight-gradient product.

Shapes: ``t`` tokens of the tile, ``in`` and ``out`` features of the projection, ``rank`` of its adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
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
    """A :class:`Projection` without its tensors, which an autograd node may hold."""

    packed: Packed | None
    transposed: bool
    has_bias: bool
    has_adapter: bool
    scaling: float
    dropout: float


class Shrink:
    """The ``A`` of the adapters that read one input, one below the other: ``low = scaling * dropout(x) A^T``.

    So adapters of several projections, as of gate and up, share every product with their input and with its gradient.

    Args:
        down: ``A``, ``[rank, in]``, in the dtype in which the adapters run.
        total: sum of its gradient, or None.
        narrow: the adapters run in the dtype of their input.
        scaling: factor of the low-rank part.
        dropout: probability with which an element of the input is dropped.
        parts: what it is made of, whose sums get theirs of the gradient by :meth:`finish`.
    """

    def __init__(
        self, down: Tensor, total: Sum | None, narrow: bool, scaling: float, dropout: float,
        parts: Sequence[Shrink] = (),
    ) -> None:  # fmt: skip
        self.down, self.total, self.narrow = down, total, narrow
        self.scaling, self.dropout, self.parts = scaling, dropout, parts

    @classmethod
    def joined(cls, shrinks: Sequence[Shrink]) -> Shrink | None:
        """All of them as one, or None where they do not read one input alike, or only some of them train."""
        settings = {(shrink.down.dtype, shrink.scaling, shrink.dropout, shrink.total is None) for shrink in shrinks}
        first = shrinks[0]
        if len(settings) > 1 or first.dropout > 0:  # each adapter drops other elements
            return None
        down = torch.cat([shrink.down for shrink in shrinks])
        return cls(down, None if first.total is None else Sum(down), first.narrow, first.scaling, 0.0, shrinks)

    def finish(self) -> None:
        """Hand the gradient on to the parts, after the last tile."""
        if self.parts and self.total is not None:
            ranks = [len(shrink.down) for shrink in self.parts]
            for shrink, gradient in zip(self.parts, self.total.total().split(ranks), strict=True):
                assert shrink.total is not None
                shrink.total.add(gradient)

    def reading(self, cut: Callable[[Tensor, int], Tensor]) -> Shrink:
        """The part of it that reads some features of its input, ``cut(tensor, dimension)``."""
        return Shrink(cut(self.down, 1), None, self.narrow, self.scaling, self.dropout)

    def draw(self, rows: int) -> Tensor | None:
        """The dropout mask for one tile, ``[t, in]``, a byte each; draws from the global generator."""
        if self.dropout == 0:
            return None
        mask = torch.empty(rows, self.down.shape[1], dtype=torch.bool, device=self.down.device)
        return mask.bernoulli_(1 - self.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[t, in] -> [t, rank]``; what :meth:`draw` drew is already applied to ``x``."""
        low = x.new_empty(x.shape[0], len(self.down), dtype=self.down.dtype)
        for xs, low_rows in self.pieces(x, low):
            scaled_product(self.cast(xs), self.down.t(), self.scaling, low_rows)  # [t, in] @ [in, rank]
        return low

    def add_gradient(self, x: Tensor, dlow: Tensor) -> None:
        """Add the gradient of ``A``; ``x`` as in :meth:`forward`, ``dlow`` is :meth:`Layer.low_rank_gradient`'s."""
        if self.total is not None:
            for xs, dlow_rows in self.pieces(x, dlow):
                self.total.add_product(dlow_rows.t(), self.cast(xs))  # [rank, t] @ [t, in]

    def add_input_gradient(self, dlow: Tensor, out: Tensor, mask: Tensor | None) -> None:
        """Add the gradient of the input to ``out``, ``[t, in]``."""
        if self.narrow and mask is None:
            torch.addmm(out, dlow, self.down, out=out)  # [t, rank] @ [rank, in]
            return
        for dlow_rows, out_rows, *kept in self.pieces(dlow, out, *([] if mask is None else [mask])):
            product = torch.mm(dlow_rows, self.down)
            out_rows.add_(product.mul_(kept[0]) if kept else product)

    def cast(self, x: Tensor) -> Tensor:
        """A layer's tensor in the adapter's dtype."""
        return x.to(self.down.dtype)

    def pieces(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The rows at once; in pieces where the adapter is wider than the rest, so that no wide tile is made."""
        rows = tensors[0].shape[0]
        step = rows if self.narrow else WIDE_ROWS
        for start in range(0, rows, step):
            yield tensors if step >= rows else tuple(t[start : start + step] for t in tensors)


class Layer:
    """A projection during one pass: its live tensors in the compute dtype, and the sums of their gradients.

    Args:
        kind: what the projection is.
        pairs: gives its tensors, each with the sum of its gradient or None.
        autocast: gives the compute dtype. Where it is on, an adapter runs in that too, else in its own precision where
            that is higher.
        holds_dense: a quantised weight is made dense once for the pass; else again for every product.

    Attributes:
        shrink: the adapter's ``A``, or None without an adapter.
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
        self.transposed = kind.transposed
        self.weight_sum: Sum | None = None
        self.bias: Tensor | None = None
        self.bias_sum: Sum | None = None
        self.shrink: Shrink | None = None
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
        down_sum = None
        if kind.has_adapter:
            down, down_sum = next(pairs)
            up, self.up_sum = next(pairs)
            low_dtype = dtype if autocast.enabled else torch.promote_types(dtype, down.dtype)
            scaling = kind.scaling / (1 - kind.dropout) if kind.dropout < 1 else 0.0
            self.shrink = Shrink(down.detach().to(low_dtype), down_sum, low_dtype == dtype, scaling, kind.dropout)
            self.up = up.detach().to(low_dtype)  # [out, rank]
        self.draws = kind.has_adapter and kind.dropout > 0
        self.needs_input = any((self.weight_sum, down_sum, self.up_sum))
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
        if self.shrink is not None:
            narrowed.shrink = self.shrink.reading(cut)
        return narrowed

    def draw(self, rows: int) -> Tensor | None:
        """The adapter's dropout mask for one tile, ``[t, in]``."""
        return None if self.shrink is None else self.shrink.draw(rows)

    def forward(self, x: Tensor, out: Tensor, mask: Tensor | None, *, overwrite: bool = False) -> None:
        """Write the projection of ``x`` ``[t, in]`` into ``out`` ``[t, out]``.

        Args:
            x: its input.
            out: its output.
            mask: what :meth:`draw` drew.
            overwrite: ``x`` is dead afterwards, so the mask may be applied in place.
        """
        self.without_adapter(x, out)
        if self.shrink is not None:
            self.add_low_rank(self.shrink.forward(without_dropped(x, mask, overwrite=overwrite)), out)

    def without_adapter(self, x: Tensor, out: Tensor) -> None:
        """Write ``x W^T + b``."""
        matrix = self.matrix if self._matrix is None else self._matrix
        if self.bias is None:
            torch.mm(x, matrix.t(), out=out)
        else:
            torch.addmm(self.bias, x, matrix.t(), out=out)

    def add_low_rank(self, low: Tensor, out: Tensor) -> None:
        """Add the adapter's part to ``out`` ``[t, out]``, from :meth:`Shrink.forward`'s ``[t, rank]``."""
        assert self.shrink is not None
        if self.shrink.narrow:
            torch.addmm(out, low, self.up.t(), out=out)  # [t, rank] @ [rank, out]
            return
        for low_rows, out_rows in self.shrink.pieces(low, out):
            out_rows.add_(torch.mm(low_rows, self.up.t()))

    def low_rank_gradient(self, dy: Tensor, out: Tensor | None = None) -> Tensor | None:
        """Gradient of ``dropout(x) A^T``, ``[t, rank]``, from that of the output; None without an adapter."""
        if self.shrink is None:
            return None
        result = dy.new_empty(dy.shape[0], self.up.shape[1], dtype=self.up.dtype) if out is None else out
        for dys, rows in self.shrink.pieces(dy, result):
            scaled_product(self.shrink.cast(dys), self.up, self.shrink.scaling, rows)  # [t, out] @ [out, rank]
        return result

    def add_gradients(
        self, x: Tensor | None, dy: Tensor, dlow: Tensor | None, mask: Tensor | None, *,
        low: Tensor | None = None, overwrite: bool = False,
    ) -> None:  # fmt: skip
        """Add this tile's gradients of everything that trains to their sums.

        Args:
            x: the projection's input, ``[t, in]``; may be None unless :attr:`needs_input`.
            dy: gradient of its output, ``[t, out]``.
            dlow: what :meth:`low_rank_gradient` returned, ``[t, rank]``; None where ``A`` gets its gradient elsewhere.
            mask: the adapter's dropout mask, ``[t, in]``.
            low: what :meth:`Shrink.forward` made of ``x``, ``[t, rank]``, if it is still there.
            overwrite: ``x`` is dead afterwards, so the mask may be applied in place.
        """
        if self.bias_sum is not None:
            self.bias_sum.add(dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)))
        if self.weight_sum is not None:
            assert x is not None
            self.weight_sum.add_product(*((x.t(), dy) if self.transposed else (dy.t(), x)))  # [in, out] or [out, in]
        shrink = self.shrink
        if shrink is None:
            return
        if dlow is not None and shrink.total is not None or self.up_sum is not None and low is None:
            assert x is not None
            x = without_dropped(x, mask, overwrite=overwrite)
        if dlow is not None and shrink.total is not None:
            assert x is not None
            shrink.add_gradient(x, dlow)
        if self.up_sum is not None:
            if low is None:
                assert x is not None
                low = shrink.forward(x)
            for dys, low_rows in shrink.pieces(dy, low):
                self.up_sum.add_product(shrink.cast(dys).t(), low_rows)  # [out, t] @ [t, rank]

    def input_gradient(
        self, dy: Tensor, out: Tensor, dlow: Tensor | None, mask: Tensor | None, *, add: bool = False
    ) -> None:
        """Write the gradient of the input, ``[t, in]``, into ``out``, or add it to its values."""
        shrink = self.shrink
        if dlow is not None and shrink is not None and shrink.narrow and mask is not None and not add:
            torch.mm(dlow, shrink.down, out=out).mul_(mask)  # the dropped part first, in place: no buffer of its own
            dlow, add = None, True
        torch.addmm(out, dy, self.matrix, beta=int(add), out=out)  # [t, out] @ [out, in]
        if dlow is not None and shrink is not None:
            shrink.add_input_gradient(dlow, out, mask)


def without_dropped(x: Tensor, mask: Tensor | None, *, overwrite: bool = False) -> Tensor:
    """An adapter's input without what its dropout drops."""
    if mask is None:
        return x
    return x.mul_(mask) if overwrite else x * mask


def scaled_product(left: Tensor, right: Tensor, scaling: float, out: Tensor) -> None:
    """Write ``scaling * left @ right``, rounded once: scaled after the product it would be rounded twice."""
    torch.addmm(out, left, right, beta=0, alpha=scaling, out=out)


WIDE_ROWS = 2048
"""Rows at once where an adapter is kept in higher precision than its layer: 112 MiB of 14,336 features in fp32."""
