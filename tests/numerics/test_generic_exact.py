"""The generic operator computes what the block computes: outputs and gradients, whatever the shape of the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call

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
    shards,
)
from numerics._layers import HOW, Layer
from numerics._mutants import COARSE, cut_along_the_length
from seqtile.ops import tile_checkpoint

TILE = 4


def check_batch(batch: int = 3, length: int = 5) -> None:
    x = random(batch, length, HIDDEN)
    assert_tiled_is_untiled(block(), [x], random(batch, length, HIDDEN, seed=2, grad=False), TILE)


@pytest.mark.parametrize("mutant", [*COARSE.values(), cut_along_the_length], ids=lambda mutant: mutant.__name__)
def test_the_checker_notices_a_broken_operator(mutant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    check_batch()
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_batch()


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("length", [1, TILE - 1, TILE, TILE + 1, 13])
def test_any_batch_and_length(batch: int, length: int) -> None:
    check_batch(batch, length)


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


@pytest.mark.parametrize("sizes", [(7,), (1,) * 7, (3, 4), (1, 5, 1), (6, 1), (3, 0, 4)])
def test_any_cut(sizes: tuple[int, ...]) -> None:
    x = random(7, HIDDEN)
    assert_tiled_is_untiled(block(), [x], random(7, HIDDEN, seed=2, grad=False), sizes)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 3, 2), (1, 2, 1, 3)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
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
    assert_tiled_is_untiled(model, [x], random(*shape, HIDDEN, seed=2, grad=False), TILE)


def check_gradcheck(tile: int = TILE) -> None:
    model = block(dtype=torch.float64)
    names = [name for name, _ in model.named_parameters()]
    x = random(2, 5, HIDDEN, dtype=torch.float64)

    def of_everything(x: Tensor, *values: Tensor) -> Tensor:
        live = dict(zip(names, values, strict=True))
        run = lambda tiles, aliases: functional_call(model, {**live, **aliases}, tuple(tiles))  # noqa: E731
        return tile_checkpoint.run_in_tiles(run, [x], cut(10, tile), lambda: live)

    weights = [weight.detach().requires_grad_() for weight in model.parameters()]
    try:
        assert torch.autograd.gradcheck(of_everything, [x, *weights], nondet_tol=0.0)
    except GradcheckError as error:
        raise AssertionError(str(error)) from error


@pytest.mark.parametrize("tile", [1, TILE, 10])
def test_gradcheck_of_input_and_weights(tile: int) -> None:
    check_gradcheck(tile)


@pytest.mark.parametrize("mutant", COARSE.values(), ids=lambda mutant: mutant.__name__)
def test_gradcheck_notices_a_broken_operator(mutant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_gradcheck()


def _transposed(batch: int, length: int) -> Tensor:
    return random(length, batch, HIDDEN).detach().transpose(0, 1)


def _strided(batch: int, length: int) -> Tensor:
    return random(batch, 2 * length, 2 * HIDDEN).detach()[:, ::2, ::2]


def _expanded(batch: int, length: int) -> Tensor:
    return random(1, length, HIDDEN).detach().expand(batch, length, HIDDEN)


def _scalar(batch: int, length: int) -> Tensor:
    return torch.tensor(-1.5).expand(batch, length, HIDDEN)


@pytest.mark.parametrize("make", [_transposed, _strided, _expanded, _scalar])
def test_non_contiguous_input(make: Callable[[int, int], Tensor]) -> None:
    x = make(2, 5)
    assert not x.is_contiguous()
    assert_tiled_is_untiled(block(), [x.requires_grad_()], random(2, 5, HIDDEN, seed=2, grad=False), TILE)


@pytest.mark.parametrize("make", [_transposed, _strided, _expanded, _scalar])
def test_non_contiguous_upstream_gradient(make: Callable[[int, int], Tensor]) -> None:
    upstream = make(2, 5)
    assert not upstream.is_contiguous()
    assert_tiled_is_untiled(block(), [random(2, 5, HIDDEN)], upstream, TILE)


@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: -3 * y.mean(), lambda y: y.pow(2).sum() / 7])
def test_upstream_gradient_from_a_loss(loss: Callable[[Tensor], Tensor]) -> None:
    assert_tiled_is_untiled(block(), [random(2, 5, HIDDEN)], loss, TILE)


@pytest.mark.parametrize("frozen", [["gate.weight"], ["down.bias", "up.weight"], ["gate", "up", "down"]], ids=str)
@pytest.mark.parametrize("input_grad", [True, False])
def test_frozen_weights_and_frozen_input(frozen: list[str], input_grad: bool) -> None:
    model = block()
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.startswith(tuple(frozen)))
    if not input_grad and not any(weight.requires_grad for weight in model.parameters()):
        assert not Tiled(model, TILE)(random(2, 5, HIDDEN, grad=False)).requires_grad
        return
    x = random(2, 5, HIDDEN, grad=input_grad)
    assert_tiled_is_untiled(model, [x], random(2, 5, HIDDEN, seed=2, grad=False), TILE)


def test_input_without_gradient_leaves_the_weights_theirs() -> None:
    model = block()
    Tiled(model, TILE)(random(2, 5, HIDDEN, grad=False)).sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.parameters())


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


def test_two_runs_are_bitwise_equal() -> None:
    runs = []
    for _ in range(2):
        model, x = block(3, dtype=torch.bfloat16), random(3, 37, HIDDEN, dtype=torch.bfloat16)
        x.retain_grad()
        Tiled(model, TILE)(x).float().square().sum().backward()
        runs.append([x.grad, *(weight.grad for weight in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("count", [1, 2, 16, 64])
def test_many_tiles(count: int) -> None:
    x = random(2, 64, HIDDEN)
    assert_tiled_is_untiled(block(), [x], random(2, 64, HIDDEN, seed=2, grad=False), shards(128, count))


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
