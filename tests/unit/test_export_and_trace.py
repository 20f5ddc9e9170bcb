"""A tiled model in ``torch.export``, ``torch.jit.trace`` and ``torch.jit.script``: it works, or one sentence says why.

In float64, where the default tolerance is far above any rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqtile
from numerics._fused import GatedMLP

HIDDEN, TILE = 8, 4

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.[a-z_]+` is deprecated"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),  # shapes that are read before the first tile
]


def tiled(path: str, inside: bool) -> nn.Module:
    """A tiled MLP, alone or behind a norm."""
    torch.manual_seed(0)
    mlp = GatedMLP(HIDDEN, 12).double()
    seqtile.tile_module(mlp, tile=TILE, path=path)
    return nn.Sequential(nn.LayerNorm(HIDDEN, dtype=torch.float64), mlp) if inside else mlp


def given() -> Tensor:
    return torch.randn(2, 6, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


PATHS = pytest.mark.parametrize("path", ["fused", "generic"])
GRADIENT = pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "with gradients"])


@pytest.mark.parametrize(("strict", "grad"), [(False, False), (False, True), (True, True)])
@PATHS
def test_a_model_with_a_tiled_block_is_exported(path: str, strict: bool, grad: bool) -> None:
    """With the tiles of the input's length, and without checkpoints: whoever compiles a program plans its recompute."""
    model, x = tiled(path, inside=True), given()
    with torch.set_grad_enabled(grad):
        program = torch.export.export(model, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), model(x))
    assert "checkpoint" not in str(program.graph)


@PATHS
def test_a_tiled_block_itself_is_not_exported(path: str) -> None:
    with pytest.raises(Exception) as caught:
        torch.export.export(tiled(path, inside=False), (given(),))
    assert says_what_to_do(caught.value, "torch.export")


@pytest.mark.parametrize("inside", [False, True])
@PATHS
def test_a_tiled_model_is_not_scripted(path: str, inside: bool) -> None:
    with pytest.raises(Exception) as caught:
        torch.jit.script(tiled(path, inside))
    assert says_what_to_do(caught.value, "torch.jit.script")


@GRADIENT
@pytest.mark.parametrize("inside", [False, True])
@PATHS
def test_a_tiled_model_is_not_traced(path: str, inside: bool, grad: bool) -> None:
    with torch.set_grad_enabled(grad), pytest.raises(NotImplementedError) as caught:
        torch.jit.trace(tiled(path, inside), (given(),))
    assert says_what_to_do(caught.value, "torch.jit.trace")


@PATHS
def test_what_the_sentences_advise_works(path: str) -> None:
    model, x = tiled(path, inside=False), given()
    expected = model(x)
    seqtile.undo(model)
    for found in (torch.jit.trace(model, (x,)), torch.export.export(model, (x,)).module()):
        torch.testing.assert_close(found(x), expected)


def says_what_to_do(error: Any, tool: str) -> bool:
    """One sentence that names the tool and the way out."""
    text = str(error)
    return tool in text and "seqtile.undo(model)" in text and "\n" not in text
