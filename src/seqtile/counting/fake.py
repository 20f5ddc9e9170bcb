"""Run code on shapes only: PyTorch's fake tensors, and what has to be fixed for real training code to run on them.

Everything of theirs that is private to PyTorch or Transformers is named in this module and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import (
    GROUPED_MM,
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    buffers_of,
    parameters_of,
)

PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Types of tensors that hold nothing but numbers, or pretend to."""


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside, tensors have shapes, types and devices but no memory, and operators compute only those.

    Three things are fixed, so that the operators are those of a real run:

    * Transformers asks whether a tensor is fake and then builds its masks in full, with keys and values repeated for
      every query head; here it is told that none is.
    * Code that reads a number (is this batch packed? is every position attended to?) has none to read; it is
      answered with "yes", which means one unpadded sequence per row. "Is this number below that?" (drawn at random,
      to drop a layer) is answered with "no".
    * The grouped product of experts knows its fake result in bf16 only; for other types it is worked out from that.

    Counters such as :func:`seqtile.counting.count_live_bytes` go inside this ``with``.
    """
    with _no_tensor_is_fake(), FakeTensorMode(), _Answers():  # type: ignore[no-untyped-call]
        yield


def make_fake(model: nn.Module) -> None:
    """Give every parameter and buffer of a model on the meta device a fake one on the CPU instead; ties are kept."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        places: list[Any] = [parameters_of(module), buffers_of(module)]
        for own in places:
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    is_weight = isinstance(tensor, nn.Parameter)
                    new = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_weight else fake
                    made[id(tensor)] = (tensor, new)  # the old one too: its id must not be given away meanwhile
                own[name] = made[id(tensor)][1]


_BELOW = "_seqtile_is_below"


_IN_PLACE = frozenset(
    overload
    for name in (
        "add_", "copy_", "div_", "exp_", "fill_", "index_add_", "log_", "masked_fill_", "mul_", "neg_", "scatter_add_",
        "square_", "sub_", "tanh_", "zero_",
    )
    for kind in getattr(torch.ops.aten, name).overloads()
    for overload in [getattr(getattr(torch.ops.aten, name), kind)]
)  # fmt: skip
"""Operators that return their first argument as it was: nothing has to be worked out, and half of a step is these."""


class _Answers(TorchDispatchMode):
    """Answers what a fake tensor cannot."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _IN_PLACE:
            return args[0]
        if func is GROUPED_MM and args[0].dtype != torch.bfloat16:
            low = [one.to(torch.bfloat16) if _is_floating(one) else one for one in args]
            return func(*low, **kwargs).to(args[0].dtype)
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            if args[0].dtype is not torch.bool:
                raise
            return not hasattr(args[0], _BELOW)
        if func is torch.ops.aten.lt.Scalar and result.dim() == 0:
            setattr(result, _BELOW, True)
        return result


def _is_floating(one: Any) -> bool:
    return isinstance(one, Tensor) and one.is_floating_point()


@contextmanager
def _no_tensor_is_fake() -> Iterator[None]:
    """``is_fake_tensor`` of Transformers says no; without Transformers there is nobody to tell."""
    try:
        utilities: Any = importlib.import_module("transformers.utils.import_utils")
    except ImportError:
        yield
        return
    before = getattr(utilities, "is_fake_tensor", None)
    if before is not None:
        utilities.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        if before is not None:
            utilities.is_fake_tensor = before
