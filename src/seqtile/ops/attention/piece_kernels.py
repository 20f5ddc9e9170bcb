"""Attention of some queries to some of their keys: output and log-sum-exp, so that pieces can be joined.

A kernel's backward takes the output and the log-sum-exp of *all* pieces. Its probabilities are then those of the whole
row, and its gradients are exact parts of the whole's: nothing is rescaled.

Shapes: q [B, H, t, E], k and v [B, K, s, E], bias [B or 1, 1 or H, t, s], log-sum-exp [B, H, t] in fp32 (float64 for
float64). Here K divides H, and v may be narrower than k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from seqtile._compat import CUDNN, CUDNN_BACKWARD, FLASH_CPU, FLASH_CPU_BACKWARD, FLASH_CUDA, FLASH_CUDA_BACKWARD
from seqtile.devices import compute_capability
from seqtile.ops.attention.backends import CUDNN_FIRST
from seqtile.ops.grad_accumulator import LOW, accelerator_meant

HIDDEN = -1e30
"""Log-sum-exp of a query that sees no key: no infinity, which would make NaNs of differences."""

PLAIN_SCORES = 2**26
"""Scores that :class:`Plain` has at once."""


class Piece(NamedTuple):
    """What a kernel computes besides its operands.

    Attributes:
        scale: factor of the scores.
        causal: queries and keys are the same tokens, and each query sees those up to its own.
        bias: added to the scores, or None.
        softcap: the scores' bound, 0 for none: ``softcap * tanh(score / softcap)``.
    """

    scale: float
    causal: bool
    bias: Tensor | None = None
    softcap: float = 0.0


def forward(q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
    """(output [B, H, t, v's width], log-sum-exp) of one piece."""
    kernel, width = _kernel(q, k, piece), v.shape[-1]
    if kernel is not Plain and width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))  # fused kernels have one width
    output, lse = kernel.forward(q, k, v, piece)
    if piece.bias is not None:  # a row that sees no key: kernels return 0 or an infinity
        lse = lse.masked_fill((piece.bias == -torch.inf).all(-1), HIDDEN)
    return output[..., :width], lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, piece: Piece
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by one piece.

    Args:
        grad: gradient of the joined output.
        q: queries.
        k: keys of the piece.
        v: values of the piece.
        output: joined over all pieces.
        lse: likewise.
        piece: as in the forward.
    """
    kernel, width = _kernel(q, k, piece), v.shape[-1]
    if kernel is not Plain and width < q.shape[-1]:
        v, output, grad = (F.pad(x, (0, q.shape[-1] - width)) for x in (v, output, grad))
    dq, dk, dv = kernel.backward(grad, q, k, v, output, lse, piece)
    return dq, dk, dv[..., :width]


def join(output: Tensor, lse: Tensor, of_piece: Tensor, lse_of_piece: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over two sets of keys, from those over each; outputs are fp32 from here on."""
    joined = torch.logaddexp(lse, lse_of_piece)
    output = output * (lse - joined).exp()[..., None]
    return output.addcmul_(of_piece.to(output.dtype), (lse_of_piece - joined).exp()[..., None]), joined


def _kernel(q: Tensor, k: Tensor, piece: Piece) -> type[Plain]:
    if piece.softcap:
        return Plain
    if q.device.type == "cpu":
        return Plain if piece.bias is not None and accelerator_meant() else Cpu
    if q.device.type == "cuda" and piece.bias is None and q.dtype in LOW and q.shape[-1] % 8 == 0:
        capability = compute_capability()
        if capability is not None and capability[0] in CUDNN_FIRST and q.shape[-1] <= 128:
            return CuDnn
        if q.shape[-1] <= 256:
            return Flash
    return Plain


