"""Run code on shapes only: PyTorch's fake tensors, and what has to be fixed for real training code to run on them.

Everything of theirs that is private to PyTorch or Transformers is named in this module and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqtile._compat import (
    GROUPED_MM,
    TO_COPY,
    UNSAFE_VIEW,
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    active_fake_mode,
    buffers_of,
    disable_current_modes,
    fake_on,
    parameters_of,
    schema_of,
    shapes_only,
    without_dispatch,
)
from seqtile.counting.watch import Seeing

PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Types of tensors that hold nothing but numbers, or pretend to."""


@contextmanager
def fake_tensors() -> Iterator[Answers]:
    """Inside, tensors have shapes, types and devices but no memory, and operators compute only those.

    Three things are fixed, so that the operators are those of a real run:

    * Transformers asks whether a tensor is fake and then builds its masks in full, with keys and values repeated for
      every query head; here it is told that none is.
    * Code that reads a number (is this batch packed? is every position attended to?) has none to read; it is
      answered with "yes", which means one unpadded sequence per row. "Is this number below that?" (drawn at random,
      to drop a layer) is answered with "no".
    * The grouped product of experts knows its fake result in bf16 only; for other types it is worked out from that.

    What is computed from real tensors alone, such as the grid of a picture's patches, is computed for real.

    Counters such as :func:`seqtile.counting.count_live_bytes` go inside this ``with``, which gives the mode that sees
    every operator.
    """
    with _no_tensor_is_fake(), FakeTensorMode(), Answers() as mode:
        yield mode


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
_LIFT = torch.ops.aten.lift_fresh.default
_CPU, _META = torch.device("cpu"), torch.device("meta")


def _overloads(*names: str) -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name) for name in names]
    return frozenset(getattr(packet, kind) for packet in packets for kind in packet.overloads())


def _pure(*names: str) -> frozenset[Any]:
    """Those that write into none of their arguments: one given as ``out`` takes the result's shape."""
    return frozenset(func for func in _overloads(*names) if not schema_of(func).is_mutable)


_IN_PLACE = _overloads(
    "add_", "bernoulli_", "clamp_", "copy_", "div_", "exp_", "fill_", "index_add_", "index_copy_", "lerp_", "log_",
    "masked_fill_", "mul_", "neg_", "rsqrt_", "scatter_add_", "sqrt_", "square_", "sub_", "tanh_", "zero_",
)  # fmt: skip
"""Operators that return their first argument as it was: nothing has to be worked out, and half of a step is these."""

_UPDATES = _overloads("_foreach_add_", "_foreach_mul_", "_fused_adamw_", "_fused_sgd_")
"""Operators that return nothing: of all weights at once, whose shapes the fake mode would look through, or, for want of
a rule, run on real tensors."""

_VIEWS = {UNSAFE_VIEW} | _pure(
    "alias", "detach", "expand", "permute", "select", "slice", "squeeze", "t", "transpose", "unsqueeze", "view"
)
_NEW = {TO_COPY} | _pure(
    "add", "addmm", "amax", "bmm", "cat", "clone", "div", "embedding", "empty", "empty_like", "gather", "index_select",
    "linalg_vector_norm", "mean", "mm", "mul", "neg", "new_empty", "new_ones", "new_zeros", "ones_like", "pow", "rsqrt",
    "sigmoid", "silu", "silu_backward", "slice_backward", "stack", "sub", "sum", "zeros", "zeros_like",
)  # fmt: skip
"""Operators with one result: a view, or a new tensor on the device of its arguments. Four fifths of a step are these,
and the fake mode's own way round takes four times as long."""


_KNOWN = {id(func): group for group in (_IN_PLACE, _UPDATES, _VIEWS, _NEW) for func in group}
"""Their groups by the operator's id, which is quicker to look up than the operator."""

_HOLD_NO_TENSOR = frozenset((int, float, bool, type(None), torch.dtype, str))


