"""The fused node among others: checkpoints, retained graphs, partial gradients, engines that listen, threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from numerics._blocks import HIDDEN, assert_same, gradients, random
from numerics._fused import (
    Between,
    Fused,
    GatedMLP,
    GateUpMLP,
    PlainMLP,
    last_tile_without_gradient,
    upstream_ignored,
)
from seqtile.ops.mlp_tile import Pass

TILE = 4
KEEP = pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])


def block(seed: int = 0) -> GatedMLP:
    torch.manual_seed(seed)
    return GatedMLP()


class Layer(nn.Module):
    """Norm, block and residual inside a checkpoint, as in a decoder layer."""

    def __init__(self, inner: nn.Module, **how: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.block = inner
        self.how = how

    def layer(self, x: Tensor) -> Tensor:
        return x + self.block(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, **self.how) if self.how else self.layer(x)


HOW = {
    "none": {},
    "checkpoint": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "no early stop": {"use_reentrant": False, "early_stop": False},
}
EVERY_HOW = pytest.mark.parametrize("how", HOW.values(), ids=HOW)


def check_layer(how: dict[str, bool], keep: float = 0.0, model: nn.Module | None = None) -> None:
    model = model or block()
    x, upstream = random(2, 5, HIDDEN), random(2, 5, HIDDEN, seed=2, grad=False)
    ours = gradients(Layer(Fused(model, TILE, keep), **how), [x], upstream)
    assert_same(ours, gradients(Layer(model), [x], upstream))


@KEEP
@EVERY_HOW
def test_under_a_checkpoint_of_the_layer(how: dict[str, bool], keep: float) -> None:
    check_layer(how, keep)


@EVERY_HOW
def test_norms_in_the_tile_under_a_checkpoint(how: dict[str, bool]) -> None:
    check_layer(how, 0.5, Between(GateUpMLP(), nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN)))


@EVERY_HOW
@pytest.mark.parametrize("mutant", [last_tile_without_gradient, upstream_ignored])
def test_the_checker_notices_a_broken_operator(
    mutant: Callable[..., None], how: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_layer(how)


@KEEP
def test_checkpoints_inside_one_another(keep: float) -> None:
    model, x = block(), random(2, 5, HIDDEN)

    class Nested(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.block = inner

        def forward(self, x: Tensor) -> Tensor:
            def outer(x: Tensor) -> Tensor:
                return checkpoint(lambda x: self.block(torch.tanh(x)), x.sin(), use_reentrant=False).cos()

            return checkpoint(outer, x, use_reentrant=False)

    ours = gradients(Nested(Fused(model, TILE, keep)), [x], lambda y: y.square().sum())
    assert_same(ours, gradients(Nested(model), [x], lambda y: y.square().sum()))


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


@KEEP
@EVERY_HOW
def test_second_backward_is_refused_in_pytorchs_words(how: dict[str, bool], keep: float) -> None:
    loss = Layer(Fused(block(), TILE, keep), **how)(random(2, 5, HIDDEN)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


def test_second_backward_of_the_block_alone_is_refused() -> None:
    output = Fused(block(), TILE)(random(2, 5, HIDDEN))
    output.sum().backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        output.sum().backward()


@KEEP
@pytest.mark.parametrize("how", [HOW["none"], HOW["checkpoint"], HOW["no early stop"]], ids=str)
def test_retained_graph_gives_the_right_gradients_every_time(how: dict[str, bool], keep: float) -> None:
    """Kept tiles are overwritten by the first backward and computed again by the second."""
    model, x = block(), random(2, 5, HIDDEN)
    layer, untiled = Layer(Fused(model, TILE, keep), **how), Layer(model)
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


@KEEP
def test_grad_of_weights_alone_and_of_the_input_alone(keep: float) -> None:
    model, x = block(), random(2, 5, HIDDEN)
    weights = list(model.parameters())
    for wanted in (weights, weights[:1], weights[-1:], [x], [x, weights[2]]):
        ours = torch.autograd.grad(Fused(model, TILE, keep)(x).square().sum(), wanted)
        twin = torch.autograd.grad(model(x).square().sum(), wanted)
        for got, expected in zip(ours, twin, strict=True):
            torch.testing.assert_close(got, expected)
    assert x.grad is None and all(weight.grad is None for weight in weights)


def test_backward_into_chosen_inputs() -> None:
    model, x = block(), random(2, 5, HIDDEN)
    Fused(model, TILE)(x).sum().backward(inputs=[model.up.weight])
    assert model.up.weight.grad is not None and x.grad is None and model.gate.weight.grad is None


@pytest.mark.parametrize("how", [HOW["none"], HOW["checkpoint"]], ids=str)
def test_graph_of_the_gradient_is_refused(how: dict[str, bool]) -> None:
    layer, x = Layer(Fused(block(), TILE), **how), random(2, 5, HIDDEN)
    with pytest.raises(NotImplementedError, match=r"first derivatives only, got create_graph=True; undo tiling"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="create_graph=True"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")  # PyTorch's own, about cycles
        layer(x).sum().backward(create_graph=True)
    assert x.grad is None


def test_an_output_that_no_loss_uses() -> None:
    model, x = block(), random(2, 5, HIDDEN)
    output = Fused(model, TILE)(x)
    (output.detach() * x).sum().backward()
    torch.testing.assert_close(x.grad, output.detach())
    assert all(weight.grad is None for weight in model.parameters())


@KEEP
def test_gradients_accumulate_over_micro_batches(keep: float) -> None:
    model, lengths, found = block(), (5, 1, 13), []
    for net in (Fused(model, TILE, keep), model):
        model.zero_grad()
        for number, length in enumerate(lengths):
            (net(random(2, length, HIDDEN, seed=number)).square().sum() / len(lengths)).backward()
        found.append([weight.grad for weight in model.parameters()])
    for ours, twin in zip(*found, strict=True):
        torch.testing.assert_close(ours, twin)


@KEEP
def test_one_gradient_per_parameter_and_backward(keep: float) -> None:
    model = Between(block(), nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN))
    layer, x = Layer(Fused(model, TILE, keep), use_reentrant=False), random(2, 5, HIDDEN)
    arrived: list[str] = []
    names = [name for name, _ in layer.named_parameters()]
    for name, weight in layer.named_parameters():
        weight.register_hook(lambda grad, name=name: arrived.append(f"grad {name}"))
        weight.register_post_accumulate_grad_hook(lambda weight, name=name: arrived.append(name))
    for _ in range(2):
        arrived.clear()
        layer(x).sum().backward()
        assert sorted(arrived) == sorted([*names, *(f"grad {name}" for name in names)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_parameters_are_their_own_memory(dtype: torch.dtype) -> None:
    """What the engine is given may be changed in place: it is nobody else's."""
    model, x = block().to(dtype), random(2, 5, HIDDEN, dtype=dtype)
    output = Fused(model, TILE)(x)
    upstream = torch.ones_like(output)
    output.backward(upstream)
    places = [t.untyped_storage().data_ptr() for t in (x.grad, upstream, *(w.grad for w in model.parameters()))]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("make", [GatedMLP, GateUpMLP, lambda: PlainMLP(transposed=True)])
def test_gradients_lie_in_memory_as_their_weights_do(make: Callable[[], nn.Module]) -> None:
    """Fused optimisers and engines that flatten gradients read them in order."""
    model = make()
    Fused(model, TILE)(random(2, 5, HIDDEN)).sum().backward()
    assert all(weight.grad.is_contiguous() for weight in model.parameters())


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
                y = y + checkpoint(Fused(model, TILE, 0.5) if tiled else model, y, use_reentrant=False)
            y.square().mean().backward()
            if not inside:
                for weight in models.parameters():
                    step(weight)
        return [weight.detach() for weight in models.parameters()]

    for ours, twin in zip(trained(tiled=True, inside=True), trained(tiled=False, inside=False), strict=True):
        torch.testing.assert_close(ours, twin)


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
