"""Ways to break the operator. A checker that does not notice each of them checks nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from pytest import MonkeyPatch
from torch import Tensor

from seqtile.ops.grad_accumulator import Sum
from seqtile.ops.tile_checkpoint import TileGradients, TileSource
from seqtile.ops.token_tiles import Cuts, Outputs

Mutant = Callable[[MonkeyPatch], None]


def last_tile_dropped(monkeypatch: MonkeyPatch) -> None:
    """The output of the last tile is never written."""
    write = Outputs.write

    def mutated(self: Outputs, index: int, result: object) -> list[Tensor]:
        tensors = write(self, index, result)
        if index == len(self.cuts.sizes) - 1:
            for buffer in self.buffers:
                buffer.view(-1, buffer.shape[-1])[self.cuts.ranges[index][0] :] = 0
        return tensors

    monkeypatch.setattr(Outputs, "write", mutated)


def last_tile_without_gradient(monkeypatch: MonkeyPatch) -> None:
    """The last tile's gradients never reach the weights and the input."""
    of_output = TileGradients.of_output

    def mutated(self: TileGradients, index: int) -> Iterator[Tensor | None]:
        for gradient in of_output(self, index):
            last = index == len(self.cuts.sizes) - 1
            yield torch.zeros_like(gradient) if last and gradient is not None else gradient

    monkeypatch.setattr(TileGradients, "of_output", mutated)


def upstream_ignored(monkeypatch: MonkeyPatch) -> None:
    """Every gradient of an output counts as ones."""
    begin = TileGradients.begin

    def mutated(self: TileGradients, outputs: tuple[Tensor | None, ...]) -> None:
        begin(self, tuple(None if grad is None else torch.ones_like(grad) for grad in outputs))

    monkeypatch.setattr(TileGradients, "begin", mutated)


def bias_skipped(monkeypatch: MonkeyPatch) -> None:
    """Biases get no gradient from any tile but the first."""
    sum_of = TileGradients.sum_of

    def mutated(self: TileGradients, name: str, weight: Tensor) -> Sum:
        forgotten = name.endswith("bias") and name in self.sums
        return Sum(weight) if forgotten else sum_of(self, name, weight)

    monkeypatch.setattr(TileGradients, "sum_of", mutated)


def low_precision_sums(monkeypatch: MonkeyPatch) -> None:
    """Weight gradients are summed over tiles in the weight's own precision."""
    init = Sum.__init__

    def mutated(self: Sum, tensor: Tensor) -> None:
        init(self, tensor)
        self._low = False

    monkeypatch.setattr(Sum, "__init__", mutated)


def shifted_by_a_row(monkeypatch: MonkeyPatch) -> None:
    """Every input gradient lands one row off."""
    write_input = TileGradients.write_input

    def mutated(self: TileGradients, number: int, index: int, gradient: Tensor) -> None:
        write_input(self, number, index, gradient.roll(1, dims=-2))

    monkeypatch.setattr(TileGradients, "write_input", mutated)


def cut_along_the_length(monkeypatch: MonkeyPatch) -> None:
    """Tiles come from a transposed view, as if the batch were cut along its length: right for one sequence only."""
    rows = Cuts.rows

    def mutated(tensors: list[Tensor]) -> list[Tensor]:
        return rows([tensor.transpose(0, 1) if tensor.dim() == 3 else tensor for tensor in tensors])

    monkeypatch.setattr(Cuts, "rows", staticmethod(mutated))


def inputs_kept(monkeypatch: MonkeyPatch) -> None:
    """The recompute's closure keeps the inputs alive after the forward."""
    end_forward = TileSource.end_forward

    def mutated(self: TileSource) -> Tensor:
        live = self._live
        last = end_forward(self)
        self._live = live
        return last

    monkeypatch.setattr(TileSource, "end_forward", mutated)


COARSE: dict[str, Mutant] = {
    mutant.__name__: mutant
    for mutant in (last_tile_dropped, last_tile_without_gradient, upstream_ignored, bias_skipped, shifted_by_a_row)
}
"""Mutants that any comparison of outputs and gradients notices."""
