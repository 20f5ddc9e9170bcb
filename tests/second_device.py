"""A second device type in plain Python, for machines without an accelerator: ``use()``, then ``"tiledev"`` is a device.

PyTorch lets a process add one device type of its own. Its tensors here keep a CPU tensor inside, on which every
operator runs, and mix with CPU tensors as an accelerator's do: not at all, but for copies and scalars. Random numbers
come from a generator of the device's own. A process that has it has it for good, so the tests start one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from seqtile.recognise import live_weights

NAME = "tiledev"
COPIES = ("aten::copy_", "aten::_to_copy")


def why_not() -> str:
    """Why this PyTorch has no such device, or ""."""
    from torch.utils import backend_registration

    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return f"PyTorch {torch.__version__} cannot register a device type from Python (2.13 can)"
    return ""


class OnDevice(Tensor):
    """A tensor on the second device."""

    __module__ = "torch.tiledev"  # what a device's own tensors are is PyTorch's; of others nothing would be known

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=f"{NAME}:0",
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operator: on the tensors inside, its results on the device that an accelerator would give them."""
    if func.name() == "aten::record_stream":  # nothing here is asynchronous
        return None
    seen: dict[int, OnDevice] = {}

    def inside(value: Any) -> Any:
        if isinstance(value, OnDevice):
            seen[id(value.held)] = value
            return value.held
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, Tensor) and value.dim() and func.name().partition(".")[0] not in COPIES:
            if func.name().partition(".")[0] not in ("aten::index", "aten::index_put_", "aten::_index_put_impl_"):
                raise RuntimeError(f"{func.name()}: a tensor on the CPU among those on {NAME}")
        return value

    asked = kwargs.get("device")
    to_host = asked is not None and torch.device(asked).type == "cpu"
    if func.name() == "aten::copy_" and not isinstance(args[0], OnDevice):
        to_host = True

    def outside(value: Any) -> Any:
        if not isinstance(value, Tensor) or to_host:
            return value
        return seen[id(value)] if id(value) in seen else OnDevice(value)

    kwargs = {name: value for name, value in kwargs.items() if name not in ("pin_memory", "non_blocking")}
    call = functools.partial(_KERNELS.get(func.name(), func), *tree_map(inside, args), **tree_map(inside, kwargs))
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return tree_map(outside, call())
    before = torch.get_rng_state()
    torch.set_rng_state(Module.state)
    try:
        return tree_map(outside, call())
    finally:
        Module.state = torch.get_rng_state()
        torch.set_rng_state(before)


class Module:
    """``torch.tiledev``, as PyTorch asks a device for it."""

    _initialized = True  # what PyTorch's checkpoint asks before it keeps the generator's state
    state = torch.Generator().manual_seed(0).get_state()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        Module.state = torch.Generator().manual_seed(seed).get_state()

    def get_rng_state(self, device: Any = None) -> Tensor:
        return Module.state.clone()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        Module.state = state.clone()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    class device:
        def __init__(self, _: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: Any) -> None: ...


@functools.cache
def use() -> None:
    """Register the device in this process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment] # nothing here is asynchronous
    library = torch.library.Library("aten", "IMPL")
    _keep.append(library)
    for name in ("empty.memory_format", "empty_strided"):
        operator = functools.reduce(getattr, [*name.split("."), *(["default"] * ("." not in name))], torch.ops.aten)
        library.impl(name, functools.partial(_create, operator), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    live_weights.PLAIN = (*live_weights.PLAIN, OnDevice)  # plain to seqtile, as an accelerator's tensors are
    library.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")


_keep: list[Any] = []


def _create(operator: Any, *args: Any, **kwargs: Any) -> Tensor:
    kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    return OnDevice(operator(*args, **kwargs))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """``torch.tensor(..., device="tiledev")``, which PyTorch copies below what a tensor can be told of."""
    getattr(target, "held", target).copy_(getattr(source, "held", source))
    return target


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    **_: Any,
) -> Tensor:  # fmt: skip
    """The operator that PyTorch offers to devices with a fused attention kernel of their own."""
    assert attn_mask is None
    return torch.ops.aten._scaled_dot_product_fused_attention_overrideable(
        query, key, value, None, dropout_p, is_causal
    )[0]


def _attention_forward(query: Tensor, key: Tensor, value: Tensor, _: Any, p: float, causal: bool) -> Any:
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, p, causal)
    none = torch.empty(0)
    return (*found, none, none, query.shape[2], key.shape[2], none, none, none)


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    _, _, output, lse, _, _, _, _, p, causal, *_ = rest
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return (*backward(gradient, query, key, value, output, lse, p, causal), None)


_KERNELS: dict[str, Any] = {
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention_forward,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
}
"""What no CPU has: the device's own attention."""


def moved(model: nn.Module) -> nn.Module:
    """``model`` with its parameters and buffers on the device."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(OnDevice(p.detach().clone()), p.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = OnDevice(buffer.clone())
    return model
