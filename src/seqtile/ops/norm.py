"""RMSNorm and LayerNorm as one kernel forward and one backward, compiled on accelerators.

A norm written in Python is ten passes over fp32 tensors. The kernels read the input and write the result, in fp32
inside, statistics included; the backward reads the input again. What a module computes is recognised by its trace
(:mod:`seqtile.recognise.formula`), which must be that of one of :data:`KNOWN_NORMS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seqtile.ops.kernels import Kernel, Kernels, as_constant, only_compiled, wide

Written = Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]
"""``(rows [..., D], weight [D], bias [D], epsilon) -> [..., D]``."""


@dataclass(frozen=True)
class NormFormula:
    """``scale * (x - mean) / sqrt(variance + epsilon) + bias`` over the last dimension.

    Attributes:
        written: how the module writes it: the plain twin.
        epsilon: added to the variance, or to the mean square.
        weights: how many there are: none, the weight, or weight and bias.
        centred: whether the mean is taken off (LayerNorm).
        plus_one: whether the scale is one plus the weight.
    """

    written: Written
    epsilon: float
    weights: int
    centred: bool = False
    plus_one: bool = False

    def plain(self, rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The module's formula in plain operators."""
        weight, bias = (*weights, None, None)[:2]
        return self.written(rows, weight, bias, self.epsilon)


def _rms(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, *, cast: str = "late", scale: str = "wide",
    power: bool = False,
) -> Tensor:  # fmt: skip
    """The ways in which models write an RMSNorm: when it casts back, and in what dtype it multiplies by its weight."""
    h = x.to(torch.float32)
    square = h.pow(2).mean(-1, keepdim=True) + epsilon  # [..., 1]
    inverse = torch.pow(square, -0.5) if power else torch.rsqrt(square)
    h = (x if cast == "never" else h) * inverse
    if cast == "early":
        h = h.to(x.dtype)
    elif cast == "never" and weight is not None and weight.dtype in (torch.float16, torch.bfloat16):
        h = h.to(weight.dtype)
    if weight is not None:
        h = h * {"wide": weight.float(), "plus_one": 1.0 + weight.float(), "own": weight}[scale]
    h = h if bias is None else h + bias
    return h.to(x.dtype) if cast == "late" else h


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


