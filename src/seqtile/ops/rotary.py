"""Rotary embeddings of queries and keys as one kernel each forward and backward, compiled on accelerators.

Written in Python they are five passes over queries and keys forward and ten backward. The kernel reads and writes once,
in fp32 inside. Which function of a model computes this is known by a trial (:mod:`seqtile.recognise.known_functions`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqtile._compat import PLAIN
from seqtile.ops.kernels import Kernel, Kernels, as_constant, only_compiled, wide
from seqtile.ops.token_tiles import refuse_second_derivative


def plain_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x * cos + cat([-x2, x1]) * sin`` of ``[B, T, H, E]``, with ``cos`` and ``sin`` ``[B or 1, T, E]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(2) + torch.cat([-second, first], -1) * sin.unsqueeze(2)


def plain_gradient(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of :func:`plain_rotary`'s ``x``."""
    first, second = (dy * sin.unsqueeze(2)).chunk(2, dim=-1)
    return dy * cos.unsqueeze(2) + torch.cat([second, -first], -1)


class RotaryKernels:
    """The compiled kernels, for contiguous tensors no wider than fp32."""

    def __init__(self) -> None:
        self._kernels = Kernels("rotary")

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, backward: bool) -> bool:
        """Write :func:`plain_rotary` of ``x``, or of a gradient its gradient, to ``out``; whether a kernel did it."""
        buffers = (x, cos, sin, out)
        if any(not buffer.is_contiguous() or buffer.dtype.itemsize > 4 for buffer in buffers):
            return False
        kinds = [buffer.dtype for buffer in buffers]
        # Sizes of one are compiled apart.
        ones = [size == 1 for size in (*x.shape[:3], cos.shape[0])]
        variant = backward, x.shape[-1], *kinds, *ones
        bases = [buffer.data for buffer in buffers]
        return self._kernels.ran(variant, lambda: _build_rotary(x.shape[-1], backward), bases)


def _build_rotary(width: int, backward: bool) -> Kernel:
    formula, constant = plain_gradient if backward else plain_rotary, as_constant(width)

    def rotary(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        only_compiled()
        assert x.shape[-1] == int(constant), "one kernel for each width, of any number of rows"
        out.copy_(formula(wide(x), wide(cos), wide(sin)))

    return rotary


ROTARY_KERNELS = RotaryKernels()

ROTARY_BY_DEVICE: dict[str, RotaryKernels | None] = {"cpu": None, "meta": None}
"""Kernels by type of device, :data:`ROTARY_KERNELS` for all others: None where the model's own function runs."""


def has_rotary_kernel(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Whether :func:`rotary` computes these arguments of a model's function."""
    tensors = (q, k, cos, sin)
    if any(type(tensor) not in PLAIN for tensor in tensors) or torch.compiler.is_compiling():
        return False
    if ROTARY_BY_DEVICE.get(q.device.type, ROTARY_KERNELS) is None or not q.numel():
        return False
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape or cos.requires_grad:
        return False
    fits = cos.shape[0] in (1, q.shape[0]) and cos.shape[1] == q.shape[2] == k.shape[2]
    return bool(fits and cos.shape[-1] == q.shape[-1] == k.shape[-1] and q.shape[-1] % 2 == 0)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, casts_back: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys.

    Replaces ``apply_rotary_pos_emb(q, k, cos, sin)`` of models that rotate the halves of a head.

    Args:
        q: ``[B, H, T, E]``, any strides.
        k: ``[B, K, T, E]``.
        cos: ``[B or 1, T, E]``, without a gradient.
        sin: the same.
        casts_back: the result has the dtype of ``q`` and ``k`` (OLMo), not that of their product with ``cos``.

    Returns:
        Both rotated.

    Cost:
        One pass over each forward and one backward; ``cos`` and ``sin`` are kept.

    Raises:
        NotImplementedError: a second derivative.
    """
    dtypes = [x.dtype if casts_back else torch.result_type(x, cos) for x in (q, k)]
    return _Rotary.apply(q, cos, sin, dtypes[0]), _Rotary.apply(k, cos, sin, dtypes[1])  # type: ignore[no-untyped-call]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)
        return _rotated(x, cos, sin, dtype, backward=False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        refuse_second_derivative()
        if dy is None:
            return None, None, None, None
        cos, sin = ctx.saved_tensors
        return _rotated(dy, cos, sin, ctx.dtype, backward=True), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, *, backward: bool) -> Tensor:
    rows = x.transpose(1, 2).contiguous()  # [B, T, H, E]: as the projections made it
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(rows.shape, dtype=dtype, device=x.device)
    kernels = ROTARY_BY_DEVICE.get(x.device.type, ROTARY_KERNELS)
    if kernels is None or not kernels.run(rows, cos, sin, out, backward=backward):
        out.copy_((plain_gradient if backward else plain_rotary)(rows, cos, sin))
    return out.transpose(1, 2)
