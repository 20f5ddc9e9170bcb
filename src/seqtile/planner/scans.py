"""Memory of the scan of a layer with a state, without running its loop.

Transformers' PyTorch paths of Gated DeltaNet, KDA, Mamba and RG-LRU loop over chunks or tokens: a fake step of 16,384
tokens would be minutes of Python. Each loop is run on fake tensors at three short lengths instead. Where what it holds
is a line in the tokens, an operator of those bytes replaces it in the fake step; where not, the loop itself runs.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import RG_LRU_SCAN, disable_current_modes, storage_key
from seqtile.counting.fake import fake_tensors, in_this_thread
from seqtile.counting.live import count_live_bytes
from seqtile.planner.layer_structure import Counts
from seqtile.planner.request import Request
from seqtile.planner.scan_kernels import SCAN_KERNELS, SOURCES
from seqtile.planner.step_config import Setup
from seqtile.planner.step_kind import StepKind

LOOPS: dict[str, dict[str, int]] = {
    "torch_chunk_gated_delta_rule": {"query": 1, "key": 1, "value": 1, "g": 1, "beta": 1},
    "chunk_kimi_delta_attention": {"query": 1, "key": 1, "value": 1, "g": 1, "beta": 1},
    "mamba_selective_scan": {"hidden_states": 2, "dt": 2, "B": 2, "C": 2, "z": 2},
    RG_LRU_SCAN: {"hidden_states": 1, "recurrent_gate": 1, "reset": 1},
}
"""Functions of transformers' modeling files that loop over the sequence: the dimension of the tokens by argument."""

TURNS = (4, 6, 8)
"""Lengths at which a loop is run, in chunks."""
_TOKENS_A_TURN = 8
"""Tokens per step of :data:`TURNS` where a loop goes over single tokens instead of chunks."""
_STRAIGHT = 1e-3
"""Largest error of the line at the middle length, relative."""


@dataclass(frozen=True)
class ScanBytes:
    """Bytes of one call beside its inputs and its output.

    Attributes:
        saved: bytes saved for the backward.
        passing: bytes at the forward's peak where nothing is saved, under an activation checkpoint.
        forward: bytes at the forward's peak beside what is saved.
        backward: bytes at the backward's peak beside what is saved, gradients of the inputs included.
    """

    saved: int
    passing: int
    forward: int
    backward: int


_BYTES = tuple(ScanBytes.__dataclass_fields__)


@contextmanager
def planned_scans(model: nn.Module, scans: str) -> Iterator[None]:
    """While the ``with`` lasts, scans that this thread calls in the modeling files of ``model`` hold their bytes
    and compute nothing.

    Args:
        model: a model on fake tensors.
        scans: one of :data:`seqtile.planner.names.SCANS`.
    """
    undo: list[Callable[[], None]] = []
    try:
        files = {type(layer).__module__ for layer in model.modules()}
        for file in files:
            if "transformers" not in file:
                continue
            module = sys.modules[file]
            for name in (LOOPS.keys() | SCAN_KERNELS.keys()) & vars(module).keys():
                original = getattr(module, name)
                undo.append(partial(setattr, module, name, original))
                setattr(module, name, in_this_thread(_planned(name, original, scans), original))
        for layer in model.modules():
            if hasattr(layer, RG_LRU_SCAN):
                undo.append(partial(delattr, layer, RG_LRU_SCAN))
                setattr(layer, RG_LRU_SCAN, _stand_in(getattr(layer, RG_LRU_SCAN), LOOPS[RG_LRU_SCAN]))
        yield
    finally:
        for restore in undo:
            restore()


def _planned(name: str, function: Callable[..., Any], scans: str) -> Callable[..., Any]:
    """A replacement of ``function``, which calls a kernel where transformers found one."""
    package, kernel = SCAN_KERNELS.get(name, ("", None))
    if kernel is not None and (scans == "kernels" or (scans == "installed" and find_spec(package) is not None)):
        return kernel
    plain = inspect.unwrap(function)
    return _stand_in(plain, LOOPS[name]) if name in LOOPS else plain


