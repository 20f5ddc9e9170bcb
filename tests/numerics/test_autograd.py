"""The operators' nodes among others: checkpoints inside and around, edges of the graph, weights, layouts, threads."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from numerics._blocks import HIDDEN, Tiled, assert_same, assert_tiled_is_untiled, block, gradients, random
from numerics._fused import Between, Fused, GateUpMLP, make
from numerics._layers import HOW, Layer
from seqtile.ops.mlp_tile import Pass
from seqtile.ops.tile_checkpoint import run_in_tiles

TILE = 4


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
            self.one, self.two = make("gated"), make("plain")
            self.run = [wrap(self.one), wrap(self.two)]

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: self.run[1](torch.tanh(self.run[0](x.sin()))), x, use_reentrant=False)

    x, upstream = random(2, 5, HIDDEN), random(2, 5, HIDDEN, seed=2, grad=False)
    assert_same(
        gradients(Two(lambda m: Fused(m, TILE, 0.5)), [x], upstream), gradients(Two(lambda m: m), [x], upstream)
    )


def test_a_checkpoint_inside_the_block() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    assert_tiled_is_untiled(Inner(), [random(2, 5, HIDDEN)], random(2, 5, HIDDEN, seed=2, grad=False), TILE)


def test_one_edge_of_the_graph_per_parameter() -> None:
    """What waits for a parameter's gradient, as DDP's reducer does, is told once, whatever the number of tiles."""
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


@pytest.mark.parametrize("kind", ["gated", "gate_up", "plain transposed"])
def test_gradients_lie_in_memory_as_their_weights_do(kind: str) -> None:
    """Fused optimizers and engines that flatten gradients read them in order."""
    model = make(kind)
    Fused(model, TILE)(random(2, 5, HIDDEN)).sum().backward()
    assert all(weight.grad.is_contiguous() for weight in model.parameters())


def test_a_kept_tile_used_twice_would_be_noticed() -> None:
    class Immortal(dict):  # type: ignore[type-arg]
        def pop(self, key: int, default: object = None) -> object:
            return self.get(key, default)

    x = random(2, 5, HIDDEN)
    output = Fused(make("gated"), TILE, keep=1.0)(x)
    assert output.grad_fn is not None
    output.grad_fn.kept = Immortal(output.grad_fn.kept)  # type: ignore[attr-defined]
    upstream = random(2, 5, HIDDEN, seed=2, grad=False)
    first, second = (torch.autograd.grad(output, x, upstream, retain_graph=True)[0] for _ in range(2))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("train", [True, False])
def test_compiled_module_gives_the_same_numbers(train: bool) -> None:
    model, x = block(), random(2, 5, HIDDEN)
    model.requires_grad_(train)
    upstream = random(2, 5, HIDDEN, seed=2, grad=False)
    twin = gradients(model, [x], upstream)
    compiled = torch.compile(Tiled(model, TILE), backend="aot_eager", fullgraph=True)
    assert_same(gradients(compiled, [x], upstream), twin)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("operator", ["generic", "fused"])
def test_backwards_in_several_threads(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs whose backwards interleave keep their sums and buffers apart."""
    model, barrier, backward = make("gated"), Barrier(2, timeout=500), Pass.backward
    weights, results = dict(model.named_parameters()), {}

    def at_the_same_tile(self: Pass, *args: object) -> None:
        barrier.wait()
        backward(self, *args)  # type: ignore[arg-type]

    def run(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor]) -> Tensor:
        barrier.wait()  # in the forward and in the recompute
        # A copy of each call's own: functional_call puts the weights into the module, for both threads.
        return torch.func.functional_call(copy.deepcopy(model), dict(aliases), tuple(tiles))

    def work(seed: int) -> None:
        x = random(10, HIDDEN, seed=seed)
        output = (
            Fused(model, TILE, 0.5)(x) if operator == "fused" else run_in_tiles(run, [x], (4, 4, 2), lambda: weights)
        )
        results[seed] = torch.autograd.grad(output.square().sum(), list(weights.values()))

    with monkeypatch.context() as patch:
        patch.setattr(Pass, "backward", at_the_same_tile)
        threads = [Thread(target=work, args=(seed,)) for seed in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for seed in (0, 1):
        loss = model(random(10, HIDDEN, seed=seed)).square().sum()
        torch.testing.assert_close(results[seed], torch.autograd.grad(loss, list(weights.values())))
