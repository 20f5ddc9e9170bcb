"""The shapes of Liger's norm and SwiGLU kernels on a fake model, for plans of runs that use them.

What they save and write over is read from Liger-Kernel 0.8.5: ``ops/rms_norm.py`` (the input's gradient over the
output's) and ``ops/swiglu.py`` (both gradients over gate and up).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _NormShapes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, torch.empty_like(ctx.saved_tensors[1])


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gate, up


def use_shapes(model: nn.Module, tiled: bool) -> None:
    """Give every RMS norm, and every untiled gated MLP, of ``model`` a forward with the kernels' shapes."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _norm_of(module)
        elif not tiled and all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
            module.forward = _mlp_of(module)


def _norm_of(module: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        result: Tensor = _NormShapes.apply(x, module.weight)  # type: ignore[no-untyped-call]
        return result

    return forward


def _mlp_of(module: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        result: Tensor = module.down_proj(_Gate.apply(module.gate_proj(x), module.up_proj(x)))  # type: ignore[no-untyped-call]
        return result

    return forward
