"""In bf16 a tiled head's gradients are as exact as untiled: 1.05 times its own error in L2, twice in maximum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from numerics import test_head_divergence as two_heads
from numerics._blocks import random
from numerics._errors import assert_as_good
from numerics._heads import IGNORE, TILED, inputs, low_precision_sums, run, twin
from seqtile.ops.lm_loss.divergence import linear_divergence
from seqtile.ops.lm_loss.token_logprobs import HeadInput, token_logprobs

TOKENS, HIDDEN, VOCABULARY, FACTOR = 2048, 48, 96, 1.05


def check(tiled: Callable[..., Any], plain: Callable[..., Any]) -> None:
    """Both take the inputs, in any precision, and return the gradients by name."""
    given = inputs(TOKENS, HIDDEN, VOCABULARY, dtype=torch.bfloat16, bias=False)
    exact = {name: t.detach().double().requires_grad_() if t.is_floating_point() else t for name, t in given.items()}
    ours, twin, truth = tiled(given), plain(given), plain(exact)
    assert_as_good(ours, twin, truth)
    for name in ("hidden", "weight"):
        error, untiled = (torch.linalg.vector_norm(run[name].double() - truth[name]) for run in (ours, twin))
        assert error <= FACTOR * untiled, f"{name}: {error:.3g}, untiled {untiled:.3g}"


def cross_entropy(function: Callable[..., Any], given: dict[str, Tensor], reduction: str, **tile: Any) -> Any:
    upstream = torch.tensor(1 / 819) if reduction == "sum" else (1 + random(TOKENS, seed=5, grad=False).abs()) / 819
    wide = torch.promote_types(given["hidden"].dtype, torch.float32)
    return run(partial(function, reduction=reduction, **tile), given, upstream.to(wide))


@pytest.mark.parametrize("tiles", [1, 16, 64])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_cross_entropy(reduction: str, tiles: int) -> None:
    check(
        lambda given: cross_entropy(TILED, given, reduction, tile=f"shards:{tiles}"),
        lambda given: cross_entropy(twin, given, reduction),
    )


@pytest.mark.parametrize("tiles", [1, 16, 64])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_divergences(beta: float, reduction: str, tiles: int) -> None:
    teacher = HeadInput(
        random(TOKENS, 32, seed=21, dtype=torch.bfloat16, grad=False),
        random(VOCABULARY, 32, seed=22, dtype=torch.bfloat16, grad=False),
    )

    def outcome(function: Callable[..., Any], given: dict[str, Tensor], **tile: Any) -> dict[str, Tensor]:
        dtype = given["hidden"].dtype
        known = HeadInput(teacher.hidden.to(dtype), teacher.weight.to(dtype))
        return two_heads.run(function, given, known, beta=beta, reduction=reduction, **tile)

    check(
        lambda given: outcome(linear_divergence, given, tile=f"shards:{tiles}"),
        lambda given: outcome(two_heads.twin, given),
    )


@pytest.mark.parametrize("tiles", [1, 16, 64])
def test_log_probabilities_and_entropies(tiles: int) -> None:
    """Each token with an upstream gradient of its own, as in GRPO with an entropy bonus."""
    factor = (1 + random(TOKENS, seed=5, grad=False).abs()) / 819

    def tiled(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        scores = token_logprobs(hidden, weight, labels, temperature=0.7, entropy=True, tile=f"shards:{tiles}")
        assert scores.entropy is not None
        return (factor * (0.1 * scores.entropy - scores.log_probs)).sum()

    def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = (hidden @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32)) / 0.7
        log_p = logits.log_softmax(-1)
        found = 0.1 * -(log_p.exp() * log_p).sum(-1) - log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return (torch.where(labels != IGNORE, factor, 0) * found).sum()

    check(lambda given: run(tiled, given), lambda given: run(plain, given))


def test_sums_in_bf16_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    low_precision_sums(monkeypatch)
    with pytest.raises(AssertionError, match="weight: .* untiled"):
        test_cross_entropy("sum", 16)
