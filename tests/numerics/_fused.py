"""MLPs for the fused operator, the operator around them, and ways to break it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor, nn
from torch.nn import functional as F

from numerics._blocks import HIDDEN, INTERMEDIATE, assert_same, cut, gradients
from seqtile.ops.grad_accumulator import Sum
from seqtile.ops.linear import Layer
from seqtile.ops.mlp import FusedWeights, fused_mlp
from seqtile.ops.mlp_tile import Pass
from seqtile.recognise.chain import Chain, inputs_of
from seqtile.recognise.live_weights import row_wise
from seqtile.recognise.proof import Mode, prove
from seqtile.recognise.widths import linear_widths


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(
        self, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE, *, bias: bool = True,
        act: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate = nn.Linear(hidden, intermediate, bias=bias)
        self.up = nn.Linear(hidden, intermediate, bias=bias)
        self.down = nn.Linear(intermediate, hidden, bias=bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class GateUpMLP(nn.Module):
    """The same with gate and up in one matrix, in either order."""

    def __init__(
        self, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE, *, bias: bool = True, up_first: bool = False
    ):
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=bias)
        self.down = nn.Linear(intermediate, hidden, bias=bias)
        self.up_first = up_first

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        if self.up_first:
            gate, up = up, gate
        return self.down(up * F.silu(gate))


class Conv1D(nn.Module):
    """GPT-2's linear layer, its weight stored ``[in, out]``."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)


class PlainMLP(nn.Module):
    """``dropout(down(act(up(x))))``."""

    def __init__(
        self, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE, *, bias: bool = True, transposed: bool = False,
        act: Callable[[Tensor], Tensor] = F.gelu, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if transposed:
            self.up: nn.Module = Conv1D(intermediate, hidden)
            self.down: nn.Module = Conv1D(hidden, intermediate)
        else:
            self.up, self.down = nn.Linear(hidden, intermediate, bias), nn.Linear(intermediate, hidden, bias)
        self.act = act
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.act(self.up(x))))


class Between(nn.Module):
    """An MLP with a norm before and after it."""

    def __init__(self, mlp: nn.Module, before: nn.Module | None, after: nn.Module | None) -> None:
        super().__init__()
        self.mlp, self.before, self.after = mlp, before, after

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(x if self.before is None else self.before(x))
        return x if self.after is None else self.after(x)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "gated": GatedMLP,
    "gated without bias": lambda: GatedMLP(bias=False),
    "gate_up": GateUpMLP,
    "gate_up without bias": lambda: GateUpMLP(bias=False),
    "up_gate": lambda: GateUpMLP(up_first=True),
    "plain": PlainMLP,
    "plain without bias": lambda: PlainMLP(bias=False),
    "plain transposed": lambda: PlainMLP(transposed=True),
}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "norm before": lambda: Between(GatedMLP(), nn.RMSNorm(HIDDEN), None),
    "norm after": lambda: Between(GatedMLP(), None, nn.LayerNorm(HIDDEN)),
    "norms around": lambda: Between(GateUpMLP(), nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN)),
    "norms around plain": lambda: Between(PlainMLP(transposed=True), nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN)),
}
ALL = {**KINDS, **NORMS}


def make(kind: str) -> nn.Module:
    """One of :data:`ALL`, with the same random weights each time."""
    torch.manual_seed(0)
    return ALL[kind]()


class Fused(nn.Module):
    """``block`` through the fused operator, in tiles of ``tile`` tokens or of the sizes given."""

    def __init__(self, block: nn.Module, tile: int | Sequence[int], keep: float = 0.0) -> None:
        super().__init__()
        self.block = block
        self.tile, self.keep = tile, keep

    def forward(self, x: Tensor) -> Tensor:
        sizes = cut(x.shape[:-1].numel(), self.tile) if isinstance(self.tile, int) else self.tile
        return fused_mlp(x, weights_of(self.block), sizes, keep=self.keep)


def fused_weights(block: nn.Module, dtype: torch.dtype | None = None) -> FusedWeights | str:
    """The live weights of a lone block for the fused operator, or why it cannot run it, as one call would find them."""
    widths = [found for part in block.modules() if (found := linear_widths(part)) is not None]
    weights = [p for p in block.parameters() if p.is_floating_point()]
    given = dtype or (weights[0].dtype if weights else torch.float32)
    where = next((p.device for p in block.parameters() if not p.is_meta), torch.device("cpu"))
    casts = torch.get_autocast_dtype(where.type) if torch.is_autocast_enabled(where.type) else None
    chain = Chain((("block", block),))
    inputs = ((("b", "s", widths[0][0]), given),) * inputs_of(block)
    proof = prove(chain, Mode(inputs, where, casts), trusted=True)
    if proof.why_not or isinstance(proof.formula, str):
        return proof.why_not or str(proof.formula)
    return proof.formula.weights(chain, given)


