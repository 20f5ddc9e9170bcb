"""Logits that are not there yet: the hidden states, and what the model has done to the product so far.

While a model with a tiled loss runs its own forward, its head returns one of these. Scales and soft-caps are written
down; whatever else is done to it makes the real logits, so that a model that does more than that is still right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seqtile.ops.lm_loss.logits_tile import LogitScaling


class LaterLogits:
    """Stands for ``scaling(head(hidden))``.

    Args:
        hidden: ``[..., D]``, the input of the head.
        vocabulary: ``V``.
        make: computes the product, and is told by what it was forced.
    """

    def __init__(
        self, hidden: Tensor, vocabulary: int, make: Callable[[Tensor, str], Tensor], before: float = 1.0,
        after: float | None = None,
    ) -> None:  # fmt: skip
        self.hidden, self.vocabulary = hidden, vocabulary
        self._make, self._before, self._after = make, before, after
        self.written: Tensor | None = None  # the real logits, once something was written into them

    @property
    def scaling(self) -> LogitScaling:
        """What the model did: a factor, a tanh, another factor."""
        if self._after is None:
            return LogitScaling(self._before)
        return LogitScaling(self._before * self._after, softcap=self._after)

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self.hidden.shape[:-1], self.vocabulary])

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def real(self, why: str) -> Tensor:
        """The logits themselves, for something that this class does not know."""
        if self.written is not None:
            return self.written
        product = self._make(self.hidden, why)
        if self._after is None:
            return product if self._before == 1.0 else product * self._before
        return torch.tanh(product * self._before) * self._after

    def _times(self, factor: Any) -> Any:
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or self.written is not None:
            return self.real("multiplied by a tensor") * factor
        if self._after is None:
            return self._with(self._before * factor, None)
        if self._after * factor <= 0:
            return self.real("negated") * factor
        return self._with(self._before, self._after * factor)

    def _with(self, before: float, after: float | None) -> LaterLogits:
        return LaterLogits(self.hidden, self.vocabulary, self._make, before, after)

    def __mul__(self, factor: Any) -> Any:
        return self._times(factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if isinstance(divisor, (int, float)) and not isinstance(divisor, bool):
            return self._times(1 / divisor)
        return self.real("divided by a tensor") / divisor

    def tanh(self) -> Any:
        if self._after is None and self.written is None:
            return self._with(self._before, 1.0)
        return self.real("a second tanh").tanh()

    def float(self) -> LaterLogits:
        """The loss is computed in fp32 in any case."""
        return self

    def contiguous(self, *_: Any, **__: Any) -> LaterLogits:
        return self

    def to(self, *_: Any, **__: Any) -> LaterLogits:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if isinstance(first, LaterLogits) and not kwargs:
            if func is torch.tanh:
                return first.tanh()
            if func in (torch.mul, torch.div, torch.true_divide) and len(args) == 2:
                return first * args[1] if func is torch.mul else first / args[1]
        why = getattr(func, "__name__", str(func))
        real = [one.real(why) if isinstance(one, LaterLogits) else one for one in args]
        named = {k: v.real(why) if isinstance(v, LaterLogits) else v for k, v in (kwargs or {}).items()}
        return func(*real, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        real = self.real(name)
        if name.endswith("_"):  # writes in place, perhaps as a statement whose result nobody takes
            self.written = real
        return getattr(real, name)

    def __getitem__(self, key: Any) -> Tensor:
        return self.real("indexed")[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.written = self.real("written to")
        self.written[key] = value

    def __add__(self, other: Any) -> Tensor:
        return self.real("added to") + other  # type: ignore[no-any-return]

    __radd__ = __add__

    def __sub__(self, other: Any) -> Tensor:
        return self.real("subtracted from") - other  # type: ignore[no-any-return]

    def __neg__(self) -> Tensor:
        return -self.real("negated")


class LaterHead(nn.Module):
    """Takes the head's place while the model's forward runs."""

    def __init__(self, head: nn.Module, make: Callable[[Tensor, str], Tensor]) -> None:
        super().__init__()
        self.__dict__["_head"], self.__dict__["_make"] = head, make  # not a submodule: it is not ours

    def forward(self, hidden: Tensor) -> LaterLogits:
        return LaterLogits(hidden, head_width(self._head), self._make)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_head"], name)  # its weight, for a model that looks


def head_width(head: nn.Module) -> int:
    """``V`` of a head, under whatever adapters."""
    for name in ("out_features", "nf"):
        width = getattr(head, name, None)
        if isinstance(width, int):
            return width
    weight = getattr(head, "weight", None)
    return int(getattr(weight, "ds_shape", weight.shape)[0]) if isinstance(weight, Tensor) else 0
