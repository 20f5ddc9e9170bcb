"""What only the fused operator has to compute: activations and their kernels, packed weights, a lone token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from numerics._blocks import HIDDEN, INTERMEDIATE, check_gradcheck, random
from numerics._fused import (
    ALL,
    Fused,
    GatedMLP,
    PlainMLP,
    assert_fused_is_untiled,
    last_projection_alone,
    make,
    weights_of,
)
from seqtile.ops import mlp as fused
from seqtile.ops import mlp_tile, pointwise
from seqtile.ops.linear import Packed, Projection
from seqtile.ops.mlp import FusedWeights, fused_mlp

TILE = 4


def check_batch(kind: str = "gated") -> None:
    assert_fused_is_untiled(make(kind), [random(3, 5, HIDDEN)], random(3, 5, HIDDEN, seed=2, grad=False), TILE)


def test_a_single_token_without_other_dimensions() -> None:
    assert_fused_is_untiled(make("gated"), [random(HIDDEN)], random(HIDDEN, seed=2, grad=False), TILE)


@pytest.mark.parametrize("keep", [0.0, 0.7])
@pytest.mark.parametrize("kind", ALL)
def test_gradcheck_of_input_and_weights(kind: str, keep: float) -> None:
    check_gradcheck(Fused(make(kind), TILE, keep))


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda z: F.relu(z).square(),
}
OTHERS = {"mish": F.mish, "tanh": torch.tanh, "quick gelu": lambda z: z * torch.sigmoid(1.702 * z), "elu": nn.ELU()}


@pytest.mark.parametrize("name", [*ACTIVATIONS, *OTHERS])
@pytest.mark.parametrize("kind", [GatedMLP, PlainMLP])
def test_every_activation(kind: type[nn.Module], name: str) -> None:
    torch.manual_seed(0)
    model = kind(act={**ACTIVATIONS, **OTHERS}[name]).double()
    assert (weights_of(model).activation in pointwise.ACTIVATIONS) == (name in ACTIVATIONS)
    x = random(2, 5, HIDDEN, dtype=torch.float64)
    assert_fused_is_untiled(model, [x], random(2, 5, HIDDEN, dtype=torch.float64, seed=2, grad=False), TILE)


@pytest.mark.parametrize("act", pointwise.ACTIVATIONS, ids=lambda act: act.name)
def test_derivatives_of_the_kernels(act: pointwise.Activation) -> None:
    assert act.derivative is not None
    z = random(200, dtype=torch.float64) * 4
    leaf = z.detach().requires_grad_()
    (truth,) = torch.autograd.grad(act.function(leaf).sum(), leaf)
    torch.testing.assert_close(act.derivative(z.detach()), truth)
    grad = random(200, dtype=torch.float64, seed=3, grad=False)
    for alias in ("none", "z", "grad"):
        zz, gg = z.detach().clone(), grad.clone()
        out = {"none": torch.empty_like(gg), "z": zz, "grad": gg}[alias]
        act.gradient_into(gg, zz, out)
        torch.testing.assert_close(out, grad * truth)


def test_the_incoming_gradient_is_not_written() -> None:
    """The residual branch shares it."""
    upstream = random(10, HIDDEN, seed=2, grad=False)
    before = upstream.clone()
    Fused(make("norms around"), TILE)(random(10, HIDDEN)).backward(upstream)
    assert torch.equal(upstream, before)


def test_one_weight_in_two_places() -> None:
    weight, down = random(INTERMEDIATE, HIDDEN, seed=3), random(HIDDEN, INTERMEDIATE, seed=4)
    x = random(10, HIDDEN)
    mlp = FusedWeights((Projection(weight), Projection(weight)), Projection(down), pointwise.SILU)
    ours = torch.autograd.grad(fused_mlp(x, mlp, (4, 6)).square().sum(), [x, weight, down])

    def untiled(x: Tensor, weight: Tensor, down: Tensor) -> Sequence[Tensor]:
        z = F.linear(x, weight)
        return torch.autograd.grad(F.linear(F.silu(z) * z, down).square().sum(), [x, weight, down])

    twin = untiled(x, weight, down)
    truth = untiled(*(one.detach().double().requires_grad_() for one in (x, weight, down)))
    for got, expected, true in zip(ours, twin, truth, strict=True):
        allowed = 2 * (expected - true).norm() + torch.finfo(got.dtype).eps * true.norm()
        assert (got - true).norm() <= allowed


@pytest.mark.parametrize("holds", [True, False], ids=["once per pass", "every product"])
@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_packed_weights_are_made_dense_once_per_pass(keep: float, holds: bool) -> None:
    torch.manual_seed(0)
    model, asked = GatedMLP(bias=False).requires_grad_(False), []

    def packed(layer: nn.Linear) -> Projection:
        def dense() -> Tensor:
            asked.append(layer)
            return layer.weight.detach().clone()

        return Projection(Packed(dense, (layer.out_features, layer.in_features)))

    mlp = FusedWeights((packed(model.gate), packed(model.up)), packed(model.down), pointwise.SILU)
    x, upstream = random(10, HIDDEN), random(10, HIDDEN, seed=2, grad=False)
    output = fused_mlp(x, mlp, (4, 4, 2), keep=keep, holds_dense=holds)
    assert len(asked) == (3 if holds else 3 * 3)
    asked.clear()
    output.backward(upstream)
    assert len(asked) == (3 if holds else 3 * (3 if keep else 5))
    (expected,) = torch.autograd.grad(model(x), x, upstream)
    torch.testing.assert_close(x.grad, expected)


def test_the_sum_over_projections_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    last_projection_alone(monkeypatch)
    with pytest.raises(AssertionError, match=r"input\.0"):
        check_batch()


def test_user_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"sizes sum to 8, expected 10 rows"):
        Fused(make("gated"), (4, 4))(random(2, 5, HIDDEN))
    with pytest.raises(ValueError, match=r"keep=1\.5: expected a fraction of the tiles, 0\.0 to 1\.0"):
        Fused(make("gated"), TILE, keep=1.5)(random(2, 5, HIDDEN))


def test_rows_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of 2^31 elements and more, on the meta device."""
    rows, width, tile = 2**31 // 64 + 300, 64, 2**24
    places = []
    forward = mlp_tile.Pass.forward

    def noting(self: mlp_tile.Pass, x: Tensor, out: Tensor, *, keep: bool) -> object:
        places.append(out.storage_offset())
        return forward(self, x, out, keep=keep)

    monkeypatch.setattr(fused.Pass, "forward", noting)
    mlp = weights_of(GatedMLP(width, 16).to("meta"))
    with torch.no_grad():
        x = torch.empty(rows, width, device="meta")
        assert fused_mlp(x, mlp, (tile, tile, rows - 2 * tile)).shape == x.shape
    assert places == [0, tile * width, 2 * tile * width] and rows * width > 2**31
