"""Results of operators on fake tensors, by the metadata of their arguments.

A fake step calls the same operators with the same shapes for every tile and layer. PyTorch's own cache of fake results
has a slow key, which covers every kind of tensor, and never keeps an operator that writes into a buffer. Here shape,
strides, offset, dtype and device of plain, strided tensors are the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqtile._compat import (
    FakeTensor,
    OpOverload,
    disable_current_modes,
    in_kernel_invocation,
    schema_of,
    storage_key,
)

MOST_RESULTS = 50_000
"""Results that are kept; beyond it all are dropped. A plan has some hundreds."""


class _NotByMetadata(Exception):
    """An argument whose metadata does not decide the result."""


class _WrittenArgument(NamedTuple):
    """A result that is the argument which the operator writes to: ``out``, or the first one."""

    place: int | str

    @classmethod
    def of(cls, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _WrittenArgument | None:
        """Describe ``result``; None if it is not an argument."""
        # The tensor given as ``out`` may be an input of this call and not of the next: exp(x, out=x), exp(x, out=y).
        places: list[tuple[int | str, Any]] = [*kwargs.items(), *enumerate(args)]
        return next((cls(place) for place, arg in places if arg is result), None)

    def make(self, mode: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs[self.place] if isinstance(self.place, str) else args[self.place]


class _NewTensor(NamedTuple):
    """A result that is a new tensor, or a view of the argument at position ``base``."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    base: int | None

    @classmethod
    def of(cls, result: Any, args: Sequence[Any]) -> _NewTensor | None:
        """Describe ``result``; None if it is not a single plain tensor, or if it is an argument itself."""
        if not _is_plain_fake(result) or any(result is arg for arg in args):
            return None
        storage = result.untyped_storage()
        key = storage_key(storage)
        bases = [
            n for n, arg in enumerate(args) if isinstance(arg, Tensor) and storage_key(arg.untyped_storage()) == key
        ]
        description = cls(
            result.shape, result.stride(), result.dtype, result.device, result.storage_offset(), next(iter(bases), None)
        )
        if bases:
            return description
        with disable_current_modes():
            size = description._on_meta().untyped_storage().nbytes()
        return description if description.offset == 0 and size == storage.nbytes() else None

    def _on_meta(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    def make(self, mode: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result for other arguments with the same metadata."""
        with in_kernel_invocation(mode):
            tensor = self._on_meta()
            if self.base is not None:
                tensor.set_(args[self.base].untyped_storage(), self.offset, self.shape, self.strides)
        return FakeTensor(mode, tensor, self.device)


class FakeResults:
    """Results of operators on the fake tensors of one mode."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute ``func(*args, **kwargs)``; rebuild the result if ``func`` has run with such arguments before."""
        try:
            key = self._key(func, args, kwargs)
            remembered = _results.get(key)
        except (_NotByMetadata, TypeError):  # an argument without a hash
            return func(*args, **kwargs)
        if remembered is not None:
            return remembered.make(self._mode, args, kwargs)
        result = func(*args, **kwargs)
        writes = schema_of(func).is_mutable
        description = _WrittenArgument.of(result, args, kwargs) if writes else _NewTensor.of(result, args)
        if description is not None and (not writes or key == self._key(func, args, kwargs)):  # nothing was resized
            if len(_results) >= MOST_RESULTS:
                _results.clear()
            _results[key] = description
        return result

    def _key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        if not isinstance(func, OpOverload) or not _depends_on_metadata(func):
            raise _NotByMetadata
        facts = [self._facts(arg) for arg in args]
        named = [(name, self._facts(arg)) for name, arg in kwargs.items()]
        return func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), *facts, *named

    def _facts(self, arg: Any) -> tuple[Any, ...]:
        if isinstance(arg, Tensor):
            if not _is_plain_fake(arg) or getattr(arg, "fake_mode", None) is not self._mode:
                raise _NotByMetadata
            return arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.device
        if isinstance(arg, (list, tuple)):
            return type(arg), *[self._facts(value) for value in arg]
        return type(arg), arg  # 1, 1.0 and True are equal


_results: dict[tuple[Any, ...], _NewTensor | _WrittenArgument] = {}


def _is_plain_fake(tensor: Any) -> bool:
    if not isinstance(tensor, FakeTensor) or tensor.constant is not None:  # a constant's number may be read
        return False
    return tensor.layout is torch.strided and not tensor.dtype.is_complex and not tensor.is_neg()


@cache
def _depends_on_metadata(func: Any) -> bool:
    """Whether an operator is PyTorch's own, its arguments' metadata decides its result, and it changes no metadata."""
    others = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
    return func.namespace == "aten" and not any(tag in func.tags for tag in others)
