"""The arithmetic of the fused operator: one tile forward, one tile backward, in buffers that all tiles share.

Shapes: ``t`` tokens of the tile, ``D`` features of the block's input and output, ``F`` of its inner tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqtile.ops.grad_accumulator import Sum
from seqtile.ops.linear import Kind, Layer
from seqtile.ops.normed_linears import Norm, NormedLinears
from seqtile.ops.pointwise import Activation, pointwise_on
from seqtile.ops.rng import Autocast, NormKind, RandomState


@dataclass(frozen=True)
class MlpPlan:
    """All of one call but its tensors; the autograd node holds it.

    Attributes:
        first: kinds of the projections before the activation.
        down: kind of the down projection.
        activation: the activation.
        gated: whether it is multiplied by ``up``.
        up_first: order of the halves of a fused gate_up.
        before: function, number of weights and formula of the norm before, or None.
        after: the same of the norm after.
        dropout: probability of the dropout after ``down``.
        sizes: tokens of each tile.
        keep: number of tiles, from the first, whose gate and up are kept.
        under_checkpoint: they are kept as autograd's saved tensors, which a checkpoint around the call drops.
        holds_dense: quantised weights are made dense once per pass, not at every product.
        autocast: autocast state of the forward.
        random: generator state at the start of the forward, or None when nothing is random.
    """

    first: tuple[Kind, ...]
    down: Kind
    activation: Activation
    gated: bool
    up_first: bool
    before: NormKind | None
    after: NormKind | None
    dropout: float
    sizes: tuple[int, ...]
    keep: int
    under_checkpoint: bool
    holds_dense: bool
    autocast: Autocast
    random: RandomState | None


class Pass:
    """One forward or one backward over all tiles.

    Args:
        plan: the call.
        device: where it runs.
        tensors: those of the call.
        sums: sum of each tensor's gradient; None if it needs none.

    Attributes:
        output_width: features of the block's output.
    """

    def __init__(
        self, plan: MlpPlan, device: torch.device, tensors: Sequence[Tensor], sums: Sequence[Sum | None]
    ) -> None:
        self.plan, self.device = plan, device
        self.dtype = plan.autocast.dtype
        take = zip(tensors, sums, strict=True)
        self.first = NormedLinears(plan.first, take, plan.autocast, plan.holds_dense)
        self.down = Layer(plan.down, take, plan.autocast, plan.holds_dense)
        self.first.norm = Norm(plan.autocast, plan.before, take) if plan.before else None
        self.after = Norm(plan.autocast, plan.after, take) if plan.after else None
        self.output_width = self.down.width
        self._sums = sums
        self._pointwise = pointwise_on(device)
        self._buffers: dict[Any, Tensor] = {}
        self._longest = max(plan.sizes, default=0)

    def output_dtype(self, rows: Tensor) -> torch.dtype:
        """The dtype of the block's output where a norm comes after."""
        assert self.after is not None
        return self.after.forward(rows.new_zeros(1, self.output_width, dtype=self.dtype)).dtype

    def gradients(self, around: Sequence[Any] | None = None) -> list[Tensor | None]:
        """The summed gradients, in the order of the tensors; the buffers are gone before they are cast.

        Args:
            around: not None where a sum is that of the tile around the call, which takes its gradient itself.
        """
        self._buffers.clear()
        self.first.finish()
        of_tile = around or [None] * len(self._sums)
        pairs = zip(self._sums, of_tile, strict=True)
        return [None if total is None or outer is not None else total.result() for total, outer in pairs]

    def forward(self, x: Tensor, out: Tensor, *, keep: bool) -> tuple[Tensor, ...]:
        """Write one tile's output, ``[t, D] -> [t, D]``; returns its pre-activations if they are to be kept."""
        n, masks, drop = self._start(x)  # [t, D], adapters' masks [t, in], [t, D]
        values, _ = self._pre_activations(n, masks, fresh=keep)
        gate, up = self._split(values)  # [t, F] each
        hidden = self._buffer("hidden", x.shape[0], gate.shape[1]) if keep else gate  # [t, F]
        self._pointwise.forward(self.plan.activation, gate, up, hidden)
        del n, gate, up
        if not keep:
            values = ()
        plain = self.after is None and out.dtype == self.dtype
        y = out if plain else torch.empty(out.shape, dtype=self.dtype, device=self.device)  # [t, D]
        self.down.forward(hidden, y, masks[-1], overwrite=True)
        if drop is not None:
            y.mul_(drop).mul_(self._drop_scale)
        if self.after is not None:
            y = self.after.forward(y, out.dtype)
        if y is not out:
            out.copy_(y)
        return values

    def backward(self, x: Tensor, dy: Tensor, dx: Tensor | None, kept: tuple[Tensor, ...] | None) -> None:
        """Add one tile's gradients to the sums and write its ``dx``; ``x``, ``dy`` and ``dx`` are ``[t, D]``."""
        n, masks, drop = self._start(x)
        inner = self.first.trains or self.first.needs_normed(dx is not None)
        lows: Sequence[Tensor | None] = ()
        values = kept
        if values is None:
            values, lows = self._pre_activations(n, masks, fresh=False)
        gate, up = self._split(values)  # [t, F] each; overwritten by their gradients below

        def spare(number: int) -> Tensor:
            return self._buffer(number, x.shape[0], gate.shape[1])

        dy = self._output_gradient(dy, drop, masks, spare, gate, up)  # [t, D]
        low = self.down.low_rank_gradient(dy)  # [t, rank]

        def use_hidden(hidden: Tensor) -> None:
            self.down.add_gradients(hidden, dy, low, masks[-1], overwrite=True)

        def write_gradient(buffer: Tensor) -> None:
            self.down.input_gradient(dy, buffer, low, masks[-1])

        if not self.down.needs_input:
            self.down.add_gradients(None, dy, low, None)
        self._pointwise.backward(
            self.plan.activation, gate, up, spare, use_hidden if self.down.needs_input else None,
            write_gradient if inner else None,
        )  # fmt: skip
        if not inner:
            return
        self.first.backward(x, n, values, masks, dx, lows)  # values hold the gradients of gate and up

    def _start(self, x: Tensor) -> tuple[Tensor, list[Tensor | None], Tensor | None]:
        """The normed input in the compute dtype, and every mask of the tile, drawn in a fixed order."""
        masks = [*self.first.draw(x.shape[0]), self.down.draw(x.shape[0]) if self.down.draws else None]
        drop = None
        if self.plan.dropout > 0:
            drop = torch.empty(x.shape[0], self.output_width, dtype=torch.bool, device=self.device)  # [t, D]
            drop.bernoulli_(1 - self.plan.dropout)
        return self.first.normed(x), masks, drop

    @property
    def _drop_scale(self) -> float:
        return 1 / (1 - self.plan.dropout) if self.plan.dropout < 1 else 0.0

    def _pre_activations(
        self, n: Tensor, masks: Sequence[Tensor | None], *, fresh: bool
    ) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        """``[t, D] ->`` gate and up, ``[t, F]`` each, or ``[t, 2 F]``; and what their adapters' ``A`` make of it."""
        values = []
        for number, layer in enumerate(self.first.layers):
            value = (
                self.kept_value(n.shape[0], layer)
                if fresh
                else self._buffer(("first", number), n.shape[0], layer.width)
            )
            layer.without_adapter(n, value)
            values.append(value)
        return tuple(values), self.first.add_low_rank(n, values, masks)

    def kept_value(self, rows: int, layer: Layer) -> Tensor:
        """Room for one layer's pre-activations of so many tokens that are kept."""
        return torch.empty(rows, layer.width, dtype=self.dtype, device=self.device)

    def _split(self, values: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Gate and up, ``[t, F]`` each; up is None in a plain MLP."""
        if not self.plan.gated:
            return values[0], None
        if len(values) == 2:
            return values[0], values[1]
        first_half, second_half = values[0].chunk(2, dim=-1)  # [t, 2 F] -> two views [t, F]
        return (second_half, first_half) if self.plan.up_first else (first_half, second_half)

    def _output_gradient(
        self, dy: Tensor, drop: Tensor | None, masks: Sequence[Tensor | None], spare: Callable[[int], Tensor],
        gate: Tensor, up: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Gradient of the down projection's output, from that of the block's; a norm after it costs one product."""
        if self.after is not None:
            hidden = spare(0)  # [t, F]
            self._pointwise.forward(self.plan.activation, gate, up, hidden)
            y = torch.empty(dy.shape, dtype=self.dtype, device=self.device)  # [t, D]
            self.down.forward(hidden, y, masks[-1], overwrite=True)
            if drop is not None:
                y.mul_(drop).mul_(self._drop_scale)
            gradient = self.after.gradient(y, dy, needs_rows=True)
            assert gradient is not None
            dy = gradient
        dy = dy.to(self.dtype)
        return dy if drop is None else (dy * drop).mul_(self._drop_scale)

    def _buffer(self, key: Any, rows: int, width: int) -> Tensor:
        """A buffer ``[rows, width]``: the first rows of one for the longest tile, made once, that all tiles share."""
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = torch.empty(self._longest, width, dtype=self.dtype, device=self.device)
        return buffer.narrow(0, 0, rows)
