"""Gradients reach parameters as they do untiled: once, through autograd, whatever asks for them and when."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from numerics._blocks import HIDDEN, Tiled, assert_same, assert_tiled_is_untiled, block, gradients, random
from numerics._layers import HOW, Layer
from numerics._mutants import last_tile_without_gradient, upstream_ignored
from seqtile.ops.tile_checkpoint import run_in_tiles

TILE = 4


def check_layer(how: dict[str, bool]) -> None:
    model, x, upstream = block(), random(2, 5, HIDDEN), random(2, 5, HIDDEN, seed=2, grad=False)
    assert_same(
        gradients(Layer(Tiled(model, TILE), HIDDEN, how), [x], upstream),
        gradients(Layer(model, HIDDEN, {}), [x], upstream),
    )


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_under_a_checkpoint_of_the_layer(how: dict[str, bool]) -> None:
    check_layer(how)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("mutant", [last_tile_without_gradient, upstream_ignored])
def test_the_checker_notices_a_broken_operator(
    mutant: Callable[..., None], how: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_layer(how)


def test_checkpoints_inside_one_another() -> None:
    model, x = block(), random(2, 5, HIDDEN)

    class Nested(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.block = inner

        def forward(self, x: Tensor) -> Tensor:
            def outer(x: Tensor) -> Tensor:
                return checkpoint(lambda x: self.block(torch.tanh(x)), x.sin(), use_reentrant=False).cos()

            return checkpoint(outer, x, use_reentrant=False)

    ours = gradients(Nested(Tiled(model, TILE)), [x], lambda y: y.square().sum())
    twin = gradients(Nested(model), [x], lambda y: y.square().sum())
    assert_same(ours, twin)


def test_a_checkpoint_inside_the_block() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    assert_tiled_is_untiled(Inner(), [random(2, 5, HIDDEN)], random(2, 5, HIDDEN, seed=2, grad=False), TILE)


def test_saved_input_may_live_on_the_host() -> None:
    """Activation offload sees one saved tensor, the input; the recompute takes its tiles from what comes back."""
    model, x, packed = block(), random(2, 5, HIDDEN), []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.clone()):
        output = Tiled(model, TILE)(x * 2)
    assert packed == [(10, HIDDEN)]
    output.square().sum().backward()
    got = x.grad
    x.grad = None
    model(x * 2).square().sum().backward()
    torch.testing.assert_close(got, x.grad)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_second_backward_is_refused_in_pytorchs_words(how: dict[str, bool]) -> None:
    loss = Layer(Tiled(block(), TILE), HIDDEN, how)(random(2, 5, HIDDEN)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


def test_second_backward_of_the_block_alone_is_refused() -> None:
    output = Tiled(block(), TILE)(random(2, 5, HIDDEN))
    output.sum().backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        output.sum().backward()


@pytest.mark.parametrize("how", [HOW["none"], HOW["checkpoint"], HOW["no early stop"]], ids=str)
def test_retained_graph_gives_the_right_gradients_every_time(how: dict[str, bool]) -> None:
    model, x = block(), random(2, 5, HIDDEN)
    layer, untiled = Layer(Tiled(model, TILE), HIDDEN, how), Layer(model, HIDDEN, {})
    untiled.norm = layer.norm
    inputs = [x, *layer.parameters()]
    output = layer(x)
    for times, upstream in (
        (1, random(2, 5, HIDDEN, seed=2, grad=False)),
        (2, random(2, 5, HIDDEN, seed=3, grad=False)),
    ):
        for _ in range(times):
            ours = torch.autograd.grad(output, inputs, upstream, retain_graph=True)
            twin = torch.autograd.grad(untiled(x), inputs, upstream)
            for got, expected in zip(ours, twin, strict=True):
                torch.testing.assert_close(got, expected)
    output.backward(upstream)
    torch.testing.assert_close(x.grad, twin[0])


def test_grad_of_weights_alone_and_of_the_input_alone() -> None:
    model, x = block(), random(2, 5, HIDDEN)
    weights = list(model.parameters())
    for wanted in (weights, weights[:1], weights[-1:], [x], [x, weights[2]]):
        ours = torch.autograd.grad(Tiled(model, TILE)(x).square().sum(), wanted)
        twin = torch.autograd.grad(model(x).square().sum(), wanted)
        for got, expected in zip(ours, twin, strict=True):
            torch.testing.assert_close(got, expected)
    assert x.grad is None and all(weight.grad is None for weight in weights)


def test_backward_into_chosen_inputs() -> None:
    model, x = block(), random(2, 5, HIDDEN)
    Tiled(model, TILE)(x).sum().backward(inputs=[model.up.weight])
    assert model.up.weight.grad is not None and x.grad is None and model.gate.weight.grad is None


@pytest.mark.parametrize("how", [HOW["none"], HOW["checkpoint"]], ids=str)
def test_graph_of_the_gradient_is_refused(how: dict[str, bool]) -> None:
    """Not left to a second derivative that is silently zero."""
    layer, x = Layer(Tiled(block(), TILE), HIDDEN, how), random(2, 5, HIDDEN)
    with pytest.raises(NotImplementedError, match=r"first derivatives only, got create_graph=True; undo tiling"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="create_graph=True"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")  # PyTorch's own, about cycles
        layer(x).sum().backward(create_graph=True)
    assert x.grad is None


def test_gradients_accumulate_over_micro_batches() -> None:
    model, lengths, found = block(), (5, 1, 13), []
    for net in (Tiled(model, TILE), model):
        model.zero_grad()
        for number, length in enumerate(lengths):
            (net(random(2, length, HIDDEN, seed=number)).square().sum() / len(lengths)).backward()
        found.append([weight.grad for weight in model.parameters()])
    for ours, twin in zip(*found, strict=True):
        torch.testing.assert_close(ours, twin)


def test_one_gradient_per_parameter_and_backward() -> None:
    model, x = block(), random(2, 5, HIDDEN)
    layer = Layer(Tiled(model, TILE), HIDDEN, HOW["checkpoint"])
    arrived: list[str] = []
    for name, weight in layer.named_parameters():
        weight.register_hook(lambda grad, name=name: arrived.append(f"grad {name}"))
        weight.register_post_accumulate_grad_hook(lambda weight, name=name: arrived.append(name))
    for _ in range(2):
        arrived.clear()
        layer(x).sum().backward()
        names = [name for name, _ in layer.named_parameters()]
        assert sorted(arrived) == sorted([*names, *(f"grad {name}" for name in names)])


def test_one_edge_of_the_graph_per_parameter() -> None:
    """What waits for a parameter's gradient, as DDP's reducer does, hears of it once, whatever the number of tiles."""
    model, x = block(), random(2, 5, HIDDEN)
    nodes, seen, edges = [Tiled(model, TILE)(x).grad_fn], set(), Counter()
    while nodes:
        node = nodes.pop()
        for following, _ in node.next_functions:
            if hasattr(following, "variable"):
                edges[id(following.variable)] += 1
            elif following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    assert edges == {id(tensor): 1 for tensor in (x, *model.parameters())}


def test_gradients_of_parameters_are_their_own_memory() -> None:
    """What the engine is given may be changed in place: it is nobody else's."""
    model, x = block(), random(2, 5, HIDDEN)
    output = Tiled(model, TILE)(x)
    upstream = torch.ones_like(output)
    output.backward(upstream)
    places = [t.untyped_storage().data_ptr() for t in (x.grad, upstream, *(w.grad for w in model.parameters()))]
    assert len(set(places)) == len(places)


