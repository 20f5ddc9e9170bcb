"""Linear layers inside a tile of the generic operator, whose weight gradients go into fp32 sums unrounded.

Autograd hands a weight's gradient over in the weight's dtype, so in low precision each tile's product is rounded before
it can be summed (:mod:`seqtile.ops.grad_accumulator` says what that costs). Inside :class:`SumsOfLinears` the calls of
``F.linear`` on a tile's own weights are one autograd node each, whose backward lets the product add into the sum.

Other operators keep autograd's gradients: products that are written otherwise (``x @ w``, ``torch.addmm``, the grouped
products of experts) and elementwise weights (norms). Their gradients round once per tile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from seqtile._compat import unsafe_view
from seqtile.ops.grad_accumulator import LOW, Sum
from seqtile.ops.rng import Autocast

SumOf = Callable[[str, Tensor], Sum]
"""The sum of a weight's gradient, by the weight's name; the tensor has its shape, dtype and device."""

SumOfOne = Callable[[Tensor], Sum]
"""The sum of one weight's gradient."""


class _Around(threading.local):
    """The innermost :class:`SumsOfLinears` of a thread; None outside a tile."""

    sums: SumsOfLinears | None = None


AROUND = _Around()


class SumsOfLinears(TorchFunctionMode):
    """Inside, ``F.linear`` adds the gradients of a tile's low-precision weights and biases to ``sum_of(name)``.

    Operators with sums of their own, such as the fused MLP, ask for those of the tile around them instead
    (:data:`AROUND`), in any precision.

    Outside autocast only: under it the product is rounded to autocast's dtype untiled too, and its fp32 weight is the
    result of a cast.

    Args:
        weights: the tensors by which this tile knows the weights that train; recognised by identity.
        sum_of: where their gradients go.
    """

    def __init__(self, weights: Mapping[str, Tensor], sum_of: SumOf) -> None:
        super().__init__()
        self._every = {id(weight): name for name, weight in weights.items()}
        self._names = {id(weight): name for name, weight in weights.items() if weight.dtype in LOW}
        self._sum_of = sum_of

    def __enter__(self) -> Self:
        self._outside, AROUND.sums = AROUND.sums, self
        if self._names:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        AROUND.sums = self._outside
        if self._names:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def of(self, tensors: Sequence[Tensor]) -> list[SumOfOne | None]:
        """For each tensor what gives its sum in a backward; None for others than this tile's weights."""
        names = [self._every.get(id(tensor)) for tensor in tensors]
        return [None if name is None else partial(self._sum_of, name) for name in names]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not torch.compiler.is_compiling() and torch.is_grad_enabled():
            x, weight, bias = _arguments(*args, **kwargs)
            names = tuple(None if tensor is None else self._names.get(id(tensor)) for tensor in (weight, bias))
            if any(names) and _is_plain(x, weight, bias) and not Autocast.of(x).enabled:
                token = _SaveOperands.apply(names[0] is not None, x, weight, bias)  # type: ignore[no-untyped-call]
                return _Linear.apply(self._sum_of, names, token.grad_fn, token, x, weight, bias)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


def _arguments(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """``F.linear``'s, by its own names."""
    return input, weight, bias


def _is_plain(*tensors: Any) -> bool:
    """Whether these are ordinary tensors of one dtype; a subclass has products of its own."""
    present = [tensor for tensor in tensors if tensor is not None]
    return {type(tensor) for tensor in present} <= {Tensor, torch.nn.Parameter} and len({t.dtype for t in present}) == 1


class _SaveOperands(torch.autograd.Function):
    """Save what the gradients need *ahead* of the product, so that a recompute ends before the tile's last one."""

    @staticmethod
    def forward(ctx: Any, weight_trains: bool, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if weight_trains else None, weight, bias)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return None, None, None, None


class _Linear(torch.autograd.Function):
    """``x W^T + b``; its backward adds the gradients of ``W`` and ``b`` to their sums and returns that of ``x``."""

    @staticmethod
    def forward(
        ctx: Any, sum_of: SumOf, names: tuple[str | None, str | None], save: Any, token: Tensor,
        x: Tensor, weight: Tensor, bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.sum_of, ctx.names, ctx.save, ctx.shape = sum_of, names, save, x.shape
        ctx.set_materialize_grads(False)
        rows = x.reshape(-1, x.shape[-1])  # [tokens, in]
        # As F.linear does: its result may be modified in place, a view that a custom function returns may not.
        return unsafe_view(F.linear(rows, weight, bias), (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        if dy is None:
            return (None,) * 7
        x, weight, bias = ctx.save.saved_tensors
        weight_name, bias_name = ctx.names
        rows = dy.reshape(-1, dy.shape[-1])  # [tokens, out]
        with Autocast.of(dy).off():  # as in the forward
            if weight_name is not None:
                ctx.sum_of(weight_name, weight).add_product(rows.t(), x.reshape(-1, x.shape[-1]))  # [out, in]
            if bias_name is not None:
                ctx.sum_of(bias_name, bias).add(rows.sum(0, dtype=torch.float32))  # [out]
            dx = torch.mm(rows, weight).view(ctx.shape) if ctx.needs_input_grad[4] else None  # [..., in]
        return None, None, None, None, dx, None, None
