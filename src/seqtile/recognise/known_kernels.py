"""Plain twins of library modules whose forward no trace can follow: Triton kernels and quantised weights.

A twin has the children, parameters and settings of its module and a forward in plain operators. It takes the module's
place in traces alone; at run time the module itself runs, or the fused operator. The table's keys are names of forward
functions, so it covers instances that Liger has patched, its classes in a model's source and their subclasses, and
imports no library. ``tests/numerics/test_known_kernels.py`` compares every entry with the real module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqtile._compat import HOOKED_FORWARD, HOOKING, PARAMETERS, FakeTensorMode
from seqtile._stand_in import ForwardStandIn

_MOVES_TENSORS = frozenset({"ModelHook", "AlignDevicesHook", "CpuOffload"})
"""accelerate's hooks that change no value: ``device_map`` puts one on every module."""


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward set on an instance in place of its class's, or None.

    Seqtile's stand-ins are skipped, and accelerate's hooks where these only move tensors.
    """
    forward: Any = _below_stand_ins(module.__dict__.get("forward"))
    if forward is not None and HOOKED_FORWARD in module.__dict__:
        classes = [type(hook) for hook in _hooks(module)]
        if all(kind.__module__ == "accelerate.hooks" and kind.__name__ in _MOVES_TENSORS for kind in classes):
            forward = _below_stand_ins(module.__dict__[HOOKED_FORWARD])
    if getattr(forward, "__self__", None) is module and forward.__func__ is type(module).forward:
        return None
    return forward  # type: ignore[no-any-return]


def _below_stand_ins(forward: Any) -> Any:
    while isinstance(forward, ForwardStandIn):
        forward = forward.before.get("forward")
    return forward


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """accelerate's hooks on a module."""
    hook = module.__dict__.get(HOOKING)
    return () if hook is None else getattr(hook, "hooks", (hook,))  # a SequentialHook has several


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate fetches the module's own weights for each call and drops them afterwards."""
    return any(getattr(hook, "offload", False) is True for hook in _hooks(module))


def _forward_name(module: nn.Module) -> str:
    """Qualified name of the function that is the module's forward."""
    forward: Any = own_forward(module) or type(module).forward
    function = getattr(forward, "__func__", forward)
    # Not __module__, which functools.wraps copies to the wrapper.
    home = getattr(function, "__globals__", {}).get("__name__", "")
    return f"{home}.{getattr(function, '__qualname__', '')}"


def twin_of(module: nn.Module) -> nn.Module | None:
    """A plain module that computes what ``module`` does, for a trace; None where the module can be traced itself."""
    make = _TWINS.get(_forward_name(module))
    return None if make is None else make(module)


def has_twin(module: nn.Module) -> bool:
    """Whether the table has an entry for the module's forward."""
    return _forward_name(module) in _TWINS


def parts_by_liger(model: nn.Module) -> list[str]:
    """The parts that Liger's kernels run in a model (rotary embedding, norms), patched on instances or in modules."""
    homes = {type(module).__module__ for module in model.modules()}
    functions = [getattr(sys.modules.get(home), "apply_rotary_pos_emb", None) for home in homes]
    rotary = any(str(getattr(function, "__module__", "")).startswith("liger_kernel.") for function in functions)
    norms = any(
        _forward_name(module).startswith("liger_kernel.")
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
    )
    return ["rotary embedding"] * rotary + ["norms"] * norms


def tiled_by_liger(module: nn.Module) -> bool:
    """Whether the module is one of Liger's tiled MLPs."""
    return _forward_name(module).startswith("liger_kernel.transformers.tiled_mlp.")


Twin = TypeVar("Twin", bound=nn.Module)


def _with_state(twin_class: type[Twin], module: nn.Module) -> Twin:
    """An instance of ``twin_class`` with the attributes of ``module``, except a forward of its own."""
    twin = object.__new__(twin_class)
    twin.__dict__.update(module.__dict__)
    for name in ("forward", HOOKED_FORWARD):
        twin.__dict__.pop(name, None)
    return twin


# ---- Liger: kernels for what is between the linear layers, and norms


class _SwiGLU(nn.Module):
    _projections = ("gate_proj", "up_proj", "down_proj")
    _activation: Callable[[Tensor], Tensor] = staticmethod(F.silu)

    def forward(self, x: Tensor) -> Any:
        gate, up, down = (getattr(self, name) for name in self._projections)
        return down(self._activation(gate(x)) * up(x))


class _MixtralSwiGLU(_SwiGLU):
    _projections = ("w1", "w3", "w2")


class _GeGLU(_SwiGLU):
    _activation = staticmethod(partial(F.gelu, approximate="tanh"))


