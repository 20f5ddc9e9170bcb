"""Plain twins of library functions that no CPU runs.

Liger replaces ``apply_rotary_pos_emb`` of a transformers module by its own, which every forward of that module then
calls. A twin takes its place in a trial on the CPU alone, in a copy of the forward with globals of its own; at run time
the kernel runs. ``tests/numerics/test_known_functions.py`` compares every twin with the kernel in Triton's interpreter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor


def _rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotates the first ``rotary_dim`` of ``[B, H, T, E]`` by the first half of ``cos`` and ``sin``, ``[B, T, R]``.

    Source: https://github.com/linkedin/Liger-Kernel/blob/v0.8.5/src/liger_kernel/ops/rope.py
    """
    half = (min(cos.shape[-1], q.shape[-1]) if rotary_dim is None else rotary_dim) // 2
    cos, sin = (t.squeeze(unsqueeze_dim) if t.dim() == 4 else t for t in (cos, sin))
    cos, sin = (t[..., :half].unsqueeze(-3) for t in (cos, sin))  # [B or 1, 1, T, R / 2]

    def rotate(x: Tensor) -> Tensor:
        first, second = (half_of_x.to(cos.dtype) for half_of_x in (x[..., :half], x[..., half : 2 * half]))
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)

    return rotate(q), rotate(k)


def _rotary_of_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotary(q, k, cos, sin, rotary_dim=q.shape[-1])


TWINS: dict[str, Callable[..., Any]] = {
    "liger_kernel.transformers.rope.liger_rotary_pos_emb": _rotary,
    "liger_kernel.transformers.rope.liger_rotary_pos_emb_gpt_oss": _rotary_of_gpt_oss,
}
"""By module and name. Each of these kernels writes into contiguous arguments."""


def twins_for(forward: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The twins of known kernels in the module of ``forward``, by the name that they have there."""
    twins = {}
    for name, value in getattr(inspect.unwrap(forward), "__globals__", {}).items():
        if isinstance(value, FunctionType):
            twin = TWINS.get(f"{value.__module__}.{value.__qualname__}")
            if twin is not None:
                twins[name] = twin
    return twins


def with_twins(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, or a copy of it that calls twins where its module has known kernels."""
    twins = twins_for(forward)
    if not twins:
        return forward
    function: Any = inspect.unwrap(forward)
    copy = FunctionType(
        function.__code__, {**function.__globals__, **twins}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
