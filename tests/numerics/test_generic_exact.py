"""What only the generic operator takes: no tokens, blocks that are no MLP; and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

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
from numerics._layers import HOW, Layer

TILE = 4


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

    torch.manual_seed(0)
    model = Noting()
    x = random(*shape, HIDDEN)
    with torch.no_grad():
        assert Tiled(model, TILE)(x).shape == x.shape
    assert [len(s) for s in seen] == [x.dim()] * len(cut(x.shape[:-1].numel(), TILE))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradient_it_tiles_too(mode: Callable[[], torch.no_grad]) -> None:
    model, x = block().eval(), random(3, 5, HIDDEN)
    rows = []
    handle = model.register_forward_hook(lambda _, __, y: rows.append(y.shape[-2]))
    with mode():
        ours = Tiled(model, TILE)(x)
        handle.remove()
        torch.testing.assert_close(ours, model(x))
    assert rows == [4, 4, 4, 3]
    assert not ours.requires_grad


class Scale(nn.Module):
    """A block that saves nothing for backward but what a scalar product needs: none of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x + 1


@pytest.mark.parametrize(
    "model", [nn.Identity(), Scale(), nn.LayerNorm(HIDDEN), nn.GELU()], ids=lambda m: type(m).__name__
)
def test_blocks_that_save_little(model: nn.Module) -> None:
    assert_tiled_is_untiled(model, [random(2, 5, HIDDEN)], random(2, 5, HIDDEN, seed=2, grad=False), TILE)


def test_the_widths_may_differ() -> None:
    model = nn.Linear(HIDDEN, INTERMEDIATE)
    assert_tiled_is_untiled(model, [random(2, 5, HIDDEN)], random(2, 5, INTERMEDIATE, seed=2, grad=False), TILE)


def test_user_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"sizes sum to 8, expected 10 rows"):
        Tiled(block(), (4, 4))(random(2, 5, HIDDEN))
    with pytest.raises(ValueError, match=r"input 1 has shape \(3, 6\), expected \[\.\.\., D\] with 10 rows"):
        Tiled(block(), TILE)(random(2, 5, HIDDEN), random(3, HIDDEN))
    with pytest.raises(
        ValueError, match=r"for a tile of 4 tokens the block returned shape \(1, 6\).* not position-wise"
    ):
        Tiled(Pooled(), TILE)(random(2, 5, HIDDEN))
    with torch.no_grad(), pytest.raises(ValueError, match=r"not position-wise, leave it out with only="):
        Tiled(Pooled(), TILE)(random(2, 5, HIDDEN))


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, -2).sum(0, keepdim=True)


def test_rows_beyond_32_bits() -> None:
    rows, width, tile = 2**31 // 64 + 300, 64, 2**24
    x = torch.empty(rows, width, device="meta")
    places = []

    class Offset(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            places.append(x.storage_offset())
            return x

    with torch.no_grad():
        assert Tiled(Offset(), tile)(x).shape == x.shape
    assert places == [0, tile * width, 2 * tile * width] and places[-1] + (rows - 2 * tile) * width > 2**31
