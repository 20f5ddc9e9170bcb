"""What both operators must keep: the untiled block's outputs and gradients, its place in autograd, precision and cost.

Each test runs the generic operator and the fused one, the latter without, with some and with all of its tiles' features
kept for the backward. What only one operator has to do is in ``test_generic_*`` and ``test_fused_*``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from numerics import _fused, _mutants
from numerics._blocks import HIDDEN, Tiled, assert_same, check_gradcheck, gradients, random, shards
from numerics._errors import Autocast, assert_as_good
from numerics._fused import ALL, Between, Fused, GatedMLP, GateUpMLP, PlainMLP, make
from numerics._layers import HOW, Layer
from seqtile.counting.products import count_products

pytestmark = pytest.mark.device

TILE = 4

Tile = Callable[[nn.Module, int | Sequence[int]], nn.Module]
"""Puts an operator around a block: tiles of so many tokens, or of these sizes."""

OPERATORS: dict[str, Tile] = {"generic": Tiled, "fused": Fused}
WAYS: dict[str, Tile] = {
    **OPERATORS, "fused, some kept": partial(Fused, keep=0.5), "fused, all kept": partial(Fused, keep=1.0),
}  # fmt: skip
EVERY_WAY = pytest.mark.parametrize("tiled", WAYS.values(), ids=WAYS)
EVERY_OPERATOR = pytest.mark.parametrize("tiled", OPERATORS.values(), ids=OPERATORS)
EVERY_HOW = pytest.mark.parametrize("how", HOW.values(), ids=HOW)

Mutant = Callable[[pytest.MonkeyPatch], None]


def broken_by(generic: Sequence[Mutant], fused: Sequence[Mutant]) -> pytest.MarkDecorator:
    """Each operator with each way to break it."""
    pairs = [(Tiled, mutant) for mutant in generic] + [(Fused, mutant) for mutant in fused]
    names = [f"{tiled.__name__}-{mutant.__name__}" for tiled, mutant in pairs]
    return pytest.mark.parametrize(("tiled", "mutant"), pairs, ids=names)


COARSE = broken_by(list(_mutants.COARSE.values()), list(_fused.COARSE.values()))


def check(tiled: Tile, model: nn.Module, x: Tensor, upstream: Any, tile: int | Sequence[int] = TILE) -> None:
    """``model`` in tiles against itself untiled."""
    assert_same(gradients(tiled(model, tile), [x], upstream), gradients(model, [x], upstream))


def check_batch(tiled: Tile, kind: str = "gated", batch: int = 3, length: int = 5) -> None:
    check(tiled, make(kind), random(batch, length, HIDDEN), random(batch, length, HIDDEN, seed=2, grad=False))


# -- outputs and gradients -------------------------------------------------------------------------------------------


@broken_by([*_mutants.COARSE.values(), _mutants.cut_along_the_length], list(_fused.COARSE.values()))
def test_the_checker_notices_a_broken_operator(tiled: Tile, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    check_batch(tiled)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_batch(tiled)


@EVERY_WAY
@pytest.mark.parametrize("kind", ALL)
def test_every_kind_of_mlp(kind: str, tiled: Tile) -> None:
    check_batch(tiled, kind)


@EVERY_WAY
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, TILE - 1, TILE, TILE + 1, 13])
def test_any_batch_and_length(batch: int, length: int, tiled: Tile) -> None:
    check_batch(tiled, "gated", batch, length)


@EVERY_WAY
@pytest.mark.parametrize("sizes", [(7,), (1,) * 7, (3, 4), (1, 5, 1), (6, 1), (0, 7, 0), (3, 0, 4)], ids=str)
def test_any_cut(sizes: tuple[int, ...], tiled: Tile) -> None:
    check(tiled, make("gated"), random(7, HIDDEN), random(7, HIDDEN, seed=2, grad=False), sizes)


@EVERY_WAY
@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 3, 2), (1, 2, 1, 3)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...], tiled: Tile) -> None:
    check(tiled, make("gated"), random(*shape, HIDDEN), random(*shape, HIDDEN, seed=2, grad=False))


@EVERY_WAY
@pytest.mark.parametrize("count", [1, 2, 16, 64])
@pytest.mark.parametrize("kind", ["gated", "gate_up", "plain transposed"])
def test_many_tiles(kind: str, count: int, tiled: Tile) -> None:
    check(tiled, make(kind), random(2, 64, HIDDEN), random(2, 64, HIDDEN, seed=2, grad=False), shards(128, count))


@pytest.mark.parametrize("count", [1, 2, 16, 64])
@pytest.mark.parametrize("kind", ["gated", "gate_up", "plain transposed"])
def test_both_operators_agree(kind: str, count: int) -> None:
    model, x, upstream = make(kind), random(2, 64, HIDDEN), random(2, 64, HIDDEN, seed=2, grad=False)
    sizes = shards(128, count)
    assert_same(gradients(Fused(model, sizes), [x], upstream), gradients(Tiled(model, sizes), [x], upstream))


@EVERY_OPERATOR
@pytest.mark.parametrize("tile", [1, TILE, 10])
def test_gradcheck_of_input_and_weights(tile: int, tiled: Tile) -> None:
    check_gradcheck(tiled(make("gated"), tile))


@pytest.mark.parametrize("tiled", [Fused, partial(Fused, keep=0.7)], ids=["fused", "fused, some kept"])
@pytest.mark.parametrize("kind", ALL)
def test_gradcheck_of_every_kind(kind: str, tiled: Tile) -> None:
    check_gradcheck(tiled(make(kind), TILE), fast_mode=True)


@COARSE
def test_gradcheck_notices_a_broken_operator(tiled: Tile, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_gradcheck(tiled(make("gated"), TILE))


def _transposed(batch: int, length: int) -> Tensor:
    return random(length, batch, HIDDEN).detach().transpose(0, 1)


def _strided(batch: int, length: int) -> Tensor:
    return random(batch, 2 * length, 2 * HIDDEN).detach()[:, ::2, ::2]


def _expanded(batch: int, length: int) -> Tensor:
    return random(1, length, HIDDEN).detach().expand(batch, length, HIDDEN)


def _scalar(batch: int, length: int) -> Tensor:
    return torch.tensor(-1.5).expand(batch, length, HIDDEN)


@EVERY_WAY
@pytest.mark.parametrize("kind", ["gated", "norms around"])
@pytest.mark.parametrize("make_x", [_transposed, _strided, _expanded, _scalar])
def test_non_contiguous_input(make_x: Callable[[int, int], Tensor], kind: str, tiled: Tile) -> None:
    x = make_x(2, 5)
    assert not x.is_contiguous()
    check(tiled, make(kind), x.requires_grad_(), random(2, 5, HIDDEN, seed=2, grad=False))


@EVERY_WAY
@pytest.mark.parametrize("kind", ["gated", "norms around"])
@pytest.mark.parametrize("make_dy", [_transposed, _strided, _expanded, _scalar])
def test_non_contiguous_upstream_gradient(make_dy: Callable[[int, int], Tensor], kind: str, tiled: Tile) -> None:
    upstream = make_dy(2, 5)
    assert not upstream.is_contiguous()
    check(tiled, make(kind), random(2, 5, HIDDEN), upstream)


@EVERY_WAY
def test_the_incoming_gradient_is_not_written(tiled: Tile) -> None:
    """The residual branch shares it."""
    upstream = random(10, HIDDEN, seed=2, grad=False)
    before = upstream.clone()
    tiled(make("norms around"), TILE)(random(10, HIDDEN)).backward(upstream)
    assert torch.equal(upstream, before)


@EVERY_WAY
@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: -3 * y.mean(), lambda y: y.pow(2).sum() / 7])
def test_upstream_gradient_from_a_loss(loss: Callable[[Tensor], Tensor], tiled: Tile) -> None:
    check(tiled, make("gated"), random(2, 5, HIDDEN), loss)


FROZEN = {
    "gated": [["gate.weight"], ["down.bias", "up.weight"], ["down"], ["gate", "up"], ["gate.bias", "up"], [""]],
    "gate_up": [["gate_up.weight"], ["down"], [""]],
    "plain transposed": [["up"], ["down.weight"], [""]],
    "norms around": [["mlp"], ["before", "after"], ["before.weight", "mlp.gate_up"], [""]],
}
"""Beginnings of the names of weights that do not train, by kind of MLP."""


@EVERY_WAY
@pytest.mark.parametrize("input_grad", [True, False])
@pytest.mark.parametrize(("kind", "frozen"), [(k, f) for k, fs in FROZEN.items() for f in fs], ids=str)
def test_frozen_weights_and_frozen_input(kind: str, frozen: list[str], input_grad: bool, tiled: Tile) -> None:
    model = make(kind)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.startswith(tuple(frozen)))
    if not input_grad and not any(weight.requires_grad for weight in model.parameters()):
        assert not tiled(model, TILE)(random(2, 5, HIDDEN, grad=False)).requires_grad
        return
    check(tiled, model, random(2, 5, HIDDEN, grad=input_grad), random(2, 5, HIDDEN, seed=2, grad=False))


@EVERY_WAY
def test_input_without_gradient_leaves_the_weights_theirs(tiled: Tile) -> None:
    model = make("gated")
    tiled(model, TILE)(random(2, 5, HIDDEN, grad=False)).sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.parameters())


@EVERY_WAY
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ALL)
def test_without_gradient(kind: str, mode: Callable[[], torch.no_grad], tiled: Tile) -> None:
    model, x = make(kind).eval(), random(3, 5, HIDDEN)
    with mode():
        ours = tiled(model, TILE)(x)
        torch.testing.assert_close(ours, model(x))
    assert not ours.requires_grad


@EVERY_WAY
def test_two_runs_are_bitwise_equal(tiled: Tile) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        model, x = GatedMLP().bfloat16(), random(3, 37, HIDDEN, dtype=torch.bfloat16)
        tiled(model, TILE)(x).float().square().sum().backward()
        runs.append([x.grad, *(weight.grad for weight in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@EVERY_OPERATOR
def test_sizes_that_do_not_sum_up_are_refused(tiled: Tile) -> None:
    with pytest.raises(ValueError, match=r"sizes sum to 8, expected 10 rows"):
        tiled(make("gated"), (4, 4))(random(2, 5, HIDDEN))


# -- autograd --------------------------------------------------------------------------------------------------------


def check_layer(tiled: Tile, how: dict[str, Any]) -> None:
    model, x, upstream = make("gated"), random(2, 5, HIDDEN), random(2, 5, HIDDEN, seed=2, grad=False)
    ours = gradients(Layer(tiled(model, TILE), HIDDEN, how), [x], upstream)
    assert_same(ours, gradients(Layer(model, HIDDEN, {}), [x], upstream))


@EVERY_WAY
@EVERY_HOW
def test_under_a_checkpoint_of_the_layer(how: dict[str, Any], tiled: Tile) -> None:
    check_layer(tiled, how)


@EVERY_HOW
@broken_by(
    [_mutants.last_tile_without_gradient, _mutants.upstream_ignored],
    [_fused.last_tile_without_gradient, _fused.upstream_ignored],
)
def test_the_checker_of_layers_notices_a_broken_operator(
    tiled: Tile, mutant: Mutant, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_layer(tiled, how)


@EVERY_WAY
def test_checkpoints_inside_one_another(tiled: Tile) -> None:
    model, x = make("gated"), random(2, 5, HIDDEN)

    class Nested(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.block = inner

        def forward(self, x: Tensor) -> Tensor:
            def outer(x: Tensor) -> Tensor:
                return checkpoint(lambda x: self.block(torch.tanh(x)), x.sin(), use_reentrant=False).cos()

            return checkpoint(outer, x, use_reentrant=False)

    ours = gradients(Nested(tiled(model, TILE)), [x], lambda y: y.square().sum())
    assert_same(ours, gradients(Nested(model), [x], lambda y: y.square().sum()))


@EVERY_WAY
@EVERY_HOW
def test_second_backward_is_refused_in_pytorchs_words(how: dict[str, Any], tiled: Tile) -> None:
    block = tiled(make("gated"), TILE)
    for net in (block, Layer(block, HIDDEN, how)):
        output = net(random(2, 5, HIDDEN))
        output.sum().backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            output.sum().backward()


@EVERY_WAY
@pytest.mark.parametrize("how", [HOW["none"], HOW["checkpoint"], HOW["no early stop"]], ids=str)
def test_retained_graph_gives_the_right_gradients_every_time(how: dict[str, Any], tiled: Tile) -> None:
    """Kept tiles are overwritten by the first backward and computed again by the second."""
    model, x = make("gated"), random(2, 5, HIDDEN)
    layer, untiled = Layer(tiled(model, TILE), HIDDEN, how), Layer(model, HIDDEN, {})
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


@EVERY_WAY
def test_grad_of_weights_alone_and_of_the_input_alone(tiled: Tile) -> None:
    model, x = make("gated"), random(2, 5, HIDDEN)
    weights = list(model.parameters())
    for wanted in (weights, weights[:1], weights[-1:], [x], [x, weights[2]]):
        ours = torch.autograd.grad(tiled(model, TILE)(x).square().sum(), wanted)
        twin = torch.autograd.grad(model(x).square().sum(), wanted)
        for got, expected in zip(ours, twin, strict=True):
            torch.testing.assert_close(got, expected)
    assert x.grad is None and all(weight.grad is None for weight in weights)


@EVERY_WAY
def test_backward_into_chosen_inputs(tiled: Tile) -> None:
    model: Any = make("gated")
    x = random(2, 5, HIDDEN)
    tiled(model, TILE)(x).sum().backward(inputs=[model.up.weight])
    assert model.up.weight.grad is not None and x.grad is None and model.gate.weight.grad is None


@EVERY_WAY
@pytest.mark.parametrize("how", [HOW["none"], HOW["checkpoint"]], ids=str)
def test_graph_of_the_gradient_is_refused(how: dict[str, Any], tiled: Tile) -> None:
    """Not left to a second derivative that is silently zero."""
    layer, x = Layer(tiled(make("gated"), TILE), HIDDEN, how), random(2, 5, HIDDEN)
    with pytest.raises(
        NotImplementedError, match=r"does not support double backward, got create_graph=True; call seqtile.undo"
    ):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="create_graph=True"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")  # PyTorch's own, about cycles
        layer(x).sum().backward(create_graph=True)
    assert x.grad is None


@EVERY_OPERATOR
def test_what_is_saved_is_the_input_and_the_weights_and_may_live_elsewhere(tiled: Tile) -> None:
    """Offload sees the input, which the recompute takes from what comes back; the generic operator saves no weight."""
    model, x, packed = make("gated"), random(2, 5, HIDDEN), []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.clone()):
        output = tiled(model, TILE)(x * 2)
    weights = [tuple(weight.shape) for weight in model.parameters()]
    assert packed == ([(10, HIDDEN)] if tiled is Tiled else [(2, 5, HIDDEN), *weights])
    got = torch.autograd.grad(output.square().sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(model(x * 2).square().sum(), x))


@EVERY_WAY
def test_an_output_that_no_loss_uses(tiled: Tile) -> None:
    model, x = make("gated"), random(2, 5, HIDDEN)
    output = tiled(model, TILE)(x)
    (output.detach() * x).sum().backward()
    torch.testing.assert_close(x.grad, output.detach())
    assert all(weight.grad is None for weight in model.parameters())


@EVERY_WAY
def test_an_input_changed_in_between_is_noticed(tiled: Tile) -> None:
    x = random(2, 5, HIDDEN) * 1
    output = tiled(make("gated"), TILE)(x)
    x.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@EVERY_WAY
def test_gradients_accumulate_over_micro_batches(tiled: Tile) -> None:
    model, lengths, found = make("gated"), (5, 1, 13), []
    for net in (tiled(model, TILE), model):
        model.zero_grad()
        for number, length in enumerate(lengths):
            (net(random(2, length, HIDDEN, seed=number)).square().sum() / len(lengths)).backward()
        found.append([weight.grad for weight in model.parameters()])
    for ours, twin in zip(*found, strict=True):
        torch.testing.assert_close(ours, twin)


@EVERY_WAY
@pytest.mark.parametrize("kind", ["gated", "norms around"])
def test_one_gradient_per_parameter_and_backward(kind: str, tiled: Tile) -> None:
    layer, x = Layer(tiled(make(kind), TILE), HIDDEN, HOW["checkpoint"]), random(2, 5, HIDDEN)
    arrived: list[str] = []
    names = [name for name, _ in layer.named_parameters()]
    for name, weight in layer.named_parameters():
        weight.register_hook(lambda grad, name=name: arrived.append(f"grad {name}"))
        weight.register_post_accumulate_grad_hook(lambda weight, name=name: arrived.append(name))
    for _ in range(2):
        arrived.clear()
        layer(x).sum().backward()
        assert sorted(arrived) == sorted([*names, *(f"grad {name}" for name in names)])


@EVERY_WAY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_parameters_are_their_own_memory(dtype: torch.dtype, tiled: Tile) -> None:
    """What the engine is given may be changed in place: it is nobody else's."""
    model, x = make("gated").to(dtype), random(2, 5, HIDDEN, dtype=dtype)
    output = tiled(model, TILE)(x)
    upstream = torch.ones_like(output)
    output.backward(upstream)
    places = [t.untyped_storage().data_ptr() for t in (x.grad, upstream, *(w.grad for w in model.parameters()))]
    assert len(set(places)) == len(places)


