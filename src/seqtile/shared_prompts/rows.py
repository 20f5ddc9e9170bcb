"""Pack samples with common prefixes into one row that has each prefix once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqtile.ops.attention.segment_tree import SegmentTable
from seqtile.ops.lm_loss.kept_tokens import IGNORED

SHORTEST_PREFIX = 16
"""Fewest tokens that are worth sharing: each branch costs further kernel calls in every attention."""


@dataclass(frozen=True, eq=False)
class TreeRow:
    """Samples in one row, ``T`` different tokens.

    Two samples share a token where they also agree on the one after it. So each token of the row predicts one token
    only, and any head and loss runs on the row with :attr:`labels`; a branch repeats the last token before it.

    Attributes:
        input_ids: ``[1, T]``.
        position_ids: ``[1, T]``, each token's position in its samples.
        labels: ``[1, T]``, already shifted: the token after each one where a sample scores it, else -100.
        segments: where each prefix and its continuations lie.
        places: ``[M]``, the index in the row at which each scored token of all samples, in order, is predicted.
        counts: scored tokens of each sample; they sum to ``M``.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    segments: SegmentTable
    places: Tensor
    counts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return self.segments.tokens

    @property
    def tokens_apart(self) -> int:
        """Tokens of the samples, each prefix as often as it is there."""
        return self.segments.tokens_apart

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of a model on which :func:`share_prompts` was called: ``model(**row.inputs)``."""
        return {
            "input_ids": self.input_ids, "position_ids": self.position_ids,
            "attention_mask": no_mask(self.input_ids.device), "use_cache": False, "shared_prompts": self.segments,
        }  # fmt: skip

    def of_samples(self, values: Tensor) -> tuple[Tensor, ...]:
        """Per-token values ``[1, T]`` of the row, such as log-probabilities of :attr:`labels`, for each sample.

        Returns:
            One tensor per sample, of its scored tokens in order. Gradients of what samples share add up.
        """
        return tuple(values[0, self.places].split(self.counts))


def no_mask(device: torch.device) -> Tensor:
    """A mask of four dimensions, which keeps transformers from building one of ``[T, T]``.

    Its value is NaN, so that attention which reads the mask in place of the segments returns NaN.
    """
    return torch.full((1, 1, 1, 1), torch.nan, device=device)


def tree_row(
    samples: Sequence[Sequence[int] | Tensor],
    scored: Sequence[int | Sequence[bool] | Tensor] | None = None,
    *,
    shortest: int = SHORTEST_PREFIX,
    device: torch.device | str | None = None,
) -> TreeRow:
    """Pack samples into one row in which each common prefix is there once.

    Args:
        samples: token ids of each sample, prompt and answer, without padding. Samples of several groups may come
            together and in any order; a sample may branch off anywhere in another.
        scored: number of each sample's first scored token, as the length of its prompt, or a mask of its
            tokens. Its first token, which nothing predicts, is never scored. None scores all others.
        shortest: fewest tokens that are shared; prefixes that are shorter are repeated.
        device: device of the row's tensors; None for the CPU.

    Cost:
        A comparison of the samples on the CPU, linear in their tokens.

    Raises:
        ValueError: no sample, a sample without a token, a mask of another length, not one entry of ``scored`` for each
            sample, or ``shortest`` below 1.
    """
    if shortest < 1:
        raise ValueError(f"got shortest={shortest}, expected at least 1 token")
    rows = [torch.as_tensor(sample, dtype=torch.long, device="cpu") for sample in samples]
    if not rows or not all(row.dim() == 1 and len(row) for row in rows):
        raise ValueError(f"got samples of shapes {[tuple(row.shape) for row in rows]}, expected [tokens] each")
    if scored is not None and (isinstance(scored, int) or len(scored) != len(rows)):
        raise ValueError(f"got scored={scored!r}, expected one entry for each of {len(rows)} samples")
    masks = [_mask(row, None if scored is None else scored[number]) for number, row in enumerate(rows)]
    forest = _Forest(rows, shortest)
    places_of = forest.places()
    ids, positions = torch.empty(2, forest.tokens, dtype=torch.long, device="cpu")
    labels = torch.full((forest.tokens,), IGNORED, device="cpu")
    predicted_at = []
    for row, mask, places in zip(rows, masks, places_of, strict=True):
        ids[places], positions[places] = row, torch.arange(len(row), device="cpu")
        predicting = places[:-1][mask[1:]]  # a token is predicted at the one before it
        labels[predicting] = row[1:][mask[1:]]
        predicted_at.append(predicting)
    return TreeRow(
        ids[None].to(device), positions[None].to(device), labels[None].to(device),
        SegmentTable(tuple(forest.starts), tuple(forest.parents), forest.tokens, sum(map(len, rows))),
        torch.cat(predicted_at).to(device), tuple(map(len, predicted_at)),
    )  # fmt: skip


def collate_tree(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A batch as one row in which each common prefix is there once: ``Trainer(data_collator=seqtile.collate_tree)``.

    For a model on which :func:`share_prompts` was called. A token that several samples score, such as one of a common
    beginning, counts once in the loss; prompts that are not scored leave it as it is.

    Args:
        samples: samples of a micro-batch, each with ``input_ids`` ``[tokens]``, without padding, and ``labels``
            ``[tokens]``: the token where it is scored, -100 elsewhere. Without ``labels`` every token is scored.

    Returns:
        Arguments of the model. Labels are shifted already.
    """
    scored = [torch.as_tensor(sample.get("labels", sample["input_ids"]), device="cpu") != IGNORED for sample in samples]
    row = tree_row([sample["input_ids"] for sample in samples], scored)
    return {**row.inputs, "labels": row.labels, "shift_labels": row.labels}


