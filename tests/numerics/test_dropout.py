"""Randomness inside a tile: the recompute draws what the forward drew, and backward draws nothing of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from numerics._blocks import HIDDEN, Tiled, assert_same, block, gradients, random
from numerics._fused import Between, Fused, GatedMLP, PlainMLP
from seqtile.ops import tile_checkpoint
from seqtile.ops.mlp_tile import Pass
from seqtile.ops.rng import RandomState

TILE, LENGTH = 4, 5


class SoftNorm(nn.Module):
    """A norm whose result depends on the size of its input, unlike RMSNorm, which hides a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1)


class Layer(nn.Module):
    """Dropout, norm, block and residual, and a norm with dropout after the block, which needs its output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.block = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(F.layer_norm(F.dropout(x, 0.3), (HIDDEN,)))
        return x + F.dropout(F.layer_norm(y, (HIDDEN,)), 0.3)


FUSED: dict[str, Callable[[], nn.Module]] = {
    "fused": lambda: PlainMLP(dropout=0.3),
    "fused, then a norm": lambda: Between(PlainMLP(dropout=0.3), None, SoftNorm()),
}
KINDS: dict[str, Callable[[], nn.Module]] = {
    **{kind: lambda make=make: Fused(make(), TILE) for kind, make in FUSED.items()},
    "generic": lambda: Tiled(block(dropout=0.4), TILE),
    "generic in a layer": lambda: Layer(Tiled(block(dropout=0.4), TILE)),
}


def check(kind: str, checkpointed: bool = False) -> None:
    """Finite differences of input and weights; every evaluation starts from one seed, so draws the same masks."""
    torch.manual_seed(0)
    tiled = KINDS[kind]().double()

    def seeded(x: Tensor, *_: Tensor) -> Tensor:
        torch.manual_seed(7)
        return checkpoint(tiled, x, use_reentrant=False) if checkpointed else tiled(x)

    x = random(2, LENGTH, HIDDEN, dtype=torch.float64)
    assert torch.autograd.gradcheck(seeded, (x, *tiled.parameters()), fast_mode=True)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["alone", "checkpointed"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str, checkpointed: bool) -> None:
    check(kind, checkpointed)


def scale_missing_in_backward(monkeypatch: pytest.MonkeyPatch, then: float = 1.0) -> None:
    """The backward drops, and does not scale."""
    output_gradient = Pass._output_gradient

    def mutated(self: Pass, *args: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pass, "_drop_scale", 1.0)
            return output_gradient(self, *args) * then

    monkeypatch.setattr(Pass, "_output_gradient", mutated)


def scale_missing_in_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is scaled; the output that is computed again for the norm's is not."""
    scale_missing_in_backward(monkeypatch, then=1 / 0.7)


def masks_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward draws from wherever the stream stands."""
    monkeypatch.setattr(RandomState, "_set", lambda self, state: None)
    monkeypatch.setattr(tile_checkpoint, "checkpoint", partial(checkpoint, preserve_rng_state=False))


@pytest.mark.parametrize(
    ("mutant", "kind"),
    [(masks_drawn_again, kind) for kind in KINDS]
    + [(scale_missing_in_backward, kind) for kind in FUSED]
    + [(scale_missing_in_recompute, "fused, then a norm")],
)
def test_a_backward_with_another_dropout_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(GradcheckError):
        check(kind)


@pytest.mark.parametrize("kind", FUSED)
def test_values_of_the_fused_operator(kind: str) -> None:
    """The forward, with the masks that the operator draws tile by tile, row by row, one byte per element."""
    torch.manual_seed(0)
    model, x = FUSED[kind]().double().train(), random(10, HIDDEN, dtype=torch.float64, grad=False)
    torch.manual_seed(7)
    got = Fused(model, TILE)(x)
    torch.manual_seed(7)
    drawn = [torch.empty(rows, HIDDEN, dtype=torch.bool).bernoulli_(0.7) for rows in (4, 4, 2)]
    mlp, after = (model.mlp, model.after) if isinstance(model, Between) else (model, nn.Identity())
    expected = after(mlp.down(mlp.act(mlp.up(x))) * torch.cat(drawn) / 0.7)
    torch.testing.assert_close(got, expected)  # float64: the default is far above any rounding here


class Masked(nn.Module):
    """A plain MLP with dropout that notes every mask; given masks, it uses those."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.drawn: list[Tensor] = []
        self.given: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, device=x.device) < 0.5 if self.given is None else self.given.view(x.shape)
        self.drawn.append(mask.flatten(0, -2))
        return self.down(F.gelu(self.up(x)) * mask)


def check_recorded_masks(device: str = "cpu") -> None:
    """The tiled run against an untiled one that is fed the masks that the tiles drew."""
    torch.manual_seed(0)
    model = Masked().to(device)
    x = random(2, LENGTH, HIDDEN).detach().to(device).requires_grad_()
    upstream = random(2, LENGTH, HIDDEN, seed=2, grad=False).to(device)
    ours = gradients(Tiled(model, TILE), [x], upstream)
    forward, recompute = model.drawn[:3], model.drawn[3:]
    for first, again in zip(forward, reversed(recompute), strict=True):
        assert torch.equal(first, again), "the recompute drew another mask"
    model.given = torch.cat(forward)
    assert_same(ours, gradients(model, [x], upstream))
    assert len({tuple(mask[:2].flatten().tolist()) for mask in forward}) == 3, "every tile draws its own mask"


def test_recorded_masks() -> None:
    check_recorded_masks()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="masks of the device's own generator need an accelerator")
def test_recorded_masks_on_the_device() -> None:
    check_recorded_masks("cuda")


def test_masks_drawn_again_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    masks_drawn_again(monkeypatch)
    with pytest.raises(AssertionError, match="another mask"):
        check_recorded_masks()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_global_stream(reentrant: bool | None) -> None:
    """Forward takes from the global stream tile by tile, in order; backward leaves it where it was."""
    model, x = block(dropout=0.5), random(2, LENGTH, HIDDEN)
    tiled = Tiled(model, TILE)
    run: Callable[[Tensor], Tensor] = (
        tiled if reentrant is None else partial(checkpoint, tiled, use_reentrant=reentrant)
    )

    torch.manual_seed(11)
    tile_by_tile = torch.cat([model(tile) for tile in x.detach().view(-1, HIDDEN).split(TILE)])
    expected = torch.get_rng_state()

    torch.manual_seed(11)
    output = run(x)
    assert torch.equal(torch.get_rng_state(), expected)
    torch.testing.assert_close(output.detach().view(-1, HIDDEN), tile_by_tile.detach())

    torch.manual_seed(12)
    before = torch.get_rng_state()
    output.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "tiled",
    [lambda: Tiled(block(dropout=0.5).eval(), TILE), lambda: Fused(PlainMLP(dropout=0.5).eval(), TILE),
     lambda: Fused(GatedMLP(), TILE)],
    ids=["generic in evaluation", "fused in evaluation", "fused without dropout"],
)  # fmt: skip
def test_nothing_is_drawn_where_nothing_drops(tiled: Callable[[], Any]) -> None:
    net, x = tiled(), random(2, LENGTH, HIDDEN)
    before = torch.get_rng_state()
    output = net(x)
    torch.testing.assert_close(output, net.block(x))
    output.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