@EVERY_WAY
def test_optimizer_that_steps_inside_the_backward(tiled: Tile) -> None:
    x = random(2, 5, HIDDEN)

    def trained(wrap: Callable[[nn.Module], nn.Module], inside: bool) -> list[Tensor]:
        torch.manual_seed(0)
        models = nn.ModuleList(GatedMLP() for _ in range(2))
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
                y = y + checkpoint(wrap(model), y, use_reentrant=False)
            y.square().mean().backward()
            if not inside:
                for weight in models.parameters():
                    step(weight)
        return [weight.detach() for weight in models.parameters()]

    ours, twins = trained(lambda model: tiled(model, TILE), inside=True), trained(lambda model: model, inside=False)
    for got, expected in zip(ours, twins, strict=True):
        torch.testing.assert_close(got, expected)


# -- low precision, judged against fp32 on the rounded inputs --------------------------------------------------------

WIDE, INNER, TOKENS = 32, 48, 1024
LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
COUNT = pytest.mark.parametrize("count", [1, 16, 64])


class Norm(nn.Module):
    """Llama's RMSNorm: fp32 inside, the input's dtype outside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(WIDE) / 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


LARGER: dict[str, Callable[[], nn.Module]] = {
    "gated": lambda: GatedMLP(WIDE, INNER),
    "gate_up": lambda: GateUpMLP(WIDE, INNER),
    "plain": lambda: PlainMLP(WIDE, INNER, transposed=True),
    "norms": lambda: Between(GatedMLP(WIDE, INNER), Norm(), Norm()),
}


def check_low_precision(tiled: Tile, dtype: torch.dtype, count: int, kind: str = "gated") -> None:
    torch.manual_seed(0)
    model = LARGER[kind]().to(dtype)
    true = copy.deepcopy(model).float()
    x = random(2, TOKENS // 2, WIDE, dtype=dtype)
    upstream = (1 + random(2, TOKENS // 2, WIDE, seed=2, grad=False)).to(dtype)  # does not cancel over tokens
    truth = gradients(true, [x.detach().float().requires_grad_()], upstream.float())
    twin = gradients(model, [x], upstream)
    ours = gradients(tiled(model, shards(TOKENS, count)), [x], upstream)
    assert {value.dtype for value in ours.values()} == {dtype}
    assert_as_good(ours, twin, truth)


@EVERY_OPERATOR
@COUNT
@LOW
@pytest.mark.parametrize("kind", LARGER)
def test_low_precision_weights(kind: str, dtype: torch.dtype, count: int, tiled: Tile) -> None:
    check_low_precision(tiled, dtype, count, kind)


def test_low_precision_with_kept_tiles() -> None:
    check_low_precision(WAYS["fused, some kept"], torch.bfloat16, 16)


@pytest.mark.parametrize("count", [16, 64])
@LOW
@broken_by([_mutants.low_precision_sums], [_fused.low_precision_sums])
def test_sums_in_the_weights_precision_are_noticed(
    tiled: Tile, mutant: Mutant, dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="untiled"):
        check_low_precision(tiled, dtype, count)


@COARSE
def test_the_checker_of_precision_notices_a_broken_operator(
    tiled: Tile, mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_low_precision(tiled, torch.bfloat16, 16)


@pytest.mark.parametrize("tiled", [Tiled, partial(Fused, keep=0.3)], ids=["generic", "fused, some kept"])
@COUNT
@LOW
@pytest.mark.parametrize("kind", LARGER)
def test_autocast(kind: str, dtype: torch.dtype, count: int, tiled: Tile) -> None:
    torch.manual_seed(0)
    model, x = LARGER[kind](), random(2, TOKENS // 2, WIDE)
    upstream = 1 + random(2, TOKENS // 2, WIDE, seed=2, grad=False)
    truth = gradients(model, [x], upstream)
    twin = gradients(Autocast(model, dtype), [x], upstream.to(dtype))
    ours = gradients(Autocast(tiled(model, shards(TOKENS, count)), dtype), [x], upstream.to(dtype))
    assert {name: value.dtype for name, value in ours.items()} == {name: value.dtype for name, value in twin.items()}
    assert {value.dtype for name, value in ours.items() if name != "output.0"} == {torch.float32}
    assert ours["output.0"].dtype == (torch.float32 if kind == "norms" else dtype)
    assert_as_good(ours, twin, truth)


# -- matrix products, in units of 2 * tokens * hidden * intermediate -------------------------------------------------

D, F, N = 48, 136, 96
COSTS = [
    ("none", False, 9, 11),
    ("checkpoint", False, 11, 11),
    ("checkpoint", True, 8, 8),
    ("none", True, 6, 8),
    ("reentrant", False, 12, 14),
    ("no early stop", False, 12, 14),
    ("reentrant", True, 9, 11),
    ("no early stop", True, 9, 11),
]
"""How the layer is checkpointed, whether its block is frozen, and the units of a step, untiled and tiled."""
GATED: dict[str, Callable[[], nn.Module]] = {
    "gated": lambda: GatedMLP(D, F, bias=False),
    "gate_up": lambda: GateUpMLP(D, F, bias=False),
}


def units(net: nn.Module, *, input_grad: bool = True) -> float:
    with count_products() as products:
        net(random(2, N // 2, D, grad=input_grad)).square().sum().backward()
    return products.units(N, D, F)


@EVERY_OPERATOR
@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize(("how", "frozen", "untiled_units", "tiled_units"), COSTS)
def test_products(how: str, frozen: bool, untiled_units: float, tiled_units: float, kind: str, tiled: Tile) -> None:
    model = GATED[kind]().requires_grad_(not frozen)
    assert units(Layer(model, D, HOW[how])) == untiled_units
    for count in (1, 3, 8, 16):
        assert units(Layer(tiled(model, shards(N, count)), D, HOW[how])) == tiled_units


@EVERY_OPERATOR
def test_products_when_the_input_needs_no_gradient(tiled: Tile) -> None:
    """Gate and up then have nothing to hand down: two products less, as untiled."""
    model = GATED["gated"]()
    for net, expected in ((model, 7), (tiled(model, shards(N, 8)), 9), (tiled(model, shards(N, 4)), 9)):
        assert units(net, input_grad=False) == expected
