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
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from seqtile._compat import PLAIN

_LOW = (torch.bfloat16, torch.float16)
_IN_FP32 = (
    F.softmax, torch.softmax, Tensor.softmax,
    F.log_softmax, torch.log_softmax, Tensor.log_softmax,
    F.layer_norm, torch.layer_norm,
)  # fmt: skip


@contextmanager
def accelerator_functions() -> Iterator[None]:
    """Inside, functions hold what they hold on an accelerator, on fake tensors of the CPU.

    Recomputes call them too if the backward is that of :func:`backward_in_modes`.
    """
    with _AcceleratorFunctions(), warnings.catch_warnings():
        # Hidden states in fp32 with bf16 weights: PyTorch's CPU warns that no fused kernel is used.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        yield


def backward_in_modes(loss: Tensor) -> None:
    """``loss.backward()`` that keeps the modes on.

    PyTorch turns a mode off inside each function that the mode is called for, and ``Tensor.backward`` is one of them.
    """
    torch.autograd.backward(get_gradient_edge(loss), torch.ones_like(loss))


class _AcceleratorFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _without_dropout(*args, **kwargs)
        if func in _IN_FP32:
            return _in_fp32(func, *args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if type(input) not in PLAIN or not training or not 0 < p < 1 or inplace:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _without_dropout(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **kwargs: Any
) -> Any:
    return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, **kwargs)


def _in_fp32(function: Callable[..., Any], input: Any, *args: Any, **kwargs: Any) -> Any:
    low = type(input) in PLAIN and input.dtype in _LOW
    asks_for_dtype = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
    if not low or not torch.is_autocast_enabled("cpu") or asks_for_dtype:
        return function(input, *args, **kwargs)
    return function(*map(_to_fp32, (input, *args)), **{name: _to_fp32(value) for name, value in kwargs.items()})


def _to_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value
