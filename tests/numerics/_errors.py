"""Is a tiled result as good as the untiled one? Judged by the untiled one's own distance from a truth in float64.

Two correct results of one formula differ where their sums run in another order, and by how much depends on the
processor, its libraries and the number of threads. A constant that fits one machine is a bet on its order of summation.
The untiled result's own error is measured on the same machine, with the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

FACTOR = 2.0
"""Errors of two orders of summation are two draws of one distribution: over a tensor their norms are much the same."""

FLOOR = {torch.float64: 8 * 2**-52, torch.float32: 8 * 2**-23, torch.bfloat16: 1e-5, torch.float16: 1e-5}
"""What is allowed beside it, in parts of the truth's norm, where the untiled error is small by luck.

In fp32 and float64 eight units in the last place of a number of that size: tensors here are as small as one number, and
a gradient comes through about as many roundings. In low precision a hundredth or less of the one rounding at the end,
so that the factor decides.
"""

NORMS = {"maximum": lambda t: t.abs().max() if t.numel() else t.new_zeros(()), "L2": torch.linalg.vector_norm}


def assert_no_worse(
    got: Tensor, expected: Tensor, truth: Tensor, *, factor: float = FACTOR, floor: float | None = None,
    name: str = "result",
) -> None:  # fmt: skip
    """``err(got) <= factor * err(expected) + floor * norm(truth)``, in maximum and in L2 norm.

    Args:
        got: the tiled result.
        expected: the untiled result, in the same dtype.
        truth: the same in float64 (or complex128).
        factor: how many times the untiled error is allowed.
        floor: :data:`FLOOR` of the dtype where it is None.
        name: what the result is called.
    """
    assert got.dtype == expected.dtype, f"{name}: got {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape == truth.shape, f"{name}: got {got.shape}, expected {expected.shape}"
    floor = FLOOR[torch.empty((), dtype=got.dtype).real.dtype] if floor is None else floor
    truth = truth.detach()
    for kind, norm in NORMS.items():
        error, untiled = (norm(tensor.detach().to(truth.dtype) - truth) for tensor in (got, expected))
        allowed = factor * untiled + floor * norm(truth)
        assert error <= allowed, f"{name}: off by {error:.3g} in {kind}, allowed {allowed:.3g} (untiled {untiled:.3g})"


def assert_all_no_worse(
    got: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], truth: Mapping[str, Tensor | None],
    *, factor: float = FACTOR, floor: float | None = None,
) -> None:  # fmt: skip
    """:func:`assert_no_worse` for everything of the same name, with ``None`` where the untiled one has it."""
    assert got.keys() == expected.keys() == truth.keys()
    for name, untiled in expected.items():
        ours, true = got[name], truth[name]
        assert (ours is None) == (untiled is None), f"{name}: got {ours}, expected {untiled}"
        if ours is not None and untiled is not None:
            assert true is not None, f"{name}: the truth has none"
            assert_no_worse(ours, untiled, true, factor=factor, floor=floor, name=name)


def in_float64(module: nn.Module) -> nn.Module:
    """A copy that computes the truth; complex parameters become complex128."""
    module = copy.deepcopy(module)
    for part in module.modules():
        for own in (part._parameters, part._buffers):
            for tensor in own.values():
                if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
                    tensor.data = tensor.data.to(torch.complex128 if tensor.is_complex() else torch.float64)
                    if tensor.grad is not None:
                        tensor.grad = None
    return module


class Autocast(nn.Module):
    """The forward under autocast and the backward outside it, as a trainer runs them."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.block = inner
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self.dtype):
            return self.block(x)


assert_as_good = partial(assert_all_no_worse, floor=1e-5)
"""For low precision: ``err(ours) <= 2 err(untiled) + 1e-5 scale``, also for what autocast leaves in fp32."""


def assert_as_exact_in_bf16(
    got: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], truth: Mapping[str, Tensor | None],
    *, factor: float = FACTOR,
) -> None:  # fmt: skip
    """``err(got) <= factor * err(expected) + 1e-5 scale`` for a whole model in bf16, in L2 norm; and in maximum.

    The one element that is furthest off may be rounded the other way twice on its way, so that the maximum may be a
    rounding of the largest element more. A loss is one number, whose own error is often small by luck: it may be off by
    a 32nd of a rounding (2**-13).
    """
    assert got.keys() == expected.keys() == truth.keys()
    failures = []
    for name, true in truth.items():
        ours, own = got[name], expected[name]
        assert (ours is None) == (own is None) == (true is None), name
        if ours is None or own is None or true is None:
            continue
        floor = 2**-13 if true.ndim == 0 else 1e-5
        for norm, rounding in ((torch.linalg.vector_norm, 0.0), (lambda t: t.abs().max(), 2**-8)):
            error, allowed = (norm(one.detach().to(true.dtype) - true) for one in (ours, own))
            most = factor * allowed + (rounding + floor) * norm(true)
            if not error <= most:
                failures.append(f"{name}: {error:.3g}, untiled {allowed:.3g} of {norm(true):.3g}")
    assert not failures, "\n".join(failures)
