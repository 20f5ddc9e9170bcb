"""Observe every operator that reaches a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import (
    DispatchKey,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    active_fake_mode,
    has_kernel,
    is_wrapper_subclass,
    schema_of,
)

_DEVICE = torch.ops.prim.device.default
_NO_WRAPPERS = frozenset((Tensor, nn.Parameter, FakeTensor))


class LettingCompile(TorchDispatchMode):
    """A dispatch mode under which compiled code stays compiled; by default torch.compile skips what runs under one."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class Seeing:
    """Callback of a dispatch mode for every operator.

    Operators under a fake tensor mode are handed on only if that mode was entered first.

    Attributes:
        see: given each operator with its arguments and result; None sees nothing.
    """

    supports_higher_order_operators = True

    def __init__(self, see: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None] | None = None) -> None:
        super().__init__()
        self.see = see
        self._fake_mode = active_fake_mode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].device  # C++ queries fake tensors' device before every operator
        kwargs = kwargs or {}
        for tensor_class in types:
            if tensor_class not in _NO_WRAPPERS and is_wrapper_subclass(tensor_class):
                return NotImplemented  # the subclass runs next, and what it calls on its inner tensors comes here
        if torch.is_inference_mode_enabled() and isinstance(func, OpOverload) and _is_composite(func):
            # Here composite operators (linear, matmul) arrive whole: count what they are made of.
            with self:  # type: ignore[attr-defined]
                return func.decompose(*args, **kwargs)
        result = self.run(func, args, kwargs)
        # Under another fake mode shapes are being worked out, as DTensor does: nothing runs.
        if self.see is not None and active_fake_mode() is self._fake_mode:
            self.see(func, args, kwargs, result)
        return result

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator's result."""
        return func(*args, **kwargs)


class Watch(Seeing, LettingCompile):
    """Hand every operator call to ``see`` with its arguments and result."""

    __torch_dispatch__ = Seeing.__torch_dispatch__


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among an operator's arguments or results, and in lists and tuples among them, in order."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value)
    return tensors


def name_of(func: Any) -> str:
    """``aten::mm`` for each of ``aten.mm.default``, ``aten.mm.out`` and ``aten.mm.dtype``."""
    entry = _OPERATOR_NAMES.get(id(func))
    if entry is None:
        entry = _OPERATOR_NAMES[id(func)] = (schema_of(func).name if isinstance(func, OpOverload) else str(func)), func
    return entry[0]


_OPERATOR_NAMES: dict[int, tuple[str, Any]] = {}
"""Names by the operator's id, which is quicker to look up than the operator; and the operator, whose id stays its."""


@cache
def _is_composite(func: OpOverload) -> bool:
    """Whether it has no kernel of its own; some, like silu_backward, have one beside their decomposition."""
    has_kernel_for = partial(has_kernel, func.name())
    return has_kernel_for(DispatchKey.CompositeImplicitAutograd) and not has_kernel_for(DispatchKey.CPU)