class _GateUpSwiGLU(nn.Module):
    gate_up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Any:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class _ScaledSwiGLU(nn.Module):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    gate_multiplier: float
    down_multiplier: float

    def forward(self, x: Tensor) -> Any:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.gate_multiplier != 1.0:
            gate = gate.float() * self.gate_multiplier  # in the kernel's registers: not rounded
        hidden = F.silu(gate).to(up.dtype) * up
        return self.down_proj(hidden if self.down_multiplier == 1.0 else hidden * self.down_multiplier)


class _OffsetRMSNorm(nn.Module):
    weight: Tensor | None
    variance_epsilon: float
    offset: float
    casting_mode: str

    def forward(self, x: Tensor) -> Tensor:
        """Spelled as the models spell theirs, so that the trace is one of :data:`seqtile.ops.norm.KNOWN_NORMS`."""
        if self.casting_mode == "none":
            h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return h if self.weight is None else h * (self.offset + self.weight)
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.weight is None:
            return h.to(x.dtype)
        if self.casting_mode == "llama":
            h = h.to(x.dtype)
            if self.offset == 0 and self.weight.dtype == x.dtype:
                return self.weight * h
        scale = self.weight.float() if self.offset == 0 else self.offset + self.weight.float()
        return (h * scale).to(x.dtype)


class _LayerNorm(nn.Module):
    weight: Tensor
    bias: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.variance_epsilon)


def _rms_norm(module: Any) -> nn.Module | None:
    if not getattr(module, "with_scale", True):  # plain operators, which a trace follows
        return None
    return _with_state(_OffsetRMSNorm, module) if module.casting_mode in ("llama", "gemma", "none") else None


# ---- bitsandbytes: frozen weights of 4 and 8 bits


class DenseLinear(nn.Linear):
    """A frozen linear layer that computes in a dtype of its own, autocast or not, and returns its input's dtype."""

    compute_dtype: torch.dtype | None

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), self.weight.to(dtype), bias).to(x.dtype)


def _dense(module: Any, compute_dtype: torch.dtype | None, dtype: torch.dtype) -> nn.Module:
    """A linear layer whose dense weight has the module's device and no memory."""
    twin = _with_state(DenseLinear, module)
    with FakeTensorMode():
        weight = torch.empty(module.out_features, module.in_features, dtype=dtype, device=module.weight.device)
    twin.__dict__[PARAMETERS] = {"weight": nn.Parameter(weight, requires_grad=False), "bias": module.bias}
    twin.compute_dtype = compute_dtype
    return twin


def _four_bits(module: Any) -> nn.Module | None:
    if module.weight.requires_grad:
        return None
    set_dtype = module.compute_dtype if module.compute_type_is_set else None
    state = getattr(module.weight, "quant_state", None) or getattr(module, "quant_state", None)
    return _dense(module, set_dtype, set_dtype or getattr(state, "dtype", None) or torch.float32)


def _eight_bits(module: Any) -> nn.Module | None:
    return None if module.state.has_fp16_weights else _dense(module, None, torch.float32)


_LIGER = "liger_kernel.transformers."
_TWINS: Mapping[str, Callable[[Any], nn.Module | None]] = {
    f"{_LIGER}swiglu.LigerSwiGLUMLP.forward": partial(_with_state, _SwiGLU),
    f"{_LIGER}swiglu.LigerQwen3MoeSwiGLUMLP.forward": partial(_with_state, _SwiGLU),
    f"{_LIGER}swiglu.LigerHunyuanV1SwiGLUMLP.forward": partial(_with_state, _SwiGLU),
    f"{_LIGER}swiglu.LigerBlockSparseTop2MLP.forward": partial(_with_state, _MixtralSwiGLU),
    f"{_LIGER}swiglu.LigerPhi3SwiGLUMLP.forward": partial(_with_state, _GateUpSwiGLU),
    f"{_LIGER}swiglu.LigerFalconH1SwiGLUMLP.forward": partial(_with_state, _ScaledSwiGLU),
    f"{_LIGER}geglu.LigerGEGLUMLP.forward": partial(_with_state, _GeGLU),
    f"{_LIGER}rms_norm.LigerRMSNorm.forward": _rms_norm,
    f"{_LIGER}rms_norm.LigerRMSNormForGemma4.forward": _rms_norm,
    f"{_LIGER}rms_norm.LigerRMSNormForMuseGlimmer.forward": _rms_norm,
    f"{_LIGER}layer_norm.LigerLayerNorm.forward": partial(_with_state, _LayerNorm),
    "bitsandbytes.nn.modules.Linear4bit.forward": _four_bits,
    "bitsandbytes.nn.modules.Linear8bitLt.forward": _eight_bits,
}
"""Functions that build a module's twin, by the name of its forward function."""
