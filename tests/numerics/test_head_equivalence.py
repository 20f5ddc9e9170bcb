"""The whole long-sequence recipe is one training run: 50 steps in fp32, each part switched on after the other."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import seqtile
from numerics._heads import upstream_ignored
from zoo import VOCABULARY, causal_lm

STEPS, BATCH, LENGTH, MICRO = 50, 2, 24, 2
TILED = {"tile": 7}
LOSS = {**TILED, "loss": "tiled", "loss_tile": 10}
REST = {**LOSS, "offload": True, "checkpoint": "attention-saved", "blocks": "mlp+norm+projections"}
RECIPES: dict[str, dict[str, Any]] = {
    "tiled": TILED,
    "tiled-loss": LOSS,
    "offload": {**LOSS, "offload": True},
    "attention-saved": {**LOSS, "offload": True, "checkpoint": "attention-saved"},
    "rest-of-the-layer": REST,
    "head-wise": {**REST, "heads": 1},
}


def train(**settings: Any) -> tuple[Tensor, Tensor]:
    """Losses, and the weights at the end; tokens that follow a rule, so that there is something to learn."""
    model = causal_lm("llama", use_cache=False, attn_implementation="sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings:
        seqtile.apply(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(MICRO):
            first = torch.randint(3, VOCABULARY, (BATCH, 1), generator=generator)
            ids = 3 + (first + 5 * torch.arange(LENGTH)) % (VOCABULARY - 3)
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=MICRO * BATCH * (LENGTH - 1)).loss
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return torch.stack(losses), torch.cat([p.detach().flatten() for p in model.parameters()])


@cache
def plain() -> tuple[Tensor, Tensor]:
    return train()


def check(recipe: str) -> None:
    expected, got = plain(), train(**RECIPES[recipe])
    assert expected[0][-1] < 0.5 * expected[0][0]  # it learns, so that a wrong gradient would show
    # A step may differ by what assert_close allows for one; fifty of them, each on the weights of the one before.
    torch.testing.assert_close(got[0], expected[0], rtol=STEPS * 1.3e-6, atol=STEPS * 1e-7)
    torch.testing.assert_close(got[1], expected[1], rtol=STEPS * 1.3e-6, atol=STEPS * 1e-6)


CONTAINED = ("tiled-loss", "offload", "attention-saved", "rest-of-the-layer")
"""Recipes whose parts are in the next ones too."""


@pytest.mark.parametrize(
    "recipe", [pytest.param(one, marks=[pytest.mark.slow] if one in CONTAINED else []) for one in RECIPES]
)
def test_one_trajectory(recipe: str) -> None:
    check(recipe)


def test_the_checker_notices_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream_ignored(monkeypatch)
    with pytest.raises(AssertionError):
        check("tiled-loss")