def test_optimizer_that_steps_inside_the_backward() -> None:
    x = random(2, 5, HIDDEN)

    def trained(tiled: bool, inside: bool) -> list[Tensor]:
        models = nn.ModuleList(block(seed) for seed in (0, 1))
        optimizers = {weight: torch.optim.SGD([weight], lr=0.1) for weight in models.parameters()}

        def step(weight: Tensor) -> None:
            optimizers[weight].step()
            weight.grad = None

        if inside:
            for weight in models.parameters():
                weight.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            y = x.detach()
            for model in models:
                y = y + checkpoint(Tiled(model, TILE) if tiled else model, y, use_reentrant=False)
            y.square().mean().backward()
            if not inside:
                for weight in models.parameters():
                    step(weight)
        return [weight.detach() for weight in models.parameters()]

    for ours, twin in zip(trained(tiled=True, inside=True), trained(tiled=False, inside=False), strict=True):
        torch.testing.assert_close(ours, twin)


def test_weights_are_asked_for_at_every_tile() -> None:
    """An engine may free and gather weights in between: nobody keeps what ``weights()`` gave."""
    weight, asked = nn.Parameter(torch.eye(HIDDEN)), []

    def weights() -> dict[str, Tensor]:
        asked.append(None)
        return {"weight": weight}

    x = random(10, HIDDEN)
    output = run_in_tiles(lambda tiles, aliases: tiles[0] @ aliases["weight"], [x], (4, 4, 2), weights)
    assert len(asked) == 4  # once to know them, then for each tile
    output.sum().backward()
    assert len(asked) == 7
    torch.testing.assert_close(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("train", [True, False])
def test_compiled_module_gives_the_same_numbers(train: bool) -> None:
    model, x = block(), random(2, 5, HIDDEN)
    model.requires_grad_(train)
    upstream = random(2, 5, HIDDEN, seed=2, grad=False)
    twin = gradients(model, [x], upstream)
    compiled = torch.compile(Tiled(model, TILE), backend="aot_eager", fullgraph=True)
    ours = gradients(compiled, [x], upstream)
    assert_same(ours, twin)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_backwards_in_several_threads() -> None:
    """Graphs whose backwards interleave keep their sums apart."""
    weight, barrier, threads, found = nn.Parameter(torch.eye(HIDDEN)), Barrier(2), [], {}

    def run(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor]) -> Tensor:
        barrier.wait()  # both threads are at the same tile, of the forward and of the recompute
        return torch.tanh(tiles[0] @ aliases["weight"]) @ aliases["weight"]

    def work(seed: int) -> None:
        output = run_in_tiles(run, [random(10, HIDDEN, seed=seed)], (4, 4, 2), lambda: {"weight": weight})
        (found[seed],) = torch.autograd.grad(output.square().sum(), weight)

    for seed in (0, 1):
        threads.append(Thread(target=work, args=(seed,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    for seed in (0, 1):
        loss = (torch.tanh(random(10, HIDDEN, seed=seed) @ weight) @ weight).square().sum()
        torch.testing.assert_close(found[seed], *torch.autograd.grad(loss, weight))
