"""What only one operator computes or takes: activations, packed weights, blocks that are no MLP, no tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from numerics._blocks import (
    HIDDEN,
    INTERMEDIATE,
    Gated,
    Tiled,
    assert_same,
    assert_tiled_is_untiled,
    block,
    cut,
    gradients,
    random,
)
from numerics._errors import assert_no_worse
from numerics._fused import Fused, GatedMLP, PlainMLP, assert_fused_is_untiled, make, weights_of
from numerics._layers import HOW, Layer
from seqtile.ops import mlp_tile, pointwise
from seqtile.ops.linear import Packed, Projection
from seqtile.ops.mlp import FusedWeights, fused_mlp

TILE = 4

# -- the fused operator ----------------------------------------------------------------------------------------------


def test_a_single_token_without_other_dimensions() -> None:
    assert_fused_is_untiled(make("gated"), [random(HIDDEN)], random(HIDDEN, seed=2, grad=False), TILE)


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


def test_one_weight_in_two_places() -> None:
    leaves = (random(10, HIDDEN), random(INTERMEDIATE, HIDDEN, seed=3), random(HIDDEN, INTERMEDIATE, seed=4))
    x, weight, down = leaves
    mlp = FusedWeights((Projection(weight), Projection(weight)), Projection(down), pointwise.SILU)
    ours = torch.autograd.grad(fused_mlp(x, mlp, (4, 6)).square().sum(), leaves)

    def untiled(x: Tensor, weight: Tensor, down: Tensor) -> Sequence[Tensor]:
        z = F.linear(x, weight)
        return torch.autograd.grad(F.linear(F.silu(z) * z, down).square().sum(), [x, weight, down])

    truth = untiled(*(leaf.detach().double().requires_grad_() for leaf in leaves))
    for got, expected, true in zip(ours, untiled(*leaves), truth, strict=True):
        assert_no_worse(got, expected, true)


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


def test_a_share_of_kept_tiles_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keep=1\.5: expected a fraction of the tiles, 0\.0 to 1\.0"):
        Fused(make("gated"), TILE, keep=1.5)(random(2, 5, HIDDEN))


# -- the generic operator --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0,)], ids=str)
@pytest.mark.parametrize("sizes", [(), (0,), (0, 0)])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_no_tokens_at_all(shape: tuple[int, ...], sizes: tuple[int, ...], checkpointed: bool) -> None:
    """Weights get the zeros that they get untiled, not None: an engine may wait for them."""
    model, x, how = block(), random(*shape, HIDDEN), HOW["checkpoint" if checkpointed else "none"]
    ours = gradients(Layer(Tiled(model, sizes), HIDDEN, how), [x], torch.ones(*shape, HIDDEN))
    assert_same(ours, gradients(Layer(model, HIDDEN, how), [x], torch.ones(*shape, HIDDEN)))
    with torch.no_grad():
        assert Tiled(model, sizes)(x).shape == x.shape


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 3, 2), (1, 2, 1, 3)], ids=str)
def test_the_block_sees_as_many_dimensions_as_untiled(shape: tuple[int, ...]) -> None:
    seen = []

    class Noting(Gated):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.shape)
            return super().forward(x)

    x = random(*shape, HIDDEN)
    with torch.no_grad():
        assert Tiled(Noting(), TILE)(x).shape == x.shape
    assert [len(s) for s in seen] == [x.dim()] * len(cut(x.shape[:-1].numel(), TILE))


class Scale(nn.Module):
    """A block that saves nothing for backward but what a scalar product needs: none of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x + 1


@pytest.mark.parametrize(
    "model",
    [nn.Identity(), Scale(), nn.LayerNorm(HIDDEN), nn.GELU(), nn.Linear(HIDDEN, INTERMEDIATE)],
    ids=lambda m: type(m).__name__,
)
def test_blocks_that_save_little_or_change_the_width(model: nn.Module) -> None:
    width = INTERMEDIATE if isinstance(model, nn.Linear) else HIDDEN
    assert_tiled_is_untiled(model, [random(2, 5, HIDDEN)], random(2, 5, width, seed=2, grad=False), TILE)


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, -2).sum(0, keepdim=True)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_block_that_is_not_position_wise_is_refused(mode: type[torch.no_grad]) -> None:
    with mode(), pytest.raises(ValueError, match=r"for a tile of 4 tokens the block returned .* not position-wise"):
        Tiled(Pooled(), TILE)(random(2, 5, HIDDEN))
    with mode(), pytest.raises(ValueError, match=r"input 1 has shape \(3, 6\), expected \[\.\.\., D\] with 10 rows"):
        Tiled(block(), TILE)(random(2, 5, HIDDEN), random(3, HIDDEN))


# -- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["generic", "fused"])
def test_rows_beyond_32_bits(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of 2^31 elements and more, on the meta device."""
    rows, width, tile = 2**31 // 64 + 300, 64, 2**24
    places = []
    forward = mlp_tile.Pass.forward

    def noting(self: mlp_tile.Pass, x: Tensor, out: Tensor, *, keep: bool) -> object:
        places.append(out.storage_offset())
        return forward(self, x, out, keep=keep)

    class Offset(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            places.append(x.storage_offset())
            return x

    monkeypatch.setattr(mlp_tile.Pass, "forward", noting)
    x = torch.empty(rows, width, device="meta")
    tiled = Tiled(Offset(), tile) if operator == "generic" else Fused(GatedMLP(width, 16).to("meta"), tile)
    with torch.no_grad():
        assert tiled(x).shape == x.shape
    assert places == [0, tile * width, 2 * tile * width] and rows * width > 2**31