@dataclass(frozen=True)
class _Shape:
    """A tensor argument but for its number of tokens: ``dim`` is their dimension, None where it has none."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    dim: int | None

    @classmethod
    def of(cls, tensor: Tensor, dim: int | None) -> _Shape:
        shape = tuple(0 if dim_number == dim else size for dim_number, size in enumerate(tensor.shape))
        order = tuple(sorted(range(tensor.dim()), key=lambda dim_number: (-tensor.stride()[dim_number], dim_number)))
        return cls(shape, order, tensor.dtype, tensor.requires_grad, dim)

    def make(self, tokens: int) -> Tensor:
        """One of ``tokens`` tokens, strided as that argument."""
        shape = [tokens if dim_number == self.dim else size for dim_number, size in enumerate(self.shape)]
        dense = torch.empty([shape[dim_number] for dim_number in self.order], dtype=self.dtype)
        back = sorted(range(len(shape)), key=self.order.__getitem__)
        return dense.permute(back).requires_grad_(self.requires_grad)


def _stand_in(loop: Callable[..., Any], dims: Mapping[str, int]) -> Callable[..., Any]:
    signature = inspect.signature(loop)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        extra = bound.arguments.pop("kwargs", {})
        tensors = {name: value for name, value in bound.arguments.items() if isinstance(value, Tensor)}
        chunk = int(bound.arguments.get("chunk_size", _TOKENS_A_TURN))
        first = next(iter(dims))
        tokens = tensors[first].shape[dims[first]]
        if tokens <= TURNS[-1] * chunk or any(isinstance(value, Tensor) for value in extra.values()):
            return loop(*args, **kwargs)
        shapes = tuple((name, _Shape.of(value, dims.get(name))) for name, value in tensors.items())
        others = tuple((name, value) for name, value in bound.arguments.items() if name not in tensors)
        line = _line(loop, shapes, others, chunk, torch.is_autocast_enabled("cpu"))
        if line is None:
            return loop(*args, **kwargs)
        outputs = _Holding.apply(line.results, tokens, line.at(tokens), line.kept, _keeping(), *tensors.values())  # type: ignore[no-untyped-call]
        if line.single:
            return outputs[0]
        left = iter(outputs)
        return tuple(None if value is None else next(left) for value in line.results)

    return call


class _Holding(torch.autograd.Function):
    """An operator that holds the given bytes."""

    @staticmethod
    def forward(
        ctx: Any, results: tuple[_Shape | None, ...], tokens: int, sizes: ScanBytes, kept: tuple[bool, ...],
        keeping: bool, *inputs: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        made = tuple(result.make(tokens).requires_grad_(False) for result in results if result is not None)
        # Where nothing stays, it has the size only, by which a checkpoint compares forward and recompute.
        saved = _bytes(sizes.saved) if keeping else _bytes(1).expand(sizes.saved)
        _bytes(sizes.forward if keeping else sizes.passing)
        ctx.save_for_backward(saved, *(result for result, stays in zip(inputs, kept, strict=True) if stays))
        ctx.inside = sizes.backward
        ctx.like = [(result.shape, result.dtype) if result.requires_grad else None for result in inputs]
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        _bytes(ctx.inside)
        del saved
        return (
            None,
            None,
            None,
            None,
            None,
            *(None if result is None else torch.empty(result[0], dtype=result[1]) for result in ctx.like),
        )


class _WatchedSave(torch.autograd.Function):
    """Saves a tensor without other references, and passes it to ``seen``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Any]) -> Tensor:
        saved = torch.empty(1)
        seen.append(weakref.ref(saved.untyped_storage()))
        ctx.save_for_backward(saved)
        return x.new_empty(1)


def _keeping() -> bool:
    """Whether what an operator saves now stays; in the forward of an activation checkpoint it does not."""
    seen: list[Any] = []
    output = _WatchedSave.apply(torch.empty(1, requires_grad=True), seen)  # type: ignore[no-untyped-call]
    stays = seen[0]() is not None
    del output
    return stays


def _bytes(count: int) -> Tensor:
    return torch.empty(max(0, count), dtype=torch.uint8)


@dataclass(frozen=True)
class _Line:
    """Memory of a loop over its tokens, from its runs at the outer two of :data:`TURNS`."""

    lengths: tuple[int, int]
    ends: tuple[ScanBytes, ScanBytes]
    results: tuple[_Shape | None, ...]
    kept: tuple[bool, ...]
    single: bool

    def at(self, tokens: int) -> ScanBytes:
        """The bytes at ``tokens`` tokens."""
        fraction = (tokens - self.lengths[0]) / (self.lengths[1] - self.lengths[0])
        low, high = self.ends
        return ScanBytes(*(
            round(getattr(low, name) + fraction * (getattr(high, name) - getattr(low, name)))
            for name in _BYTES
        ))  # fmt: skip


