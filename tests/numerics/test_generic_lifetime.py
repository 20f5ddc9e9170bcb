"""Nothing outlives its use: after a backward or an exception no tensor of the operator's is alive, without any gc."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from numerics._births import Births, births
from numerics._blocks import HIDDEN, Gated, Tiled, block, random
from numerics._layers import HOW, Layer
from numerics._mutants import inputs_kept
from seqtile.ops.tile_checkpoint import TileGradients, run_in_tiles

TILE = 4


class Boom(Exception):
    pass


class Failing(Gated):
    """Raises when it is called for the ``at``-th time."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        inner = torch.tanh(self.gate(x)) * self.up(x)
        if self.calls == self.at:
            raise Boom
        return self.down(inner)


class FailingGradient(Gated):
    """Raises in the backward of the ``at``-th tile that gets there."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.gate(x)) * self.up(x)
        if inner.requires_grad:
            inner.register_hook(self.count)
        return self.down(inner)

    def count(self, gradient: Tensor) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise Boom


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def run(net: nn.Module, x: Tensor, born: Births) -> None:
    """Forward and backward with what leads to the input made inside, as in a model."""
    with born:
        net(torch.sin(x)).square().sum().backward()


def check_backward(how: dict[str, Any], retain: bool = False) -> None:
    layer, x = Layer(Tiled(block(), TILE), HIDDEN, how), random(2, 5, HIDDEN)
    with births() as born:
        inner = torch.sin(x)
        output = layer(inner)
        loss = output.sum()
        loss.backward(retain_graph=retain)
    held = [inner, output, loss, x.grad, *(weight.grad for weight in layer.parameters())]
    assert born.alive(*held) == []
    del inner, held
    assert born.alive(output, loss, x.grad, *(weight.grad for weight in layer.parameters())) == []


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_after_a_backward(how: dict[str, Any]) -> None:
    check_backward(how)


@pytest.mark.parametrize("how", [HOW["none"], HOW["checkpoint"]], ids=str)
def test_kept_inputs_are_noticed(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs_kept(monkeypatch)
    with pytest.raises(AssertionError):
        check_backward(how)


@pytest.mark.parametrize("how", [HOW["none"], HOW["checkpoint"]], ids=str)
def test_kept_sums_are_noticed(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    add_weight = TileGradients.add_weight

    def mutated(self: TileGradients, name: str, gradient: Tensor) -> None:
        add_weight(self, name, gradient)
        self.__dict__.setdefault("kept", []).append(gradient)

    monkeypatch.setattr(TileGradients, "add_weight", mutated)
    with pytest.raises(AssertionError):
        check_backward(how)


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x + 1


@pytest.mark.parametrize("inner", [nn.Identity(), Scale(), nn.LayerNorm(HIDDEN)], ids=lambda m: type(m).__name__)
def test_after_a_backward_that_recomputes_little(inner: nn.Module) -> None:
    x = random(2, 5, HIDDEN)
    tiled = Tiled(inner, TILE)
    with births() as born:
        output = tiled(torch.sin(x))
        output.backward(torch.ones(2, 5, HIDDEN))
    assert born.alive(output, x.grad, *(weight.grad for weight in inner.parameters())) == []


@pytest.mark.parametrize("wanted", ["input", "weights", "one weight"])
def test_after_a_gradient_of_some(wanted: str) -> None:
    model, x = block(), random(2, 5, HIDDEN)
    tiled = Tiled(model, TILE)
    weights = list(model.parameters())
    with births() as born:
        output = tiled(torch.sin(x))
        found = torch.autograd.grad(
            output.sum(), {"input": [x], "weights": weights, "one weight": weights[-1:]}[wanted]
        )
    assert born.alive(output, *found) == []


@pytest.mark.parametrize("frozen", ["input", "weights"])
def test_after_a_backward_with_something_frozen(frozen: str) -> None:
    model = block().requires_grad_(frozen != "weights")
    x = random(2, 5, HIDDEN, grad=frozen != "input")
    tiled = Tiled(model, TILE)
    with births() as born:
        output = tiled(torch.sin(x))
        output.sum().backward()
    assert born.alive(output, x.grad, *(weight.grad for weight in model.parameters())) == []


def test_a_graph_that_is_dropped_without_backward() -> None:
    layer, x = Layer(Tiled(block(), TILE), HIDDEN, HOW["checkpoint"]), random(2, 5, HIDDEN)
    with births() as born:
        output = layer(torch.sin(x))
        assert born.alive(output) != []
        del output
    assert born.alive() == []


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_after_an_exception_in_forward(at: int, how: dict[str, Any]) -> None:
    layer, x, born = Layer(Tiled(Failing(at), TILE), HIDDEN, how), random(2, 5, HIDDEN), Births()
    with suppress(Boom):
        run(layer, x, born)
    assert layer.block.block.calls == at, "it raised"
    assert born.alive() == []


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("make", [lambda at: Failing(at + 3), FailingGradient], ids=["recompute", "hook"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_after_an_exception_in_backward(at: int, make: Callable[[int], nn.Module], how: dict[str, Any]) -> None:
    inner = make(at)
    layer, x, born = Layer(Tiled(inner, TILE), HIDDEN, how), random(2, 5, HIDDEN), Births()
    with suppress(Boom):
        run(layer, x, born)
    assert inner.calls == inner.at, "it raised"
    assert born.alive(*(p.grad for p in (x, *layer.parameters()))) == []


def test_a_backward_that_failed_may_be_tried_again() -> None:
    """What the failed one had summed does not count twice."""
    inner, x = FailingGradient(2), random(2, 5, HIDDEN)
    output = Tiled(inner, TILE)(x)
    with suppress(Boom):
        output.sum().backward(retain_graph=True)
    assert inner.calls == 2 and x.grad is None
    output.sum().backward()
    got = [x.grad, *(weight.grad for weight in inner.parameters())]
    twin = torch.autograd.grad(inner(x).sum(), [x, *inner.parameters()])
    for ours, expected in zip(got, twin, strict=True):
        torch.testing.assert_close(ours, expected)


def test_a_retained_graph_keeps_the_input_and_nothing_of_the_backward() -> None:
    model, x = block(), random(2, 5, HIDDEN)
    tiled = Tiled(model, TILE)
    with births() as born:
        inner = torch.sin(x)
        output = tiled(inner)
        loss = output.sum()
        before = born.alive(inner, output, loss)
        for _ in range(2):
            loss.backward(retain_graph=True)
            assert born.alive(inner, output, loss, x.grad, *(w.grad for w in model.parameters())) == before


def test_no_copy_of_a_weight_is_kept() -> None:
    """Weights that an engine gathers for a tile go with it; those of the first call stay until the forward's end."""
    shard, copies, most = nn.Parameter(torch.eye(HIDDEN)), [], []

    def alive() -> int:
        return sum(copy() is not None for copy in copies)

    def gather() -> dict[str, Tensor]:
        whole = shard * 1
        copies.append(weakref.ref(whole.untyped_storage()))
        return {"weight": whole}

    def run(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor]) -> Tensor:
        most.append(alive())
        return torch.tanh(tiles[0] @ aliases["weight"])

    output = run_in_tiles(run, [random(40, HIDDEN)], (4,) * 10, gather)
    assert max(most) <= 2 and alive() == 0
    output.sum().backward()
    assert len(copies) == 21 and max(most) <= 2 and alive() == 0


def test_a_counter_that_saw_nothing_says_so() -> None:
    with pytest.raises(RuntimeError, match="no tensor was born"):
        Births().alive()
