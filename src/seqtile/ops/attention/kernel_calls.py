"""Record attention kernels' outputs in forward and replay them in the recompute.

A kernel's result is its output and what its backward needs besides, the log-sum-exp. Both are seen below autograd, as
the results of one operator, whichever library it comes from; attention of plain products has none and is computed
again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from seqtile._compat import (
    ATTENTION_KERNELS,
    TreeSpec,
    hooks_inside_checkpoints,
    storage_key,
    tree_flatten,
    tree_unflatten,
)
from seqtile.counting.watch import LettingCompile, name_of
from seqtile.ops.attention.backends import AllowedKernels, backend_of, refuse_wrong
from seqtile.ops.rng import RandomState


@cache
def is_attention(op: Any) -> bool:
    """Whether an operator is a fused attention forward; asked for every operator that runs in a pass."""
    space, _, name = op.name().partition("::") if hasattr(op, "name") else ("", "", "")
    name = name.partition(".")[0]
    if space == "aten":
        return name in ATTENTION_KERNELS
    # FlashAttention's own operators, also under the hashed namespaces of downloaded kernels.
    return "flash_attn" in space and "backward" not in name and "bwd" not in name


@dataclass(frozen=True)
class OutputAlias:
    """A kernel's result that is the output of the call itself, in another shape: kept once, with the output."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Recorded:
    """The results of the kernels in one call, without their tensors: an autograd node may hold it.

    Attributes:
        calls: each kernel's operator, the form of its results and the results themselves; a :class:`Position`
            stands for one of the tensors, an :class:`OutputAlias` for a view of the output.
    """

    calls: tuple[tuple[Any, TreeSpec, tuple[Any, ...]], ...]


@dataclass(frozen=True)
class Position:
    """Stands for a tensor among the tensors."""

    position: int


def record(run: Callable[[], tuple[Tensor, Any]], *, for_backward: bool) -> tuple[Tensor, Any, Recorded, list[Tensor]]:
    """Call ``run()`` and record what the attention kernels in it return beside its output.

    Args:
        run: returns its output and anything else.
        for_backward: whether a backward replays the kernels. ``run()`` then runs under gradient mode, and its inputs
            must require gradients, because SDPA chooses its kernel by both and cuDNN and the memory-efficient kernel
            compute a log-sum-exp only then:
            https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/attention.cpp
    """
    with _graph_without_tensors() if for_backward else torch.no_grad(), _Recording() as mode:
        output, beside = run()
    output = output.detach()
    tensors: list[Tensor] = []
    calls = []
    for operator, result in mode.calls:
        leaves, spec = tree_flatten(result)
        calls.append((operator, spec, tuple(_describe_argument(leaf, output, tensors) for leaf in leaves)))
    return output, beside, Recorded(tuple(calls)), tensors


@contextmanager
def _graph_without_tensors() -> Iterator[None]:
    """Gradient mode whose graph holds no tensors; hides the pack hooks of an activation checkpoint around it."""
    with torch.enable_grad(), hooks_inside_checkpoints(lambda _: None, lambda _: torch.empty(0)):
        yield


def _describe_argument(leaf: Any, output: Tensor, tensors: list[Tensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.numel() == output.numel() > 0 and leaf.dtype == output.dtype and output.is_contiguous():
        if storage_key(leaf.untyped_storage()) == storage_key(output.untyped_storage()):
            offset = int(leaf.storage_offset() - output.storage_offset())
            return OutputAlias(tuple(leaf.shape), tuple(leaf.stride()), offset)
    tensors.append(leaf.detach())  # autograd has written its node on the kernel's own result
    return Position(len(tensors) - 1)


@contextmanager
def replayed(recorded: Recorded, tensors: Sequence[Tensor], output: Tensor) -> Iterator[None]:
    """Inside, attention kernels return what they returned when ``record`` saw them, in the same order.

    Args:
        recorded: result of :func:`record`.
        tensors: likewise.
        output: the output of that call; copied, since kernels of a backward want the strides of their forward.
    """
    calls = []
    for operator, spec, leaves in recorded.calls:
        values = [
            tensors[leaf.position] if isinstance(leaf, Position)
            else _placed(leaf, output) if isinstance(leaf, OutputAlias)
            else leaf
            for leaf in leaves
        ]  # fmt: skip
        calls.append((operator, tree_unflatten(values, spec)))
    with _Replaying(calls):
        yield


def _placed(alias: OutputAlias, output: Tensor) -> Tensor:
    with torch.no_grad():
        copy = output.clone(memory_format=torch.contiguous_format)
        return copy.as_strided(alias.shape, alias.stride, copy.storage_offset() + alias.offset)


class _Recording(LettingCompile):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_attention(func):
            return func(*args, **(kwargs or {}))
        refuse_wrong(func, args)
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, result))
        return result


class _Replaying(LettingCompile):
    def __init__(self, calls: list[tuple[Any, Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_attention(func):
            return func(*args, **(kwargs or {}))
        operator, result = self._calls.pop(0) if self._calls else (None, None)
        if operator is not func:  # another kernel's log-sum-exp has another form, and gives wrong gradients silently
            ran = "plain products" if operator is None else backend_of(name_of(operator))
            raise RuntimeError(
                f"attention ran on {ran} in forward, but backward would run on {backend_of(name_of(func))}; use the "
                "same torch.backends settings for both"
            )
        return result


@contextmanager
def names_of_kernels() -> Iterator[set[str]]:
    """The names of the attention operators that run inside, such as ``aten::_scaled_dot_product_cudnn_attention``."""
    with _Naming() as mode:
        yield mode.names


class _Naming(LettingCompile):
    supports_higher_order_operators = True  # which are handed on as they are

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_attention(func):
            refuse_wrong(func, args)
            self.names.add(name_of(func))
        return func(*args, **(kwargs or {}))


@dataclass
class Kept:
    """Attention outputs that a layer's activation checkpoint keeps for its recompute.

    Attributes:
        replaying: whether the layer is being computed again.
        computing: whether an attention that keeps its own results here is at work now.
        outputs: what was put here, first in first out.
        random: where the generator stood after each kernel whose results PyTorch keeps. The recompute does not run it,
            but its dropout has drawn from the stream with which the rest of the layer goes on.
        kernels: SDPA's kernels that the forward could choose from.
    """

    replaying: bool = False
    computing: bool = False
    outputs: list[Any] = field(default_factory=list)
    random: list[RandomState] = field(default_factory=list)
    kernels: AllowedKernels | None = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, only this module saves attention kernels' results."""
        self.computing = True
        try:
            yield
        finally:
            self.computing = False


_running = threading.local()


def kept_now() -> Kept | None:
    """Where the layer checkpoint around the caller keeps attention outputs; None without such a checkpoint."""
    return getattr(_running, "kept", None)


@contextmanager
def keeping(kept: Kept, *, replaying: bool) -> Iterator[None]:
    """Inside, ``kept`` is where attention outputs go, or come from when ``replaying``."""
    outer = kept_now()
    _running.kept, kept.replaying = kept, replaying
    try:
        yield
    finally:
        _running.kept = outer
