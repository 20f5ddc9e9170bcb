"""Sums of sequences and ratios of policies, against the formulas of TRL's trainers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from numerics._blocks import random
from seqtile.ops.lm_loss.policy import importance_ratios, sequence_logprobs

ROWS, TOKENS = 3, 7


def given() -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]]).bool()
    log_probs = -random(ROWS, TOKENS, dtype=torch.float64, grad=False).abs()
    return log_probs.requires_grad_(), -random(ROWS, TOKENS, seed=3, dtype=torch.float64, grad=False).abs(), mask


def packed(rows: Tensor) -> Tensor:
    """Two tokens of the first row, all of the second one, three of the third."""
    return torch.cat([rows[0, 2:4], rows[1], rows[2, :3]])


CUTS = torch.tensor([0, 2, 9, 12])


@pytest.mark.parametrize("average", [False, True])
def test_sums(average: bool) -> None:
    log_probs, _, mask = given()
    divisors = mask.sum(-1).clamp(min=1) if average else 1
    torch.testing.assert_close(
        sequence_logprobs(log_probs, mask, average=average), (log_probs * mask).sum(-1) / divisors
    )
    expected = torch.stack([part[kept].sum() / (max(1, int(kept.sum())) if average else 1) for part, kept in zip(
        packed(log_probs).split([2, 7, 3]), packed(mask).split([2, 7, 3]), strict=True)])  # fmt: skip
    for shape in ((12,), (1, 12)):
        got = sequence_logprobs(
            packed(log_probs).view(shape), packed(mask).view(shape), cu_seqlens=CUTS, average=average
        )
        torch.testing.assert_close(got, expected)


def expected_ratios(log_probs: Tensor, old: Tensor, mask: Tensor, level: str) -> Tensor:
    """As ``importance_sampling_level`` of TRL's GRPOTrainer."""
    log_ratio = log_probs - old
    if level == "token":
        return log_ratio.exp()
    mean = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    return (mean if level == "sequence" else mean.detach() + log_probs - log_probs.detach()).exp()


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_ratios(level: str) -> None:
    log_probs, old, mask = given()
    whole = expected_ratios(log_probs, old, mask, level).expand(ROWS, TOKENS)
    upstream = random(ROWS, TOKENS, seed=5, dtype=torch.float64, grad=False) * mask
    got = importance_ratios(log_probs, old, mask, level=level)
    torch.testing.assert_close(got, torch.where(mask, whole, 1))
    torch.testing.assert_close(
        torch.autograd.grad(got, log_probs, upstream, retain_graph=True),
        torch.autograd.grad(whole, log_probs, upstream, retain_graph=True),
    )
    in_one_row = importance_ratios(packed(log_probs), packed(old), packed(mask), level=level, cu_seqlens=CUTS)
    if level != "token":
        first, kept = (log_probs - old)[0, 2:4], mask[0, 2:4]
        torch.testing.assert_close(in_one_row[:2][kept], (first * kept).sum().div(kept.sum()).exp().expand(2)[kept])
    torch.testing.assert_close(in_one_row[2:9], got[1])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradcheck(level: str) -> None:
    log_probs, old, mask = given()
    assert torch.autograd.gradcheck(lambda each: importance_ratios(each, old, mask, level=level), log_probs)
    assert torch.autograd.gradcheck(lambda each: sequence_logprobs(each, mask, average=True), log_probs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"level": "group"}, "level='group': expected one of 'token', 'sequence', 'sequence_token'"),
        ({"mask": torch.ones(3)}, r"mask has shape \(3,\)"),
        ({"old_log_probs": torch.ones(3)}, r"old_log_probs have shape \(3,\)"),
        ({"mask": None}, "mask is None, expected a tensor"),
        ({"cu_seqlens": CUTS}, "expected one packed row"),
        ({"old_log_probs": None}, "old_log_probs is None, expected a tensor"),
        ({"log_probs": torch.zeros(3).long()}, "log_probs are torch.int64"),
        ({"log_probs": torch.tensor(0.5)}, r"log_probs are torch.float32 of shape \(\)"),
    ],
)
def test_refusals(change: dict[str, Any], words: str) -> None:
    log_probs, old, mask = given()
    with pytest.raises(ValueError, match=words):
        importance_ratios(**{"log_probs": log_probs, "old_log_probs": old, "mask": mask, **change})


@pytest.mark.parametrize(
    ("cu_seqlens", "words"),
    [
        ([0, 2, 4], "cu_seqlens is of type list, expected a tensor"),
        (torch.tensor([0.0, 4.0]), "expected int32 or int64"),
        (torch.tensor([[0, 2, 4]]), "expected int32 or int64"),
        (torch.tensor([0]), "expected int32 or int64"),
        (torch.tensor([0, 3, 2, 4]), r"cu_seqlens are \[0, 3, 2, 4\], expected ascending offsets from 0 to 4"),
        (torch.tensor([0, 2, 9]), "expected ascending offsets from 0 to 4"),
        (torch.tensor([0, 2, 3]), "cover every token of the loss"),
        (torch.tensor([1, 2, 4]), "cover every token of the loss"),
    ],
)
def test_places_that_are_none_are_refused(cu_seqlens: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sequence_logprobs(torch.zeros(4), torch.ones(4), cu_seqlens=cu_seqlens)


def test_padding_may_lie_outside_all_sequences() -> None:
    log_probs, mask = torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([1, 1, 1, 0])
    found = sequence_logprobs(log_probs, mask, cu_seqlens=torch.tensor([0, 2, 3], dtype=torch.int32))
    assert found.tolist() == [-3.0, -3.0]
