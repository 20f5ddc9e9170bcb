"""A tile is recomputed with the weights that its forward ran with, or the backward says that it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from numerics._blocks import HIDDEN, Gated, Tiled, block, cut, gradients, random
from numerics._errors import assert_all_no_worse, assert_no_worse, in_float64
from numerics._layers import HOW, Layer
from seqtile.ops.same_weights import SameWeights
from seqtile.ops.tile_checkpoint import run_in_tiles

TILE = 4
ONCE = pytest.mark.parametrize("how", [HOW["none"], HOW["checkpoint"]], ids=["alone", "in a layer checkpoint"])


class TiledWithAll(Tiled):
    """Tells the operator of every weight of the block, not only of those that train."""

    def forward(self, *tensors: Tensor, **kwargs: Any) -> Any:
        def everything() -> dict[str, Tensor]:
            return dict(self.block.named_parameters())

        def run(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor]) -> Any:
            return functional_call(self.block, dict(aliases), tuple(tiles), kwargs)

        return run_in_tiles(run, tensors, cut(10, TILE), everything)


def others(model: nn.Module) -> dict[str, Tensor]:
    return {name: (weight.detach() + 0.1).requires_grad_() for name, weight in model.named_parameters()}


OTHERS: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "others that train": others,
    "others of which none trains": lambda model: {n: w.detach() for n, w in others(model).items()},
    "computed by the caller, as in meta-learning": lambda model: {n: w * 0.9 for n, w in model.named_parameters()},
}


@ONCE
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_weights_for_the_length_of_the_forward(
    make: Callable[[nn.Module], dict[str, Tensor]], how: dict[str, Any]
) -> None:
    model = Layer(Tiled(block(), TILE), HIDDEN, how)
    output = functional_call(model, make(model), (random(10, HIDDEN),))
    with pytest.raises(RuntimeError, match="cannot recompute a tile|in backward"):
        output.sum().backward()


def test_other_frozen_weights() -> None:
    model = TiledWithAll(block(), TILE)
    model.block.up.requires_grad_(False)
    other = {"block.up.weight": torch.randn_like(model.block.up.weight)}
    output = functional_call(model, other, (random(10, HIDDEN),))
    with pytest.raises(RuntimeError, match="'up.weight' is a different tensor in backward"):
        output.sum().backward()


def replaced(model: Gated) -> None:
    model.up.weight = nn.Parameter(model.up.weight.detach().clone())


def stepped(model: Gated) -> None:
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def frozen(model: Gated) -> None:
    model.up.requires_grad_(False)


CHANGES = {
    replaced: "'up.weight' is a different tensor",
    stepped: "'gate.weight' was modified in place",
    frozen: "has no trainable weight 'up.bias'",
}


@ONCE
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_weights_that_change_after_the_forward(change: Callable[[Gated], None], how: dict[str, Any]) -> None:
    model = block()
    output = Layer(Tiled(model, TILE), HIDDEN, how)(random(10, HIDDEN))
    change(model)
    with pytest.raises(RuntimeError, match=f"cannot recompute a tile: .*{CHANGES[change]}"):
        output.sum().backward()


def test_without_the_check_the_gradients_are_wrong_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SameWeights, "check", lambda self, live: live)
    model, x = Tiled(block(), TILE), random(10, HIDDEN)
    other = others(model)
    functional_call(model, other, (x,)).sum().backward()
    got, x.grad = x.grad, None
    functional_call(model.block, {n.removeprefix("block."): w for n, w in other.items()}, (x,)).sum().backward()
    assert (got - x.grad).norm() > 0.01 * x.grad.norm()


def check_same(model: nn.Module, run: Callable[[nn.Module, Tensor], None], how: dict[str, Any]) -> None:
    """``run`` gives the gradients of the untiled layer."""
    x = random(10, HIDDEN)
    twin = gradients(Layer(model, HIDDEN, {}), [x], lambda y: y.square().sum())
    wide = [x.detach().double().requires_grad_()]
    truth = gradients(Layer(in_float64(model), HIDDEN, {}).double(), wide, lambda y: y.square().sum())
    layer = Layer(Tiled(model, TILE), HIDDEN, how)
    layer.zero_grad()
    x = x.detach().requires_grad_()
    run(layer, x)
    for name, weight in layer.named_parameters():
        name = name.replace("block.", "")
        assert_no_worse(weight.grad, twin[name], truth[name], name=name)
    assert_no_worse(x.grad, twin["input.0"], truth["input.0"])


@ONCE
def test_weights_that_share_the_modules_memory_are_the_same(how: dict[str, Any]) -> None:
    """Detached parameters, as torch.func's recipes make them: other objects, the same numbers."""

    def run(layer: nn.Module, x: Tensor) -> None:
        given = {name: weight.detach().requires_grad_() for name, weight in layer.named_parameters()}
        functional_call(layer, given, (x,)).square().sum().backward()
        for name, weight in layer.named_parameters():
            weight.grad = given[name].grad

    check_same(block(), run, how)


