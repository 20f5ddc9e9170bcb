"""Run real training code on PyTorch's fake tensors.

Everything of theirs that is private to PyTorch or Transformers is named in this module and nowhere else.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import (
    FUSED_UPDATES,
    GROUPED_MM,
    DataDependentOutputException,
    FakeTensor,
    PlanMode,
    TorchDispatchMode,
    active_fake_mode,
    buffers_of,
    disable_current_modes,
    function_mode_off,
    function_modes_on,
    parameters_of,
)
from seqtile.counting.fake_results import FakeResults
from seqtile.counting.watch import Seeing

FAKE_RUN = threading.RLock()
"""Held by the thread that computes on fake tensors, which meanwhile calls other functions than Transformers' own."""


def in_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``replacement`` in this thread and ``original`` in any other, which may train meanwhile."""
    thread = threading.get_ident()

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == thread else original)(*args, **kwargs)

    return function


@contextmanager
def callers_modes_off() -> Iterator[None]:
    """Inside, gradients are recorded, and neither an autocast nor a function mode of the caller is on.

    A default device is such a mode. A checkpoint's recompute would enter it a second time, and it would then stay on
    after the caller has left it.
    """
    with (
        torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False), ExitStack() as stack,
    ):  # fmt: skip
        for _ in range(function_modes_on()):
            stack.enter_context(function_mode_off())
        depth = torch.autocast_increment_nesting() - 1
        for _ in range(depth + 1):
            torch.autocast_decrement_nesting()  # the outermost autocast drops the weights that it cast
        try:
            yield
        finally:
            for _ in range(depth):
                torch.autocast_increment_nesting()


@contextmanager
def fake_tensors() -> Iterator[Answers]:
    """Inside, tensors have shapes, types and devices but no memory, and operators compute only those.

    Three things are fixed, so that the operators are those of a real run:

    * Transformers asks whether a tensor is fake and then builds its masks in full, with keys and values repeated for
      every query head; here it reads that none is.
    * Code that reads a number (is this batch packed? is every position attended to?) has none to read; it is
      answered with "yes", which means one unpadded sequence per row. "Is this number below that?" (drawn at random,
      to drop a layer) is answered with "no".
    * The grouped product of experts knows its fake result in bf16 only; for other types it is worked out from that.

    Another thread that enters waits until this one has left.

    What is computed from real tensors alone, such as the grid of a picture's patches, is computed for real.

    Counters such as :func:`seqtile.counting.count_live_bytes` go inside this ``with``, which gives the mode that sees
    every operator.
    """
    with FAKE_RUN, _no_tensor_is_fake(), PlanMode(), Answers() as mode:
        yield mode


def make_fake(model: nn.Module) -> None:
    """Give every parameter and buffer of a model on the meta device a fake one on the CPU instead; ties are kept."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        places: list[Any] = [parameters_of(module), buffers_of(module)]
        for tensors_by_name in places:
            for name, tensor in tensors_by_name.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    is_weight = isinstance(tensor, nn.Parameter)
                    new = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_weight else fake
                    made[id(tensor)] = (tensor, new)  # the old one too: its id must not be given away meanwhile
                tensors_by_name[name] = made[id(tensor)][1]


_BELOW = "_seqtile_is_below"
_LIFT = torch.ops.aten.lift_fresh.default

_UPDATES = frozenset(getattr(packet, overload) for packet in FUSED_UPDATES for overload in packet.overloads())
"""Updates of all weights at once, in place. They have no fake rule: the fake mode would run them on real zeros."""


class Answers(Seeing, TorchDispatchMode):
    """Answers queries that a fake tensor cannot, and passes operators on to :meth:`shown_to`."""

    def __init__(self) -> None:
        super().__init__()
        self._results = FakeResults(active_fake_mode())

    @contextmanager
    def shown_to(self, see: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> Iterator[None]:
        """Inside, ``see`` is given each operator with its arguments and result."""
        previous, self.see = self.see, see
        try:
            yield
        finally:
            self.see = previous

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _UPDATES:
            return None
        if func is GROUPED_MM and args[0].dtype != torch.bfloat16:
            in_bf16 = [arg.to(torch.bfloat16) if isinstance(arg, Tensor) and arg.is_floating_point() else arg
                       for arg in args]  # fmt: skip
            return func(*in_bf16, **kwargs).to(args[0].dtype)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if func is not _LIFT and tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with disable_current_modes():
                return func(*args, **kwargs)
        try:
            result = self._results.run(func, args, kwargs)
        except DataDependentOutputException:
            if args[0].dtype is not torch.bool:
                raise
            return not hasattr(args[0], _BELOW)
        if func is torch.ops.aten.lt.Scalar and result.dim() == 0:
            setattr(result, _BELOW, True)
        return result


@contextmanager
def _no_tensor_is_fake() -> Iterator[None]:
    """``is_fake_tensor`` of Transformers says no in this thread; without Transformers it does nothing."""
    try:
        utilities: Any = importlib.import_module("transformers.utils.import_utils")
    except ImportError:
        yield
        return
    original = getattr(utilities, "is_fake_tensor", None)
    if original is not None:
        utilities.is_fake_tensor = in_this_thread(lambda tensor: False, original)
    try:
        yield
    finally:
        if original is not None:
            utilities.is_fake_tensor = original
