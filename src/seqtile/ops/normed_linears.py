"""Linear layers that read one normed input, tile by tile: gate and up of an MLP; query, key and value of attention.

``y_i = layer_i(norm(x))`` forward, and backward ``dx`` from all ``dy_i`` in one buffer, with the gradients of whatever
trains: the one loop that both operators run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from seqtile.ops.grad_accumulator import LOW, Sum
from seqtile.ops.kernels import pieces
from seqtile.ops.linear import Kind, Layer, Shrink, without_dropped
from seqtile.ops.norm import BY_DEVICE, NORM_KERNELS
from seqtile.ops.rng import Autocast, NormKind
from seqtile.ops.tile_linear import SumOfOne


def sums_for(
    tensors: Sequence[Tensor], needs: Sequence[bool], around: Sequence[SumOfOne | None] | None = None
) -> list[Sum | None]:
    """One sum per tensor that needs a gradient: its own, or that of the tile around the call."""
    sums = around or [None] * len(tensors)
    return [
        (sum_of or Sum)(tensor) if need else None for tensor, need, sum_of in zip(tensors, needs, sums, strict=True)
    ]


class Norm:
    """A row-wise function during one pass.

    Args:
        autocast: autocast state of the forward, in which it runs.
        norm: the function, how many weights it has, and its formula.
        pairs: gives the weights, each with the sum of its gradient or None.
    """

    def __init__(self, autocast: Autocast, norm: NormKind, pairs: Iterator[tuple[Tensor, Sum | None]]) -> None:
        self._autocast, self._function, self._formula = autocast, norm[0], norm[2]
        self._weights: list[Tensor] = []
        self._sums: list[Sum | None] = []
        for weight, total in islice(pairs, norm[1]):
            self._weights.append(weight.detach())
            self._sums.append(total)
        self.trains = any(self._sums)

    def forward(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The normed rows, ``[t, D]``, in ``dtype`` or in the function's own."""
        out: Tensor | None = None
        kernels = BY_DEVICE.get(rows.device.type, NORM_KERNELS) if dtype is not None else None
        if kernels is not None and self._formula is not None:
            out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
            if kernels.forward(self._formula, rows, self._weights, out):
                return out
        with torch.no_grad(), self._autocast.on():
            if out is None:
                result = self._function(rows, self._weights)
                return result if dtype is None else result.to(dtype)
            for xs, out_rows in pieces(rows, out):
                out_rows.copy_(self._function(xs, self._weights))
            return out

    def gradient(self, rows: Tensor, dy: Tensor, *, needs_rows: bool, out: Tensor | None = None) -> Tensor | None:
        """Gradient of ``rows``; those of the weights go into their sums.

        Where low-precision weights train the norm is differentiated in fp32: autograd would round each tile's part of
        a weight's gradient to the weight's dtype.

        Args:
            rows: the input, ``[t, D]``.
            dy: gradient of the output, ``[t, D]``.
            needs_rows: whether the gradient of ``rows`` is needed.
            out: where a kernel writes it; what is returned may be another tensor.
        """
        kernels = BY_DEVICE.get(rows.device.type, NORM_KERNELS)
        if kernels is None or self._formula is None:
            return self._plain_gradient(rows, dy, needs_rows)
        dx = (torch.empty_like(rows) if out is None else out) if needs_rows else None
        totals = [None if total is None else total.total() for total in self._sums]
        if not kernels.backward(self._formula, rows, dy, self._weights, dx, totals):
            for xs, dys, dx_rows in pieces(rows, dy, rows if dx is None else dx):
                gradient = self._plain_gradient(xs, dys, needs_rows)
                if gradient is not None:
                    dx_rows.copy_(gradient)
        return dx

    def _plain_gradient(self, rows: Tensor, dy: Tensor, needs_rows: bool) -> Tensor | None:
        in_fp32 = self.trains and any(weight.dtype in LOW for weight in self._weights) and not self._autocast.enabled
        with torch.enable_grad(), self._autocast.on():
            leaf = (rows.float() if in_fp32 else rows.detach()).requires_grad_(needs_rows)
            weights = [
                (weight.float() if in_fp32 else weight.detach()).requires_grad_(total is not None)
                for weight, total in zip(self._weights, self._sums, strict=True)
            ]
            differentiated = [tensor for tensor in (leaf, *weights) if tensor.requires_grad]
            if not differentiated:
                return None
            result = self._function(leaf, weights)
            gradients: Iterator[Tensor] = iter(torch.autograd.grad(result, differentiated, dy.to(result.dtype)))
        gradient = next(gradients) if needs_rows else None
        for total in self._sums:
            if total is not None:
                total.add(next(gradients))
        return gradient


