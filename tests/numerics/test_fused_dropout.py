"""Dropout of the fused operator's output, alone and before a norm in the tile: masks and scale, in both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from numerics._blocks import random
from numerics._fused import Between, Fused, GatedMLP, PlainMLP
from seqtile.ops.mlp_tile import Pass
from seqtile.ops.rng import RandomState

HIDDEN, INTERMEDIATE, TILE = 6, 10, 4


class SoftNorm(nn.Module):
    """A norm whose result depends on the size of its input, unlike RMSNorm, which hides a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: PlainMLP(HIDDEN, INTERMEDIATE, dropout=0.3),
    "dropout, then a norm": lambda: Between(PlainMLP(HIDDEN, INTERMEDIATE, dropout=0.3), None, SoftNorm()),
}


def check(kind: str) -> None:
    """Finite differences of input and weights; every evaluation starts from one seed, so draws the same masks."""
    torch.manual_seed(0)
    model = KINDS[kind]().double().train()
    block = Fused(model, TILE)

    def seeded(x: Tensor, *_: Tensor) -> Tensor:
        torch.manual_seed(7)
        return block(x)

    x = random(2, 5, HIDDEN, dtype=torch.float64)
    assert torch.autograd.gradcheck(seeded, (x, *model.parameters()), fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    check(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: str) -> None:
    """The forward, with the masks that the operator draws tile by tile, row by row, one byte per element."""
    torch.manual_seed(0)
    model, x = KINDS[kind]().double().train(), random(10, HIDDEN, dtype=torch.float64, grad=False)
    torch.manual_seed(7)
    got = Fused(model, TILE)(x)
    torch.manual_seed(7)
    drawn = [torch.empty(rows, HIDDEN, dtype=torch.bool).bernoulli_(0.7) for rows in (4, 4, 2)]
    mlp, after = (model.mlp, model.after) if isinstance(model, Between) else (model, nn.Identity())
    expected = after(mlp.down(mlp.act(mlp.up(x))) * torch.cat(drawn) / 0.7)
    torch.testing.assert_close(got, expected)  # float64: the default is far above any rounding here


def _backward_with_scale(monkeypatch: pytest.MonkeyPatch, scale: float, then: float) -> None:
    output_gradient = Pass._output_gradient

    def mutated(self: Pass, *args: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pass, "_drop_scale", scale)
            return output_gradient(self, *args) * then

    monkeypatch.setattr(Pass, "_output_gradient", mutated)


def scale_missing_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward drops, and does not scale."""
    _backward_with_scale(monkeypatch, 1.0, 1.0)


def scale_missing_in_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is scaled; the output that is computed again for the norm's is not."""
    _backward_with_scale(monkeypatch, 1.0, 1 / 0.7)


def masks_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward draws from wherever the stream stands."""
    monkeypatch.setattr(RandomState, "_set", lambda self, state: None)


@pytest.mark.parametrize(
    ("mutant", "kind"),
    [(mutant, kind) for mutant in (scale_missing_in_backward, masks_drawn_again) for kind in KINDS]
    + [(scale_missing_in_recompute, "dropout, then a norm")],
)
def test_a_backward_with_another_dropout_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(RuntimeError, match="Jacobian mismatch|Backward is not reentrant"):
        check(kind)


def test_no_random_numbers_without_dropout() -> None:
    block = Fused(GatedMLP(HIDDEN, INTERMEDIATE), TILE)
    before = torch.get_rng_state()
    block(random(10, HIDDEN)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
