"""Experts in 4 bits: which weights bitsandbytes packs by a parametrization, and why it would leave some whole.

Transformers 5 has the experts of a layer as 3-D parameters, and bitsandbytes' own loading packs ``nn.Linear`` alone:
https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.torch_version import TorchVersion

from seqtile.devices import package_version

OLDEST = "0.50"
"""First bitsandbytes whose parametrization clears its cache under activation checkpoints.

Before it, a recompute that stops early leaves the global cache on, which then keeps every layer's dense experts.
"""

MOST_ELEMENTS = 2**31 - 1
"""Elements of a weight that bitsandbytes' kernels can count. DeepSeek-V3's experts have more in each layer."""

TOO_LARGE = "a weight of them has 2**31 elements or more, which bitsandbytes cannot pack"


def is_packed(parametrization: Any) -> bool:
    """Whether the parametrization of a weight is bitsandbytes' 4-bit one and nothing else."""
    classes = [(type(part).__module__, type(part).__name__) for part in parametrization]
    return classes == [("bitsandbytes.nn.parametrize", "Bnb4bitParametrization")]


def packed_experts(model: nn.Module) -> list[str]:
    """Names of the weights of ``model`` that bitsandbytes' parametrization has packed."""
    return [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name, parametrization in getattr(module, "parametrizations", {}).items()
        if is_packed(parametrization)
    ]


def whole_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """The experts' 3-D weights by name that are not packed; the model may be on the meta device."""
    # JetMoE's have a module for each weight, and 3-D weights of scans and convolutions are no experts.
    return {
        f"{prefix}.{name}".lstrip("."): weight
        for prefix, module in model.named_modules()
        if "Experts" in type(module).__name__
        for name, weight in module.named_parameters(recurse=False)
        if weight.dim() == 3
    }


def packable_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those of :func:`whole_experts` that bitsandbytes can pack."""
    return {name: weight for name, weight in whole_experts(model).items() if weight.numel() <= MOST_ELEMENTS}


def why_experts_stay_whole(config: Any) -> str:
    """Why 4-bit loading leaves all experts whole, or ""; without bitsandbytes, what the newest one does."""
    installed = package_version("bitsandbytes") or OLDEST
    if TorchVersion(installed) < OLDEST:
        return f"bitsandbytes {installed} cannot train with experts in 4 bits; install {OLDEST} or newer"
    if quantization_of(config) == "bitsandbytes":
        return "the checkpoint is quantized already, and is loaded as it is"
    return ""


def quantization_of(config: Any) -> str:
    """How a checkpoint's weights are quantized, such as ``"mxfp4"``, or ""."""
    quantized = getattr(config, "quantization_config", None) or {}
    method = quantized.get("quant_method") if isinstance(quantized, dict) else getattr(quantized, "quant_method", "")
    return str(getattr(method, "value", method) or "")
