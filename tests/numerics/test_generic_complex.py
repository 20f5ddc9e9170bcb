"""Complex numbers in tiles: gradients of inputs and weights, whatever of input and output is complex."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import seqtile
from numerics._blocks import Tiled, gradients
from numerics._errors import assert_all_no_worse, in_float64
from seqtile.ops import tile_checkpoint
from seqtile.ops.linear import Projection
from seqtile.ops.mlp import FusedWeights, fused_mlp
from seqtile.ops.pointwise import SILU

HIDDEN, TOKENS, TILE = 4, 7, 3


class ComplexMLP(nn.Module):
    """Complex in and out; holomorphic but for the modulus that gates it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 6, dtype=torch.complex64)
        self.down = nn.Linear(6, HIDDEN, dtype=torch.complex64)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y * torch.sigmoid(y.abs() * self.scale))


class FromReal(ComplexMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.up.weight.dtype))


class ToReal(ComplexMLP):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y.abs(), y


KINDS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "complex": (ComplexMLP, True),
    "from real": (FromReal, False),
    "to real and complex": (ToReal, True),
}
"""Each with whether its input is complex."""
KIND = pytest.mark.parametrize("kind", KINDS)


def made(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, is_complex = KINDS[kind]
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.complex64 if is_complex else torch.float32)
    return make(), x.requires_grad_()


def real_loss(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """A loss whose gradient is no multiple of the output's conjugate."""
    parts = (output,) if isinstance(output, Tensor) else output
    loss = torch.zeros(())
    for part in parts:
        turned = part * (0.3 + 0.8j) if part.is_complex() else part
        loss = loss + turned.real.square().sum() + turned.real.sin().sum()
    return loss


@KIND
def test_equal_to_untiled(kind: str) -> None:
    model, x = made(kind)
    true = in_float64(model)
    wide = x.detach().to(torch.complex128 if x.is_complex() else torch.float64).requires_grad_()
    ours, twin = gradients(Tiled(model, TILE), [x], real_loss), gradients(model, [x], real_loss)
    assert all(value is not None and value.norm() > 0 for value in ours.values())
    assert_all_no_worse(ours, twin, gradients(true, [wide], real_loss))


@KIND
def test_gradcheck(kind: str) -> None:
    model, x = made(kind)
    model = in_float64(model)
    x = x.detach().to(torch.complex128 if x.is_complex() else torch.float64).requires_grad_()
    names, weights = zip(*model.named_parameters(), strict=True)

    def run(x: Tensor, *weights: Tensor) -> object:
        given = dict(zip(names, weights, strict=True))
        return tile_checkpoint.run_in_tiles(
            lambda tiles, aliases: torch.func.functional_call(model, dict(aliases), tuple(tiles)), [x], (3, 3, 1),
            lambda: given,
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, (x, *weights))


def test_an_output_of_which_the_operator_thinks_it_has_no_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_checkpoint, "is_differentiable", Tensor.is_floating_point)
    with pytest.raises(AssertionError):
        test_equal_to_untiled("complex")


def test_a_module_of_ones_own() -> None:
    model, x = made("complex")
    twin = gradients(model, [x], real_loss)
    truth = gradients(in_float64(model), [x.detach().to(torch.complex128).requires_grad_()], real_loss)
    seqtile.tile_module(model, tile=TILE)
    assert_all_no_worse(gradients(model, [x], real_loss), twin, truth)


def test_the_fused_operator_refuses_them() -> None:
    up, down = (Projection(torch.randn(*shape, dtype=torch.complex64)) for shape in ((6, HIDDEN), (HIDDEN, 6)))
    mlp = FusedWeights((up,), down, SILU, gated=False)
    with pytest.raises(TypeError, match="does not support torch.complex64; use run_in_tiles"):
        fused_mlp(torch.randn(TOKENS, HIDDEN, dtype=torch.complex64), mlp, (TOKENS,))
