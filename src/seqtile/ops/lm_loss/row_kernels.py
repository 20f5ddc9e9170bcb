"""Runs a function over the rows of a tile of logits: as one compiled kernel, or eagerly over blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from seqtile._compat import FakeTensor, PlanMode
from seqtile.ops.grad_accumulator import accelerator_meant
from seqtile.ops.kernels import Kernel, Kernels, as_constant, only_compiled

BLOCK_ELEMENTS = {"cpu": 2**20}
"""Elements of one block of rows, of which a function holds two or three fp32 copies: in the cache of a CPU core;
elsewhere 2**25, enough to fill a device."""

KERNELS_BY_DEVICE: dict[str, Kernels | None] = {"cpu": None, "meta": None}
"""Kernels by type of device, :data:`HEAD_KERNELS` for all others: None where everything runs eagerly."""

HEAD_KERNELS = Kernels("language-model head")


def blocks_of_rows(y: Tensor) -> Iterator[slice]:
    """Blocks of the rows of ``y`` ``[t, V]`` for what holds fp32 copies of them."""
    rows, vocabulary = y.shape
    step = max(1, BLOCK_ELEMENTS.get(y.device.type, 2**25) // max(1, vocabulary))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
        if isinstance(y, FakeTensor) and isinstance(y.fake_mode, PlanMode):
            return  # nothing is written, and each block takes as much memory as the first one


def run_over_rows(
    function: Callable[..., None], formula: Any, rows: Sequence[Tensor | None], constants: Sequence[Tensor | None] = ()
) -> None:
    """Call ``function(formula, *rows, *constants)``, which writes in place.

    Args:
        function: computes each row for itself.
        formula: hashable, what a kernel is compiled for; it tells the width of a row.
        rows: tensors of ``t`` rows each, the first of them ``[t, V]``; None for those that are not there.
        constants: tensors that all rows share.
    """
    y = rows[0]
    assert y is not None
    if accelerator_meant():
        return  # fake tensors: a kernel holds nothing, and there is nothing to write
    kernels = KERNELS_BY_DEVICE.get(y.device.type, HEAD_KERNELS)
    tensors = (*rows, *constants)
    if kernels is not None and all(t is None or t.is_contiguous() for t in tensors):
        kinds = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
        variant = function, formula, y.shape[1], kinds
        bases = [None if tensor is None else tensor.data for tensor in tensors]
        if kernels.ran(variant, lambda: _build_rows(function, formula, y.shape[1]), bases):
            return
    for block in blocks_of_rows(y):
        function(formula, *(None if tensor is None else tensor[block] for tensor in rows), *constants)


def _build_rows(function: Callable[..., None], formula: Any, width: int) -> Kernel:
    constant = as_constant(width)

    def head_rows(*tensors: Tensor | None) -> None:
        only_compiled()
        y = tensors[0]
        assert y is not None
        assert y.shape[1] == int(constant), "one kernel for each vocabulary, of any number of rows"
        function(formula, *tensors)

    return head_rows