class _Laid(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Laid:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


_FUNCTIONS = {id(func): func for func in _NEW}


@lru_cache(8192, typed=True)
def _new(default: torch.dtype, func: int, names: tuple[str, ...], *values: Any) -> _Laid:
    """What an operator, given by its id, returns for these arguments where ``default`` is the dtype.

    The last ones have ``names``.
    """
    given = [_made(one) for one in values]
    first = len(given) - len(names)
    return _Laid.of(_FUNCTIONS[func](*given[:first], **dict(zip(names, given[first:], strict=True))))


def _made(one: Any) -> Any:
    """An argument of an operator on the meta device, from one of :func:`_new`."""
    if isinstance(one, _Laid):
        return one.make()
    return [_made(each) for each in one] if isinstance(one, tuple) else one


class _Shapes:
    """Works out the results of the commonest operators of a fake mode, in a quarter of its time."""

    def __init__(self) -> None:
        self._mode: Any = None
        self._like: Any = None

    def know(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the one result of ``func``, a view or a new tensor, is worked out here."""
        group = _KNOWN.get(id(func))
        if group is not _VIEWS and group is not _NEW:
            return False
        mode = active_fake_mode()
        return _are_plain(mode, args) and (not kwargs or _are_plain(mode, kwargs.values()))

    def of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """That result."""
        mode = active_fake_mode()
        if _KNOWN[id(func)] is _VIEWS:
            with shapes_only(mode):
                found = func(*args, **kwargs)
        else:
            with without_dispatch():
                described = map(_described, (*args, *kwargs.values()))
                found = _new(torch.get_default_dtype(), id(func), tuple(kwargs), *described).make()
        if self._mode is not mode:
            with shapes_only(mode):
                self._mode, self._like = mode, FakeTensor(mode, torch.empty((), device=_META), _CPU)
        return fake_on(found, self._like)


class _Answering(Seeing):
    """What :class:`Answers` does at every operator."""

    def __init__(self) -> None:
        super().__init__()
        self._shapes = _Shapes()

    @contextmanager
    def shown_to(self, see: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> Iterator[None]:
        """Inside, ``see`` is given each operator with its arguments and result."""
        before, self.see = self.see, see
        try:
            yield
        finally:
            self.see = before

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = _KNOWN.get(id(func))
        if known is _IN_PLACE:
            return args[0]
        if known is _UPDATES:
            return None
        out = kwargs.get("out", kwargs.get("grad_input"))
        if isinstance(out, Tensor) and out.numel():
            return out
        if self._shapes.know(func, args, kwargs):
            return self._shapes.of(func, args, kwargs)
        if func is GROUPED_MM and args[0].dtype != torch.bfloat16:
            low = [one.to(torch.bfloat16) if _is_floating(one) else one for one in args]
            return func(*low, **kwargs).to(args[0].dtype)
        if func is not _LIFT and _are_real(args):
            with disable_current_modes():
                return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            if args[0].dtype is not torch.bool:
                raise
            return not hasattr(args[0], _BELOW)
        if func is torch.ops.aten.lt.Scalar and result.dim() == 0:
            setattr(result, _BELOW, True)
        return result


class Answers(_Answering, TorchDispatchMode):
    """Answers what a fake tensor cannot, and shows what runs to whoever is :meth:`shown_to`.

    Nobody compiles what runs under it: its method is inherited, so that PyTorch does not keep torch.compile out of it
    at every operator: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_python_dispatch.py,
    ``__init_subclass__``.
    """


class _Quickening:
    """What :class:`Quicker` does at every operator."""

    def __init__(self) -> None:
        super().__init__()
        self._shapes = _Shapes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plainly_asked = not any(isinstance(one, _WHERE_AND_HOW) for one in (*args, *kwargs.values()))
        if plainly_asked and func is not _SILU_BACKWARD and self._shapes.know(func, args, kwargs):
            with suppress(Exception):  # the fake mode says what is wrong
                return self._shapes.of(func, args, kwargs)
        return func(*args, **kwargs)


class Quicker(_Quickening, TorchDispatchMode):
    """Inside a fake mode: what it returns, in less time.

    What asks for a device, a layout or a memory format is left to the fake mode, and so is ``silu_backward``, whose
    result lies otherwise there. As of :class:`Answers`, its method is inherited.
    """


_WHERE_AND_HOW = (torch.device, torch.layout, torch.memory_format)
_SILU_BACKWARD = torch.ops.aten.silu_backward.default


def _are_plain(mode: Any, values: Iterable[Any]) -> bool:
    return all(type(one) in _HOLD_NO_TENSOR or _is_plain(mode, one) for one in values)


def _is_plain(mode: Any, one: Any) -> bool:
    """Whether an argument is a fake tensor of ``mode`` on the CPU, of no number that is known, or no tensor.

    No other device or layout is.
    """
    if isinstance(one, Tensor):
        if not isinstance(one, FakeTensor) or one.layout is not torch.strided:
            return False
        return one.fake_mode is mode and one.fake_device == _CPU and (one.numel() > 1 or one.constant is None)
    if isinstance(one, list):
        return _are_plain(mode, one)
    if isinstance(one, torch.layout):
        return one is torch.strided
    return not isinstance(one, torch.device) or one == _CPU


def _are_real(args: Any) -> bool:
    """Whether there are tensors among the arguments, all of them with numbers."""
    held = [one for one in args if isinstance(one, Tensor)]
    return bool(held) and not any(isinstance(one, FakeTensor) for one in held)


def _described(one: Any) -> Any:
    """An argument as :func:`_new` takes it."""
    if type(one) in _HOLD_NO_TENSOR:
        return one
    if isinstance(one, Tensor):
        return _Laid.of(one)
    return _META if isinstance(one, torch.device) else tuple(map(_described, one)) if isinstance(one, list) else one


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
