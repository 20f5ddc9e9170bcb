"""The fused node among others: norms in the tile, what is saved and kept, layouts of gradients, threads."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from numerics._blocks import HIDDEN, assert_same, gradients, random
from numerics._fused import Between, Fused, GatedMLP, GateUpMLP, PlainMLP
from numerics._layers import HOW, Layer
from seqtile.ops.mlp_tile import Pass

TILE = 4


def block(seed: int = 0) -> GatedMLP:
    torch.manual_seed(seed)
    return GatedMLP()


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_norms_in_the_tile_under_a_checkpoint(how: dict[str, bool]) -> None:
    model = Between(GateUpMLP(), nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN))
    x, upstream = random(2, 5, HIDDEN), random(2, 5, HIDDEN, seed=2, grad=False)
    ours = gradients(Layer(Fused(model, TILE, 0.5), HIDDEN, how), [x], upstream)
    assert_same(ours, gradients(Layer(model, HIDDEN, {}), [x], upstream))


def test_two_blocks_in_one_checkpoint() -> None:
    """The first one's input is saved before the second one runs; both are recomputed from what the layer gives."""

    class Two(nn.Module):
        def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
            super().__init__()
            self.one, self.two = block(0), block(1)
            self.run = [wrap(self.one), wrap(self.two)]

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: self.run[1](torch.tanh(self.run[0](x.sin()))), x, use_reentrant=False)

    x, upstream = random(2, 5, HIDDEN), random(2, 5, HIDDEN, seed=2, grad=False)
    assert_same(
        gradients(Two(lambda m: Fused(m, TILE, 0.5)), [x], upstream), gradients(Two(lambda m: m), [x], upstream)
    )


def test_what_is_saved_is_the_input_and_the_weights_and_may_live_elsewhere() -> None:
    model, x, packed = block(), random(2, 5, HIDDEN), []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.clone()):
        output = Fused(model, TILE)(x * 2)
    weights = [tuple(weight.shape) for layer in (model.gate, model.up, model.down) for weight in layer.parameters()]
    assert packed == [(2, 5, HIDDEN), *weights]
    output.square().sum().backward()
    got = x.grad
    x.grad = None
    model(x * 2).square().sum().backward()
    torch.testing.assert_close(got, x.grad)


def test_a_kept_tile_used_twice_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Immortal(dict):  # type: ignore[type-arg]
        def pop(self, key: int, default: object = None) -> object:
            return self.get(key, default)

    def keeping(output: Tensor) -> None:
        node = output.grad_fn
        assert node is not None
        node.kept = Immortal(node.kept)  # type: ignore[attr-defined]

    model, x = block(), random(2, 5, HIDDEN)
    output = Fused(model, TILE, keep=1.0)(x)
    keeping(output)
    upstream = random(2, 5, HIDDEN, seed=2, grad=False)
    first, second = (torch.autograd.grad(output, x, upstream, retain_graph=True)[0] for _ in range(2))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(first, second)


def test_an_output_that_no_loss_uses() -> None:
    model, x = block(), random(2, 5, HIDDEN)
    output = Fused(model, TILE)(x)
    (output.detach() * x).sum().backward()
    torch.testing.assert_close(x.grad, output.detach())
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("make", [GatedMLP, GateUpMLP, lambda: PlainMLP(transposed=True)])
def test_gradients_lie_in_memory_as_their_weights_do(make: Callable[[], nn.Module]) -> None:
    """Fused optimisers and engines that flatten gradients read them in order."""
    model = make()
    Fused(model, TILE)(random(2, 5, HIDDEN)).sum().backward()
    assert all(weight.grad.is_contiguous() for weight in model.parameters())


def test_an_input_changed_in_between_is_noticed() -> None:
    x = random(2, 5, HIDDEN) * 1
    output = Fused(block(), TILE)(x)
    x.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_backwards_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs whose backwards interleave keep their sums and buffers apart."""
    model, barrier, found, backward = block(), Barrier(2, timeout=500), {}, Pass.backward

    def meeting(self: Pass, *args: object) -> None:
        barrier.wait()  # both threads are at the same tile
        backward(self, *args)  # type: ignore[arg-type]

    def work(seed: int) -> None:
        output = Fused(model, TILE, 0.5)(random(10, HIDDEN, seed=seed))
        found[seed] = torch.autograd.grad(output.square().sum(), list(model.parameters()))

    with monkeypatch.context() as patch:
        patch.setattr(Pass, "backward", meeting)
        threads = [Thread(target=work, args=(seed,)) for seed in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for seed in (0, 1):
        loss = model(random(10, HIDDEN, seed=seed)).square().sum()
        for got, expected in zip(found[seed], torch.autograd.grad(loss, list(model.parameters())), strict=True):
            torch.testing.assert_close(got, expected)
