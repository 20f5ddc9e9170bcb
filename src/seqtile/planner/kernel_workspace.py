"""Workspace that attention kernels allocate internally."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
_ELEMENTWISE = frozenset(f"aten::{name}{ending}" for name in ("add", "sub", "mul", "div") for ending in ("", "_"))


def cpu_workspace(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Buffers of operators on the CPU: attention's blocks of scores, and copies of operands in another type.

    Flash attention has, per thread, one block of scores in fp32 and one of sums; source:
    ``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp``, ``cpu_flash_attention`` and its backward: blocks of 256, 64
    or 32 queries (from 768, from 192, below) and at most 512 keys. Elementwise operators copy what is not in the common
    type, results too (``aten/src/ATen/TensorIterator.cpp``, ``compute_types``), which no GPU does.
    """
    if name in _ELEMENTWISE:
        return _promoted(args, args[0] if name.endswith("_") else kwargs.get("out"))
    if name not in (_FORWARD, _BACKWARD):
        return 0
    backward = name == _BACKWARD
    query, key = args[1 if backward else 0], args[2 if backward else 1]
    tokens, width = query.shape[-2], query.shape[-1]
    rows = min(256 if tokens >= 768 else 64 if tokens >= 192 else 32, tokens)
    columns = min(512, key.shape[-2])
    low = query.element_size() if query.dtype in (torch.bfloat16, torch.float16) else 0
    if backward:
        numbers = 4 * (2 * rows * columns + rows) + 2 * low * rows * columns
    else:
        numbers = 4 * (rows * columns + 2 * rows + rows * width) + low * rows * columns
    return numbers * torch.get_num_threads()  # type: ignore[no-any-return]


def _promoted(args: tuple[Any, ...], out: Tensor | None) -> int:
    """Bytes of the operands, and of the given result, that are copied to the type that both have in common."""
    operands = [operand for operand in args[:2] if isinstance(operand, Tensor)]
    if len(operands) < 2:
        return 0
    first, second = operands
    # torch.result_type refuses a fake tensor beside a real one, such as a plan's grid of pictures.
    common = first.dtype if first.dtype == second.dtype else torch.result_type(first, second)
    copied = sum(operand.numel() for operand in operands if operand.dtype != common and operand.dim())
    if out is not None and out.dtype != common:
        copied += out.numel()
    return copied * common.itemsize


def flash2_workspace(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Buffers of FlashAttention-2's backward on a GPU, by the shapes of the fake kernel that replaces it.

    The query's gradient is summed in fp32 over lengths rounded up to 128; one fp32 number per query and head; keys'
    and values' gradients are made for every query head and summed afterwards. Source: PyTorch
    ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``, ``mha_bwd`` (2.13).
    """
    if name != _BACKWARD:
        return 0
    query, key = args[1], args[2]
    batch, heads, tokens, width = query.shape
    rounded = -(-tokens // 128) * 128
    padded_width = -(-width // 32) * 32
    sums = 4 * batch * heads * rounded * (padded_width + 1)
    expanded = 2 * key.element_size() * batch * heads * key.shape[-2] * width if key.shape[1] != heads else 0
    return sums + expanded  # type: ignore[no-any-return]


def flash3_workspace(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The same of FlashAttention-3, which sums keys' and values' gradients in fp32 per key-value head.

    Source: Dao-AILab/flash-attention ``hopper/flash_api.cpp``, ``mha_bwd``.
    """
    if name != _BACKWARD:
        return 0
    query, key = args[1], args[2]
    batch, heads, tokens, width = query.shape
    rounded = -(-tokens // 128) * 128
    padded_width = -(-width // 32) * 32
    sums = 4 * batch * heads * rounded * (padded_width + 2)
    shared = 2 * 4 * batch * key.shape[1] * rounded * padded_width if key.shape[1] != heads else 0
    return sums + shared  # type: ignore[no-any-return]
