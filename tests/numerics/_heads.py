"""Inputs for the tiled head, its plain twin, and ways to break it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch.nn import functional as F

from numerics._blocks import random
from seqtile.ops.grad_accumulator import Sum
from seqtile.ops.lm_loss.cross_entropy import linear_cross_entropy
from seqtile.ops.lm_loss.head_nodes import LossPlan
from seqtile.ops.lm_loss.kept_tokens import KeptTokens
from seqtile.ops.lm_loss.logits_tile import HeadPass, LogitScaling

HIDDEN, VOCABULARY = 8, 19
IGNORE = -100

SCALINGS = {
    "plain": LogitScaling(),
    "scaled": LogitScaling(scale=0.25),  # Cohere, Granite
    "capped": LogitScaling(scale=0.7, softcap=1.5, temperature=1.3),  # Gemma, and more than it does
}


def inputs(
    tokens: int = 37, hidden: int = HIDDEN, vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float32,
    bias: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    """``hidden``, ``weight``, ``bias`` that need a gradient, and ``labels`` of which every fifth is ignored."""
    made = {
        "hidden": random(tokens, hidden, dtype=dtype),
        "weight": random(vocabulary, hidden, seed=2, dtype=dtype),
    }
    if bias:
        made["bias"] = random(vocabulary, seed=3, dtype=dtype)
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator, device="cpu")
    labels[::5] = IGNORE
    return {**made, "labels": labels.to(torch.get_default_device())}


def twin(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None,
    scaling: LogitScaling | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0, ignore_index: int = IGNORE,
    token_weights: Tensor | None = None, reduction: str = "mean", num_items: Any = None,
) -> Tensor:  # fmt: skip
    """The head and its loss as plain PyTorch."""
    logits = (scaling or LogitScaling()).on(F.linear(hidden, weight, bias))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, weight.shape[0])
    flat = labels.reshape(-1)
    loss = F.cross_entropy(logits, flat, label_smoothing=label_smoothing, ignore_index=ignore_index, reduction="none")
    valid = flat != ignore_index
    if z_loss:
        loss = loss + z_loss * torch.where(valid, logits.logsumexp(-1).square(), 0)
    weights = valid.to(loss.dtype) if token_weights is None else torch.where(valid, token_weights.reshape(-1), 0)
    if reduction == "none":
        return (loss * weights).view(labels.shape)
    if reduction == "sum":
        return (loss * weights).sum()
    return (loss * weights).sum() / (weights.sum() if num_items is None else num_items)


def run(
    function: Callable[..., Tensor], given: dict[str, Tensor], upstream: Tensor | None = None, **kwargs: Any
) -> dict[str, Tensor]:
    """Loss and the gradient of everything that needs one, for an upstream gradient that is not 1."""
    loss = function(**given, **kwargs)
    wanted = {name: tensor for name, tensor in given.items() if tensor.requires_grad}
    if upstream is None:
        upstream = 0.375 * random(max(1, loss.numel()), seed=5, dtype=loss.dtype, grad=False)[: loss.numel()].view(
            loss.shape
        )
    found = torch.autograd.grad(loss, list(wanted.values()), upstream)
    return {"loss": loss.detach(), **dict(zip(wanted, found, strict=True))}


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert ours[name].dtype == value.dtype, name
        torch.testing.assert_close(ours[name], value, msg=lambda text, name=name: f"{name}: {text}")


def last_tile_dropped(monkeypatch: MonkeyPatch) -> None:
    """The last tile is never computed."""
    parts = LossPlan.parts
    monkeypatch.setattr(LossPlan, "parts", lambda self: iter(list(parts(self))[:-1]))


def upstream_ignored(monkeypatch: MonkeyPatch) -> None:
    """The gradients of the forward are handed out as they are, and each token's as if its upstream were 1."""
    result, gradient = Sum.result, HeadPass.gradient
    monkeypatch.setattr(Sum, "scaled", lambda self, factor, keep: result(self))

    def mutated(self: HeadPass, y: Any, targets: Any, factor: Any, normaliser: Any, *rest: Any) -> None:
        gradient(self, y, targets, None, normaliser, *rest)

    monkeypatch.setattr(HeadPass, "gradient", mutated)


def bias_skipped(monkeypatch: MonkeyPatch) -> None:
    """What is added to a sum without being a product is forgotten."""
    monkeypatch.setattr(Sum, "add", lambda self, part: None)


def ignored_tokens_count(monkeypatch: MonkeyPatch) -> None:
    """Ignored tokens are trained like any other, towards token 0."""

    def mutated(labels: Tensor, ignore_index: int, vocabulary: int, conditions: Any = ()) -> KeptTokens:
        return KeptTokens(labels.numel(), torch.where(labels == ignore_index, 0, labels), None)

    monkeypatch.setattr(KeptTokens, "of", mutated)


def kept_tokens_shifted(monkeypatch: MonkeyPatch) -> None:
    """The states of other tokens than those that count are read."""
    of = KeptTokens.of

    def mutated(labels: Tensor, ignore_index: int, vocabulary: int, conditions: Any = ()) -> KeptTokens:
        kept = of(labels, ignore_index, vocabulary)
        return KeptTokens(kept.total, kept.targets, None if kept.index is None else (kept.index + 1) % kept.total)

    monkeypatch.setattr(KeptTokens, "of", mutated)


def low_precision_sums(monkeypatch: MonkeyPatch) -> None:
    """Weight gradients are summed over tiles in the weight's own precision."""
    init = Sum.__init__

    def mutated(self: Sum, tensor: Tensor) -> None:
        init(self, tensor)
        self._low = False

    monkeypatch.setattr(Sum, "__init__", mutated)


MUTANTS = (last_tile_dropped, upstream_ignored, bias_skipped, ignored_tokens_count, kept_tokens_shifted)
TILED = linear_cross_entropy
