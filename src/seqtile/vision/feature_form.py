"""The form of a result with features of pictures, and how the results of groups are joined.

A result has tensors, lists with one entry per picture, and lists of these (one per layer of DeepStack). The results of
two pictures and of one tell them apart: a list per picture has two entries in the first and one in the second. Features
are joined as rows ``[R, D]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqtile.vision.picture_call import NotCutError

POOLED = "pooler_output"
INNER = ("last_hidden_state", "hidden_states", "attentions")
"""Outputs that a model does not read beside pooled features; for all frames they take more memory than those."""


@dataclass(frozen=True)
class FeatureTensor:
    """A tensor of features; with ``by_owner`` it is ``[owners, n, D]``, with all ``n`` features of an owner."""

    by_owner: bool


@dataclass(frozen=True)
class FeatureList:
    """A list or tuple with one tensor per picture."""

    container: type


@dataclass(frozen=True)
class FeatureTree:
    """A list, tuple or mapping of other forms, by number or name."""

    container: type
    forms: Mapping[Any, Any]


Form = FeatureTensor | FeatureList | FeatureTree


class GroupShapes:
    """Shapes needed to rebuild one group's result.

    Attributes:
        entries: entries of each picture along the first dimension, for each list per picture.
        tails: other dimensions of each tensor.
    """

    def __init__(self) -> None:
        self.entries: list[list[int]] = []
        self.tails: list[tuple[int, ...]] = []


def form_of(for_two: Any, for_one: Any, units: int) -> Form:
    """The form of results, found by comparing two.

    Args:
        for_two: result for two pictures or rows of them.
        for_one: result for one.
        units: number of units in the call of ``for_two``.
    """
    if isinstance(for_two, Tensor):
        if for_two.dim() < 2:
            raise NotCutError(f"it returns a tensor of shape {tuple(for_two.shape)}")
        return FeatureTensor(for_two.dim() == 3 and len(for_two) == 2 != units)
    if isinstance(for_two, Mapping):
        kept = [name for name in for_two if not (name in INNER and for_two.get(POOLED) is not None)]
        return FeatureTree(type(for_two), {name: form_of(for_two[name], for_one[name], units) for name in kept})
    if not isinstance(for_two, list | tuple):
        raise NotCutError(f"it returns a {type(for_two).__name__}")
    if (len(for_two), len(for_one)) == (2, 1) and all(isinstance(entry, Tensor) for entry in for_two):
        return FeatureList(type(for_two))
    inner = [form_of(*entries, units) for entries in zip(for_two, for_one, strict=True)]
    return FeatureTree(type(for_two), dict(enumerate(inner)))


def rows_of(form: Form, result: Any, shapes: GroupShapes) -> Iterator[Tensor]:
    """The features of a result as rows ``[R, D]``; ``shapes`` records the shapes that :func:`restored` needs."""
    if isinstance(form, FeatureTensor):
        shapes.tails.append(tuple(result.shape[2 if form.by_owner else 1 :]))
        yield result.reshape(-1, result.shape[-1])
    elif isinstance(form, FeatureList):
        shapes.entries.append([len(entry) for entry in result])
        shapes.tails.append(tuple(result[0].shape[1:]))
        yield joined([entry.reshape(-1, entry.shape[-1]) for entry in result])
    else:
        for name, inner in form.forms.items():
            yield from rows_of(inner, result[name], shapes)


def joined(rows: Sequence[Tensor]) -> Tensor:
    """Concatenate rows; a single tensor is not copied."""
    return rows[0] if len(rows) == 1 else torch.cat([*rows])


def restored(
    form: Form, rows: Iterator[Tensor], entries: Iterator[list[int]], tails: Iterator[tuple[int, ...]], owners: int
) -> Any:
    """Rebuild a result of this form from joined rows.

    Args:
        form: form of the result.
        rows: the joined rows of each tensor.
        entries: rows of each owner, for each list per picture.
        tails: the last dimensions of each tensor.
        owners: number of owners.
    """
    if isinstance(form, FeatureTree):
        inner = {name: restored(inner_form, rows, entries, tails, owners) for name, inner_form in form.forms.items()}
        return form.container(inner.values()) if issubclass(form.container, list | tuple) else form.container(**inner)
    tensor = next(rows).reshape(*((owners, -1) if getattr(form, "by_owner", False) else (-1,)), *next(tails))
    return form.container(tensor.split(next(entries))) if isinstance(form, FeatureList) else tensor