def _layer_in_python(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    h = x.to(torch.float32)
    mean = h.mean(-1, keepdim=True)  # [..., 1]
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    h = (h - mean) * torch.rsqrt(variance + epsilon)
    h = h if weight is None else weight.to(torch.float32) * h
    return (h if bias is None else h + bias).to(x.dtype)


def _torch_rms(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    h = F.rms_norm(x, x.shape[-1:], weight, epsilon)
    return h if bias is None else h + bias


KNOWN_NORMS: tuple[tuple[Written, dict[str, bool]], ...] = (
    (functools.partial(_rms, cast="early", scale="own"), {}),  # Llama, Qwen, Mistral
    (functools.partial(_rms, scale="own"), {}),  # OLMo
    (functools.partial(_rms, scale="plus_one"), {"plus_one": True}),  # Gemma
    (functools.partial(_rms, power=True), {}),  # Gemma 4
    (_rms, {}),  # Moshi, Helium; Llama 4's without a weight
    (functools.partial(_rms, cast="never", scale="own"), {}),  # T5
    (_torch_rms, {}),
    (_layer_norm, {"centred": True}),
    (_layer_in_python, {"centred": True}),  # Cohere
)
"""How models write their norms, and which formula that is."""


class NormKernels:
    """The compiled kernels, for rows that are contiguous and no wider than fp32."""

    def __init__(self) -> None:
        self._kernels = Kernels("norm")

    @property
    def failed(self) -> bool:
        """Whether the compiler has failed on a kernel, which is not tried again."""
        return bool(self._kernels.failed)

    def forward(self, norm: NormFormula, x: Tensor, weights: Sequence[Tensor], out: Tensor) -> bool:
        """``out = norm(x)``, ``[t, D]``; whether a kernel did it."""
        weight, bias = (*weights, None, None)[:2]
        return self._ran(_build_forward, norm, (x, weight, bias, out))

    def backward(
        self, norm: NormFormula, x: Tensor, dy: Tensor, weights: Sequence[Tensor], dx: Tensor | None,
        sums: Sequence[Tensor | None],
    ) -> bool:  # fmt: skip
        """Write the input's gradient and add those of the weights to their sums; whether a kernel did it.

        Args:
            norm: the formula.
            x: its input, ``[t, D]``.
            dy: gradient of its output, ``[t, D]``.
            weights: weight and bias, as many as there are, ``[D]`` each.
            dx: where the gradient of ``x`` goes, ``[t, D]``, or None.
            sums: fp32 sum of each weight's gradient, None where it is frozen.
        """
        weight = weights[0] if weights else None
        return self._ran(_build_backward, norm, (x, weight, dy, dx, *(*sums, None, None)[:2]))

    def _ran(self, build: Callable[[NormFormula, int], Kernel], norm: NormFormula, buffers: Sequence[Any]) -> bool:
        kinds = []
        bases = []
        for buffer in buffers:
            if buffer is not None and (not buffer.is_contiguous() or buffer.dtype.itemsize > 4):
                return False
            kinds.append(None if buffer is None else buffer.dtype)
            bases.append(None if buffer is None else buffer.data)
        width = buffers[0].shape[-1]
        variant = build, norm, width, *kinds
        return self._kernels.ran(variant, lambda: build(norm, width), bases)


def _normalised(norm: NormFormula, x: Tensor) -> tuple[Tensor, Tensor]:
    """``n = (x - mean) / sqrt(variance + epsilon)`` in fp32, ``[t, D]``, and the inverse root, ``[t, 1]``."""
    h = wide(x)
    h = h - h.mean(-1, keepdim=True) if norm.centred else h
    inverse = torch.rsqrt((h * h).mean(-1, keepdim=True) + norm.epsilon)
    return h * inverse, inverse


def _scaled(norm: NormFormula, n: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return n
    return n * (1 + wide(weight) if norm.plus_one else wide(weight))


def _build_forward(norm: NormFormula, width: int) -> Kernel:
    constant = as_constant(width)

    def norm_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor) -> None:
        only_compiled()
        assert x.shape[1] == int(constant), "one kernel for each width, of any number of rows"
        n, _ = _normalised(norm, x)
        y = _scaled(norm, n, weight)
        out.copy_(y if bias is None else y + wide(bias))

    return norm_forward


def _build_backward(norm: NormFormula, width: int) -> Kernel:
    constant = as_constant(width)

    def norm_backward(
        x: Tensor, weight: Tensor | None, dy: Tensor, dx: Tensor | None, weight_sum: Tensor | None,
        bias_sum: Tensor | None,
    ) -> None:  # fmt: skip
        only_compiled()
        assert x.shape[1] == int(constant), "one kernel for each width, of any number of rows"
        n, inverse = _normalised(norm, x)
        upstream = wide(dy)
        if weight_sum is not None:
            weight_sum.add_((upstream * n).sum(0))  # [t, D] -> [D]
        if bias_sum is not None:
            bias_sum.add_(upstream.sum(0))  # [t, D] -> [D]
        if dx is None:
            return
        dn = _scaled(norm, upstream, weight)  # [t, D]
        change = dn - n * (dn * n).mean(-1, keepdim=True)
        dx.copy_(inverse * (change - dn.mean(-1, keepdim=True) if norm.centred else change))

    return norm_backward


NORM_KERNELS = NormKernels()


BY_DEVICE: dict[str, NormKernels | None] = {"cpu": None, "meta": None}
"""Kernels by type of device, :data:`NORM_KERNELS` for all others: None where the module's own operators run."""
