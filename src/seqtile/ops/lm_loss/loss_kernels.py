"""Other libraries' operators for the head's scalar loss.

``"native"`` is PyTorch's own chunked ``linear_cross_entropy`` of PyTorch 2.13 and later, in fp32 and float64: in low
precision it rounds the scalar loss, and what the gradients are multiplied by, to 8 or 11 bits.
``"liger"`` is Liger's fused linear cross-entropy with fp32 sums; ``"cce"`` Apple's cut cross-entropy without its filter
of small gradients, and with fp32 sums where its version has them. These two need Triton and a device for it. What one
does not compute, or computes less exactly than plain PyTorch would, is a reason not to use it.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seqtile.ops.grad_accumulator import LOW
from seqtile.ops.lm_loss.head_nodes import HeadCall
from seqtile.options import LOSS_KERNELS

_PACKAGES = {"cce": "cut_cross_entropy", "liger": "liger_kernel"}
_ORDER = ("cce", "liger")
"""Fastest first, by TRL's published numbers (pull request 6858: 93 ms against 321 ms on an H100)."""


def choose_kernel(impl: str, call: HeadCall, *, weighted: bool, per_token: bool, returns_z_loss: bool = False) -> str:
    """Which kernel computes this call: ``"torch"``, or one that is installed and means the same.

    Raises:
        ValueError: an unknown name, or a kernel asked for by name that cannot; with the reason.
    """
    if impl not in LOSS_KERNELS:
        raise ValueError(f"impl={impl!r}: expected one of {', '.join(map(repr, LOSS_KERNELS))}")
    if impl == "torch":
        return impl
    for name in _ORDER if impl == "auto" else (impl,):
        reason = why_kernel_cannot(name, call, weighted=weighted, per_token=per_token, returns_z_loss=returns_z_loss)
        if not reason:
            return name
        if impl != "auto":
            raise ValueError(f"impl={impl!r} cannot compute this: {reason}; use impl='torch' or 'auto'")
    return "torch"


def why_kernel_cannot(
    name: str, call: HeadCall, *, weighted: bool, per_token: bool, returns_z_loss: bool = False
) -> str:
    """Why a kernel cannot compute this call, or ""."""
    aim = call.plan.objective
    if name == "native":
        if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
            return f"PyTorch {torch.__version__} has no chunked linear_cross_entropy (2.13 does)"
    else:
        package = _PACKAGES[name]
        if find_spec(package) is None:
            return f"{package} is not installed"
        if call.hidden.device.type == "cpu" or find_spec("triton") is None:
            return f"it needs Triton and a GPU, and the hidden states are on {call.hidden.device.type!r}"
    if per_token or weighted:
        return "it returns a sum only, without token weights"
    if returns_z_loss:
        return "it does not return the z-loss"
    if aim.scaling.scale != 1.0 or aim.scaling.temperature != 1.0:
        return "it does not scale logits"
    if name == "native":
        if aim.scaling.softcap is not None or aim.label_smoothing or aim.z_loss:
            return "it does not support soft-cap, label smoothing and z-loss"
        return f"it rounds the loss and its upstream gradient to {call.plan.dtype}" if call.plan.dtype in LOW else ""
    if aim.class_weights is not None:
        return "it does not support class weights"
    if call.plan.dtype == torch.float64:
        return "it computes in fp32"
    if name == "cce":
        if call.bias is not None or aim.label_smoothing or aim.z_loss:
            return "it does not support bias, label smoothing and z-loss"
        if call.plan.dtype not in LOW:
            return "it supports bf16 and fp16 only"
        trains = call.weight.requires_grad or call.hidden.requires_grad
        if trains and "accum_c_fp32" not in _parameters(_cce()):
            return "this version sums gradients in low precision"
    return ""


def kernel_sum(name: str, call: HeadCall) -> Tensor:
    """Sum of the losses of the tokens that count, in fp32 (float64 for float64 states)."""
    aim, dtype, labels = call.plan.objective, call.plan.dtype, call.kept.targets
    hidden, weight = call.kept.take(call.hidden).to(dtype), call.weight.to(dtype)
    bias = None if call.bias is None else call.bias.to(dtype)
    if name == "native":
        weights = aim.class_weights
        return F.linear_cross_entropy(
            hidden, weight, labels, linear_bias=bias, weight=None if weights is None else weights.detach().to(dtype),
            reduction="sum", ignore_index=aim.ignore_index,
            options=torch.nn.LinearCrossEntropyOptions(allow_retain_graph=True, acc_policy="accurate"),
        ).to(torch.promote_types(dtype, torch.float32))  # fmt: skip
    if name == "cce":
        exact = {key: True for key in ("accum_e_fp32", "accum_c_fp32") if key in _parameters(_cce())}
        return _cce()(  # type: ignore[no-any-return]
            hidden, weight, labels, ignore_index=aim.ignore_index, softcap=aim.scaling.softcap, reduction="sum",
            filter_eps=None, **exact,
        ).float()  # fmt: skip
    liger = import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return liger(  # type: ignore[no-any-return]
        hidden, weight, labels, bias=bias, ignore_index=aim.ignore_index,
        lse_square_scale=aim.z_loss, label_smoothing=aim.label_smoothing, reduction="sum",
        softcap=aim.scaling.softcap, accum_dtype=torch.float32,
    ).float()  # fmt: skip


def _cce() -> Any:
    return import_module("cut_cross_entropy").linear_cross_entropy


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)