@ONCE
def test_a_step_between_batches(how: dict[str, Any]) -> None:
    def run(layer: nn.Module, x: Tensor) -> None:
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)  # writes into the weights, and changes none
        for _ in range(2):  # accumulation, then a step
            layer(random(6, HIDDEN)).sum().backward()
            layer(random(7, HIDDEN)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        layer(x).square().sum().backward()

    check_same(block(), run, how)


@ONCE
def test_twice_through_one_graph(how: dict[str, Any]) -> None:
    def run(layer: nn.Module, x: Tensor) -> None:
        loss = layer(x).square().sum()
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()

    check_same(block(), run, how)


@ONCE
def test_saved_tensors_on_the_host(how: dict[str, Any]) -> None:
    def run(layer: nn.Module, x: Tensor) -> None:
        with torch.autograd.graph.save_on_cpu():
            loss = layer(x).square().sum()
        loss.backward()

    check_same(block(), run, how)


@ONCE
def test_parameters_with_other_data(how: dict[str, Any]) -> None:
    """As ZeRO-3 does: empty between the layers' turns, gathered into new memory for each."""

    def run(layer: nn.Module, x: Tensor) -> None:
        weights = list(layer.parameters())
        whole = [weight.data.clone() for weight in weights]
        loss = layer(x).square().sum()
        for weight in weights:
            weight.data = torch.empty(0)
        for weight, data in zip(weights, whole, strict=True):
            weight.data = data
        loss.backward()

    check_same(block(), run, how)


def test_views_of_one_flat_parameter() -> None:
    """As FSDP1 does: new views of one storage, which is emptied and filled again in between."""
    model, x = block(bias=False), random(10, HIDDEN)
    shapes = [weight.shape for weight in model.parameters()]
    flat = nn.Parameter(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    whole = flat.detach().clone()

    def weights() -> dict[str, Tensor]:
        parts = flat.split([shape.numel() for shape in shapes])
        return {name: part.view(shape) for name, part, shape in zip(("g", "u", "d"), parts, shapes, strict=True)}

    def run(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor]) -> Tensor:
        return F.linear(F.silu(F.linear(tiles[0], aliases["g"])) * F.linear(tiles[0], aliases["u"]), aliases["d"])

    output = run_in_tiles(run, [x], (4, 4, 2), weights)
    storage, size = flat.untyped_storage(), flat.untyped_storage().nbytes()
    storage.resize_(0)
    storage.resize_(size)
    flat.data.copy_(whole)
    output.square().sum().backward()
    twin = gradients(model, [x], lambda y: y.square().sum())
    truth = gradients(in_float64(model), [x.detach().double().requires_grad_()], lambda y: y.square().sum())
    parts = [part.view(shape) for part, shape in zip(flat.grad.split([s.numel() for s in shapes]), shapes, strict=True)]
    names = [name for name, _ in model.named_parameters()]
    assert_all_no_worse(
        {**dict(zip(names, parts, strict=True)), "input.0": x.grad},
        *({name: one[name] for name in (*names, "input.0")} for one in (twin, truth)),
    )


def test_weights_that_wait_elsewhere_are_not_judged() -> None:
    """Accelerate's hooks keep them on the meta device and fetch new tensors for each call of a layer inside."""
    SameWeights({"w": torch.empty(2, device="meta")}).check({"w": nn.Parameter(torch.ones(2))})
    SameWeights({"w": torch.ones(2)}).check({"w": torch.empty(2, device="meta")})


def test_a_frozen_weight_that_is_written_after_the_forward() -> None:
    model = TiledWithAll(block(), TILE)
    model.block.up.requires_grad_(False)
    output = model(random(10, HIDDEN))
    with torch.no_grad():
        model.block.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="'up.weight' was modified in place"):
        output.sum().backward()


def test_a_frozen_weight_that_the_forward_writes_itself_is_not_judged() -> None:
    """As PEFT's target_parameters gives a weight back after each call."""
    weight = torch.ones(2)
    same = SameWeights({"w": weight})
    weight.mul_(1)
    same.settle({"w": weight})
    weight.mul_(1)
    same.check({"w": weight})
