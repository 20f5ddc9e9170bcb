"""Identify the kernel that computes attention, recommend a faster one, and warn of a wrong one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import ATTENTION_BACKENDS, EFFICIENT_ATTENTION, allowed_sdpa_kernels
from seqtile._errors import UserError
from seqtile.devices import compute_capability, is_accelerator

FASTER = {"memory-efficient": 0, "FlashAttention-2": 1, "cuDNN": 2, "FlashAttention-3": 3}
"""Order of speed on Hopper, the slowest first; a name stands for all that begin with it."""

CUDNN_FIRST = (9, 10)
"""Major compute capabilities on which PyTorch takes cuDNN's kernel before its own."""

MASKED_TOKENS = 65_536
"""With a mask, SDPA's memory-efficient kernel is wrong beyond this many tokens, in every PyTorch that is supported:
https://github.com/pytorch/pytorch/issues/162588 and https://github.com/pytorch/pytorch/issues/187227."""


FLEX = "flex_attention"
"""An operator that takes functions: PyTorch makes a kernel of its own of them."""


def backend_of(operator: str) -> str:
    """The name of the kernel behind an attention operator, such as ``aten::_scaled_dot_product_cudnn_attention``."""
    space, _, name = operator.partition("::")
    if operator == FLEX:
        return "FlexAttention"
    if space == "aten":
        return ATTENTION_BACKENDS.get(name.partition(".")[0], name)
    return "FlashAttention-3" if "3" in space else "FlashAttention-2"


def recommended(capability: tuple[int, int] | None) -> str:
    """The fastest attention for a CUDA device of this compute capability, and how to have it; "" where one is left.

    The package of FlashAttention-2 names Ampere, Ada and Hopper (8.x and 9.0) as what it runs on, FlashAttention-3 the
    H100 and H800 (https://github.com/Dao-AILab/flash-attention). PyTorch has a FlashAttention-2 of its own for 8.0 to
    12.1, and takes cuDNN first on 9.0 and 10.x with a new cuDNN (check_prefer_cudnn_attention in
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    if capability is None or capability < (8, 0):
        return ""
    if capability[0] in CUDNN_FIRST:
        cudnn = "cuDNN (with torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION), attn_implementation='sdpa')"
        flash3 = "FlashAttention-3 (attn_implementation='flash_attention_3' with its package), else "
        return flash3 * (capability[0] == 9) + cudnn
    package = "'flash_attention_2', or " * (capability[0] == 8)
    return f"FlashAttention-2 (attn_implementation={package}'sdpa' without a mask)"


def slower_than_possible(operators: Collection[str], capability: tuple[int, int] | None, *, flash3: bool) -> str:
    """One sentence where an attention ran that this device has a faster one for, else "".

    Args:
        operators: that ran; none means plain products.
        capability: compute capability of the CUDA device; None for another device.
        flash3: whether FlashAttention-3 is installed.
    """
    way_out = recommended(capability)
    if not way_out:
        return ""
    names = sorted({backend_of(operator) for operator in operators})
    ranks = [rank for name in names for prefix, rank in FASTER.items() if name.startswith(prefix)]
    major = 0 if capability is None else capability[0]
    best = 3 if flash3 and major == 9 else 2 if major in CUDNN_FIRST else 1
    if names and min(ranks, default=best) >= best:
        return ""
    ran = ", ".join(names) or "plain products"
    return f"attention ran on {ran}, but this device has a faster one: {way_out}"


def attention_sentences(operators: Collection[str]) -> list[str]:
    """Describe the kernels that ran, and a faster one."""
    slower = slower_than_possible(operators, compute_capability(), flash3=find_spec("flash_attn_interface") is not None)
    ran = ", ".join(sorted({backend_of(operator) for operator in operators})) or "plain products"
    return [slower or f"attention ran on {ran}"]


@dataclass(frozen=True)
class AllowedKernels:
    """Which of SDPA's kernels may run, in order of preference, as ``torch.nn.attention.sdpa_kernel`` sets it.

    A backward usually runs outside the ``with sdpa_kernel(...)`` of its forward.
    """

    kernels: tuple[Any, ...]

    @classmethod
    def now(cls) -> AllowedKernels:
        """Those that the caller allows."""
        return cls(tuple(allowed_sdpa_kernels(with_priority=True)))

    def allowed(self) -> AbstractContextManager[Any]:
        """Inside, SDPA chooses among these; the process's setting is left alone where it is this already."""
        from torch.nn.attention import sdpa_kernel

        return nullcontext() if self == self.now() else sdpa_kernel(list(self.kernels), set_priority=True)


def refuse_wrong(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse the memory-efficient kernel where its numbers are wrong.

    Args:
        func: an attention operator.
        args: its arguments.

    Raises:
        UserError: it has a mask, and more tokens than it can address.
    """
    if EFFICIENT_ATTENTION not in func.name():
        return
    query, key, bias = args[0], args[1], args[3] if len(args) > 3 else None
    if isinstance(bias, Tensor) and _is_faulty(query.device) and max(query.shape[-2], key.shape[-2]) > MASKED_TOKENS:
        raise UserError("attention.kernel-wrong-with-mask", _REFUSED % max(query.shape[-2], key.shape[-2]))


_REFUSED = (
    "PyTorch's memory-efficient attention is wrong with a mask beyond 65,536 tokens, got %d "
    "(https://github.com/pytorch/pytorch/issues/162588); use attn_implementation='flash_attention_2', or batches "
    "without padding"
)


def _has_capability(device: torch.device) -> bool:
    return is_accelerator(device) and compute_capability() is not None


_is_faulty = _has_capability


def rotary_sentences(model: nn.Module) -> list[str]:
    """Whether rotary embeddings of a model on a CUDA device run in Python although Liger has a kernel, in a sentence.

    Transformers' attention calls a function of its module, which Liger puts its own in place of:
    https://github.com/linkedin/Liger-Kernel/blob/main/src/liger_kernel/transformers/monkey_patch.py
    """
    if not any(_has_capability(parameter.device) for parameter in model.parameters()):
        return []
    homes = {type(module).__module__ for module in model.modules()}
    functions = [getattr(sys.modules.get(home), "apply_rotary_pos_emb", None) for home in sorted(homes)]
    packages = [str(getattr(function, "__module__", "")).partition(".")[0] for function in functions]
    return [_ROTARY] if "transformers" in packages else []


_ROTARY = (
    "rotary embeddings run as PyTorch operators; Liger has a kernel for many models: use_liger_kernel=True with "
    "liger_kernel_config={'rope': True, 'rms_norm': False, 'swiglu': False, 'cross_entropy': False, "
    "'fused_linear_cross_entropy': False}"
)


def has_long_mask(values: Collection[Any]) -> bool:
    """Whether a mask for every two tokens is among a layer's arguments, longer than :data:`MASKED_TOKENS`."""
    for value in values:
        if isinstance(value, Tensor) and value.dim() == 4 and _is_faulty(value.device):
            if value.shape[-1] > MASKED_TOKENS and value.shape[-2] > 1:
                return True
    return False


def without_wrong_kernel(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``, in which SDPA takes another kernel than the memory-efficient one.

    Raises:
        UserError: no other kernel takes these arguments; plain products of so many tokens fit nowhere.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            bound = getattr(function, "keywords", {})
            masks = [value for value in (*args, *kwargs.values(), *bound.values()) if isinstance(value, Tensor)]
            tokens = max(mask.shape[-1] for mask in masks if mask.dim() == 4)
            raise UserError("attention.kernel-wrong-with-mask", _REFUSED % tokens) from error
