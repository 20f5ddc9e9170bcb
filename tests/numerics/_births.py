"""Every tensor that operators make while a piece of code runs, and which of them are still alive afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Births(TorchDispatchMode):
    """Notes the storages that are born inside the ``with``, weakly."""

    def __init__(self) -> None:
        super().__init__()
        self._born: dict[int, tuple[weakref.ref[Any], tuple[int, ...]]] = {}
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in known and tensor.numel():
                storage = tensor.untyped_storage()
                self._born[storage._cdata] = weakref.ref(storage), tuple(tensor.shape)
                self.shapes.add(tuple(tensor.shape))
        return result

    def alive(self, *expected: Tensor | None) -> list[tuple[int, ...]]:
        """Shapes of those still alive, but for the ``expected`` ones. An expected one that is dead is an error."""
        if not self._born:
            raise RuntimeError("no tensor was born; run the code inside the `with`")
        left = {key: shape for key, (ref, shape) in self._born.items() if ref() is not None}
        for tensor in expected:
            if tensor is not None:
                left.pop(tensor.untyped_storage()._cdata, None)
        return sorted(left.values())


@contextmanager
def births() -> Iterator[Births]:
    with Births() as mode:
        yield mode
