"""A norm outside the MLP's tile as one autograd node: by its kernel, or over tiles of tokens without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqtile.ops.norm import BY_DEVICE, NORM_KERNELS
from seqtile.ops.normed_linears import Norm, sums_for
from seqtile.ops.rng import Autocast, NormKind, RowWise
from seqtile.ops.token_tiles import refuse_second_derivative, refuse_trace
from seqtile.tiling import tile_ranges


@dataclass(frozen=True)
class _NormPlan:
    """All of one call but its tensors; the autograd node holds it."""

    norm: NormKind
    dtype: torch.dtype
    sizes: tuple[int, ...]
    autocast: Autocast


def fused_norm(x: Tensor, norm: RowWise, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
    """Compute a norm that keeps nothing but its input for the backward.

    Replaces the norm's own forward, which keeps its input and the normalised states in fp32.

    Args:
        x: ``[..., D]`` with ``N`` rows.
        norm: its function, live weights ``[D]`` and formula.
        dtype: dtype of the result.
        sizes: tokens of each tile where there is no kernel, in order; they sum to ``N``.

    Returns:
        ``[..., D]`` in ``dtype``.

    Cost:
        With kernels one pass over the input forward, and backward one for the input's gradient and one for those of the
        weights. Without them the function is computed twice, a tile at a time.

    Raises:
        NotImplementedError: inside ``torch.jit.trace``; a second derivative.
    """
    refuse_trace()
    whole = BY_DEVICE.get(x.device.type, NORM_KERNELS) is not None
    plan = _NormPlan(
        norm.kind(), dtype, (x.shape[:-1].numel(),) if whole else tuple(sizes),
        Autocast.of(x),
    )  # fmt: skip
    return _FusedNorm.apply(plan, x, *norm.weights)  # type: ignore[no-any-return, no-untyped-call]


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _NormPlan, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        norm = Norm(plan.autocast, plan.norm, zip(weights, [None] * len(weights), strict=True))
        rows = x.reshape(-1, x.shape[-1]).contiguous()  # [N, D], as the kernels need it
        if len(plan.sizes) == 1:
            return norm.forward(rows, plan.dtype).view(x.shape)
        out = torch.empty(rows.shape, dtype=plan.dtype, device=x.device)
        for start, size in tile_ranges(plan.sizes):
            out.narrow(0, start, size).copy_(norm.forward(rows.narrow(0, start, size), plan.dtype))
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        refuse_second_derivative()
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        plan: _NormPlan = ctx.plan
        needs_x, *needs = ctx.needs_input_grad[1:]
        x, *weights = ctx.saved_tensors
        sums = sums_for(weights, needs)
        norm = Norm(plan.autocast, plan.norm, zip(weights, sums, strict=True))
        rows, upstream = (tensor.reshape(-1, tensor.shape[-1]).contiguous() for tensor in (x, dy))  # [N, D] each
        dx = torch.empty(rows.shape, dtype=x.dtype, device=x.device) if needs_x else None
        for start, size in tile_ranges(plan.sizes):
            out = None if dx is None else dx.narrow(0, start, size)
            tile = rows.narrow(0, start, size)  # [t, D]
            gradient = norm.gradient(tile, upstream.narrow(0, start, size), needs_rows=needs_x, out=out)
            if out is not None and gradient is not None and gradient is not out:
                out.copy_(gradient)
        return (
            None,
            None if dx is None else dx.view(x.shape),
            *(None if total is None else total.result() for total in sums),
        )
