"""The generic operator in autograd: what is saved, edges of the graph, weights that come and go, compiling, threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from numerics._blocks import HIDDEN, Tiled, assert_same, assert_tiled_is_untiled, block, gradients, random
from seqtile.ops.tile_checkpoint import run_in_tiles

TILE = 4


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
