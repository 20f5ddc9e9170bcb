"""Randomness inside a block: the recompute draws what the forward drew, and backward draws nothing of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from numerics._blocks import HIDDEN, Tiled, assert_same, block, gradients, random
from seqtile.ops import tile_checkpoint

TILE, LENGTH = 4, 5


class Masked(nn.Module):
    """A plain MLP with dropout that notes every mask; given masks, it uses those."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
        self.down = nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
        self.drawn: list[Tensor] = []
        self.given: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, device=x.device) < 0.5 if self.given is None else self.given.view(x.shape)
        self.drawn.append(mask.flatten(0, -2))
        return self.down(F.gelu(self.up(x)) * mask)


class Layer(nn.Module):
    """Norm, block and residual, perhaps with a norm after the block that needs its output."""

    def __init__(self, inner: nn.Module, after: bool) -> None:
        super().__init__()
        self.block = inner
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(F.layer_norm(F.dropout(x, 0.3), (HIDDEN,)))
        return x + (F.dropout(F.layer_norm(y, (HIDDEN,)), 0.3) if self.after else y)


def check_recorded_masks(device: str = "cpu") -> None:
    """The tiled run against an untiled one that is fed the masks that the tiles drew."""
    torch.manual_seed(0)
    model = Masked().to(device)
    x = random(2, LENGTH, HIDDEN).detach().to(device).requires_grad_()
    upstream = random(2, LENGTH, HIDDEN, seed=2, grad=False).to(device)
    ours = gradients(Tiled(model, TILE), [x], upstream)
    forward, recompute = model.drawn[:3], model.drawn[3:]
    assert len(forward) == len(recompute) == 3
    for one, other in zip(forward, reversed(recompute), strict=True):
        assert torch.equal(one, other), "the recompute drew another mask"
    model.given = torch.cat(forward)
    assert_same(ours, gradients(model, [x], upstream))
    masks = {tuple(mask[:2].flatten().tolist()) for mask in forward}
    assert len(masks) == 3, "every tile draws its own mask"


def test_recorded_masks() -> None:
    check_recorded_masks()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="masks of the device's own generator need an accelerator")
def test_recorded_masks_on_the_device() -> None:
    check_recorded_masks("cuda")


def test_masks_drawn_again_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_checkpoint, "checkpoint", partial(checkpoint, preserve_rng_state=False))
    with pytest.raises(AssertionError, match="another mask"):
        check_recorded_masks()
    with pytest.raises(GradcheckError):
        check_finite_differences(False, False)


def check_finite_differences(checkpointed: bool, after: bool) -> None:
    """Every evaluation starts from one seed, so finite differences see one set of masks; backward starts elsewhere."""
    layer = Layer(Tiled(block(dtype=torch.float64, dropout=0.4), TILE), after)
    x = random(2, LENGTH, HIDDEN, dtype=torch.float64)

    def seeded(x: Tensor, *_: Tensor) -> Tensor:
        torch.manual_seed(7)
        return checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)

    assert torch.autograd.gradcheck(seeded, (x, *layer.parameters()), fast_mode=True)


@pytest.mark.parametrize("after", [False, True], ids=["residual next", "dropout and norm next"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["alone", "checkpointed layer"])
def test_finite_differences_under_a_reset_seed(checkpointed: bool, after: bool) -> None:
    check_finite_differences(checkpointed, after)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_global_stream(reentrant: bool | None) -> None:
    """Forward takes from the global stream tile by tile, in order; backward leaves it where it was."""
    model, x = block(dropout=0.5), random(2, LENGTH, HIDDEN)
    tiled = Tiled(model, TILE)
    run: Callable[[Tensor], Tensor] = (
        tiled if reentrant is None else partial(checkpoint, tiled, use_reentrant=reentrant)
    )

    torch.manual_seed(11)
    one_by_one = torch.cat([model(tile) for tile in x.detach().view(-1, HIDDEN).split(TILE)])
    expected = torch.get_rng_state()

    torch.manual_seed(11)
    output = run(x)
    assert torch.equal(torch.get_rng_state(), expected)
    torch.testing.assert_close(output.detach().view(-1, HIDDEN), one_by_one.detach())

    torch.manual_seed(12)
    before = torch.get_rng_state()
    output.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_no_dropout_in_eval() -> None:
    model, x = block(dropout=0.5).eval(), random(2, LENGTH, HIDDEN)
    before = torch.get_rng_state()
    torch.testing.assert_close(Tiled(model, TILE)(x), model(x))
    assert torch.equal(torch.get_rng_state(), before)
