"""Library functions whose formula is known: plain twins of kernels that no CPU runs, and rotary embeddings.

Liger replaces ``apply_rotary_pos_emb`` of a transformers module by its own, which every forward of that module then
calls. A trial on the CPU calls a twin instead, in a copy of the forward with globals of its own; at run time the kernel
runs. ``tests/numerics/test_known_functions.py`` compares every twin with the kernel in Triton's interpreter.

If a trial shows that a model's own ``apply_rotary_pos_emb`` rotates the halves of a head, such a copy calls
:func:`seqtile.ops.rotary.rotary` instead. The library's module is not changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from seqtile.ops.rotary import has_rotary_kernel, plain_rotary, rotary
from seqtile.recognise.known_code import is_known
from seqtile.recognise.trace import in_a_thread


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
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([rotated.to(x.dtype), x[..., 2 * half :]], -1)

    return rotate(q), rotate(k)


def _rotary_of_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotary(q, k, cos, sin, rotary_dim=q.shape[-1])


TWINS: dict[str, Callable[..., Any]] = {
    "liger_kernel.transformers.rope.liger_rotary_pos_emb": _rotary,
    "liger_kernel.transformers.rope.liger_rotary_pos_emb_gpt_oss": _rotary_of_gpt_oss,
}
"""Twins by the kernel's module and name. Each of these kernels overwrites contiguous arguments."""


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
    return _with_globals(inspect.unwrap(forward), twins)


def _with_globals(function: Any, replaced: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of a function with some globals of its own, and the others as they are now."""
    copy = FunctionType(
        function.__code__, {**function.__globals__, **replaced}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


ROTARY = "apply_rotary_pos_emb"

_RENAMES_ARGUMENTS = "transformers.utils.deprecation"
"""The module of the wrapper that renames arguments: since 5.24 every attention's forward is in one, for its cache."""


def with_rotary(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, or a copy of it whose rotary embedding runs by a kernel where there is one."""
    if not isinstance(forward, FunctionType) or not is_known(forward):
        return forward
    inner: Any = forward
    while hasattr(inner, "__wrapped__") and inner.__globals__.get("__name__") == _RENAMES_ARGUMENTS:
        inner = inner.__wrapped__  # transformers' own layers pass the new names
    if hasattr(inner, "__wrapped__"):
        return forward
    function = inner.__globals__.get(ROTARY) if ROTARY in inner.__code__.co_names else None
    if not isinstance(function, FunctionType) or not rotates_halves(function):
        return forward
    casts_back = rotates_halves(function) == CASTS_BACK

    def call(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if args or kwargs or not has_rotary_kernel(q, k, cos, sin):
            return function(q, k, cos, sin, *args, **kwargs)  # type: ignore[no-any-return]
        return rotary(q, k, cos, sin, casts_back=casts_back)

    return _with_globals(inner, {ROTARY: call})


PROMOTES, CASTS_BACK = "promotes", "casts back"


@cache
def rotates_halves(function: Callable[..., Any]) -> str:
    """Whether a library's function of (q, k, cos, sin) is the known one, by a trial on a few numbers; "" if it is not.

    Its result has the dtype of queries times tables (:data:`PROMOTES`) or of the queries (:data:`CASTS_BACK`).
    """
    return str(in_a_thread(partial(_rotates_halves, function))) if is_known(function) else ""


def _rotates_halves(function: Callable[..., Any]) -> str:
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():
        for rows in (1, 2):
            shapes = (2, 3, 5, 8), (2, 1, 5, 8), (rows, 5, 8), (rows, 5, 8)
            q, k, cos, sin = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
            expected = [plain_rotary(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k)]
            try:
                results = function(q, k, cos, sin)
                if len(results) != 2 or not all(map(torch.allclose, results, expected)):
                    return ""
                dtypes = {result.dtype for result in function(q.bfloat16(), k.bfloat16(), cos.float(), sin.float())}
            except Exception:  # noqa: BLE001 - it takes other arguments
                return ""
    return {torch.float32: PROMOTES, torch.bfloat16: CASTS_BACK}[dtypes.pop()] if len(dtypes) == 1 else ""