def weights_of(block: nn.Module) -> FusedWeights:
    """Live weights of an MLP, alone or between norms."""
    mlp = block.mlp if isinstance(block, Between) else block
    weights = fused_weights(mlp)
    assert not isinstance(weights, str), weights
    norms: dict[str, Any] = {}
    if isinstance(block, Between):
        norms = {name: row_wise(norm) for name in ("before", "after") if (norm := getattr(block, name)) is not None}
        assert not any(isinstance(norm, str) for norm in norms.values()), norms
    return dataclasses.replace(weights, **norms)


def assert_fused_is_untiled(
    block: nn.Module, inputs: Sequence[Tensor], upstream: Any, tile: int | Sequence[int], keep: float = 0.0
) -> None:
    """The checker of most tests: ``block`` through the fused operator against itself untiled."""
    assert_same(gradients(Fused(block, tile, keep), inputs, upstream), gradients(block, inputs, upstream))


def _is_last(rows: Tensor) -> bool:
    return rows.storage_offset() + rows.numel() == rows.untyped_storage().nbytes() // rows.element_size()


def last_tile_dropped(monkeypatch: MonkeyPatch) -> None:
    """The output of the last tile is not what the block computes."""
    forward = Pass.forward

    def mutated(self: Pass, x: Tensor, out: Tensor, **kwargs: Any) -> Any:
        kept = forward(self, x, out, **kwargs)
        if _is_last(out):
            out.zero_()
        return kept

    monkeypatch.setattr(Pass, "forward", mutated)


def _with_gradient(monkeypatch: MonkeyPatch, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    backward = Pass.backward

    def mutated(self: Pass, x: Tensor, dy: Tensor, dx: Tensor | None, kept: Any) -> None:
        backward(self, x, change(x, dy), dx, kept)

    monkeypatch.setattr(Pass, "backward", mutated)


def last_tile_without_gradient(monkeypatch: MonkeyPatch) -> None:
    """The last tile's gradients never reach the weights and the input."""
    _with_gradient(monkeypatch, lambda x, dy: torch.zeros_like(dy) if _is_last(x) else dy)


def upstream_ignored(monkeypatch: MonkeyPatch) -> None:
    """Every gradient of an output counts as ones."""
    _with_gradient(monkeypatch, lambda x, dy: torch.ones_like(dy))


def bias_skipped(monkeypatch: MonkeyPatch) -> None:
    """What is added to a sum without being a product is forgotten after the first tile."""
    add = Sum.add

    def mutated(self: Sum, part: Tensor) -> None:
        if self._total is None:
            add(self, part)

    monkeypatch.setattr(Sum, "add", mutated)


def shifted_by_a_row(monkeypatch: MonkeyPatch) -> None:
    """Every input gradient lands one row off."""
    backward = Pass.backward

    def mutated(self: Pass, x: Tensor, dy: Tensor, dx: Tensor | None, kept: Any) -> None:
        backward(self, x, dy, dx, kept)
        if dx is not None:
            dx.copy_(dx.roll(1, dims=0))

    monkeypatch.setattr(Pass, "backward", mutated)


def last_projection_alone(monkeypatch: MonkeyPatch) -> None:
    """The input's gradient is that of the last projection instead of the sum over both."""
    input_gradient = Layer.input_gradient

    def mutated(self: Layer, dy: Tensor, out: Tensor, low: Any, mask: Any, *, add: bool = False) -> None:
        input_gradient(self, dy, out, low, mask, add=False)

    monkeypatch.setattr(Layer, "input_gradient", mutated)


def low_precision_sums(monkeypatch: MonkeyPatch) -> None:
    """Weight gradients are summed over tiles in the weight's own precision."""
    init = Sum.__init__

    def mutated(self: Sum, tensor: Tensor) -> None:
        init(self, tensor)
        self._low = False

    monkeypatch.setattr(Sum, "__init__", mutated)


COARSE = {
    mutant.__name__: mutant
    for mutant in (
        last_tile_dropped, last_tile_without_gradient, upstream_ignored, bias_skipped, shifted_by_a_row,
        last_projection_alone,
    )
}  # fmt: skip
"""Mutants that any comparison of outputs and gradients of a gated MLP with biases notices."""
