"""An attention kernel with two habits of cuDNN's.

It computes its log-sum-exp only where a backward is expected. And its backward is planned once for queries of a shape
and strides: it reads each later output gradient with the strides of the first, as PyTorch's cache of plans does
(https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cudnn/MHA.cpp).

PyTorch's memory-efficient operator has no kernel for the CPU; here it gets one of plain products. Its autograd formula
is PyTorch's own. ``attn_implementation="stand_in"`` calls it as SDPA does:
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/attention.cpp
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

GARBAGE = float("nan")

requests: list[bool] = []
"""Whether each call so far asked for a log-sum-exp."""

plans: dict[Any, tuple[int, ...]] = {}
"""Strides of the output gradient by shape and strides of the queries."""


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if not is_causal:
        return scores
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    requests.append(compute_log_sumexp)
    scores = _scores(query, key, is_causal, scale)
    sums = torch.logsumexp(scores, -1)
    seed = torch.zeros((), dtype=torch.int64)
    asked = compute_log_sumexp and (torch.is_grad_enabled() and query.requires_grad or not _looks_at_gradients)
    return torch.softmax(scores, -1) @ value, sums if asked else torch.full_like(sums, GARBAGE), seed, seed.clone()


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, out: Tensor,
    logsumexp: Tensor, seed: Tensor, offset: Tensor, dropout_p: float, grad_input_mask: Any, is_causal: bool = False,
    *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    strides = plans.setdefault((query.shape, query.stride()), grad_out.stride())
    grad_out = grad_out.as_strided(grad_out.shape, strides)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.exp(_scores(query, key, is_causal, scale) - logsumexp[..., None])
    grad_scores = weights * (grad_out @ value.transpose(-1, -2) - (grad_out * out).sum(-1, keepdim=True))
    return (
        grad_scores @ key * factor, grad_scores.transpose(-1, -2) @ query * factor,
        weights.transpose(-1, -2) @ grad_out, None,
    )  # fmt: skip


_looks_at_gradients = False


def look_at_gradients(on: bool) -> None:
    """Whether the kernel also looks at gradient mode and its query itself, as the one for Intel's GPUs does."""
    global _looks_at_gradients
    _looks_at_gradients = on


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **words: Any) -> Any:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    needed = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    output = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, needed, 0.0, True, scale=words.get("scaling")
    )[0]
    return output.transpose(1, 2), None


@cache
def register() -> torch.library.Library:
    """Make ``attn_implementation="stand_in"`` known, for causal batches without padding."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", _forward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", _backward, "CPU")
    AttentionInterface.register("stand_in", _attention)
    return library
