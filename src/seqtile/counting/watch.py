"""See every operator that reaches a kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch._C import DispatchKey, _dispatch_has_kernel_for_dispatch_key
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

_DEVICE = torch.ops.prim.device.default


class Watch(TorchDispatchMode):
    """Hand every operator call to ``see`` with its arguments and result.

    Calls under a fake tensor mode are handed on only if that mode was entered first.
    """

    supports_higher_order_operators = True

    def __init__(self, see: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see
        self._fake_mode = _active_fake_mode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the subclass runs next, and what it calls on its inner tensors comes here
        if func is _DEVICE:
            return args[0].device  # a question that C++ asks of fake tensors before every operator
        if torch.is_inference_mode_enabled() and isinstance(func, OpOverload) and _is_composite(func):
            # Here composite operators (linear, matmul) arrive whole: count what they are made of.
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if _active_fake_mode() is self._fake_mode:  # else shapes are being worked out, as DTensor does: nothing runs
            self._see(func, args, kwargs, result)
        return result


def name_of(func: Any) -> str:
    """``aten::mm`` for each of ``aten.mm.default``, ``aten.mm.out`` and ``aten.mm.dtype``."""
    return func._schema.name if isinstance(func, OpOverload) else str(func)


def _active_fake_mode() -> Any:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


@cache
def _is_composite(func: OpOverload) -> bool:
    """Whether it has no kernel of its own; some, like silu_backward, have one beside their decomposition."""
    has_kernel_for = partial(_dispatch_has_kernel_for_dispatch_key, func.name())
    return has_kernel_for(DispatchKey.CompositeImplicitAutograd) and not has_kernel_for(DispatchKey.CPU)