class Plain:
    """Products and a softmax in fp32, for what no fused kernel takes: a bias on CUDA, a soft cap, wide heads."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        output = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=_sum_dtype(q.dtype))
        lse = q.new_empty(q.shape[:-1], dtype=_sum_dtype(q.dtype))
        for heads, group in _groups(q, k):
            scores, _ = _scores(q[:, heads], k[:, group], piece, heads)
            row = torch.logsumexp(scores, -1).clamp_(min=HIDDEN)
            lse[:, heads] = row
            output[:, heads] = scores.sub_(row[..., None]).exp_() @ v[:, group].to(scores.dtype)
        return output, lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, piece: Piece
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq = torch.empty_like(q, dtype=_sum_dtype(q.dtype))
        dk, dv = (torch.zeros_like(x, dtype=_sum_dtype(x.dtype)) for x in (k, v))
        for heads, group in _groups(q, k):
            scores, slope = _scores(q[:, heads], k[:, group], piece, heads)
            weights = scores.sub_(lse[:, heads, :, None]).exp_()
            wide = grad[:, heads].to(weights.dtype)
            dv[:, group] += (weights.mT @ wide).sum(1, keepdim=True)
            delta = (wide * output[:, heads].to(weights.dtype)).sum(-1, keepdim=True)
            dscores = (wide @ v[:, group].to(weights.dtype).mT).sub_(delta).mul_(weights).mul_(piece.scale)
            if slope is not None:
                dscores.mul_(slope)
            dq[:, heads] = dscores @ k[:, group].to(weights.dtype)
            dk[:, group] += (dscores.mT @ q[:, heads].to(weights.dtype)).sum(1, keepdim=True)
        return dq.to(q.dtype), dk, dv


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in LOW else dtype


def _groups(q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    """(query heads, their key head): as many at once as :data:`PLAIN_SCORES` allows, one key head each."""
    per_key = q.shape[1] // k.shape[1]
    step = max(1, min(per_key, PLAIN_SCORES // max(1, q.shape[0] * q.shape[2] * k.shape[2])))
    return [
        (slice(head, min(head + step, (key + 1) * per_key)), slice(key, key + 1))
        for key in range(k.shape[1])
        for head in range(key * per_key, (key + 1) * per_key, step)
    ]


def _scores(q: Tensor, k: Tensor, piece: Piece, heads: slice) -> tuple[Tensor, Tensor | None]:
    """Scores of some heads in fp32, and the derivative of their soft cap."""
    wide, slope = _sum_dtype(q.dtype), None
    scores = (q.to(wide) @ k.to(wide).mT).mul_(piece.scale)
    if piece.softcap:
        scores = torch.tanh(scores.div_(piece.softcap))
        slope = 1 - scores.square()
        scores = scores.mul_(piece.softcap)
    if piece.causal:
        rows, columns = scores.shape[-2:]
        scores.masked_fill_(scores.new_ones(rows, columns, dtype=torch.bool).triu_(1), -torch.inf)
    if piece.bias is not None:
        scores += piece.bias if piece.bias.shape[1] == 1 else piece.bias[:, heads]
    return scores, slope


class Cpu(Plain):
    """PyTorch's own kernel; takes grouped keys as they are, a bias, and any floating dtype."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        output, lse = FLASH_CPU(q, k, v, 0.0, piece.causal, attn_mask=piece.bias, scale=piece.scale)
        return output, lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, piece: Piece
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor, Tensor] = FLASH_CPU_BACKWARD(
            grad, q, k, v, output, lse, 0.0, piece.causal, attn_mask=piece.bias, scale=piece.scale
        )
        return gradients


class Flash(Plain):
    """FlashAttention-2 as PyTorch ships it, for half precision without a bias."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        output, lse, *_ = FLASH_CUDA(q, k, v, 0.0, piece.causal, False, scale=piece.scale)
        return output, lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, piece: Piece
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # sequence starts and the seed of a dropout
        gradients: tuple[Tensor, Tensor, Tensor] = FLASH_CUDA_BACKWARD(
            grad, q, k, v, output, lse, unused, unused, q.shape[2], k.shape[2], 0.0, piece.causal,
            torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, dtype=torch.uint64, device=q.device),
            scale=piece.scale,
        )  # fmt: skip
        return gradients


class CuDnn(Plain):
    """cuDNN's kernel, nearly twice as fast as FlashAttention-2 on Hopper and Blackwell."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        output, lse, *_ = CUDNN(q, k, v, None, True, 0.0, piece.causal, False, scale=piece.scale)
        return output, lse.reshape(q.shape[:-1])

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, piece: Piece
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.zeros(2, dtype=torch.int64, device=q.device)
        gradients: tuple[Tensor, Tensor, Tensor] = CUDNN_BACKWARD(
            grad, q, k, v, output, lse[..., None], seed[:1], seed[1:], None, None, None, q.shape[2], k.shape[2],
            0.0, piece.causal, scale=piece.scale,
        )  # fmt: skip
        return gradients


def score_arguments(kwargs: Mapping[str, Any], width: int, implementation: str) -> dict[str, Any]:
    """Scale, soft cap and sinks among the arguments of a call of one of Transformers' attention functions."""
    scaling = kwargs.get("scaling")
    if implementation == "sdpa":  # ignores soft caps and sinks
        kwargs = {}
    scale = 1 / math.sqrt(width) if scaling is None else float(scaling)
    return {"scale": scale, "softcap": kwargs.get("softcap") or 0.0, "sinks": kwargs.get("s_aux")}