def _mask(row: Tensor, scored: int | Sequence[bool] | Tensor | None) -> Tensor:
    mask_or_first = torch.as_tensor(0 if scored is None else scored, device="cpu")
    if not mask_or_first.dim():
        return torch.arange(len(row), device="cpu") >= mask_or_first
    mask = mask_or_first.bool()
    if mask.shape != row.shape:
        raise ValueError(f"got a mask of shape {tuple(mask.shape)} for a sample of {len(row)} tokens")
    return mask


class _Forest:
    """Segments in depth-first order, and the segments of each sample."""

    def __init__(self, rows: Sequence[Tensor], shortest: int) -> None:
        self.rows, self.shortest = rows, shortest
        self.starts: list[int] = []
        self.parents: list[int] = []
        self.tokens = 0
        self.segments_of: list[list[tuple[int, int]]] = [[] for _ in rows]
        pending = [(list(range(len(rows))), 0, -1)]
        while pending:  # not by recursion, whose depth Python limits
            members, depth, parent = pending.pop()
            sharing = self._sharing(members, depth)
            if others := [member for member in members if member not in sharing]:
                pending.append((others, depth, parent))
            size = min(sharing.values())
            for member in sharing:
                self.segments_of[member].append((self.tokens, size))
            if longer := [member for member in sharing if len(rows[member]) > depth + size]:
                pending.append((longer, depth + size, len(self.starts)))
            self.starts.append(self.tokens)
            self.parents.append(parent)
            self.tokens += size

    def _sharing(self, members: list[int], depth: int) -> dict[int, int]:
        """The members that share tokens with the first one from ``depth`` on, and how many tokens."""
        first = self.rows[members[0]][depth:]
        shared = {member: _shared(first, self.rows[member][depth:]) for member in members}
        least = min(self.shortest, len(first))
        return {member: size for member, size in shared.items() if size >= least}

    def places(self) -> list[Tensor]:
        """For each sample, the index in the row of each of its tokens."""
        return [
            torch.cat([torch.arange(start, start + size, device="cpu") for start, size in segments])
            for segments in self.segments_of
        ]


def _shared(left: Tensor, right: Tensor) -> int:
    """Number of leading tokens after each of which two samples also agree on the next token, or both end."""
    size = min(len(left), len(right))
    differs = (left[:size] != right[:size]).nonzero()
    same = int(differs[0]) if len(differs) else size
    return same if same == len(left) == len(right) else max(same - 1, 0)
