"""What operators read while a piece of code runs, seen from outside.

A hook that notes its calls in a list is custom code, which would leave its block untiled. A dispatch mode belongs to
nobody's forward, and the traces that prove a block run in a thread where it is not active.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "convolution_backward"}


class _Watch(TorchDispatchMode):
    def __init__(self, operator: str, weights: set[int]) -> None:
        super().__init__()
        self.operator, self.weights = operator, weights
        self.shapes: list[torch.Size] = []
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor) and not isinstance(t, FakeTensor)]
        others = [t for t in tensors if t.untyped_storage()._cdata not in self.weights]
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if self.weights:
            watched = name in _PRODUCTS and len(others) < len(tensors)
        else:
            watched = name == self.operator
        if watched and others:
            x = max(others, key=lambda t: (t.dim(), t.numel()))  # a bias may be among them
            self.shapes.append(x.shape)
            self.rows.append(x.numel() // max(x.shape[-1], 1))
        return result


@contextmanager
def shapes_of(*watched: str | Tensor) -> Iterator[list[torch.Size]]:
    """Shapes of the tensors that one operator is given, or that are multiplied by a weight, in order of the calls.

    Args:
        watched: the name of the operator without its ``aten::``, in place or not, such as ``"silu"``; or weights, whose
            matrix products and convolutions are watched, forward and backward.
    """
    with _watch(watched) as watch:
        yield watch.shapes


@contextmanager
def rows_of(*watched: str | Tensor) -> Iterator[list[int]]:
    """As :func:`shapes_of`: the products of all dimensions but the last."""
    with _watch(watched) as watch:
        yield watch.rows


def _watch(watched: tuple[str | Tensor, ...]) -> _Watch:
    names = [one for one in watched if isinstance(one, str)]
    weights = {one.untyped_storage()._cdata for one in watched if isinstance(one, Tensor)}
    assert len(names) <= 1 and bool(names) != bool(weights)
    return _Watch("".join(names), weights)


@contextmanager
def dropout_that_scales(monkeypatch: MonkeyPatch) -> Iterator[list[float]]:
    """Dropouts scale instead of drawing, so that tiled and untiled agree; twice or never would show.

    Nothing is to be proven inside: a trace must see the real dropout.

    Yields:
        The probabilities of all that were asked to drop.
    """
    shares: list[float] = []
    dropout = F.dropout

    def scaling(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if type(x) is not Tensor:  # what stands for a block's output in the layer: it counts who drops it
            return dropout(x, p, training, inplace)
        shares.append(p)
        return x / (1 - p) if training and p else x

    with monkeypatch.context() as patch:
        patch.setattr(F, "dropout", scaling)
        patch.setattr(torch.Tensor, "bernoulli_", lambda mask, p: shares.append(1 - p) or mask.fill_(True))
        yield shares


def adapter_units(products: Any, tokens: int, hidden: int, intermediate: int, rank: int) -> float:
    """Cost of low-rank adapters of ``rank``, in the unit of ``products.units``.

    Counts the products that have ``rank``, or twice that where one product serves two adapters (gate and up), and one
    of ``hidden`` and ``intermediate`` among their sizes, but not both of these.
    """
    widths = hidden, intermediate
    sides = {rank, 2 * rank} - {hidden, intermediate}

    def is_adapter(product: Any) -> bool:
        if product.has(hidden, intermediate):
            return False
        return any(product.has(side, width) for side in sides for width in widths)

    return float(products.flops_where(is_adapter) / (2 * tokens * hidden * intermediate))
