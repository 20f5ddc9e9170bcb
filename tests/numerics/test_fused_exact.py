"""The fused operator computes what the block computes: outputs and gradients, for every kind of MLP and batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.nn import functional as F

from numerics._blocks import HIDDEN, INTERMEDIATE, Tiled, assert_same, gradients, random, shards
from numerics._fused import (
    COARSE,
    Between,
    Fused,
    GatedMLP,
    GateUpMLP,
    PlainMLP,
    assert_fused_is_untiled,
    last_projection_alone,
    weights_of,
)
from seqtile.ops import mlp as fused
from seqtile.ops import mlp_tile, pointwise
from seqtile.ops.linear import Packed, Projection
from seqtile.ops.mlp import FusedWeights, fused_mlp

TILE = 4

KINDS: dict[str, Callable[[], nn.Module]] = {
    "gated": GatedMLP,
    "gated without bias": lambda: GatedMLP(bias=False),
    "gate_up": GateUpMLP,
    "gate_up without bias": lambda: GateUpMLP(bias=False),
    "up_gate": lambda: GateUpMLP(up_first=True),
    "plain": PlainMLP,
    "plain without bias": lambda: PlainMLP(bias=False),
    "plain transposed": lambda: PlainMLP(transposed=True),
}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "norm before": lambda: Between(GatedMLP(), nn.RMSNorm(HIDDEN), None),
    "norm after": lambda: Between(GatedMLP(), None, nn.LayerNorm(HIDDEN)),
    "norms around": lambda: Between(GateUpMLP(), nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN)),
    "norms around plain": lambda: Between(PlainMLP(transposed=True), nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN)),
}
ALL = {**KINDS, **NORMS}


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return ALL[kind]()


def check_batch(kind: str = "gated", batch: int = 3, length: int = 5, keep: float = 0.0) -> None:
    x = random(batch, length, HIDDEN)
    assert_fused_is_untiled(make(kind), [x], random(batch, length, HIDDEN, seed=2, grad=False), TILE, keep)


@pytest.mark.parametrize("mutant", COARSE.values(), ids=lambda mutant: mutant.__name__)
def test_the_checker_notices_a_broken_operator(mutant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    check_batch()
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_batch()


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ALL)
def test_every_kind_of_mlp(kind: str, keep: float) -> None:
    check_batch(kind, keep=keep)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, TILE - 1, TILE, TILE + 1, 13])
def test_any_batch_and_length(batch: int, length: int) -> None:
    check_batch("gated", batch, length)


@pytest.mark.parametrize("sizes", [(7,), (1,) * 7, (3, 4), (1, 5, 1), (6, 1), (0, 7, 0)], ids=str)
def test_any_cut(sizes: tuple[int, ...]) -> None:
    assert_fused_is_untiled(make("gated"), [random(7, HIDDEN)], random(7, HIDDEN, seed=2, grad=False), sizes, keep=0.5)


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (2, 3, 2), (1, 2, 1, 3)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    x = random(*shape, HIDDEN)
    assert_fused_is_untiled(make("gated"), [x], random(*shape, HIDDEN, seed=2, grad=False), TILE)


@pytest.mark.parametrize("count", [1, 2, 16, 64])
@pytest.mark.parametrize("kind", ["gated", "gate_up", "plain transposed"])
def test_many_tiles_and_the_generic_operator_agree(kind: str, count: int) -> None:
    model, x, upstream = make(kind), random(2, 64, HIDDEN), random(2, 64, HIDDEN, seed=2, grad=False)
    sizes = shards(128, count)
    assert_fused_is_untiled(model, [x], upstream, sizes)
    assert_same(gradients(Fused(model, sizes), [x], upstream), gradients(Tiled(model, sizes), [x], upstream))


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda z: F.relu(z).square(),
}
OTHERS = {"mish": F.mish, "tanh": torch.tanh, "quick gelu": lambda z: z * torch.sigmoid(1.702 * z), "elu": nn.ELU()}


@pytest.mark.parametrize("name", [*ACTIVATIONS, *OTHERS])
@pytest.mark.parametrize("kind", [GatedMLP, PlainMLP])
def test_every_activation(kind: type[nn.Module], name: str) -> None:
    torch.manual_seed(0)
    model = kind(act={**ACTIVATIONS, **OTHERS}[name]).double()
    assert (weights_of(model).activation in pointwise.KNOWN) == (name in ACTIVATIONS)
    x = random(2, 5, HIDDEN, dtype=torch.float64)
    assert_fused_is_untiled(model, [x], random(2, 5, HIDDEN, dtype=torch.float64, seed=2, grad=False), TILE)


@pytest.mark.parametrize("act", pointwise.KNOWN, ids=lambda act: act.name)
def test_derivatives_of_the_kernels(act: pointwise.Activation) -> None:
    assert act.derivative is not None
    z = random(200, dtype=torch.float64) * 4
    leaf = z.detach().requires_grad_()
    (truth,) = torch.autograd.grad(act.function(leaf).sum(), leaf)
    torch.testing.assert_close(act.derivative(z.detach()), truth)
    grad = random(200, dtype=torch.float64, seed=3, grad=False)
    for alias in ("none", "z", "grad"):
        zz, gg = z.detach().clone(), grad.clone()
        out = {"none": torch.empty_like(gg), "z": zz, "grad": gg}[alias]
        act.gradient_into(gg, zz, out)
        torch.testing.assert_close(out, grad * truth)


def check_gradcheck(kind: str = "gated", tile: int = TILE, keep: float = 0.0) -> None:
    model = make(kind).double()
    names = [name for name, _ in model.named_parameters()]
    x = random(2, 5, HIDDEN, dtype=torch.float64)

    def of_everything(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(Fused(model, tile, keep), {
            f"block.{name}": value for name, value in zip(names, values, strict=True)
        }, (x,))  # fmt: skip

    try:
        weights = [weight.detach().requires_grad_() for weight in model.parameters()]
        assert torch.autograd.gradcheck(of_everything, [x, *weights], nondet_tol=0.0)
    except GradcheckError as error:
        raise AssertionError(str(error)) from error


@pytest.mark.parametrize("keep", [0.0, 0.7])
@pytest.mark.parametrize("kind", ALL)
def test_gradcheck_of_input_and_weights(kind: str, keep: float) -> None:
    check_gradcheck(kind, keep=keep)


@pytest.mark.parametrize("tile", [1, 10])
def test_gradcheck_of_small_and_single_tiles(tile: int) -> None:
    check_gradcheck("gated", tile)


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


@pytest.mark.parametrize("kind", ["gated", "norms around"])
@pytest.mark.parametrize("make_x", [_transposed, _strided, _expanded, _scalar])
def test_non_contiguous_input(make_x: Callable[[int, int], Tensor], kind: str) -> None:
    x = make_x(2, 5)
    assert not x.is_contiguous()
    assert_fused_is_untiled(make(kind), [x.requires_grad_()], random(2, 5, HIDDEN, seed=2, grad=False), TILE)


@pytest.mark.parametrize("kind", ["gated", "norms around"])
@pytest.mark.parametrize("make_dy", [_transposed, _strided, _expanded, _scalar])
def test_non_contiguous_upstream_gradient(make_dy: Callable[[int, int], Tensor], kind: str) -> None:
    upstream = make_dy(2, 5)
    assert not upstream.is_contiguous()
    assert_fused_is_untiled(make(kind), [random(2, 5, HIDDEN)], upstream, TILE)


@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: -3 * y.mean(), lambda y: y.pow(2).sum() / 7])
def test_upstream_gradient_from_a_loss(loss: Callable[[Tensor], Tensor]) -> None:
    assert_fused_is_untiled(make("gated"), [random(2, 5, HIDDEN)], loss, TILE)


def test_the_incoming_gradient_is_not_written() -> None:
    """The residual branch shares it."""
    upstream = random(10, HIDDEN, seed=2, grad=False)
    before = upstream.clone()
    Fused(make("norms around"), TILE)(random(10, HIDDEN)).backward(upstream)
    assert torch.equal(upstream, before)


FROZEN = {
    "gated": [["gate.weight"], ["down.bias", "up.weight"], ["down"], ["gate", "up"], ["gate.bias", "up"], [""]],
    "gate_up": [["gate_up.weight"], ["down"], [""]],
    "plain transposed": [["up"], ["down.weight"], [""]],
    "norms around": [["mlp"], ["before", "after"], ["before.weight", "mlp.gate_up"], [""]],
}


@pytest.mark.parametrize("keep", [0.0, 1.0])
@pytest.mark.parametrize("input_grad", [True, False])
@pytest.mark.parametrize(("kind", "frozen"), [(k, f) for k, fs in FROZEN.items() for f in fs], ids=str)
def test_frozen_weights_and_frozen_input(kind: str, frozen: list[str], input_grad: bool, keep: float) -> None:
    model = make(kind)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.startswith(tuple(frozen)))
    if not input_grad and not any(weight.requires_grad for weight in model.parameters()):
        assert not Fused(model, TILE)(random(2, 5, HIDDEN, grad=False)).requires_grad
        return
    x = random(2, 5, HIDDEN, grad=input_grad)
    assert_fused_is_untiled(model, [x], random(2, 5, HIDDEN, seed=2, grad=False), TILE, keep)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ALL)
def test_without_gradient_it_tiles_too(kind: str, mode: Callable[[], torch.no_grad]) -> None:
    model, x = make(kind).eval(), random(3, 5, HIDDEN)
    with mode():
        ours = Fused(model, TILE, keep=1.0)(x)
        torch.testing.assert_close(ours, model(x))
    assert not ours.requires_grad


def test_two_runs_are_bitwise_equal() -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        model, x = GatedMLP().bfloat16(), random(3, 37, HIDDEN, dtype=torch.bfloat16)
        Fused(model, TILE)(x).float().square().sum().backward()
        runs.append([x.grad, *(weight.grad for weight in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_one_weight_in_two_places() -> None:
    weight, down = random(INTERMEDIATE, HIDDEN, seed=3), random(HIDDEN, INTERMEDIATE, seed=4)
    x = random(10, HIDDEN)
    mlp = FusedWeights((Projection(weight), Projection(weight)), Projection(down), pointwise.SILU)
    ours = torch.autograd.grad(fused_mlp(x, mlp, (4, 6)).square().sum(), [x, weight, down])

    def untiled(x: Tensor, weight: Tensor, down: Tensor) -> Sequence[Tensor]:
        z = F.linear(x, weight)
        return torch.autograd.grad(F.linear(F.silu(z) * z, down).square().sum(), [x, weight, down])

    twin = untiled(x, weight, down)
    truth = untiled(*(one.detach().double().requires_grad_() for one in (x, weight, down)))
    for got, expected, true in zip(ours, twin, truth, strict=True):
        allowed = 2 * (expected - true).norm() + torch.finfo(got.dtype).eps * true.norm()
        assert (got - true).norm() <= allowed


@pytest.mark.parametrize("holds", [True, False], ids=["once per pass", "every product"])
@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_packed_weights_are_made_dense_once_per_pass(keep: float, holds: bool) -> None:
    torch.manual_seed(0)
    model, asked = GatedMLP(bias=False).requires_grad_(False), []

    def packed(layer: nn.Linear) -> Projection:
        def dense() -> Tensor:
            asked.append(layer)
            return layer.weight.detach().clone()

        return Projection(Packed(dense, (layer.out_features, layer.in_features)))

    mlp = FusedWeights((packed(model.gate), packed(model.up)), packed(model.down), pointwise.SILU)
    x, upstream = random(10, HIDDEN), random(10, HIDDEN, seed=2, grad=False)
    output = fused_mlp(x, mlp, (4, 4, 2), keep=keep, holds_dense=holds)
    assert len(asked) == (3 if holds else 3 * 3)
    asked.clear()
    output.backward(upstream)
    assert len(asked) == (3 if holds else 3 * (3 if keep else 5))
    (expected,) = torch.autograd.grad(model(x), x, upstream)
    torch.testing.assert_close(x.grad, expected)


def test_the_sum_over_projections_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    last_projection_alone(monkeypatch)
    with pytest.raises(AssertionError, match=r"input\.0"):
        check_batch()


def test_user_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"sizes sum to 8, expected 10 rows"):
        Fused(make("gated"), (4, 4))(random(2, 5, HIDDEN))
    with pytest.raises(ValueError, match=r"keep=1\.5: expected a fraction of the tiles, 0\.0 to 1\.0"):
        Fused(make("gated"), TILE, keep=1.5)(random(2, 5, HIDDEN))


def test_rows_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of 2^31 elements and more, on the meta device."""
    rows, width, tile = 2**31 // 64 + 300, 64, 2**24
    places = []
    forward = mlp_tile.Pass.forward

    def noting(self: mlp_tile.Pass, x: Tensor, out: Tensor, *, keep: bool) -> object:
        places.append(out.storage_offset())
        return forward(self, x, out, keep=keep)

    monkeypatch.setattr(fused.Pass, "forward", noting)
    mlp = weights_of(GatedMLP(width, 16).to("meta"))
    with torch.no_grad():
        x = torch.empty(rows, width, device="meta")
        assert fused_mlp(x, mlp, (tile, tile, rows - 2 * tile)).shape == x.shape
    assert places == [0, tile * width, 2 * tile * width] and rows * width > 2**31
