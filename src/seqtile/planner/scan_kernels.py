"""Allocations of the fast kernels of layers with a state, read from their sources, not measured.

Each class replaces one ``torch.autograd.Function`` of a kernel library: it makes the tensors that one makes, in its
order, keeps what it saves, lets go where it lets go, and computes nothing. Sources: flash-linear-attention 0.5.2
(``fla/ops/gated_delta_rule/chunk.py``, ``fla/ops/kda/chunk.py``), mamba-ssm 2.3.2
(``mamba_ssm/ops/triton/ssd_combined.py``, ``mamba_ssm/ops/selective_scan_interface.py``), causal-conv1d. Left out:
copies for alignment, workspaces of autotuning, and buffers that grow with the number of multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK = 64
"""Tokens a chunk in flash-linear-attention."""
_SCAN_CHUNK = 2048
"""Tokens between two states that ``selective_scan_cuda`` keeps."""

SOURCES: dict[str, str] = {
    "Gated DeltaNet": "flash-linear-attention 0.5.2 and causal-conv1d",
    "KDA": "flash-linear-attention 0.5.2 and causal-conv1d",
    "Mamba-2": "mamba-ssm 2.3.2 and causal-conv1d",
    "Mamba": "mamba-ssm 2.3.2 and causal-conv1d",
    "short convolution": "causal-conv1d",
}
"""The library whose allocations model each kind of state; other kinds have PyTorch paths only."""


class _DeltaRule(torch.autograd.Function):
    """``ChunkGatedDeltaRuleFunction`` (``g`` per head) and ``ChunkKDAFunction`` (``g`` per channel).

    Shapes: q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV] or [B, T, HV, K]; beta [B, T, HV]; the state before the
    sequence, if there is one, and the one after it, if it is asked for, [B, HV, K, V] in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, has_final: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in (q, k, v, g, beta)]
        inputs = [tensor.contiguous() for tensor in (q, k, v, g, beta)]
        q, k, v, g, beta = inputs
        q, k, norms = torch.empty_like(q), torch.empty_like(k), [_numbers(q), _numbers(k)]
        rows, width, channels = v.shape[:-1], v.shape[-1], k.shape[-1]  # [B, T, HV], V, K
        per_channel = g.dim() == 4
        g_sum = torch.empty_like(g, dtype=torch.float32)
        scores = [k.new_empty(*rows, CHUNK) for _ in range(2 if per_channel else 1)]
        inverse = torch.empty(*rows, 16, dtype=torch.float32) if per_channel else None
        w, u = k.new_empty(*rows, channels), torch.empty_like(v)
        gated = k.new_empty(*rows, channels) if per_channel else None
        states, v_new = _states(k, rows, channels, width), torch.empty_like(u)
        final = torch.empty(rows[0], rows[2], channels, width, dtype=torch.float32) if has_final else None
        output = torch.empty_like(v)
        del w, u, states, v_new, inverse, gated, inputs
        state_tensors = [] if state is None else [state]
        ctx.save_for_backward(q, k, *norms, v, g_sum, *([g] if per_channel else []), beta, *scores, *state_tensors)
        ctx.per_channel, ctx.state = per_channel, None if state is None else (state.shape, state.dtype)
        return output, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, _, _, v, g, *other_grads = ctx.saved_tensors
        rows, width, channels = v.shape[:-1], v.shape[-1], k.shape[-1]
        sums = torch.float32 if ctx.per_channel else k.dtype
        w, u = k.new_empty(*rows, channels), torch.empty_like(v)
        gated = [k.new_empty(*rows, channels) for _ in range(2)] if ctx.per_channel else []
        states, v_new = _states(k, rows, channels, width), torch.empty_like(u)
        d_scores = [torch.empty(*rows, CHUNK, dtype=torch.float32)] if ctx.per_channel else []
        dv = torch.empty_like(v)
        d_states, dv2 = _states(k, rows, channels, width), torch.empty_like(v)
        dv = dv2
        dq, dk = (torch.empty(*rows, channels, dtype=sums) for _ in range(2))
        if ctx.per_channel:
            dv, dg = torch.empty_like(v), torch.empty_like(g)
            d_scores.append(torch.empty(*rows, CHUNK, dtype=torch.float32))
            dq2, dk2, dg2 = torch.empty_like(dq), torch.empty_like(dk), torch.empty_like(dg)
            dq, dk, dg = dq2, dk2, dg2
            dg = torch.empty_like(dg)
        else:
            dg, dw = torch.empty(-(-channels // CHUNK), *g.shape, dtype=torch.float32), torch.empty_like(w)
            dg, dq, dk = torch.empty_like(g), _summed(dq, q), _summed(dk, k)
            dk2, dv = k.new_empty(*rows, channels), torch.empty_like(v)
            del dw, dk2
        del w, u, gated, states, v_new, d_scores, d_states, dv2, other_grads
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        d_state = None if ctx.state is None else torch.empty(ctx.state[0], dtype=ctx.state[1])
        return dq, dk, dv, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.like[3:]), d_state, None


def _states(k: Tensor, rows: Any, channels: int, width: int) -> Tensor:
    """A state of [K, V] for each head and chunk."""
    batch, tokens, heads = rows
    return k.new_empty(batch, -(-tokens // CHUNK), heads, channels, width)


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    """Gradients of value heads that share a key head are summed in a tensor of their own."""
    return grad if grad.shape == like.shape else torch.empty_like(like)


def _numbers(x: Tensor) -> Tensor:
    """One fp32 number a row."""
    return torch.empty(x.shape[:-1], dtype=torch.float32)


class _Mamba2(torch.autograd.Function):
    """``MambaSplitConv1dScanCombinedFn``: convolution, scan, gated norm and ``out_proj`` in one.

    Shapes: zxbcdt [B, T, 2 * D + 2 * G * N + H]; conv1d_weight [D + 2 * G * N, 4]; outproj_weight [hidden, D].
    """

    @staticmethod
    def forward(
        ctx: Any, sizes: tuple[int, int, int, int], zxbcdt: Tensor, conv_weight: Tensor, out_weight: Tensor,
        *others: Tensor | None,
    ) -> Tensor:  # fmt: skip
        chunk, heads, head_width, groups = sizes
        ctx.sizes, ctx.others = sizes, [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in others]
        batch, tokens = zxbcdt.shape[:2]
        chunks, width = -(-tokens // chunk), heads * head_width
        channels = (conv_weight.shape[0] - width) // groups // 2
        mixed = zxbcdt.new_empty(batch, tokens, conv_weight.shape[0])
        decays = [torch.empty(batch, heads, chunks, chunk, dtype=torch.float32) for _ in range(2)]
        states = torch.empty(batch, chunks, heads, head_width, channels, dtype=torch.float32)
        states = torch.empty_like(states, dtype=zxbcdt.dtype)
        scores = torch.empty(batch, chunks, groups, chunk, chunk, dtype=torch.float32)
        scanned = zxbcdt.new_empty(batch, tokens, width)
        del states, scores
        normed, scale = torch.empty_like(scanned), torch.empty(batch * tokens * groups, dtype=torch.float32)
        output = zxbcdt.new_empty(batch, tokens, out_weight.shape[0])
        del mixed, decays, normed
        ctx.save_for_backward(zxbcdt, conv_weight, scanned, scale, out_weight)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        zxbcdt, conv_weight, scanned, _, out_weight = ctx.saved_tensors
        chunk, heads, head_width, groups = ctx.sizes
        batch, tokens, width = scanned.shape
        chunks = -(-tokens // chunk)
        channels = (conv_weight.shape[0] - width) // groups // 2
        again = torch.empty_like(scanned)
        mixed = zxbcdt.new_empty(batch, tokens, conv_weight.shape[0])
        d_input, d_mixed = torch.empty_like(zxbcdt), torch.empty_like(mixed)
        d_normed = torch.empty_like(scanned)
        d_scanned = torch.empty_like(scanned)
        decays = [torch.empty(batch, heads, chunks, chunk, dtype=torch.float32) for _ in range(2)]
        scores = torch.empty(batch, chunks, groups, chunk, chunk, dtype=torch.float32)
        states = torch.empty(batch, chunks, heads, head_width, channels, dtype=torch.float32)
        states = torch.empty_like(states)
        d_states = torch.empty_like(states)
        d_low, low = (torch.empty_like(states, dtype=zxbcdt.dtype) for _ in range(2))
        d_states, states = d_low, low
        d_decays = [torch.empty(batch, heads, chunks, chunk, dtype=torch.float32)]
        d_keys = [torch.empty(batch, tokens, 1, groups, channels, dtype=torch.float32) for _ in range(2)]
        d_scores = torch.empty_like(scores)
        del decays, scores, states, d_states, d_low, low, d_decays, d_keys, d_scores
        d_weight = torch.empty_like(out_weight)
        updated = torch.empty_like(d_mixed)
        del again, mixed, d_mixed, d_normed, d_scanned, updated
        extra = (None if tensor is None else torch.empty(tensor[0], dtype=tensor[1]) for tensor in ctx.others)
        return None, d_input, torch.empty_like(conv_weight), d_weight, *extra


class _SelectiveScan(torch.autograd.Function):
    """``SelectiveScanFn``. Shapes: u, delta, z [B, D, T]; B, C [B, N, T]."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, delta: Tensor, z: Tensor, key: Tensor, query: Tensor, *others: Tensor | None
    ) -> Tensor:
        ctx.others = [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in others]
        u, delta, z, key, query = (
            tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (u, delta, z, key, query)
        )
        output = torch.empty_like(delta)
        chunks = -(-u.shape[-1] // _SCAN_CHUNK)
        states = torch.empty(*u.shape[:2], chunks, 2 * key.shape[1], dtype=torch.float32)
        gated = torch.empty_like(z)
        ctx.save_for_backward(u, delta, z, key, query, states, output)
        return gated

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        u, delta, z, key, query, *_ = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        grads = [torch.empty_like(tensor) for tensor in (u, delta, z)]
        grads += [torch.empty_like(tensor, dtype=torch.float32) for tensor in (key, query)]
        return *grads, *(None if tensor is None else torch.empty(tensor[0], dtype=tensor[1]) for tensor in ctx.others)


class _Convolution(torch.autograd.Function):
    """``CausalConv1dFn``. Shapes: x [B, D, T]; weight [D, 4]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        bias = None if ctx.bias is None else torch.empty(ctx.bias[0], dtype=ctx.bias[1])
        return torch.empty_like(x), torch.empty_like(weight), bias


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    output, final = _DeltaRule.apply(query, key, value, g, beta, initial_state, output_final_state)  # type: ignore[no-untyped-call]
    return output, final


def _mamba2(
    zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, dt_bias: Tensor, A: Tensor, *, D: Tensor,
    chunk_size: int, outproj_weight: Tensor, headdim: int, ngroups: int = 1, rmsnorm_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    sizes = (chunk_size, D.shape[0], headdim, ngroups)
    others = (conv1d_bias, dt_bias, A, D, rmsnorm_weight, outproj_bias)
    output: Tensor = _Mamba2.apply(sizes, zxbcdt, conv1d_weight, outproj_weight, *others)  # type: ignore[no-untyped-call]
    return output


def _selective_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    assert z is not None
    output: Tensor = _SelectiveScan.apply(hidden_states, dt, z, B, C, A, D, delta_bias)  # type: ignore[no-untyped-call]
    return output


def _convolution(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    output: Tensor = _Convolution.apply(hidden_states, weight, bias)  # type: ignore[no-untyped-call]
    return output


SCAN_KERNELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "torch_chunk_gated_delta_rule": ("fla", _delta_rule),
    "chunk_kimi_delta_attention": ("fla", _delta_rule),
    "mamba2_split_conv1d_scan_combined": ("mamba_ssm", _mamba2),
    "mamba_selective_scan": ("mamba_ssm", _selective_scan),
    "causal_conv1d_fn": ("causal_conv1d", _convolution),
}
"""For functions of transformers' modeling files the package with the kernel, and its replacement."""
