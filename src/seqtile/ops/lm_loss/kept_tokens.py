"""Select the tokens with a target, so that nothing is computed for prompts and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqtile._compat import FakeTensor

IGNORED = -100
"""The label of a token that does not count, as PyTorch and Transformers write it."""


@dataclass(frozen=True)
class Condition:
    """A condition on each token that is not ignored.

    Attributes:
        holds: ``[N]`` booleans.
        values: ``[N, ...]``, what is looked at.
        sentence: said where it does not hold; ``{value}`` is that of the first such token.
    """

    holds: Tensor
    values: Tensor
    sentence: str


@dataclass(frozen=True)
class KeptTokens:
    """The ``n`` of ``N`` tokens whose target counts.

    Attributes:
        total: ``N``.
        targets: ``[n]``, their targets.
        index: ``[n]``, their positions, ascending; None where all of them count.
    """

    total: int
    targets: Tensor
    index: Tensor | None

    @classmethod
    def of(cls, labels: Tensor, ignore_index: int, vocabulary: int, conditions: Sequence[Condition] = ()) -> KeptTokens:
        """Find them among ``labels`` ``[N]``.

        Args:
            labels: ``[N]``.
            ignore_index: label of tokens that do not count.
            vocabulary: ``V``.
            conditions: read with the count, and not on fake tensors.

        Cost:
            One synchronisation with the host, for the number of tokens that a shape depends on. Fake tensors have no
            values to count: for them every token is kept and looked up by its position, the upper bound.

        Raises:
            ValueError: labels that are no integers, or outside the vocabulary; or a condition that does not hold.
        """
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise ValueError(f"labels have dtype {labels.dtype}, expected integers; use .long()")
        labels, total = labels.long(), labels.numel()
        if total == 0 or labels.is_meta:
            return cls(total, labels, None)
        valid = labels != ignore_index
        if isinstance(labels, FakeTensor):
            index = valid.to(torch.uint8).argsort(descending=True, stable=True)
            return cls(total, labels.index_select(0, index), index)
        inside = torch.where(valid, labels, 0)
        hold = [(condition.holds | ~valid).all().long() for condition in conditions]
        count, low, high, *satisfied = torch.stack([valid.sum(), inside.amin(), inside.amax(), *hold]).cpu().tolist()
        if count and (low < 0 or high >= vocabulary):
            raise ValueError(
                f"labels range from {low} to {high}, expected 0 to {vocabulary - 1} (rows of the head's weight); "
                f"set tokens outside the loss to ignore_index={ignore_index}"
            )
        for condition, holds in zip(conditions, satisfied, strict=True):
            if not holds:
                first = condition.values[valid & ~condition.holds][0].tolist()
                raise ValueError(condition.sentence.format(value=first))
        if count == total:
            return cls(total, labels, None)
        # Positions of kept tokens first, in order; unlike nonzero this does not synchronise with the device.
        index = valid.to(torch.uint8).argsort(descending=True, stable=True)[:count]
        return cls(total, labels.index_select(0, index), index)

    def __len__(self) -> int:
        return self.targets.shape[0]

    def take(self, values: Tensor) -> Tensor:
        """``[N, ...] -> [n, ...]``."""
        return values if self.index is None else values.index_select(0, self.index)

    def spread(self, values: Tensor) -> Tensor:
        """``[n, ...] -> [N, ...]``, 0 for the tokens that do not count."""
        if self.index is None:
            return values
        return values.new_zeros(self.total, *values.shape[1:]).index_copy(0, self.index, values)


def read_rows(x: Tensor, index: Tensor | None, tile: slice) -> Tensor:
    """Some of the rows that count, of ``[N, ...]``; a copy where not all of them do."""
    return x[tile] if index is None else x.index_select(0, index[tile])


def empty_gradient(x: Tensor, index: Tensor | None) -> Tensor:
    """A buffer for the gradient of ``x``: zero where no row will be written."""
    if index is None:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


def write_rows(out: Tensor, index: Tensor | None, tile: slice, rows: Tensor) -> None:
    """Write some of the rows that count into ``[N, ...]``."""
    if index is None:
        out[tile] = rows
    else:
        out.index_copy_(0, index[tile], rows.to(out.dtype))