class NormedLinears:
    """The layers and their norm during one pass.

    Args:
        layers: kinds of the layers.
        pairs: gives their tensors, each with the sum of its gradient or None.
        autocast: autocast state of the forward; its dtype is the compute dtype.
        holds_dense: a quantised weight is made dense once for the pass.

    Attributes:
        norm: the norm before them, or None; set by the owner, whose tensors may come in another order.
        trains: whether something in a layer needs a gradient.
    """

    def __init__(
        self, layers: Sequence[Kind], pairs: Iterator[tuple[Tensor, Sum | None]], autocast: Autocast,
        holds_dense: bool = True,
    ) -> None:  # fmt: skip
        self.dtype = autocast.dtype
        self.layers: list[Layer] = []
        self.norm: Norm | None = None
        self.trains = self._draws = False
        adapters: list[Shrink] = []
        for layer_kind in layers:
            layer = Layer(layer_kind, pairs, autocast, holds_dense)
            self.layers.append(layer)
            self.trains |= layer.trains
            self._draws |= layer.draws
            if layer.shrink is not None:
                adapters.append(layer.shrink)
        self._joined = Shrink.joined(adapters) if len(adapters) > 1 else None

    def needs_normed(self, needs_x: bool) -> bool:
        """Whether the gradient of the normed input is needed."""
        return needs_x or (self.norm is not None and self.norm.trains)

    def draw(self, rows: int) -> list[Tensor | None]:
        """Draw the masks of the layers' adapters for one tile, in a fixed order."""
        return [layer.draw(rows) for layer in self.layers] if self._draws else [None] * len(self.layers)

    def normed(self, x: Tensor) -> Tensor:
        """The layers' input, ``[t, D]`` in the compute dtype."""
        return x.to(self.dtype) if self.norm is None else self.norm.forward(x, self.dtype)

    def add_low_rank(
        self, normed: Tensor, outputs: Sequence[Tensor], masks: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Add the adapters' parts to each layer's output, ``[t, F_i]``; returns what :meth:`low_rank` does."""
        lows = self.low_rank(normed, masks)
        for layer, low, output in zip(self.layers, lows, outputs, strict=True):
            if low is not None:
                layer.add_low_rank(low, output)
        return lows

    def low_rank(self, normed: Tensor, masks: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Each adapter's ``A`` times the input, ``[t, rank_i]``, by one product where they are joined."""
        if self._joined is not None:
            return self._columns(self._joined.forward(normed))
        return [
            None if layer.shrink is None else layer.shrink.forward(without_dropped(normed, mask))
            for layer, mask in zip(self.layers, masks, strict=False)
        ]

    def _columns(self, joined: Tensor) -> list[Tensor | None]:
        """Each layer's part of ``[t, rank_1 + rank_2 ...]``, None without an adapter."""
        ranks = [0 if layer.shrink is None else len(layer.shrink.down) for layer in self.layers]
        return [columns if rank else None for rank, columns in zip(ranks, joined.split(ranks, dim=1), strict=True)]

    def finish(self) -> None:
        """Give every adapter its part of joined sums, after the last tile."""
        if self._joined is not None:
            self._joined.finish()

    def backward(
        self, x: Tensor, normed: Tensor, gradients: Sequence[Tensor], masks: Sequence[Tensor | None], dx: Tensor | None,
        lows: Sequence[Tensor | None] = (),
    ) -> None:  # fmt: skip
        """Add one tile's gradients to the sums and write the input's.

        Args:
            x: the input, ``[t, D]``.
            normed: what :meth:`normed` made of it.
            gradients: that of each layer's output, ``[t, F_i]``.
            masks: what :meth:`draw` drew; more may follow.
            dx: where the gradient of ``x`` goes, or None.
            lows: what :meth:`low_rank` gave for this tile, if it is still there.
        """
        nothing: list[Tensor | None] = [None] * len(self.layers)
        joined_dlow = None
        if self._joined is not None:
            down = self._joined.down
            joined_dlow = normed.new_empty(normed.shape[0], len(down), dtype=down.dtype)  # [t, rank_1 + rank_2 ...]
            if not lows and any([layer.up_sum for layer in self.layers]):
                lows = self.low_rank(normed, masks)
        columns = nothing if joined_dlow is None else self._columns(joined_dlow)
        dlows = [
            layer.low_rank_gradient(dy, column)
            for layer, dy, column in zip(self.layers, gradients, columns, strict=True)
        ]
        if self._joined is not None and joined_dlow is not None:
            self._joined.add_gradient(normed, joined_dlow)
            dlows = nothing
        for layer, dy, dlow, mask, low in zip(self.layers, gradients, dlows, masks, lows or nothing, strict=False):
            if layer.trains:
                layer.add_gradients(normed, dy, dlow, mask, low=low)
        if not self.needs_normed(dx is not None):
            return
        direct = dx is not None and self.norm is None and dx.dtype == self.dtype
        dn = dx if direct and dx is not None else torch.empty(normed.shape, dtype=self.dtype, device=x.device)  # [t, D]
        for number, (layer, dy, dlow, mask) in enumerate(zip(self.layers, gradients, dlows, masks, strict=False)):
            layer.input_gradient(dy, dn, dlow, mask, add=number > 0)
        if self._joined is not None and joined_dlow is not None:
            self._joined.add_input_gradient(joined_dlow, dn, None)
        if direct:
            return
        gradient = dn if self.norm is None else self.norm.gradient(x, dn, needs_rows=dx is not None, out=dx)
        if dx is not None and gradient is not None and gradient is not dx:
            dx.copy_(gradient)
