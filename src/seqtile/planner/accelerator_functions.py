"""Functions whose memory differs between accelerators and the CPU, for fake steps.

* Dropout keeps its mask in a byte an element, not in the type of its input (``at::dropout`` calls ``native_dropout``
  where ``is_fused_kernel_acceptable``; ``aten/src/ATen/native/Dropout.cpp``).
* Attention's kernels draw their dropout again in the backward, where the CPU's has none and falls back to products.
* Autocast computes softmax and LayerNorm in fp32, and returns it, where the CPU's leaves them in bf16
  (``AT_FORALL_FP32`` and ``AT_FORALL_FP32_SET_OPT_DTYPE`` in ``aten/src/ATen/autocast_mode.h``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seqtile.counting.fake import PLAIN
from seqtile.planner.flash_shapes import NAME as FLASH

_LOW = (torch.bfloat16, torch.float16)
_IN_FP32 = ("softmax", "log_softmax", "layer_norm")


@contextmanager
def accelerator_functions() -> Iterator[None]:
    """Inside, these functions hold what they hold on an accelerator, on fake tensors of the CPU."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    original = {name: getattr(F, name) for name in ("dropout", *_IN_FP32)}
    attentions = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ("sdpa", FLASH) if name in ALL_ATTENTION_FUNCTIONS}
    F.dropout = _dropout(original["dropout"])
    for name in _IN_FP32:
        setattr(F, name, _in_fp32(original[name]))
    for name, function in attentions.items():
        AttentionInterface.register(name, _drops_nothing(function))
    try:
        with warnings.catch_warnings():
            # Hidden states in fp32 with bf16 weights: PyTorch's CPU warns that no fused kernel is used.
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
            yield
    finally:
        for name, function in original.items():
            setattr(F, name, function)
        for name, function in attentions.items():
            AttentionInterface.register(name, function)


def _dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if type(input) not in PLAIN or not training or not 0 < p < 1 or inplace:
            return original(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    return dropout


def _in_fp32(original: Callable[..., Any]) -> Callable[..., Any]:
    def function(input: Any, *args: Any, **kwargs: Any) -> Any:
        low = type(input) in PLAIN and input.dtype in _LOW
        if not low or not torch.is_autocast_enabled("cpu") or kwargs.get("dtype") is not None:
            return original(input, *args, **kwargs)
        return original(*map(_to_fp32, (input, *args)), **{name: _to_fp32(value) for name, value in kwargs.items()})

    return function


def _to_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value


def _drops_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    def attention(module: Any, *tensors: Any, dropout: float = 0.0, **kwargs: Any) -> Any:
        return original(module, *tensors, dropout=0.0, **kwargs)

    return attention