@cache
def _line(
    loop: Callable[..., Any], shapes: tuple[tuple[str, _Shape], ...], others: tuple[tuple[str, Any], ...], chunk: int,
    autocast: bool,
) -> _Line | None:  # fmt: skip
    """The fitted line of ``loop``, or None; runs under the current autocast, with which results are cached."""
    lengths = [turns * chunk for turns in TURNS]
    runs = [_run(loop, shapes, others, length) for length in lengths]
    sizes = [run[0] for run in runs]
    line = _Line((lengths[0], lengths[-1]), (sizes[0], sizes[-1]), *runs[0][1:])
    middle = line.at(lengths[1])
    for name in _BYTES:
        expected = getattr(sizes[1], name)
        if abs(getattr(middle, name) - expected) > _STRAIGHT * max(1, expected):
            return None
    return line


def _run(
    loop: Callable[..., Any], shapes: tuple[tuple[str, _Shape], ...], others: tuple[tuple[str, Any], ...], tokens: int
) -> tuple[ScanBytes, tuple[_Shape | None, ...], tuple[bool, ...], bool]:
    """One call of ``tokens`` tokens on fake tensors: its bytes, its results, and which inputs it keeps."""
    with disable_current_modes(), fake_tensors(), torch.enable_grad():
        inputs = {name: shape.make(tokens) for name, shape in shapes}
        keys: set[int] = set()

        def pack(tensor: Tensor) -> Tensor:
            keys.add(storage_key(tensor.untyped_storage()))
            return tensor

        with count_live_bytes("cpu") as live, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with live.phase("forward"):
                results = loop(**inputs, **dict(others))
            single = isinstance(results, Tensor)
            results = (results,) if single else tuple(results)
            result_shapes = tuple(
                None if result is None else _Shape.of(result, _tokens_in(result, tokens)) for result in results
            )
            sizes = [result.numel() * result.element_size() for result in results if result is not None]
            kept = tuple(storage_key(tensor.untyped_storage()) in keys for tensor in inputs.values())
            total = _Begin.apply(results[0])  # type: ignore[no-untyped-call]
            saved = max(0, live.timeline()[-1].live - sum(sizes))
            with live.phase("backward"):
                del results
                total.backward()
        peaks = {name: live.phases[name].peak for name in ("forward", "backward")}
        with count_live_bytes("cpu") as live, torch.no_grad():
            loop(**inputs, **dict(others))
    # The gradient of the output is as large as the output.
    forward, backward = peaks["forward"] - saved - sum(sizes), peaks["backward"] - saved - sizes[0]
    return (
        ScanBytes(saved, max(0, live.peak - sum(sizes)), max(0, forward), max(0, backward)),
        result_shapes,
        kept,
        single,
    )


def _tokens_in(tensor: Tensor, tokens: int) -> int | None:
    """The dimension of the tokens in a result, None where it has none."""
    return next((dim_number for dim_number, size in enumerate(tensor.shape) if size == tokens), None)


class _Begin(torch.autograd.Function):
    """Begins a backward with a gradient without other references."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = output.shape, output.dtype
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        return torch.empty(ctx.shape, dtype=ctx.dtype)


class ScanStep(StepKind):
    """A step of a model with layers that carry a state, if it has any."""

    def applies(self, config: Any, setup: Setup) -> bool:
        return True  # no effect on models without such layers

    def running(self, model: Any, setup: Setup, tokens: int) -> AbstractContextManager[Any]:
        return planned_scans(model, setup.scans)

    def notes(self, request: Request, counts: Counts, states: Mapping[str, Sequence[str]]) -> list[str]:
        notes, scans = [], request.setup().scans
        for kind_of_state, layers in states.items():
            many = len(layers) > 1
            which = f"{len(layers)} layer{'s' * many} with a state ({kind_of_state}) run{'s' * (not many)}"
            source = SOURCES.get(kind_of_state)
            if scans == "pytorch" or source is None:
                reason = f"used without {source}" if source else "the only one"
                notes.append(f"{which} in transformers' PyTorch path, {reason}")
                continue
            where = "" if scans == "kernels" else " where installed"
            notes.append(f"{which} in {source}{where}; their allocations are read from source, not measured")
        return notes
